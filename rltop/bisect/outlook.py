"""What the outcome of a trial would tell: mutual information with the culprit and its hazard, in bits.

A trial ends in one bit, crashed or quiet. What it tells is how uncertain that bit is, less how uncertain it would be if
the culprit and its hazard were known: an arm that every culprit can crash tells only how often, one that none can crash
tells nothing. Made once per decision. Culprits of no weight are left out, and arms that the rest can not tell apart are
weighed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from math import log2
from operator import mul

from rltop.bisect.belief import UNLIKELY, Belief
from rltop.bisect.space import OTHER
from rltop.bisect.trials import Running

HAZARD_WEIGHT = 0.5
"""What a bit about the hazard is worth beside a bit about the culprit. How long is quiet long enough hangs on it, but
crashes that tell of the culprit tell of it too. (Simulated, on other bugs than are measured: 0 and 1 both take longer.)
"""
RUNNING_WEIGHED = 3
"""So many of the arms that run are weighed exactly when another is chosen; each doubles the work."""


Group = tuple[tuple[int, ...], float]
"""What can crash in an arm: numbers of culprits that matter, and the chance that it can if the culprit is `OTHER`."""


@dataclass(frozen=True, slots=True)
class Window:
    """One length of a trial: what each culprit that matters would do within it, where it may crash."""

    length: float
    """Minutes, or starts."""
    chance: list[float]
    """Probability of a crash."""
    noise: list[float]
    """Bits that the outcome leaves open if the culprit were known; what it tells of the hazard counts by weight."""
    heavy: list[float]
    """Chance times what is believed of the culprit."""
    open: list[float]
    """Noise times what is believed of the culprit."""
    of_other: dict[float, float] = field(default_factory=dict)
    """Chance that an arm can crash if the culprit is `OTHER` -> noise. Most arms have the same."""


class Outlook:
    """The culprits that matter, and what runs already on other engines."""

    def __init__(self, belief: Belief) -> None:
        self._belief = belief
        pairs = zip(belief.space.culprits, belief.probability, belief.kind, strict=True)
        live = [row for row in pairs if row[1] > UNLIKELY]
        self._culprits = [row[0] for row in live]
        self._weights = [row[1] for row in live]
        self._kinds = [row[2] for row in live]
        self._other = self._culprits.index(OTHER) if OTHER in self._culprits else -1
        self._named = [(at, culprit) for at, culprit in enumerate(self._culprits) if culprit != OTHER]
        self._top = max(range(len(live)), key=self._weights.__getitem__)
        # Only the laws that have some weight are summed over.
        hazards = {kind: belief.hazards[kind] for kind in self._kinds}
        keep = [any(weight > UNLIKELY for weight in column) for column in zip(*hazards.values(), strict=True)]
        self._keep = keep
        self._hazards = {kind: list(compress(hazard, keep)) for kind, hazard in hazards.items()}
        self._branches: list[tuple[float, list[float]]] = []

    def window(self, length: float, *, age: float = 0.0) -> Window:
        """length: in minutes, or starts. age: minutes that the trial has been quiet already."""
        dies = list(compress(self._belief.grid.dies(length, age=age), self._keep))
        doubt = list(map(binary, dies))
        known = {
            kind: (sum(map(mul, hazard, dies)), sum(map(mul, hazard, doubt))) for kind, hazard in self._hazards.items()
        }
        chance = [known[kind][0] for kind in self._kinds]
        noise = [
            whole - HAZARD_WEIGHT * max(0.0, whole - known[kind][1])
            for kind, whole in zip(self._kinds, map(binary, chance), strict=True)
        ]
        return Window(
            length, chance, noise, list(map(mul, self._weights, chance)), list(map(mul, self._weights, noise))
        )

    def group(self, arm: int) -> Group:
        """Equal for arms that tell the same."""
        inside = [at for at, culprit in self._named if culprit & arm == culprit]
        return tuple(inside), self._belief.crashes.get(arm, self._belief.untried) if self._other >= 0 else 0.0

    def expects_crash(self, group: Group) -> bool:
        """Whether the likeliest culprit can crash there."""
        return self._top in group[0] or (self._top == self._other and group[1] > 0.5)

    def crash(self, group: Group, when: Window) -> float:
        """Probability of a crash within the window."""
        inside, other = group
        heavy = when.heavy
        return sum([heavy[at] for at in inside]) + (other * heavy[self._other] if other else 0.0)

    def alone(self, group: Group, when: Window, crash: float) -> float:
        """Bits, as if nothing else ran: never less than `bits`, for the outcomes are independent given the culprit.

        crash: its probability.
        """
        inside, other = group
        opened = when.open
        left = sum([opened[at] for at in inside])
        if other:
            left += self._weights[self._other] * self._noise_of_other(other, when)
        return max(0.0, binary(crash) - left)

    def bits(self, group: Group, when: Window, crash: float) -> float:
        """Bits beyond what the other engines will tell anyway."""
        if not self._branches:
            return self.alone(group, when, crash)
        inside, other = group
        rows = [(at, when.chance[at], when.noise[at]) for at in inside]
        if other:
            rows.append((self._other, other * when.chance[self._other], self._noise_of_other(other, when)))
        found = 0.0
        for share, weights in self._branches:
            total, left = 0.0, 0.0
            for at, chance, noise in rows:
                weight = weights[at]
                total += weight * chance
                left += weight * noise
            found += share * max(0.0, binary(total) - left)
        return found

    def _noise_of_other(self, other: float, when: Window) -> float:
        """Whether it can crash in this arm is a fact of its own; the hazard is what it is elsewhere."""
        if (found := when.of_other.get(other)) is None:
            chance, noise = when.chance[self._other], when.noise[self._other]
            found = binary(other * chance) - max(0.0, binary(chance) - noise) * other
            when.of_other[other] = found
        return found

    def beside(self, others: Iterable[Running], middle: Window) -> None:
        """Weigh from now on what trials on other engines will tell, whose outcome is expected within `middle`.

        Every outcome of theirs is a branch. Engines in one arm are one arm with that much more time. Only the arms that
        tell most are weighed exactly.
        """
        arms: dict[int, int] = {}
        for one in others:
            arms[one.arm] = arms.get(one.arm, 0) + 1
        groups = {arm: self.group(arm) for arm in arms}
        tells = {arm: self.alone(group, middle, self.crash(group, middle)) for arm, group in groups.items()}
        ranked = sorted(arms, key=lambda arm: -tells[arm])[:RUNNING_WEIGHED]
        branches = [(1.0, self._weights)]
        for arm in ranked:
            inside, other = groups[arm]
            quiet = [1.0] * len(self._weights)
            for at in inside:
                quiet[at] = (1.0 - middle.chance[at]) ** arms[arm]
            if other:
                quiet[self._other] = (1.0 - other * middle.chance[self._other]) ** arms[arm]
            grown: list[tuple[float, list[float]]] = []
            for share, weights in branches:
                for factors in (quiet, [1.0 - value for value in quiet]):
                    joint = list(map(mul, weights, factors))
                    whole = sum(joint)
                    if share * whole > UNLIKELY:
                        grown.append((share * whole, [value / whole for value in joint]))
            branches = grown
        self._branches = branches


def binary(chance: float) -> float:
    """Entropy of a coin, in bits."""
    if chance <= 0.0 or chance >= 1.0:
        return 0.0
    return -chance * log2(chance) - (1.0 - chance) * log2(1.0 - chance)
