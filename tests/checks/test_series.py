"""Series, trends and thresholds."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.checks.observe import Args, MetricRow, RunStart
from rltop.checks.phrase import brief, num
from rltop.checks.samples import make_sample, pooled, token_gap
from rltop.checks.series import (
    finite,
    maybe_on_policy,
    median,
    old_log_probs,
    points,
    quarters,
    rank_correlation,
    segments,
    start_of,
    steps_per_rollout,
    surely_on_policy,
    trend,
)
from rltop.checks.thresholds import DEFAULTS, Thresholds, override
from rltop.errors import RltopError
from tests.checks.build import healthy, obs, rollout, train


@pytest.mark.parametrize(
    ("value", "text"),
    [(16384.0, "16384"), (0.0, "0"), (-3.0, "-3"), (0.012345, "0.01235"), (1e12, "1e+12"), (math.nan, "NaN")],
)
def test_whole_numbers_are_whole(value: float, text: str) -> None:
    assert num(value) == text


def test_what_others_wrote_is_cut_between_sentences_or_words() -> None:
    assert brief("It failed.\nTwice.") == "It failed. Twice"
    assert brief("It failed here. " + "word " * 90, 40) == "It failed here"
    assert brief("word " * 90, 20) == "word word word word…"


def test_points_are_sorted_and_one_per_step() -> None:
    rows = [train(2, loss=0.2), train(0, loss=0.0), train(2, loss=0.2), train(1, loss=math.nan)]
    assert [(p.step, p.value) for p in points(obs(*rows), "train/loss")][::2] == [(0, 0.0), (2, 0.2)]
    assert [p.step for p in finite(points(obs(*rows), "train/loss"))] == [0, 2]
    assert points(obs(*rows), "train/other") == ()


def test_of_several_ranks_the_lowest_is_taken_and_of_two_times_the_later() -> None:
    ranks = [dataclasses.replace(train(0, loss=float(rank)), rank=rank) for rank in (3, 1, 2)]
    assert points(obs(*ranks), "train/loss")[0].value == 1.0
    times = [dataclasses.replace(train(0, loss=float(t)), time=float(t)) for t in (3, 5, 4)]
    assert points(obs(*times), "train/loss")[0].value == 5.0


def test_a_copy_of_observations_does_not_see_the_series_of_the_original() -> None:
    first = obs(train(0, loss=1.0))
    assert points(first, "train/loss")[0].value == 1.0
    assert points(dataclasses.replace(first, metrics=(train(0, loss=2.0),)), "train/loss")[0].value == 2.0


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({}, None),
        ({"num_steps_per_rollout": 4}, 4),
        ({"num_steps_per_rollout": "2"}, 2),
        ({"rollout_batch_size": "32", "n_samples_per_prompt": "8", "global_batch_size": "64"}, 4),
        ({"rollout_batch_size": 32, "global_batch_size": 64}, None),
        ({"rollout_batch_size": 32, "n_samples_per_prompt": 8, "global_batch_size": 0}, None),
    ],
)
def test_steps_per_rollout_come_from_the_arguments(flags: dict[str, object], steps: int | None) -> None:
    assert steps_per_rollout(obs(flags=flags)) == steps


def test_on_policy_steps_are_told_by_the_row_else_by_the_arguments_else_unknown() -> None:
    rows = [train(step, loss=0.1) for step in range(8)]
    known = points(obs(*rows, flags={"num_steps_per_rollout": 4}), "train/loss")
    assert [(p.step, p.rollout) for p in known if p.on_policy] == [(0, 0), (4, 1)]
    unknown = points(obs(*rows), "train/loss")
    assert [p.step for p in surely_on_policy(unknown)] == [0]
    assert len(maybe_on_policy(unknown)) == 8


def test_segments_are_kept_apart() -> None:
    rows = [train(step, loss=0.1) for step in (5, 6)]
    rows += [dataclasses.replace(row, segment=1) for row in rows]
    assert [[p.step for p in part] for part in segments(points(obs(*rows), "train/loss"))] == [[5, 6], [5, 6]]


@pytest.mark.parametrize(
    ("rows", "flags", "fresh"),
    [
        ([rollout(0, log_probs=-0.3)], {}, True),
        ([rollout(0, log_probs=-0.3)], {"load": "A", "ref_load": "A"}, True),
        ([rollout(0, log_probs=-0.3)], {"load": "A"}, None),
        ([rollout(3, log_probs=-0.3)], {}, None),
        ([], {}, None),
    ],
)
def test_a_start_is_fresh_only_when_nothing_speaks_against_it(
    rows: list[MetricRow], flags: dict[str, object], fresh: bool | None
) -> None:
    assert start_of(obs(*rows, flags=flags, starts=())).fresh is fresh


def test_a_start_that_the_source_knows_wins_and_a_restart_is_not_fresh() -> None:
    row = rollout(0, log_probs=-0.3)
    assert start_of(obs(row, flags={"load": "A"}, starts=[RunStart(0, 0, True)])).fresh is True
    assert start_of(obs(rollout(4, segment=1, log_probs=-0.3), starts=()), 1).fresh is False


def test_old_log_probs_are_measured_only_when_something_proves_it() -> None:
    assert old_log_probs(obs(healthy(0)), 0) == "reused"
    assert old_log_probs(obs(healthy(0), rollout(0, log_probs=-0.3)), 0) == "measured"
    assert old_log_probs(obs(healthy(0), rollout(0, segment=1, log_probs=-0.3)), 0) == "reused"
    assert old_log_probs(obs(healthy(0), flags={"use_rollout_logprobs": True}), 0) == "engine"
    assert old_log_probs(obs(healthy(0), flags={"keep_old_actor": "true"}), 0) == "old-actor"


def test_trends_need_ten_points_and_ignore_one_spike() -> None:
    assert trend([0.1] * 9) is None
    rising = trend([0.01 * i for i in range(20)])
    assert rising is not None
    assert rising.correlation == pytest.approx(1.0)
    assert rising.last > 2 * rising.first
    spiked = trend([0.1] * 10 + [464.0] + [0.1] * 10)
    assert spiked is not None
    assert spiked.first == spiked.last == 0.1


def test_rank_correlation_of_ties_and_constants() -> None:
    assert rank_correlation([1.0, 1.0, 1.0]) == 0.0
    assert rank_correlation([1.0, 2.0]) == 0.0
    assert rank_correlation([3.0, 2.0, 2.0, 1.0]) == pytest.approx(-0.9486, abs=1e-3)
    assert math.isnan(median([math.nan]))
    assert quarters([1.0, 9.0, 9.0, 2.0]) == (1.0, 2.0)


@settings(deadline=None)
@given(st.lists(st.floats(), max_size=40))
def test_trend_functions_take_any_numbers(values: list[float]) -> None:
    assert -1.000001 <= rank_correlation(values) <= 1.000001
    trend(values)
    quarters(values)


def test_token_gaps_are_pooled_by_tokens_and_skip_what_is_not_finite() -> None:
    one, two = token_gap([-1.0, -2.0, math.nan], [-1.5, -2.0, -1.0]), token_gap([-1.0], [-2.0])
    assert one is not None
    assert two is not None
    assert (one.mean, one.largest, one.tokens) == (0.25, 0.5, 2)
    both = pooled([one, two])
    assert both is not None
    assert both.mean == pytest.approx(0.5)
    assert token_gap([-1.0], [-1.0, -2.0]) is None
    assert pooled([]) is None


def test_a_field_of_a_wrong_type_is_taken_as_absent() -> None:
    odd = make_sample(
        {
            "response": 7,
            "reward": "x",
            "log_probs": ["a"],
            "token_ids": "abc",
            "index": True,
            "weight_version": ["1", 2],
        },
        rollout_id=3,
    )
    assert (odd.reward, odd.mean_log_prob, odd.index, odd.weight_version) == (None, None, 0, "2")
    assert make_sample({"reward": 10**400}, rollout_id=None).reward == math.inf


@pytest.mark.parametrize(
    ("value", "on", "number"),
    [
        (True, True, None),
        ("false", False, None),
        ("0.5", True, 0.5),
        ("0", False, 0.0),
        (None, False, None),
        ("x", True, None),
    ],
)
def test_arguments_read_as_flags_and_numbers(value: object, on: bool, number: float | None) -> None:
    args = Args({"flag": value})
    assert (args.on("flag"), args.number("flag"), args.on("other")) == (on, number, False)
    assert args.given("flag") is (value is not None)


def test_thresholds_are_overridden_by_name() -> None:
    changed = override({"gap_warn": 1, "grad_spike_window": 30})
    assert (changed.gap_warn, changed.grad_spike_window, changed.gap_fail) == (1.0, 30, DEFAULTS.gap_fail)
    assert override({}) == DEFAULTS == Thresholds()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("gap_wran", 0.2, "did you mean 'gap_warn'?"),
        ("grad-first-warn", 20, "did you mean 'grad_first_warn'?"),
        ("zzz", 1, "thresholds.py"),
        ("gap_warn", "0.2", "gap_warn = 0.1"),
        ("gap_warn", math.nan, "gap_warn = 0.1"),
        ("gap_warn", -1, "not negative"),
        ("gap_warn", True, "got True"),
        ("grad_spike_window", 2.5, "a whole number"),
        ("gap_warn", 10**400, "a number"),
    ],
)
def test_a_bad_threshold_is_refused_with_what_to_do(name: str, value: object, told: str) -> None:
    with pytest.raises(RltopError) as caught:
        override({name: value}, where="rltop.toml [checks.thresholds]")
    assert told in str(caught.value)
    assert "rltop.toml" in str(caught.value)
    assert caught.value.exit_code == 2
