"""The simulator's bugs and clock."""

from __future__ import annotations

import random
import statistics

import pytest

from rltop.bisect.planner import Budget, Planner
from rltop.bisect.simulate import Bug, Law, Ours, bisect, bugs
from rltop.bisect.space import space
from rltop.evidence.priors import load

SPACE = space(("cuda_graph", "speculative", "deepep"), load().priors)


@pytest.mark.parametrize("law", ["steady", "waves", "wear", "early"])
def test_every_law_has_the_mean_that_it_was_given(law: Law) -> None:
    draw = random.Random(5)
    bug = Bug((1,), 20.0, law)
    assert statistics.fmean(bug.minutes(draw) for _ in range(4000)) == pytest.approx(20.0, rel=0.12)


def test_a_bug_is_possible_where_all_it_needs_is_on() -> None:
    pair, either = Bug((0b011,), 10.0), Bug((0b001, 0b100), 10.0)
    assert [pair.possible(arm) for arm in (0b111, 0b011, 0b001, 0b000)] == [True, True, False, False]
    assert [either.possible(arm) for arm in (0b110, 0b001, 0b010)] == [True, True, False]
    assert Bug((0,), 10.0).possible(0)


def test_bugs_are_the_same_for_the_same_seed_and_have_all_sizes() -> None:
    found = list(bugs(SPACE.toggles, SPACE.mask, count=200, seed=3))
    assert found == list(bugs(SPACE.toggles, SPACE.mask, count=200, seed=3))
    assert {bug.needs[0].bit_count() for bug in found} == {0, 1, 2, 3}
    assert all(5.0 <= bug.mean_min <= 60.0 for bug in found)


@pytest.mark.parametrize("engines", [1, 3])
def test_a_bisection_is_played_to_its_verdict(engines: int) -> None:
    right = 0
    for seed in range(8):
        planner = Planner(SPACE, Budget(minutes=1e5), seed=seed)
        bug = Bug((0b011,), 8.0)
        outcome = bisect(
            bug,
            Ours(planner),
            all_on=SPACE.all_on,
            engines=engines,
            restart_min=2.0,
            draw=random.Random(seed),
            budget_min=1e5,
        )
        right += outcome.culprit == 0b011
        assert outcome.busy_min <= engines * outcome.minutes + 60.0
        assert outcome.trials > 0
    assert right >= 7


def test_a_budget_ends_it_without_a_name() -> None:
    planner = Planner(SPACE, Budget(minutes=30.0), seed=1)
    outcome = bisect(
        Bug((0b001,), 60.0),
        Ours(planner),
        all_on=SPACE.all_on,
        engines=1,
        restart_min=2.0,
        draw=random.Random(1),
        budget_min=30.0,
    )
    assert outcome.culprit is None
