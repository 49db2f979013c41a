"""How long a generation had requests to work on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.engines.exposure import MOST_GAP_S, Exposure
from rltop.engines.scrape import EngineStats


def stats(active: int | None, tokens: float | None = None, running: int | None = None) -> EngineStats:
    return EngineStats(url="", reachable=True, active=active, decode_tokens_total=tokens, running=running)


def test_idle_time_is_no_exposure() -> None:
    seen = Exposure()
    for second in range(3600):
        seen.scraped(stats(0, 0), second)
    for second in range(3600, 3660):
        seen.scraped(stats(4, 0), second)
    for second in range(3660, 5000):
        seen.scraped(stats(0, 0), second)
    assert seen.seconds(4999.0, 5000.0) == pytest.approx(61.0)


def test_it_crashed_under_traffic_that_came_after_the_last_look() -> None:
    seen = Exposure()
    seen.scraped(stats(0), 100.0)
    assert seen.seconds(101.0, 101.0) == 0.5
    assert Exposure().seconds(7.0, 0.25) == 0.125, "it was never looked at"


def test_short_requests_are_seen_by_their_tokens_and_a_silence_is_not() -> None:
    seen = Exposure()
    for second in range(11):
        seen.scraped(stats(0, 100.0 * second), second)
    assert seen.seconds(10.0, 10.0) == pytest.approx(10.0)
    seen.scraped(EngineStats(url="", reachable=False), 11.0)
    seen.scraped(stats(1, 1100.0), 1000.0)
    assert seen.seconds(1000.0, 1000.0) == pytest.approx(10.0 + MOST_GAP_S)


def test_one_that_an_earlier_daemon_watched_is_estimated_from_its_tokens() -> None:
    seen = Exposure()
    for second in range(11):
        seen.scraped(stats(None, 9000.0 + 100.0 * second, running=1), second)
    assert seen.seconds(10.0, 5000.0) == pytest.approx(10.0 * 10.0)
    assert seen.seconds(10.0, 50.0) == 50.0, "never longer than it was up"


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.none() | st.integers(0, 3), st.none() | st.floats(0, 1e6), st.booleans()),
        max_size=30,
    )
)
def test_it_is_never_negative_and_never_more_than_the_time_up(
    looks: list[tuple[float, int | None, float | None, bool]],
) -> None:
    seen, now = Exposure(), 0.0
    for after, active, tokens, reachable in looks:
        now += after
        seen.scraped(EngineStats(url="", reachable=reachable, active=active, decode_tokens_total=tokens), now)
    assert 0.0 <= seen.seconds(now + 1.0, now + 1.0) <= now + 1.0
