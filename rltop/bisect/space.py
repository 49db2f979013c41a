"""What can be the culprit, and how much each is believed before any trial.

A culprit is a conjunction: a set of toggles that must all be on for the crash to be possible. A set of one is a plain
culprit, two or three an interaction, and the empty set says that none of these toggles matters. Arms and culprits are
bit masks over the list of toggles, so that "may it crash" is one operation: `culprit & arm == culprit`.

`OTHER` is the way out: something that no conjunction of up to three of these toggles explains (four at once, one bug or
another). Each set of toggles that was tried then crashes or not for a reason of its own, so it explains everything and
nothing well: it wins only where all the others fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

from rltop.errors import RltopError

OTHER = -1
"""The mask of "something else"."""
MOST_TOGETHER = 3
"""Largest conjunction. Interactions of four were not found in any thread (facts of the priors' source)."""
MOST_TOGGLES = 16
"""More toggles than these make more conjunctions than a bisection can tell apart in a night."""


@dataclass(frozen=True, slots=True)
class Toggle:
    """One thing that a trial may turn off."""

    name: str
    weight: float
    """How often it was the isolating toggle, relative to the others. Above 0."""


@dataclass(frozen=True, slots=True)
class Priors:
    """What is believed before the first crash: a table (`priors.toml`), and a person may change each of it."""

    weights: Mapping[str, float]
    """Toggle -> how often it was the isolating one, in any unit."""
    default_weight: float = 0.02
    """Of a toggle that the table does not have."""
    none: float = 0.08
    """None of the toggles: a bug in the model's own kernels, or hardware."""
    other: float = 0.03
    """Something that the hypotheses can not say."""
    pairs: float = 0.25
    """Share of pairs among the culprits that are toggles."""
    triples: float = 0.08
    affinity: Mapping[frozenset[str], float] | None = None
    """Pairs that were seen together: set of two names -> factor on the weight of every conjunction with both."""


NO_PRIORS = Priors(weights={})
"""Without a table: all toggles alike."""


@dataclass(frozen=True, slots=True)
class Space:
    """The toggles that can be turned off, and every culprit over them."""

    toggles: tuple[str, ...]
    culprits: tuple[int, ...]
    """Masks; `OTHER` last."""
    prior: tuple[float, ...]
    """One per culprit; they sum to 1."""
    alike: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Culprits that stand for several which no trial can tell apart -> all of these, itself perhaps not among them."""
    told: tuple[float, ...] = ()
    """One per culprit: its factor by the facts, which `prior` has in it. Empty: no facts."""

    @property
    def all_on(self) -> int:
        """The arm of the crash: everything as it was."""
        return (1 << len(self.toggles)) - 1

    def mask(self, names: Iterable[str]) -> int:
        """The mask of a set of toggles. Raises RltopError for a name that is not one of them."""
        found = 0
        for name in names:
            if name not in self.toggles:
                raise RltopError(f"{name!r} is not a toggle of this bisection", do=f"one of {', '.join(self.toggles)}")
            found |= 1 << self.toggles.index(name)
        return found

    def names(self, mask: int) -> tuple[str, ...]:
        """The toggles of a mask, in their order. None of `OTHER`."""
        return () if mask == OTHER else tuple(name for at, name in enumerate(self.toggles) if mask >> at & 1)

    def words(self, culprit: int) -> str:
        """A culprit for people."""
        if culprit == OTHER:
            return "something else"
        core = self.core(culprit)
        if not culprit and (fixed := self._either(culprit)):
            return f"none of these, or {' x '.join(self.names(fixed))}, which can not be turned off"
        doubtful = self.names(culprit & ~core)
        if doubtful and not core:
            return f"{' or '.join(doubtful)} or both, which go off together"
        told = " x ".join(self.names(core)) or "none of these"
        return f"{told}, alone or with {', '.join(doubtful)}" if doubtful else told

    def witnessed(self, culprit: int, member: int) -> float:
        """How many times likelier the facts are with this culprit than with any that has nothing to do with a member of
        it (mask). At least 1, which says that the facts do not speak for the member."""
        if not self.told:
            return 1.0
        without = [
            factor for one, factor in zip(self.culprits, self.told, strict=True) if one == OTHER or not one & member
        ]
        return max(1.0, self.told[self.culprits.index(culprit)] / max(without))

    def core(self, culprit: int) -> int:
        """The toggles that are part of it for certain: of the culprits that it stands for, what all have."""
        found = culprit
        for one in self.alike.get(culprit, ()):
            found &= one
        return found

    def _either(self, culprit: int) -> int:
        found = 0
        for one in self.alike.get(culprit, ()):
            found |= one
        return found

    def merged(self, into: Mapping[int, int]) -> Space:
        """Culprits that no trial can tell apart made one. into: culprit -> mask of the one that stands for it."""
        members: dict[int, list[int]] = {}
        prior: dict[int, float] = {}
        untold: dict[int, float] = {}
        told = self.told or (1.0,) * len(self.culprits)
        for culprit, chance, factor in zip(self.culprits, self.prior, told, strict=True):
            stands = into.get(culprit, culprit)
            members.setdefault(stands, []).append(culprit)
            prior[stands] = prior.get(stands, 0.0) + chance
            untold[stands] = untold.get(stands, 0.0) + chance / factor
        alike = {stands: tuple(found) for stands, found in members.items() if found != [stands]}
        factors = tuple(chance / untold[stands] if chance else 1.0 for stands, chance in prior.items())
        return Space(self.toggles, tuple(prior), tuple(prior.values()), alike, factors if self.told else ())


def space(toggles: Sequence[str], priors: Priors = NO_PRIORS, *, factors: Mapping[str, float] | None = None) -> Space:
    """Every culprit over these toggles with its prior.

    factors: what facts say (`rltop.bisect.facts`): toggle -> how many times likelier every culprit with it is than it
    would be without the fact; the key `none` is for no toggle at all.
    A conjunction's weight is the product of its members' relative weights times what is known of its pairs; singles,
    pairs and triples then get their share of the whole.
    Raises RltopError: no toggle, too many, one twice.
    """
    if not toggles or len(set(toggles)) < len(toggles) or len(toggles) > MOST_TOGGLES:
        raise RltopError(
            f"can not bisect over {len(toggles)} toggles",
            why="a toggle is there twice" if len(set(toggles)) < len(toggles) else f"1 to {MOST_TOGGLES} can be told",
            do="name the toggles that are on and can be turned off",
        )
    factors = factors or {}
    total = sum(priors.weights.get(name, priors.default_weight) for name in toggles)
    single = {name: priors.weights.get(name, priors.default_weight) / total for name in toggles}
    shares = [1.0 - priors.pairs - priors.triples, priors.pairs, priors.triples][: len(toggles)]
    culprits, prior, told = [0], [priors.none * factors.get("none", 1.0)], [factors.get("none", 1.0)]
    for size, share in enumerate(shares, start=1):
        groups = list(combinations(toggles, size))
        weights = [prod(single[name] for name in group) * _together(group, priors) for group in groups]
        scale = share / sum(shares) * (1.0 - priors.none - priors.other) / sum(weights)
        for group, weight in zip(groups, weights, strict=True):
            culprits.append(sum(1 << toggles.index(name) for name in group))
            told.append(prod(factors.get(name, 1.0) for name in group))
            prior.append(weight * scale * told[-1])
    culprits.append(OTHER)
    prior.append(priors.other)
    told.append(1.0)
    whole = sum(prior)
    chances = tuple(weight / whole for weight in prior)
    return Space(tuple(toggles), tuple(culprits), chances, told=tuple(told) if factors else ())


def _together(group: Sequence[str], priors: Priors) -> float:
    known = priors.affinity or {}
    return prod(known.get(frozenset(pair), 1.0) for pair in combinations(group, 2))
