"""The planner against bugs whose culprit is known; time is counted, not waited for."""

from __future__ import annotations

import random

import pytest

from rltop.bisect.belief import Trial
from rltop.bisect.planner import Budget, Planner, Running, Verdict
from rltop.bisect.space import space
from rltop.evidence.priors import load

PRIORS = load().priors
TOGGLES = ("cuda_graph", "speculative", "overlap_schedule", "deepep", "prefill_graph")
SPACE = space(TOGGLES, PRIORS)
FAR = 1e9


def hunt(
    culprit: frozenset[str] | None, *, seed: int, mean_min: float = 12.0, engines: int = 1, budget_min: float = 6000.0
) -> tuple[Verdict, float, list[int]]:
    """Play a bisection: (verdict, minutes, arms in their order). culprit None: it never crashes again."""
    draw = random.Random(seed)
    planner = Planner(SPACE, Budget(minutes=budget_min), seed=seed)
    needed = None if culprit is None else SPACE.mask(culprit)
    trials = [Trial(SPACE.all_on, draw.expovariate(1 / mean_min), crashed=True)]
    arms: list[int] = []
    now, live = 0.0, dict[int, tuple[int, float, float, float]]()
    while True:
        running = [Running(str(at), arm, max(0.0, now - began)) for at, (arm, began, _, _) in live.items()]
        verdict = planner.verdict(trials, running, minutes=now)
        if verdict.state != "open":
            return verdict, now, arms
        for engine in range(engines):
            one = live.get(engine)
            if one is not None and one[3] > now:
                continue
            others = [Running(str(at), arm, max(0.0, now - began)) for at, (arm, began, _, _) in live.items()]
            then = planner.choose(trials, others, engine=str(engine))
            if one is not None and one[0] == then.arm:
                live[engine] = (*one[:3], now + then.minutes)
                continue
            if one is not None:
                trials.append(Trial(one[0], now - one[1], crashed=False))
            began = now + planner.budget.restart_min
            can = needed is not None and then.arm & needed == needed
            live[engine] = (
                then.arm,
                began,
                began + draw.expovariate(1 / mean_min) if can else FAR,
                began + then.minutes,
            )
            arms.append(then.arm)
        engine, now = min(((at, min(one[2], one[3])) for at, one in live.items()), key=lambda pair: pair[1])
        arm, began, crash, _ = live[engine]
        if crash <= now:
            trials.append(Trial(arm, crash - began, crashed=True))
            del live[engine]


@pytest.mark.parametrize(
    "culprit",
    [
        {"cuda_graph"},
        {"prefill_graph"},
        {"cuda_graph", "speculative"},
        {"overlap_schedule", "deepep"},
        {"cuda_graph", "speculative", "overlap_schedule"},
        set[str](),
    ],
    ids=lambda names: " x ".join(sorted(names)) or "none",
)
def test_it_names_the_culprit(culprit: set[str]) -> None:
    verdicts = [hunt(frozenset(culprit), seed=seed)[0] for seed in range(4)]
    right = sum(verdict.culprit == SPACE.mask(culprit) for verdict in verdicts)
    assert right >= 3, [(verdict.state, verdict.text) for verdict in verdicts]
    assert all(verdict.state == ("found" if culprit else "none") for verdict in verdicts if verdict.probability)


def test_more_engines_take_less_time() -> None:
    minutes = {
        engines: sum(hunt(frozenset({"speculative"}), seed=seed, engines=engines)[1] for seed in range(5))
        for engines in (1, 4)
    }
    assert minutes[4] < 0.6 * minutes[1]


def test_the_same_seed_plans_the_same() -> None:
    first = hunt(frozenset({"deepep"}), seed=3)
    assert hunt(frozenset({"deepep"}), seed=3) == first


def test_a_crash_that_never_comes_again_ends_with_the_budget_and_no_name() -> None:
    verdict, minutes, _ = hunt(None, seed=1, budget_min=600.0)
    assert verdict.state in ("budget", "not-separable")
    assert verdict.culprit is None
    assert minutes >= 600.0 or verdict.state == "not-separable"


def test_a_toggle_that_can_not_be_turned_off_is_on_in_every_arm() -> None:
    deepep = SPACE.mask({"deepep"})
    planner = Planner(SPACE, fixed=deepep)
    assert all(arm & deepep for arm in planner.arms())


def test_what_goes_off_together_is_off_together_in_every_arm() -> None:
    deepep, graph = SPACE.mask({"deepep"}), SPACE.mask({"cuda_graph"})
    planner = Planner(SPACE, together={deepep: graph})
    assert all(arm & deepep or not arm & graph for arm in planner.arms())


def test_it_goes_on_with_a_trial_rather_than_pay_for_the_same_one_again() -> None:
    planner = Planner(SPACE, Budget(restart_min=30.0))
    trials = [Trial(SPACE.all_on, 10.0, crashed=True)]
    first = planner.choose(trials)
    again = planner.choose(trials, [Running("0", first.arm, 1.0)], engine="0")
    assert again.arm == first.arm
    assert again.why.startswith("go on")


def test_a_named_culprit_has_to_crash_alone() -> None:
    """However sure the belief is: the last crash is what a person will ask for."""
    graph = SPACE.mask({"cuda_graph"})
    rest = SPACE.all_on & ~graph
    trials = [Trial(SPACE.all_on, 5.0, crashed=True)] * 4 + [Trial(rest, 300.0, crashed=False)]
    trials += [Trial(SPACE.all_on & ~SPACE.mask({name}), 6.0, crashed=True) for name in TOGGLES[1:]]
    planner = Planner(SPACE)
    assert planner.verdict(trials).state == "open"
    then = planner.choose(trials)
    assert then.arm == graph
    assert "has to crash" in then.why
    assert planner.verdict([*trials, Trial(graph, 6.0, crashed=True)]).state == "found"


def test_arms_that_are_refused_are_never_asked_for() -> None:
    bare = frozenset({0, SPACE.mask({"cuda_graph"})})
    planner = Planner(SPACE, barred=bare)
    assert not bare.intersection(planner.arms())
    graph = SPACE.mask({"cuda_graph"})
    trials = [Trial(SPACE.all_on, 5.0, crashed=True)] * 4 + [Trial(SPACE.all_on & ~graph, 400.0, crashed=False)]
    trials += [Trial(SPACE.all_on & ~SPACE.mask({name}), 6.0, crashed=True) for name in TOGGLES[1:]]
    then = planner.choose(trials)
    assert then.arm not in bare
    assert then.arm & graph
    end = planner.verdict([*trials, Trial(then.arm, 4.0, crashed=True)])
    beside = SPACE.names(then.arm & ~graph)
    assert end.text == (
        f"cuda_graph: crashes with nothing else on but {beside[0]}, quiet with any of it off (400 min without "
        "cuda_graph)"
    )


PADDED = space(("cuda_graph", "cuda_graph_padding", "speculative"), PRIORS)
GRAPH, PADDING = PADDED.mask({"cuda_graph"}), PADDED.mask({"cuda_graph_padding"})


def test_culprits_that_no_arm_tells_apart_are_one() -> None:
    """Without graphs nothing is padded: "padding" and "graph x padding" crash in the same arms."""
    planner = Planner(PADDED, together={GRAPH: PADDING})
    both = GRAPH | PADDING
    assert PADDING not in planner.space.culprits
    assert planner.space.words(both) == "cuda_graph_padding, alone or with cuda_graph"
    apart = PADDED.prior[PADDED.culprits.index(PADDING)] + PADDED.prior[PADDED.culprits.index(both)]
    assert planner.believe([]).of(both) == pytest.approx(apart)
    trials = [Trial(7, 5.0, crashed=True)] * 4 + [Trial(7 & ~PADDING, 300.0, crashed=False)]
    trials += [Trial(both, 5.0, crashed=True), Trial(7 & ~both, 300.0, crashed=False)]
    verdict = planner.verdict(trials)
    assert (verdict.state, verdict.culprit) == ("found", both)
    assert verdict.text.endswith("(600 min without cuda_graph_padding)")


def test_what_goes_off_together_goes_along_a_chain() -> None:
    spec = PADDED.mask({"speculative"})
    planner = Planner(PADDED, together={PADDING: spec, GRAPH: PADDING})
    assert set(planner.arms()) == {7, GRAPH, GRAPH | PADDING, 0}


def test_a_toggle_that_is_always_on_is_not_blamed_and_not_cleared() -> None:
    planner = Planner(PADDED, fixed=GRAPH)
    assert not any(culprit > 0 and culprit & GRAPH for culprit in planner.space.culprits)
    trials = [Trial(7, 5.0, crashed=True), Trial(GRAPH, 6.0, crashed=True), Trial(GRAPH, 3.0, crashed=True)]
    verdict = planner.verdict(trials)
    assert verdict.state == "none"
    assert verdict.text.endswith("none of these, or cuda_graph, which can not be turned off")


@pytest.mark.parametrize("culprit", [{"speculative"}, {"cuda_graph", "speculative"}])
def test_a_crash_at_the_start_is_counted_in_starts(culprit: set[str]) -> None:
    """A flaky start, four of ten: minutes say nothing, and no trial waits once its engine is ready."""
    needed, right = PADDED.mask(culprit), 0
    for seed in range(5):
        draw = random.Random(seed)
        planner = Planner(PADDED, seed=seed, exposure="start")
        trials = [Trial(7, 0.0, crashed=True)]
        while (verdict := planner.verdict(trials)).state == "open" and len(trials) < 300:
            then = planner.choose(trials)
            assert then.minutes == 0.0
            trials.append(Trial(then.arm, 0.0, crashed=then.arm & needed == needed and draw.random() < 0.4))
        right += verdict.culprit == needed
        assert "starts without speculative" in verdict.text
    assert right >= 4


def test_many_toggles_still_have_every_bare_arm_that_a_culprit_needs() -> None:
    names = tuple(f"t{at}" for at in range(14))
    many = space(names)
    planner = Planner(many)
    culprit = many.mask({"t2", "t9", "t11"})
    trials = [Trial(many.all_on, 5.0, crashed=True)] * 6
    trials += [Trial(many.all_on & ~(1 << at), 900.0, crashed=False) for at in (2, 9, 11)]
    trials += [Trial(culprit | 1 << at | 1 << also, 5.0, crashed=True) for at in range(8) for also in range(at)]
    then = planner.choose(trials)
    assert then.arm == culprit
    assert planner.verdict([*trials, Trial(culprit, 4.0, crashed=True)]).culprit == culprit


def test_of_two_toggles_none_is_named_when_it_crashed_twice_with_both_off() -> None:
    """ "Something else" crashes there as well: no number of crashes tells the two apart."""
    known = space(("cuda_graph", "speculative"))
    planner = Planner(known, budget=Budget(minutes=600.0, restart_min=2.0), fixed=0, seed=1)
    hunted = Trial(known.all_on, 10.0, crashed=True)
    bare = Trial(0, 9.0, crashed=True)
    assert planner.verdict([hunted, bare]).state == "open", "one may be a stray"
    ended = planner.verdict([hunted, bare, bare])
    assert (ended.state, ended.culprit) == ("none", 0)


def test_a_budget_in_which_nothing_ran_says_nothing_of_quiet() -> None:
    planner = Planner(SPACE, Budget(minutes=1.0))
    hunted = Trial(SPACE.all_on, 10.0, crashed=True)
    nothing = planner.verdict([hunted, Trial(0, 0.0, crashed=False)], minutes=2.0)
    assert nothing.text.startswith("no trial came under traffic; the budget is spent")
    some = planner.verdict([hunted, Trial(0, 3.0, crashed=False)], minutes=2.0)
    assert some.text.startswith("it did not crash again in 3 min")


def test_toggles_that_were_not_named_are_not_called_off() -> None:
    known = space(("speculative",))
    planner = Planner(known, untried=("cuda_graph", "overlap_schedule"))
    on, off = Trial(1, 1.0, crashed=True), Trial(0, 60.0, crashed=False)
    text = planner.verdict([on, on, on, off]).text
    assert "crashes with nothing else of what was tried on" in text
    assert text.endswith("; not tried: cuda_graph, overlap_schedule")
