"""Series, samples and syncs in bounded memory: what is kept exactly, what only as medians."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.keep import KeepSizes, KeptSamples, KeptSyncs
from rltop.checks.observe import MetricRow, SyncEvent
from rltop.checks.series import median, quarters
from rltop.checks.thin import Sizes, ThinSeries, median_row
from tests.checks.build import sample

SMALL = Sizes(first=4, blocks=6, newest=8, notable=3, block_rows=2)


def row(step: int, value: float, segment: int = 0) -> MetricRow:
    return MetricRow("train", step, {"train/grad_norm": value}, segment=segment)


def fill(series: ThinSeries, values: Iterable[float]) -> ThinSeries:
    for step, value in enumerate(values):
        series.append(row(step, value))
    return series


def values_of(series: ThinSeries) -> list[float]:
    return [kept.values["train/grad_norm"] for kept in sorted(series.rows(), key=lambda kept: kept.step)]


def test_a_short_series_is_kept_whole() -> None:
    series = fill(ThinSeries(SMALL), range(12))
    assert values_of(series) == list(range(12))
    assert {kept.span for kept in series.rows()} == {1}


def test_a_long_series_keeps_its_ends_and_every_row_is_accounted_for() -> None:
    series = fill(ThinSeries(SMALL), range(10_000))
    steps = sorted(kept.step for kept in series.rows())
    assert steps[:4] == [0, 1, 2, 3]
    assert steps[-8:] == list(range(9_992, 10_000))
    assert sum(kept.span for kept in series.rows()) == series.seen == 10_000
    assert len(series.rows()) <= 4 + 6 + 2 + 12 + 8  # first, blocks, open rows, parts of a block, newest


def test_the_default_sizes_hold_a_long_run_in_a_few_hundred_rows_with_its_quarters() -> None:
    values = [0.3 + 0.1 * math.sin(i) + i * 5e-5 for i in range(20_000)]
    series = fill(ThinSeries(), values)
    assert sum(kept.span for kept in series.rows()) == 20_000
    assert len(series.rows()) < 400
    blocks = [r for r in sorted(series.rows(), key=lambda r: r.step) if r.span == series.block_rows]
    thin = quarters([r.values["train/grad_norm"] for r in blocks])
    assert thin == pytest.approx(quarters(values[48:-192]), rel=0.05)


def test_one_spike_leaves_no_trace_in_the_medians_and_a_notable_row_stays_exact() -> None:
    series = ThinSeries(SMALL)
    for step in range(400):
        series.append(row(step, 1e9 if step in (50, 60) else 0.3), notable=step == 60)
    assert values_of(series).count(1e9) == 1
    exact = {kept.step: kept.values["train/grad_norm"] for kept in series.rows() if kept.step in (59, 60)}
    assert (exact[59], exact[60]) == (0.3, 1e9)


def test_the_first_and_the_newest_notable_rows_are_kept() -> None:
    series = ThinSeries(SMALL)
    for step in range(400):
        series.append(row(step, float(step)), notable=step % 10 == 0)
    exact = sorted(kept.step for kept in series.rows() if kept.span == 1 and 4 <= kept.step < 392)
    assert {9, 10, 19, 380, 389, 390} <= set(exact)
    assert len(exact) <= 6 + SMALL.block_rows
    assert sum(kept.span for kept in series.rows()) == 400


def test_blocks_do_not_mix_segments_and_restarts_do_not_grow_the_series() -> None:
    series = ThinSeries(SMALL)
    for step in range(3_000):
        series.append(row(step, float(step // 5), segment=step // 5))
    for kept in series.rows():
        assert kept.values["train/grad_norm"] == kept.segment
    assert len(series.rows()) <= 4 + 6 + 2 + 12 + 8


def test_a_median_row_leaves_out_what_has_no_number() -> None:
    merged = median_row([MetricRow("train", 0, {"a": math.nan, "b": 1.0}), MetricRow("train", 1, {"b": 3.0})])
    assert merged.values == {"b": 2.0}
    assert (merged.step, merged.span) == (1, 2)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_thinning_loses_no_row_and_stays_within_the_range(values: list[float]) -> None:
    series = fill(ThinSeries(SMALL), values)
    assert sum(kept.span for kept in series.rows()) == len(values)
    assert all(min(values) <= value <= max(values) for value in values_of(series))
    assert min(values) <= median(values_of(series)) <= max(values)


def test_samples_of_the_first_the_newest_and_the_marked_rollouts_are_kept() -> None:
    kept = KeptSamples(KeepSizes(first=2, newest=3, notable=2, samples_per_rollout=2))
    for rollout in range(50):
        for _ in range(2):  # two records of one rollout add up
            kept.add((0, rollout), [sample(rollout_id=rollout)] * 2, notable=rollout in (10, 20, 30, 40))
    rollouts = [s.rollout_id for s in kept.all()]
    assert sorted(set(rollouts), key=lambda r: r or 0) == [0, 1, 10, 20, 30, 40, 47, 48, 49]
    assert max(rollouts.count(r) for r in set(rollouts)) == 2
    assert kept.left_out == 100


def test_of_many_marked_rollouts_the_first_and_the_newest_stay() -> None:
    kept = KeptSamples(KeepSizes(first=1, newest=1, notable=2))
    for rollout in range(20):
        kept.add((0, rollout), [sample(rollout_id=rollout)], notable=True)
    assert [s.rollout_id for s in kept.all()] == [0, 1, 2, 17, 18, 19]


def test_syncs_around_evidence_are_kept() -> None:
    kept = KeptSyncs(KeepSizes(first=1, syncs=4))
    for version in range(100):
        kept.add(SyncEvent(str(version), version), {(0, 50)})
    assert [sync.version for sync in kept.all()] == ["0", "50", "51", "96", "97", "98", "99"]
