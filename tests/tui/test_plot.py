"""Histories stay bounded and honest; charts keep spikes, mark NaN and never fail on a number."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.tui.history import MAX_BUCKETS, Bucket, History
from rltop.tui.plot import draw, headroom, y_axis
from tests.tui.fake import series

calm = settings(deadline=None)  # a shared machine has no clock to rely on
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def line(*values: float) -> list[Bucket]:
    history = History()
    for step, value in enumerate(values):
        history.append(step, value)
    return history.buckets


def ink(rows: tuple[str, ...]) -> int:
    """Dots that are set."""
    return sum(bin(ord(char) - 0x2800).count("1") for row in rows for char in row if 0x2800 <= ord(char) < 0x2900)


def test_a_spike_of_one_step_in_ten_thousand_reaches_the_top_of_a_narrow_chart() -> None:
    values = [0.1] * 10_000
    values[7_001] = 9.0
    history = History()
    history.refine(series(values))
    plot = draw(history.buckets, 30, 4, (0, 9_999))
    assert plot.axis is not None
    assert plot.axis.hi >= 9.0
    assert [x for x, char in enumerate(plot.rows[0]) if char != " "] == [20]


def test_nan_breaks_the_line_and_leaves_a_mark_where_it_happened() -> None:
    plot = draw(line(1.0, 1.0, math.nan, 1.0, 1.0), 5, 3, (0, 4))
    assert {x for _, x in plot.marks} == {2}
    assert any("✗" in row for row in plot.rows)
    alone = draw(line(1.0, 1.0, 1.0, 1.0, 1.0), 5, 3, (0, 4))
    assert ink(plot.rows) < ink(alone.rows)


def test_only_nan_draws_marks_and_no_axis() -> None:
    plot = draw(line(math.nan, math.inf), 10, 3, (0, 1))
    assert plot.axis is None
    assert len(plot.marks) == 2
    assert ink(plot.rows) == 0


def test_the_threshold_line_is_there_when_the_data_come_near_it_and_only_then() -> None:
    near = draw(line(1.0, 2.0, 4.0), 10, 4, (0, 2), limit=5.0)
    far = draw(line(0.1, 0.2, 0.1), 10, 4, (0, 2), limit=5.0)
    assert near.limit == 0
    assert far.limit is None
    assert far.axis is not None
    assert far.axis.hi < 1.0


def test_a_log_axis_spreads_small_values_and_counts_what_it_cannot_show() -> None:
    plot = draw(line(0.0, 1e-6, 1e-3, 1.0), 8, 4, (0, 3), log=True)
    assert plot.below == 1
    assert plot.axis is not None
    assert plot.axis.labels == ("1", "1e-6")


def test_ascii_charts_are_ascii() -> None:
    plot = draw(line(1.0, 5.0, 2.0, math.nan), 12, 4, (0, 3), ascii_only=True, mark="X")
    assert all(row.isascii() for row in plot.rows)
    assert any("*" in row for row in plot.rows)


@calm
@given(
    st.lists(NUMBERS, max_size=40),
    st.integers(1, 20),
    st.integers(1, 6),
    st.booleans(),
    st.none() | st.floats(1e-9, 1e9),
)
def test_no_number_breaks_a_chart(values: list[float], width: int, height: int, log: bool, limit: float | None) -> None:
    buckets = line(*values)
    plot = draw(buckets, width, height, (0, max(1, len(values) - 1)), log=log, limit=limit)
    assert len(plot.rows) == height
    assert all(len(row) == width for row in plot.rows)


@calm
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=30))
def test_the_axis_holds_every_finite_value(values: list[float]) -> None:
    axis = y_axis(line(*values))
    assert axis is not None
    slack = 1e-9 * (axis.hi - axis.lo)
    assert axis.lo - slack <= min(values)
    assert max(values) <= axis.hi + slack


@calm
@given(st.floats(0, 1e9))
def test_the_x_axis_leaves_little_room_and_moves_seldom(length: float) -> None:
    room = headroom(length)
    assert room >= length * (1 - 1e-9)
    assert room <= max(10.0, length * 1.1501)


def test_live_points_extend_the_history_and_a_hole_is_noticed() -> None:
    history = History()
    history.refine(series([1.0, 2.0, 3.0]))
    history.append(3, 4.0)
    assert history.holes == 0
    history.append(7, 5.0)
    assert history.holes == 3
    assert history.span == (0.0, 7.0)


def test_the_answer_of_the_daemon_fills_the_hole_and_keeps_newer_points() -> None:
    history = History()
    history.append(0, 1.0)
    history.append(5, 6.0)
    history.append(6, 7.0)
    history.refine(series([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert [bucket.step for bucket in history.buckets] == [0, 1, 2, 3, 4, 5, 6]
    assert history.holes == 0


def test_the_same_step_again_replaces_its_value() -> None:
    history = History()
    history.append(1, 1.0)
    history.append(1, 2.0)
    assert [bucket.last for bucket in history.buckets] == [2.0]


def test_a_run_that_starts_again_from_a_checkpoint_cuts_the_old_future() -> None:
    history = History()
    for step in range(10):
        history.append(step, float(step))
    history.append(4, 99.0)
    assert [bucket.step for bucket in history.buckets] == [0, 1, 2, 3, 4]


def test_a_night_of_points_stays_bounded_and_keeps_extremes_and_nan_counts() -> None:
    history = History()
    for step in range(50_000):
        history.append(step, math.nan if step == 20_000 else 1e6 if step == 30_000 else 1.0)
    assert len(history.buckets) <= MAX_BUCKETS
    assert history.bad == 1
    assert max(bucket.hi for bucket in history.buckets if bucket.finite) == 1e6
    assert history.span is not None
    assert history.span[1] == 49_999
