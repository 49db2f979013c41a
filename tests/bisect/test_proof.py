"""What a culprit has to show, counted by hand."""

from __future__ import annotations

import math

import pytest

from rltop.bisect.planner import Planner
from rltop.bisect.proof import SURVIVES, WITNESSED, Asked, owed, paid, quiet_for, seen, told_by
from rltop.bisect.space import space
from rltop.bisect.trials import Running, Trial
from rltop.evidence.priors import load

SPACE = space(("cuda_graph", "speculative", "overlap_schedule"), load().priors)
GRAPH = Asked(bare=0b001, rests={0b110: 3.0})


def test_quiet_says_something_on_engines_that_crash_and_on_all_once_two_did() -> None:
    one = [Trial(7, 5.0, crashed=True, engine="0"), Trial(6, 9.0, crashed=False, engine="1")]
    assert told_by(one, "2") == {"", "0"}
    assert told_by([*one, Trial(1, 4.0, crashed=True, engine="2")], "3") == {"", "0", "1", "2", "3"}
    assert told_by([*one, Trial(1, 4.0, crashed=True, engine="2", counts=False)], "3") == {"", "0"}
    assert told_by([*one, Trial(1, 4.0, crashed=True)], "3") == {"", "0", "1", "3"}


def test_quiet_is_counted_since_the_last_crash_of_the_arm() -> None:
    trials = [Trial(6, 9.0, crashed=False), Trial(6, 2.0, crashed=True), Trial(6, 5.0, crashed=False)]
    lost = Trial(6, 50.0, crashed=False, counts=False)
    elsewhere = Trial(6, 50.0, crashed=False, engine="7")
    shown = seen([*trials, lost, elsewhere], [Running("", 6, 4.0)], frozenset({""}), starts=False)
    assert shown.quiet == {6: 9.0}
    assert shown.crashed == {6}
    assert shown.lacks(GRAPH, 3.0) == {0b001: 3.0}
    assert shown.lacks(GRAPH, 4.0) == {0b001: 4.0, 0b110: 3.0}
    assert seen(trials, [Running("", 6, 4.0)], frozenset({""}), starts=True).quiet == {6: 1.0}


def test_an_arm_owes_what_is_lacking_by_what_is_believed_of_each_culprit() -> None:
    shown = seen([Trial(6, 10.0, crashed=False), Trial(7, 5.0, crashed=True)], [], frozenset({""}), starts=False)
    pair = Asked(bare=0b011, rests={0b110: 2.0, 0b101: 2.0})
    debt = owed([(0.5, GRAPH), (0.25, pair)], shown, 10.0, [Running("1", 0b101, 1.0)])
    assert debt == {
        0b001: [(0.5, 10.0)],
        0b110: [(0.5, 20.0), (0.25, 10.0)],
        0b011: [(0.25, 10.0)],
        0b101: [(0.25, 10.0)],
    }
    assert paid(debt[0b110], 15.0) == pytest.approx(0.5 * 15 + 0.25 * 10)
    assert paid(debt[0b110], 500.0) == pytest.approx(0.5 * 20 + 0.25 * 10)


def test_several_engines_have_to_be_surer() -> None:
    """Enough for one engine, and not for two; of none of these, that it crashed with everything off is enough."""
    trials = [Trial(7, 12.0, crashed=True), Trial(1, 9.0, crashed=True)]
    minutes = 10.0
    while Planner(SPACE).verdict([*trials, Trial(6, minutes, crashed=False)]).state == "open":
        minutes += 1.0
    trials.append(Trial(6, minutes, crashed=False))
    assert Planner(SPACE).verdict(trials).culprit == 1
    assert Planner(SPACE, engines=2).verdict(trials).state == "open"
    everywhere = [Trial(arm, 5.0, crashed=True) for arm in (7, 0, 1, 2, 4, 3)]
    shown = [Planner(SPACE, engines=engines).verdict(everywhere) for engines in (1, 2)]
    assert [verdict.state for verdict in shown] == ["none", "none"]
    assert shown[0].probability < 0.98


def test_facts_that_speak_for_a_member_have_shown_some_of_its_quiet() -> None:
    assert [quiet_for(members, 1.0) for members in (1, 2, 3, 4)] == [*SURVIVES, SURVIVES[-1]]
    assert quiet_for(1, math.e) == pytest.approx(SURVIVES[0] - 1.0)
    assert quiet_for(3, 1e9) == WITNESSED, "never none at all"


def test_a_fact_is_a_witness_of_the_member_that_it_points_to_and_of_no_other() -> None:
    graph, spec, both = 0b001, 0b010, 0b011
    kernel = space(SPACE.toggles, load().priors, factors={"speculative": 15.0})
    assert kernel.witnessed(spec, spec) == pytest.approx(15.0)
    assert kernel.witnessed(both, spec) == pytest.approx(15.0)
    assert kernel.witnessed(both, graph) == 1.0, "speculative alone is told as loudly"
    assert kernel.witnessed(graph, graph) == 1.0
    table = space(SPACE.toggles, load().priors, factors={"speculative": 6.0, "cuda_graph": 2.0})
    assert table.witnessed(spec, spec) == pytest.approx(3.0), "the graph's factor speaks against it"
    assert table.witnessed(both, graph) == pytest.approx(2.0)
    nobody = space(SPACE.toggles, load().priors, factors={"speculative": 6.0, "none": 12.0})
    assert nobody.witnessed(spec, spec) == 1.0
    assert SPACE.witnessed(spec, spec) == 1.0
    assert kernel.merged({both: both}).witnessed(both, spec) == pytest.approx(15.0)
    aliased = kernel.merged({spec: both})
    assert 1.0 < aliased.witnessed(both, spec) <= 15.0


def test_with_its_kernel_known_a_single_needs_less_quiet_and_is_not_asked_for_more_than_is_lacking() -> None:
    trials = [Trial(7, 12.0, crashed=True), Trial(2, 9.0, crashed=True)]
    minutes = {}
    for name, factors in (("plain", None), ("kernel", {"speculative": 15.0})):
        planner = Planner(space(SPACE.toggles, load().priors, factors=factors))
        then = planner.choose(trials)
        quiet = 0.0
        while planner.verdict([*trials, Trial(5, quiet, crashed=False)]).state == "open":
            quiet += 1.0
        minutes[name] = quiet
        if name == "kernel":
            assert then.arm == 5
            assert then.minutes <= quiet
    assert minutes["kernel"] < minutes["plain"] / 2
