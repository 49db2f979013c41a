"""The simulator's bugs and clock."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from rltop.bisect.planner import Budget, Planner
from rltop.bisect.rehearse import Ours, rehearse
from rltop.bisect.simulate import NEVER, Bug, Law, Mix, bisect, bugs
from rltop.bisect.space import space
from rltop.evidence.priors import load

SPACE = space(("cuda_graph", "speculative", "deepep"), load().priors)


@pytest.mark.parametrize("law", ["steady", "waves", "wear", "early"])
def test_every_law_has_the_mean_that_it_was_given(law: Law) -> None:
    draw = random.Random(5)
    bug = Bug((1,), 20.0, law)
    assert statistics.fmean(bug.drawn(draw) for _ in range(4000)) == pytest.approx(20.0, rel=0.12)


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


def test_the_simulator_knows_nothing_of_the_planners_model() -> None:
    """Else the benchmark would ask the model about itself."""
    import rltop.bisect.simulate as simulator

    text = Path(simulator.__file__).read_text(encoding="utf-8")
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("from rltop", "import rltop"))}
    assert imported == {"rltop.bisect.trials"}


def test_several_bugs_come_each_in_its_own_time() -> None:
    draw = random.Random(1)
    both = Bug((0b001, 0b010), 20.0)
    alone = statistics.fmean(both.minutes(draw, 0b001, all_on=7) for _ in range(3000))
    together = statistics.fmean(both.minutes(draw, 0b011, all_on=7) for _ in range(3000))
    assert alone == pytest.approx(20.0, rel=0.1)
    assert together == pytest.approx(10.0, rel=0.1)


def test_a_bug_may_be_slower_with_something_off_on_one_engine_only_or_gone() -> None:
    draw = random.Random(1)
    slow = Bug((0b001,), 10.0, off=3.0)
    assert statistics.fmean(slow.minutes(draw, 0b001, all_on=7) for _ in range(3000)) == pytest.approx(30.0, rel=0.1)
    assert statistics.fmean(slow.minutes(draw, 0b111, all_on=7) for _ in range(3000)) == pytest.approx(10.0, rel=0.1)
    broken = Bug((0,), 10.0, host=2)
    assert [broken.minutes(draw, 7, all_on=7, engine=at) < NEVER for at in range(4)] == [False, False, True, False]
    assert Bug((0,), 10.0, again=False).minutes(draw, 7, all_on=7) == NEVER


def test_a_mix_of_bugs_at_once_has_none_inside_another() -> None:
    mix = Mix(sizes={1: 0.5, 2: 0.5}, at_once=2)
    for bug in bugs(SPACE.toggles, SPACE.mask, count=60, seed=2, mix=mix):
        one, two = bug.needs
        assert one & two not in (one, two)


def _first_steps(engines: int) -> list[tuple[str, int]]:
    played = rehearse(Planner(SPACE, Budget(minutes=1e5), seed=3), Bug((0b001,), 8.0), engines=engines, seed=3)
    assert played.right
    assert played.verdict.state == "found"
    return [(step.what, step.engine) for step in played.steps]


def test_a_rehearsal_tells_every_step_with_its_reason() -> None:
    steps = rehearse(Planner(SPACE, Budget(minutes=1e5), seed=3), Bug((0b011,), 8.0), engines=2, seed=3).steps
    assert [step.minutes for step in steps] == sorted(step.minutes for step in steps)
    assert all(step.why for step in steps if step.what in ("started", "goes on"))
    assert {step.what for step in steps} >= {"started", "crashed", "quiet"}
    assert _first_steps(2) == _first_steps(2)


@pytest.mark.parametrize(
    "bug",
    [
        Bug((0b0001, 0b0010), 12.0),
        Bug((0b1111,), 6.0),
    ],
    ids=["two bugs at once", "four together"],
)
def test_what_the_prior_holds_impossible_is_not_given_a_wrong_name(bug: Bug) -> None:
    four = space(("cuda_graph", "speculative", "overlap_schedule", "deepep"), load().priors)
    ends = [rehearse(Planner(four, Budget(1e5), seed=seed), bug, engines=2, seed=seed) for seed in range(10)]
    assert sum(end.right for end in ends) >= 9
    assert all("no single toggle, pair or triple" in end.verdict.text for end in ends if end.right)


def test_one_broken_engine_among_others_makes_no_toggle_the_culprit() -> None:
    ends = [
        rehearse(Planner(SPACE, Budget(1440.0), seed=seed), Bug((0,), 12.0, host=1), engines=4, seed=seed)
        for seed in range(6)
    ]
    assert sum(end.outcome.culprit in (0, None) for end in ends) >= 5
