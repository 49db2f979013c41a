"""The series store against a naive one: same buckets, whatever the order of points, restarts and NaN."""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise
from math import inf, isfinite, isnan, nan

from hypothesis import given
from hypothesis import strategies as st

from rltop.daemon.series import BLOCK, MAX_SERIES, MIN_POINTS, Buckets, SeriesStore
from tests.examples import examples

numbers = st.floats(width=32) | st.sampled_from([nan, inf, -inf, 0.0])
points = st.lists(st.tuples(st.integers(0, 300), numbers), max_size=300)


def naive(truth: dict[int, float], lo: float | None, hi: float | None, buckets: int) -> list[tuple[float, ...]]:
    """(last step, min, max, last finite, non-finite count) per bucket, straight from the definition."""
    chosen = [
        (step, value)
        for step, value in sorted(truth.items())
        if (lo is None or step >= lo) and (hi is None or step <= hi)
    ]
    if len(chosen) <= buckets:
        groups = [[point] for point in chosen]
    else:
        first, width = float(chosen[0][0]), (chosen[-1][0] - chosen[0][0]) / buckets
        groups = []
        for number in range(buckets):
            start = -inf if number == 0 else first + number * width
            stop = inf if number == buckets - 1 else first + (number + 1) * width
            groups.append([point for point in chosen if start <= point[0] < stop])
    found: list[tuple[float, ...]] = []
    for group in filter(None, groups):
        finite = [value for _, value in group if isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (nan, nan)
        found.append((group[-1][0], low, high, finite[-1] if finite else nan, len(group) - len(finite)))
    return found


def rows(found: Buckets | None) -> list[tuple[float, ...]]:
    assert found is not None
    return list(zip(found.step, found.lo, found.hi, found.last, found.nan, strict=True))


def same(got: list[tuple[float, ...]], wanted: list[tuple[float, ...]]) -> bool:
    return len(got) == len(wanted) and all(
        a == b or (isnan(a) and isnan(b))
        for row, other in zip(got, wanted, strict=True)
        for a, b in zip(row, other, strict=True)
    )


bounds = st.none() | st.integers(-5, 310)


@given(points, bounds, bounds, st.integers(1, 80), st.integers(0, 300))
@examples(150)
def test_buckets_are_those_of_the_definition(
    given_points: list[tuple[int, float]], lo: int | None, hi: int | None, buckets: int, early: int
) -> None:
    store = SeriesStore()
    truth: dict[int, float] = {}
    for index, (step, value) in enumerate(given_points):
        store.append("k", step, value)
        truth[step] = value
        if index == early:
            store.query("k", None, None, 1)  # summaries made early must not go stale
    if not truth:
        assert store.query("k", lo, hi, buckets) is None
        return
    assert same(rows(store.query("k", lo, hi, buckets)), naive(truth, lo, hi, buckets))


@given(points, points, st.integers(1, 40))
@examples(80)
def test_after_a_restart_the_first_point_cuts_what_is_gone_over_again(
    before: list[tuple[int, float]], after: list[tuple[int, float]], buckets: int
) -> None:
    store = SeriesStore()
    truth: dict[int, float] = {}
    for step, value in before:
        store.append("k", step, value)
        truth[step] = value
    store.restart()
    cut = False
    for index, (step, value) in enumerate(after):
        if index == 0:
            cut = any(old >= step for old in truth)
            truth = {old: kept for old, kept in truth.items() if old < step}
        assert store.append("k", step, value) is (cut and index == 0)
        truth[step] = value
    if truth:
        assert same(rows(store.query("k", None, None, buckets)), naive(truth, None, None, buckets))


@given(st.lists(points, max_size=4), st.booleans())
@examples(60)
def test_loading_chunks_is_the_same_as_appending(chunks: list[list[tuple[int, float]]], summarise: bool) -> None:
    appended, loaded = SeriesStore(), SeriesStore()
    for chunk in chunks:
        steps, values = array("d", [step for step, _ in chunk]), array("d", [value for _, value in chunk])
        rising = all(a < b for a, b in pairwise(steps))
        loaded.extend("k", steps, values, rising=rising)
        if summarise:
            loaded.summarise()
        for step, value in chunk:
            appended.append("k", step, value)
    if any(chunks):
        assert same(rows(loaded.query("k", None, None, 50)), rows(appended.query("k", None, None, 50)))


# ---------------------------------------------------------------- long series


long_series = st.builds(
    lambda size, stride, odd, late: (size, stride, odd, late),
    st.integers(1, 6_000),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 5_999), numbers), max_size=20),
    st.lists(st.tuples(st.integers(0, 18_000), numbers), max_size=10),
)


def check_a_long_series(
    what: tuple[int, int, list[tuple[int, float]], list[tuple[int, float]]], buckets: int, cut: int | None
) -> None:
    """Memory is bounded; the extremes, the NaNs, the first and the newest points are the true ones."""
    size, stride, odd, late = what
    store, truth = SeriesStore(MIN_POINTS), {}
    for index in range(size):
        truth[index * stride] = float(index % 97)
    truth |= {index * stride: value for index, value in odd if index < size}
    for step, value in truth.items():
        store.append("k", step, value)
    if not late:
        singles = min(size, 64)
        head = rows(store.query("k", 0, (singles - 1) * stride, 10_000))
        assert same(head, naive(dict(list(truth.items())[:singles]), None, None, 10_000)), "the first points stay"
    replaced = False
    for step, value in late:
        replaced = replaced or step in truth
        truth[step] = value
        store.append("k", step, value)
    if cut is not None:
        store.cut("k", cut)
        kept = rows(store.query("k", None, None, 10_000))
        assert all(row[0] < cut for row in kept)
        if not late:
            first = [step for step in list(truth)[:64] if step < cut]
            assert [row[0] for row in kept][: len(first)] == first
        return
    assert store.size_bytes() <= MIN_POINTS * 16 + MIN_POINTS // BLOCK * 20 + MIN_POINTS // 4 * 44
    found = rows(store.query("k", None, None, buckets))
    assert len(found) <= buckets
    assert all(earlier[0] < later[0] for earlier, later in pairwise(found))
    assert found[-1][0] == max(truth)
    if not replaced:
        ((_, low, high, _, bad),) = naive(truth, None, None, 1)
        lows, highs = [row[1] for row in found if row[1] == row[1]], [row[2] for row in found if row[2] == row[2]]
        assert (min(lows, default=nan), max(highs, default=nan)) == (low, high) or isnan(low)
        assert sum(row[4] for row in found) == bad
        tail = sorted(truth)[-MIN_POINTS // 2 :]
        if len(tail) == MIN_POINTS // 2:
            assert same(rows(store.query("k", tail[0], None, buckets)), naive(truth, tail[0], None, buckets))


@given(long_series, st.integers(1, 80), st.none() | st.integers(0, 18_000))
@examples(60)
def test_a_long_series_is_bounded_and_keeps_what_matters(
    what: tuple[int, int, list[tuple[int, float]], list[tuple[int, float]]], buckets: int, cut: int | None
) -> None:
    check_a_long_series(what, buckets, cut)


def test_many_long_series_stay_within_the_bound() -> None:
    store = SeriesStore()
    steps = array("d", range(512))
    for number in range(1000):  # with more and more names the long ones become shorter
        for chunk in range(20 if number < 50 else 4):
            shifted = array("d", [step + chunk * 512 for step in steps])
            store.extend(f"k{number}", shifted, shifted, rising=True)
    assert store.size_bytes() < 70_000_000
    found = store.query("k0", None, None, 10)
    assert found is not None
    assert (found.step[-1], found.hi[-1]) == (20 * 512 - 1, 20 * 512 - 1)
    assert len(rows(store.query("k0", 0, 63, 1000))) == 64


def test_loading_a_long_series_is_the_same_as_appending_it() -> None:
    appended, loaded = SeriesStore(MIN_POINTS), SeriesStore(MIN_POINTS)
    for chunk in range(40):
        steps = array("d", range(chunk * 512, (chunk + 1) * 512))
        loaded.extend("k", steps, steps, rising=True)
        for step in steps:
            appended.append("k", step, step)
    for buckets in (1, 7, 100, 10_000):
        assert same(rows(loaded.query("k", None, None, buckets)), rows(appended.query("k", None, None, buckets)))


def test_a_run_that_goes_back_far_cuts_the_old_part_too() -> None:
    store = SeriesStore(MIN_POINTS)
    for step in range(5000):
        store.append("k", step, 1.0)
    store.restart()
    assert store.append("k", 100, 2.0)
    found = rows(store.query("k", None, None, 10_000))
    assert found[-1][:4] == (100.0, 2.0, 2.0, 2.0)
    assert 64 <= len(found) <= 101
    assert all(row[0] <= 100 for row in found)


def test_a_single_spike_survives_in_a_long_series() -> None:
    store = SeriesStore()
    for step in range(10_000):
        store.append("k", step, 1e6 if step == 7_777 else 1.0)
    found = rows(store.query("k", None, None, 50))
    assert len(found) == 50
    assert [row[2] for row in found].count(1e6) == 1


def test_summaries_follow_when_old_points_change() -> None:
    store = SeriesStore()
    truth = dict.fromkeys(range(0, 10 * BLOCK, 2), 1.0)
    for step, value in truth.items():
        store.append("k", step, value)

    def check() -> None:
        for buckets in (1, 3, 5):
            assert same(rows(store.query("k", None, None, buckets)), naive(truth, None, None, buckets))

    check()
    for step, value in ((BLOCK, 50.0), (BLOCK + 1, -50.0), (3, nan)):  # replaced, inserted, inserted
        store.append("k", step, value)
        truth[step] = value
        check()
    store.cut("k", 7 * BLOCK + 5)
    for step in range(7 * BLOCK + 5, 12 * BLOCK):
        store.append("k", step, 2.0)
    truth = {step: value for step, value in truth.items() if step < 7 * BLOCK + 5}
    truth |= dict.fromkeys(range(7 * BLOCK + 5, 12 * BLOCK), 2.0)
    check()


def test_huge_values_are_clipped_and_overflowing_sums_do_not_hide_them() -> None:
    store = SeriesStore()
    for step in range(BLOCK * 2):
        store.append("k", step, 1e308)
    ((_, low, high, last, bad),) = rows(store.query("k", None, None, 1))
    assert low == high == last == struct.unpack("<f", struct.pack("<f", 3.4028234663852886e38))[0]
    assert bad == 0


def test_blobs_are_little_endian_columns_of_the_documented_types() -> None:
    store = SeriesStore()
    store.append("k", 7, 0.5)
    store.append("k", 9, nan)
    found = store.query("k", None, None, 10)
    assert found is not None
    step, low, high, last, bad = found.blobs()
    assert struct.unpack("<2d", step) == (7.0, 9.0)
    for column in (low, high, last):
        first, second = struct.unpack("<2f", column)
        assert first == 0.5
        assert isnan(second)
    assert struct.unpack("<2I", bad) == (0, 1)


def test_an_empty_range_is_an_answer_and_an_unknown_key_is_none() -> None:
    store = SeriesStore()
    store.append("k", 5, 1.0)
    assert rows(store.query("k", 6, None, 10)) == []
    assert rows(store.query("k", 9, 2, 10)) == []
    assert store.query("other", None, None, 10) is None


def test_names_without_end_are_refused_at_a_limit() -> None:
    store = SeriesStore()
    for number in range(MAX_SERIES):
        store.append(f"k{number}", 0, 0.0)
    assert store.full("one more")
    assert not store.full("k7")
