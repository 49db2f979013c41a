"""Which trial next, and when to stop.

The next arm is the one that is expected to tell most per minute, restart included. What a trial tells is the mutual
information between the culprit and its outcome: nothing if every culprit would crash it, nothing if none would. On
several engines the arms that already run are taken into account: what they will tell anyway is not worth a second
engine, unless it is worth it (then the same arm runs twice).

It ends when one culprit has `sure` of the belief and the two facts that a person asks for: a crash with nothing but the
culprit on, and quiet, for long enough, with each of its members off. Where the arms can not give these (a toggle that
can not be turned off, a budget that is spent, an explanation outside the hypotheses), it says what is left and why.
Never a wrong name for the sake of a name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, log2
from typing import Literal

from rltop.bisect.belief import Belief, Trial, believe
from rltop.bisect.hazard import laws
from rltop.bisect.space import MOST_TOGETHER, OTHER, Space

SURE = 0.95
WINDOWS = (0.5, 1.5, 4.0)
"""Trial lengths that are weighed, in believed mean minutes to the crash."""
CLOSE = 0.02
"""Arms within so much of the best are equally good; chance (seeded) takes one, so that engines do not all copy."""
HAZARD_WEIGHT = 1.0
"""What a bit about the hazard is worth beside a bit about the culprit: how long is quiet long enough hangs on it."""
PATIENCE = 1.2
"""A trial goes on unless another is so many times better: a restart that tells little more is none."""
MOST_ARMS = 400
RUNNING_WEIGHED = 3
"""So many of the arms that run are weighed exactly when another is chosen; each doubles the work."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a bisection may cost."""

    minutes: float = 24 * 60.0
    """Wall time."""
    restart_min: float = 2.0
    """Minutes from the decision to an engine that is ready in another arm."""
    longest_trial_min: float = 120.0
    """Look again after so long, at the latest."""
    shortest_trial_min: float = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """A trial on an engine now."""

    engine: str
    arm: int
    minutes: float
    """So far."""


@dataclass(frozen=True, slots=True)
class Next:
    """What an engine should do now."""

    arm: int
    minutes: float
    """Look again after so many minutes, if it did not crash."""
    bits: float
    """What it is expected to tell."""
    crash: float
    """Probability that it crashes within that time."""
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it ended, or stands."""

    state: Literal["open", "found", "none", "not-separable", "budget"]
    culprit: int | None
    probability: float
    text: str
    left: tuple[tuple[int, float], ...] = ()
    """What can not be told apart, likeliest first."""


@dataclass(frozen=True, slots=True)
class Planner:
    """A bisection over a space. Holds no state: everything follows from the trials.

    fixed: toggles that can not be turned off here (mask): every arm has them on.
    together: toggle -> toggles that go off with it (masks): DeepEP `normal` has the graphs off, say.
    """

    space: Space
    budget: Budget = field(default_factory=Budget)
    fixed: int = 0
    together: Mapping[int, int] = field(default_factory=dict)
    seed: int = 0

    def arms(self) -> tuple[int, ...]:
        """Every set of toggles that a trial may have: up to three off, or up to three on beside the fixed ones."""
        width, on = len(self.space.toggles), self.space.all_on
        free = [1 << at for at in range(width) if not self.fixed >> at & 1]
        found: dict[int, None] = {on: None}
        for size in range(1, len(free) + 1):
            for group in combinations(free, size):
                if MOST_TOGETHER < size < len(free) - MOST_TOGETHER:
                    continue
                off = sum(group)
                found[self._effective(on & ~off)] = None
                if len(found) >= MOST_ARMS:
                    return tuple(found)
        return tuple(found)

    def _effective(self, arm: int) -> int:
        off = self.space.all_on & ~arm
        for toggle, more in self.together.items():
            if off & toggle:
                arm &= ~more
        return arm | self.fixed

    def believe(self, trials: Iterable[Trial], running: Iterable[Running] = ()) -> Belief:
        """The posterior; what runs counts as quiet so far."""
        so_far = [Trial(one.arm, one.minutes, crashed=False) for one in running if one.minutes > 0]
        return believe(self.space, [*trials, *so_far])

    def choose(self, trials: Sequence[Trial], running: Sequence[Running] = (), *, engine: str = "") -> Next:
        """What a free engine should do. A trial of its own that it may go on with is in `running` under its name."""
        belief = self.believe(trials, running)
        if (last := self._last_word(belief, trials)) is not None:
            return last
        others = [one for one in running if one.engine != engine]
        mine = next((one for one in running if one.engine == engine), None)
        scale = max(belief.mean_minutes(), self.budget.shortest_trial_min)
        lengths = sorted({self._bounded(scale * window) for window in WINDOWS})
        outlook = _Outlook(belief, lengths)
        aged = outlook if mine is None else _Outlook(belief, lengths, age=mine.minutes)
        branches = _branches(belief, others, outlook)
        scored: list[tuple[float, int, float, float, float]] = []
        for arm in self.arms():
            goes_on = mine is not None and mine.arm == arm
            for at, minutes in enumerate(lengths):
                seen = aged if goes_on else outlook
                bits = sum(chance * seen.bits(weights, arm, at) for chance, weights in branches)
                crash = seen.crash(belief.probability, arm, at)
                took = minutes * (1.0 - crash / 2) + (0.0 if goes_on else self.budget.restart_min)
                scored.append((bits / took, arm, minutes, crash, bits))
        if mine is not None:
            stay = max((row for row in scored if row[1] == mine.arm), default=(0.0, mine.arm, 0.0, 0.0, 0.0))
            if stay[0] * PATIENCE >= max(row[0] for row in scored):
                scored = [stay]
        best = max(row[0] for row in scored)
        pick = random.Random(f"{self.seed}/{len(trials)}/{engine}/{len(running)}")
        close = [row for row in scored if row[0] >= best * (1.0 - CLOSE)]
        _, arm, minutes, crash, bits = pick.choice(close)
        goes_on = mine is not None and mine.arm == arm
        return Next(arm, minutes, bits, crash, self._why(belief, arm, minutes, crash, goes_on=goes_on))

    def _last_word(self, belief: Belief, trials: Sequence[Trial]) -> Next | None:
        """The crash that a named culprit still lacks. What is believed anyway tells nothing, but a person wants it."""
        culprit, chance = belief.best()
        if culprit == OTHER or chance < SURE or self._confirmed(culprit, trials):
            return None
        bare = self._bare(culprit)
        minutes = self._bounded(WINDOWS[-1] * belief.mean_minutes())
        names = self.space.words(culprit)
        crash = _Outlook(belief, [minutes]).crash(belief.probability, bare, 0)
        return Next(
            bare, minutes, 0.0, crash, f"{names} is {chance:.0%} sure: now nothing but it is on, and it has to crash"
        )

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running] = (), *, minutes: float = 0.0) -> Verdict:
        """Where it stands after `minutes` of wall time."""
        belief = self.believe(trials, running)
        culprit, chance = belief.best()
        left = tuple(belief.ranking(0.02))
        words = self.space.words(culprit)
        if culprit != OTHER and chance >= SURE and self._confirmed(culprit, trials):
            if culprit == 0:
                text = "it crashes with all of these toggles off: none of them is the culprit"
                return Verdict("none", 0, chance, text)
            return Verdict("found", culprit, chance, f"{words}: crashes with nothing else on, quiet with any of it off")
        if belief.of(OTHER) >= SURE:
            text = "no single toggle, pair or triple explains the outcomes: four together, or more than one bug"
            return Verdict("not-separable", None, belief.of(OTHER), text, left)
        if minutes >= self.budget.minutes:
            text = "the budget is spent; left: " + ", ".join(f"{self.space.words(c)} {p:.0%}" for c, p in left)
            return Verdict("budget", None, chance, text, left)
        return Verdict("open", culprit, chance, f"{words} {chance:.0%}", left)

    def _bare(self, culprit: int) -> int:
        """The arm with the fewest toggles on that has the culprit."""
        having = [arm for arm in self.arms() if arm & culprit == culprit]
        return min(having, key=lambda arm: (arm.bit_count(), arm))

    def _confirmed(self, culprit: int, trials: Sequence[Trial]) -> bool:
        """A crash in the barest arm that has it, and nothing in that arm but it and what is never off.

        That it is quiet with a member off is in the belief already.
        """
        bare = self._bare(culprit)
        crashed = any(trial.crashed and trial.counts and trial.arm == bare for trial in trials)
        return crashed and not bare & ~culprit & ~self.fixed

    def _bounded(self, minutes: float) -> float:
        return min(max(minutes, self.budget.shortest_trial_min), self.budget.longest_trial_min)

    def _why(self, belief: Belief, arm: int, minutes: float, crash: float, *, goes_on: bool) -> str:
        names = self.space.names
        off = self.space.all_on & ~arm
        if not off:
            what = "everything on"
        elif off.bit_count() <= arm.bit_count():
            what = f"without {', '.join(names(off))}"
        else:
            what = f"only {', '.join(names(arm)) or 'the bare engine'}"
        verb = "go on" if goes_on else "try"
        inside = sum(
            chance
            for culprit, chance in zip(self.space.culprits, belief.probability, strict=True)
            if culprit != OTHER and culprit & arm == culprit
        )
        return (
            f"{verb} {what}: {inside:.0%} of the belief says that it can crash there, "
            f"{crash:.0%} that it does within {minutes:.0f} min"
        )


class _Outlook:
    """What the outcomes of a trial would be, per culprit and length. Made once per decision."""

    def __init__(self, belief: Belief, lengths: Sequence[float], *, age: float = 0.0) -> None:
        """age: minutes that the trial has been quiet already."""
        self._culprits = belief.space.culprits
        self._other = belief.crashes
        dies = [
            [1.0 - exp(law.log_survival(age + minutes) - law.log_survival(age)) for law in laws()]
            for minutes in lengths
        ]
        doubt = [[_binary(chance) for chance in row] for row in dies]
        known: dict[int, list[float]] = {}
        noise: dict[int, list[float]] = {}
        for hazard in belief.hazard:
            if id(hazard) not in known:
                known[id(hazard)] = [sum(map(_times, hazard, row)) for row in dies]
                noise[id(hazard)] = [sum(map(_times, hazard, row)) for row in doubt]
        self.chance = [known[id(hazard)] for hazard in belief.hazard]
        """Per culprit: probability of a crash within each length, where it may come."""
        self.noise = [noise[id(hazard)] for hazard in belief.hazard]
        """Per culprit: what the outcome leaves open, in bits, even if the hazard were known."""

    def at(self, which: int, arm: int, length: int) -> float:
        """Probability of a crash if culprit number `which` is the one."""
        culprit = self._culprits[which]
        if culprit == OTHER:
            return self.chance[which][length] * self._other.get(arm, 0.5)
        return self.chance[which][length] if culprit & arm == culprit else 0.0

    def crash(self, weights: Sequence[float], arm: int, length: int) -> float:
        """Probability of a crash under these weights of the culprits."""
        return sum(weight * self.at(which, arm, length) for which, weight in enumerate(weights) if weight > 1e-9)

    def bits(self, weights: Sequence[float], arm: int, length: int) -> float:
        """Mutual information of the outcome with the culprit, and, weighted, with its hazard."""
        total, inside = 0.0, 0.0
        for which, weight in enumerate(weights):
            if weight > 1e-6 and (chance := self.at(which, arm, length)) > 0.0:
                total += weight * chance
                own = _binary(chance)
                inside += weight * (own - HAZARD_WEIGHT * max(0.0, own - self.noise[which][length]))
        return max(0.0, _binary(total) - inside)


def _branches(belief: Belief, running: Sequence[Running], outlook: _Outlook) -> list[tuple[float, Sequence[float]]]:
    """(probability, weights of the culprits) for every outcome of the arms that run on other engines.

    Engines in one arm are one arm with that much more time. Only the arms that tell most are weighed exactly.
    """
    arms: dict[int, int] = {}
    for one in running:
        arms[one.arm] = arms.get(one.arm, 0) + 1
    middle = min(1, len(outlook.chance[0]) - 1)
    ranked = sorted(arms, key=lambda arm: -outlook.bits(belief.probability, arm, middle))[:RUNNING_WEIGHED]
    branches: list[tuple[float, Sequence[float]]] = [(1.0, belief.probability)]
    for arm in ranked:
        times = arms[arm]
        quiet = [(1.0 - outlook.at(which, arm, middle)) ** times for which in range(len(belief.probability))]
        grown: list[tuple[float, Sequence[float]]] = []
        for chance, weights in branches:
            for factors in (quiet, [1.0 - value for value in quiet]):
                joint = list(map(_times, weights, factors))
                whole = sum(joint)
                if whole > 1e-9:
                    grown.append((chance * whole, [value / whole for value in joint]))
        branches = grown
    return branches


def _times(one: float, two: float) -> float:
    return one * two


def _binary(chance: float) -> float:
    """Entropy of a coin, in bits."""
    if chance <= 0.0 or chance >= 1.0:
        return 0.0
    return -chance * log2(chance) - (1.0 - chance) * log2(1.0 - chance)
