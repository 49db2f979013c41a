"""What trials must and must not change in the belief about a culprit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.bisect.belief import Trial, believe
from rltop.bisect.space import OTHER, Priors, space
from rltop.errors import RltopError
from rltop.evidence.priors import load

PRIORS = load().priors
TOGGLES = ("cuda_graph", "speculative", "overlap_schedule", "deepep", "prefill_graph")
SPACE = space(TOGGLES, PRIORS)
ALL = SPACE.all_on

trials = st.lists(
    st.builds(
        Trial,
        arm=st.integers(0, ALL),
        minutes=st.floats(0.01, 600),
        crashed=st.booleans(),
        counts=st.booleans(),
    ),
    max_size=8,
)


def test_the_space_has_every_conjunction_up_to_three_and_sums_to_one() -> None:
    sizes = [culprit.bit_count() for culprit in SPACE.culprits if culprit != OTHER]
    assert [sizes.count(size) for size in range(5)] == [1, 5, 10, 10, 0]
    assert sum(SPACE.prior) == pytest.approx(1)
    assert SPACE.words(SPACE.mask({"speculative", "cuda_graph"})) == "cuda_graph x speculative"
    assert (SPACE.words(0), SPACE.words(OTHER)) == ("none of these", "something else")


def test_a_pair_that_was_seen_together_is_likelier_than_one_that_was_not() -> None:
    belief = believe(SPACE, [])
    assert belief.of(SPACE.mask({"cuda_graph", "speculative"})) > 3 * belief.of(
        SPACE.mask({"overlap_schedule", "speculative"})
    )


def test_a_fact_moves_every_culprit_with_the_toggle() -> None:
    told = space(TOGGLES, PRIORS, factors={"deepep": 8.0})
    before, after = believe(SPACE, []), believe(told, [])
    assert after.involved()["deepep"] > 3 * before.involved()["deepep"]


@pytest.mark.parametrize("names", [(), ("a", "a"), tuple(f"t{at}" for at in range(17))])
def test_a_space_that_can_not_be_bisected_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(RltopError, match="can not bisect"):
        space(names)


def test_an_unknown_toggle_has_the_default_weight_and_no_name_is_guessed() -> None:
    assert space(("cuda_graph", "my_flag"), Priors(weights={"cuda_graph": 1.0})).toggles == ("cuda_graph", "my_flag")
    with pytest.raises(RltopError, match="'grpah' is not a toggle"):
        SPACE.mask({"grpah"})


@given(trials)
def test_beliefs_are_probabilities_whatever_was_seen(seen: list[Trial]) -> None:
    belief = believe(SPACE, seen)
    assert sum(belief.probability) == pytest.approx(1)
    assert all(0 <= chance <= 1 for chance in belief.probability)
    assert all(sum(hazard) == pytest.approx(1) for hazard in belief.hazards)
    assert all(0 <= chance <= 1 + 1e-9 for chance in belief.crashes.values())
    assert belief.entropy_bits() >= 0 < belief.mean_minutes()


@given(trials.filter(lambda seen: len(seen) > 1))
def test_the_order_of_trials_is_nothing(seen: list[Trial]) -> None:
    first = believe(SPACE, seen).probability
    assert believe(SPACE, reversed(seen)).probability == pytest.approx(first, abs=1e-9)


@given(trials, st.integers(0, ALL))
def test_a_trial_that_does_not_count_changes_nothing(seen: list[Trial], arm: int) -> None:
    blocked = [Trial(arm, 500.0, crashed=False, counts=False)]
    assert believe(SPACE, [*seen, *blocked]).probability == pytest.approx(believe(SPACE, seen).probability)


def test_a_crash_rules_out_what_was_not_wholly_on() -> None:
    without_graph = ALL & ~SPACE.mask({"cuda_graph"})
    belief = believe(SPACE, [Trial(ALL, 10.0, crashed=True), Trial(without_graph, 12.0, crashed=True)])
    ruled_out = sum(belief.of(culprit) for culprit in SPACE.culprits if culprit > 0 and culprit & 1)
    assert ruled_out < 0.02
    assert belief.of(SPACE.mask({"speculative"})) > 0.2


def test_a_quiet_trial_speaks_as_loudly_as_it_was_long() -> None:
    crash = Trial(ALL, 10.0, crashed=True)
    without_graph = ALL & ~SPACE.mask({"cuda_graph"})
    chances = [
        believe(SPACE, [crash, crash, crash, Trial(without_graph, minutes, crashed=False)]).involved()["cuda_graph"]
        for minutes in (0.1, 5.0, 20.0, 100.0)
    ]
    assert chances == sorted(chances)
    assert chances[0] < 0.6 < 0.95 < chances[-1]


def test_quiet_with_either_off_is_the_pair() -> None:
    graph, spec = SPACE.mask({"cuda_graph"}), SPACE.mask({"speculative"})
    seen = [Trial(ALL, minutes, crashed=True) for minutes in (8.0, 12.0, 10.0)]
    seen += [Trial(ALL & ~graph, 80.0, crashed=False), Trial(ALL & ~spec, 80.0, crashed=False)]
    seen += [Trial(graph | spec, minutes, crashed=True) for minutes in (9.0, 11.0)]
    culprit, chance = believe(SPACE, seen).best()
    assert SPACE.words(culprit) == "cuda_graph x speculative"
    assert chance > 0.95


def test_four_together_are_something_else() -> None:
    seen = [Trial(ALL, minutes, crashed=True) for minutes in (8.0, 12.0, 10.0, 9.0)]
    seen += [Trial(ALL & ~(1 << at), 120.0, crashed=False) for at in range(4)]
    culprit, _ = believe(SPACE, seen).best()
    assert culprit == OTHER


def test_two_bugs_at_once_are_something_else() -> None:
    graph, spec = SPACE.mask({"cuda_graph"}), SPACE.mask({"speculative"})
    seen = [Trial(arm, 10.0, crashed=True) for arm in (ALL, ALL & ~graph, ALL & ~spec, graph, spec)]
    seen += [Trial(ALL & ~graph & ~spec, 120.0, crashed=False)] * 2
    culprit, _ = believe(SPACE, seen).best()
    assert culprit == OTHER


def test_one_stray_crash_does_not_rule_out_the_truth() -> None:
    graph = SPACE.mask({"cuda_graph"})
    rest = ALL & ~graph
    seen = [Trial(graph, 10.0, crashed=True), Trial(graph, 12.0, crashed=True), Trial(ALL, 8.0, crashed=True)]
    seen += [Trial(rest, 200.0, crashed=False), Trial(rest, 150.0, crashed=True), Trial(rest, 300.0, crashed=False)]
    belief = believe(SPACE, seen)
    ranked = [culprit for culprit, _ in itertools.islice(belief.ranking(), 3)]
    assert graph in ranked
