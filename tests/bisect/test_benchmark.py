"""The pinned bugs of the benchmark, and that its strategies play them."""

from __future__ import annotations

import pytest

from benchmarks.bisect import HONEST, RIGHT, Bench, Job, Setting, play, ratio, scenarios, wilson
from rltop.bisect.simulate import Bug

PINNED = scenarios()


@pytest.mark.parametrize("setting", PINNED.settings, ids=lambda setting: setting.name)
def test_the_bugs_are_the_pinned_ones(setting: Setting) -> None:
    """A change of the simulator or of the mix makes another benchmark, and has to say so."""
    assert PINNED.digest(setting) == setting.sha256


def test_tuning_is_done_on_other_bugs() -> None:
    plain = PINNED.settings[0]
    assert not set(PINNED.found(plain, 50)) & set(PINNED.found(plain, 50, tuning=True))


def test_another_seed_is_other_bugs_in_other_worlds() -> None:
    plain = PINNED.settings[0]
    assert not set(PINNED.found(plain, 50)) & set(PINNED.found(plain, 50, seed=7))
    pinned, other = (Bench(None, 3, seed=seed).measure("checklist", plain, 1) for seed in (None, 7))
    assert pinned.ended != other.ended


@pytest.mark.parametrize("what", ["rltop", "checklist", "exhaustive", "ddmin"])
@pytest.mark.parametrize("engines", [1, 8])
def test_each_strategy_ends_with_a_name(what: str, engines: int) -> None:
    bug = Bug((0b00001,), 6.0)
    ended = [play(Job(seed, bug, engines, what, PINNED.settings[0], (4.0, 9.0))) for seed in range(6)]
    assert sum(one.said == "right" for one in ended) >= (3 if what == "checklist" else 5)
    assert all(0 < one.minutes < 1000 for one in ended)


def test_a_share_has_its_interval_and_a_ratio_its_own() -> None:
    low, high = wilson(0.95, 200)
    assert (round(low, 3), round(high, 3)) == (0.910, 0.973)
    bench = Bench(None, 30)
    mine = bench.measure("checklist", PINNED.settings[0], 8)
    assert ratio(mine, mine) == (1.0, 0.0)


@pytest.mark.soak
@pytest.mark.parametrize("engines", [1, 8])
def test_part_of_the_pinned_bugs_is_near_the_goals(engines: int) -> None:
    """150 bugs tell a share to three or four in a hundred. The whole table is `python -m benchmarks.bisect --full`."""
    bench = Bench(None, 150)
    by_name = {setting.name: setting for setting in PINNED.settings}
    assert bench.measure("rltop", by_name["plain"], engines).share("right") >= RIGHT[engines] - 0.02
    for name in ("replays crash 3x sooner than the first", "replays crash 3x later than the first"):
        assert bench.measure("rltop", by_name[name], engines).share("right") >= 0.93, name
    for name in ("four together", "two bugs at once", "outside the toggles"):
        assert bench.measure("rltop", by_name[name], engines).share("wrong") <= 1 - HONEST + 0.04, name
