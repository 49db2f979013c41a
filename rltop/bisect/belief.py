"""What the trials say: the probability of every culprit, over all hazards it may have.

Bayes' rule, and nothing else. For a culprit, a trial in an arm where it may crash is weighed by every hazard law; a
trial in another arm should be quiet but for strays. A crash therefore rules out every culprit that was not wholly on,
at once; a quiet trial only speaks as loudly as its time is long against the hazard, which the crashes told. Trials that
still run count as quiet so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from operator import mul

from rltop.bisect.hazard import Grid, Tally, added, load_grid
from rltop.bisect.space import OTHER, Space
from rltop.bisect.trials import Trial

__all__ = ["Belief", "Trial", "believe"]

UNLIKELY = 1e-4
"""What is believed less than this does not steer the next trial."""
SHARES = (0.15, 0.5, 0.85)
"""Of the arms that can crash if the culprit is `OTHER`, equally believed."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Posterior over the culprits of a space."""

    space: Space
    probability: tuple[float, ...]
    """Per culprit, in the order of `space.culprits`; sums to 1."""
    kind: tuple[int, ...]
    """Per culprit: which of `hazards` is its own. Culprits that the trials did not tell apart share one."""
    hazards: tuple[tuple[float, ...], ...]
    """Weights of the grid's laws, given a culprit of that kind; each sums to 1."""
    grid: Grid
    """The laws that are still possible."""
    crashes: Mapping[int, float]
    """Per arm that was tried: the chance that it can crash, if the culprit is `OTHER`. Empty if that is `UNLIKELY`."""
    untried: float
    """The same of an arm that was not."""

    def best(self) -> tuple[int, float]:
        """The likeliest culprit and its probability."""
        at = max(range(len(self.probability)), key=self.probability.__getitem__)
        return self.space.culprits[at], self.probability[at]

    def of(self, culprit: int) -> float:
        """Probability of one culprit; 0 if it is none of the space."""
        found = self.space.culprits
        return self.probability[found.index(culprit)] if culprit in found else 0.0

    def ranking(self, least: float = 0.01) -> list[tuple[int, float]]:
        """Culprits by probability, those of at least `least`."""
        pairs = zip(self.space.culprits, self.probability, strict=True)
        return sorted((pair for pair in pairs if pair[1] >= least), key=lambda pair: (-pair[1], pair[0]))

    def involved(self) -> dict[str, float]:
        """Per toggle: the probability that it is part of the culprit."""
        named = dict.fromkeys(self.space.toggles, 0.0)
        for culprit, chance in zip(self.space.culprits, self.probability, strict=True):
            for name in self.space.names(culprit):
                named[name] += chance
        return named

    def entropy_bits(self) -> float:
        """What is still unknown, in bits."""
        return -sum(chance * log(chance, 2) for chance in self.probability if chance > 0)

    def mean_minutes(self) -> float:
        """Minutes (or starts) to a crash in an arm where it may come: geometric mean over everything believed."""
        scales = list(map(log, self.grid.scales))
        share = [0.0] * len(self.hazards)
        for chance, kind in zip(self.probability, self.kind, strict=True):
            share[kind] += chance
        pairs = zip(share, self.hazards, strict=True)
        return exp(sum(chance * sum(map(mul, hazard, scales)) for chance, hazard in pairs if chance > 1e-9))


def believe(space: Space, trials: Iterable[Trial], grid: Grid | None = None) -> Belief:
    """The posterior after these trials, whatever their order. grid: hazards of a crash under load, or at a start."""
    grid = grid or load_grid()
    arms = _by_arm(trials, grid)
    stray = [grid.stray_log(seen[0], minutes) for seen, minutes in arms.values()]
    all_stray = sum(stray)
    tallies = [seen for seen, _ in arms.values()]
    # Every culprit can crash where everything is on.
    grid = grid.likely(arms[space.all_on][0]) if space.all_on in arms else grid
    kinds: dict[int, int] = {}
    other: _Other | None = None
    evidence: list[float] = []
    hazards: list[tuple[float, ...]] = []
    kind: list[int] = []
    bits = [(1 << at, arm) for at, arm in enumerate(arms)]
    for culprit in space.culprits:
        # Which of the arms it may crash in, as bits; `OTHER` is none of these.
        may = -1 if culprit == OTHER else sum([bit for bit, arm in bits if culprit & arm == culprit])
        if (found := kinds.get(may)) is None:
            found = kinds[may] = len(hazards)
            if culprit == OTHER:
                (logs, other), calm = _other(grid, arms, stray), 0.0
            else:
                inside = [at for at in range(len(arms)) if may >> at & 1]
                logs = grid.log_weights(added([tallies[at] for at in inside]))
                calm = all_stray - sum([stray[at] for at in inside])
            whole, weights = _normal(logs)
            hazards.append(weights)
            evidence.append(whole + calm)
        kind.append(found)
    chances = [
        evidence[which] + log(prior) if prior > 0 else float("-inf")
        for which, prior in zip(kind, space.prior, strict=True)
    ]
    _, probability = _normal(chances)
    crashes, untried = {}, 0.5
    if other is not None and probability[space.culprits.index(OTHER)] > UNLIKELY:
        hazard = hazards[kinds[-1]]
        crashes, untried = other.crashes(hazard, arms), other.untried(hazard)
    return Belief(space, probability, tuple(kind), tuple(hazards), grid, crashes, untried)


def _by_arm(trials: Iterable[Trial], grid: Grid) -> dict[int, tuple[Tally, float]]:
    """Per arm: its tally and all its exposure."""
    found: dict[int, tuple[list[Tally], float]] = {}
    for trial in trials:
        if trial.counts:
            tallies, minutes = found.get(trial.arm, ([], 0.0))
            tallies.append(grid.tally(trial.minutes, crashed=trial.crashed))
            found[trial.arm] = tallies, minutes + (1.0 if grid.starts else trial.minutes)
    return {
        arm: (tallies[0] if len(tallies) == 1 else added(tallies), minutes) for arm, (tallies, minutes) in found.items()
    }


def _normal(logs: list[float]) -> tuple[float, tuple[float, ...]]:
    """(log of the sum, each one's share) of numbers that are given by their logarithms."""
    top = max(logs)
    weights = [exp(value - top) for value in logs]
    whole = sum(weights)
    return top + log(whole), tuple([weight / whole for weight in weights])


@dataclass(frozen=True, slots=True)
class _Other:
    """What is known of the arms if the culprit is `OTHER`."""

    odds: Mapping[int, list[float]]
    """Per quiet arm, per law: how much likelier its quiet is if it can crash than if it can not."""
    by_share: Sequence[list[float]]
    """Per share of the arms that can crash, per law: likelihood."""
    whole: Sequence[float]

    def crashes(self, hazard: Sequence[float], arms: Iterable[int]) -> dict[int, float]:
        """Per arm that was tried: the probability that it can crash."""
        scaled = [
            (share, [weight * has / all_of for weight, has, all_of in zip(hazard, product, self.whole, strict=True)])
            for share, product in zip(SHARES, self.by_share, strict=True)
        ]
        found = dict.fromkeys(arms, 1.0)
        for arm, row in self.odds.items():
            found[arm] = sum(
                sum([weight * share * odd / (share * odd + 1.0 - share) for weight, odd in zip(has, row, strict=True)])
                for share, has in scaled
            )
        return found

    def untried(self, hazard: Sequence[float]) -> float:
        """The probability that an arm can crash that was not tried."""
        found = 0.0
        for share, product in zip(SHARES, self.by_share, strict=True):
            rows = zip(hazard, product, self.whole, strict=True)
            found += share * sum([weight * has / all_of for weight, has, all_of in rows])
        return found


def _other(grid: Grid, arms: Mapping[int, tuple[Tally, float]], stray: list[float]) -> tuple[list[float], _Other]:
    """(per law the log likelihood of all, what is known of the arms), if the culprit is `OTHER`.

    Every arm can crash or can not, for a reason that no culprit of ours can say; how many can is unknown (`SHARES`). An
    arm that crashed can: that all its crashes were strays is left out, which is less than one in a hundred.
    """
    crashed = [seen for seen, _ in arms.values() if seen[0]]
    calm = sum(one for (seen, _), one in zip(arms.values(), stray, strict=True) if not seen[0])
    odds = {
        arm: [exp(min(quiet - one, 700.0)) for quiet in grid.log_quiet(seen)]
        for (arm, (seen, _)), one in zip(arms.items(), stray, strict=True)
        if not seen[0]
    }
    width = len(grid.scales)
    by_share: list[list[float]] = []
    for share in SHARES:
        product = [share ** len(crashed) / len(SHARES)] * width
        for row in odds.values():
            product = [value * (share * odd + 1.0 - share) for value, odd in zip(product, row, strict=True)]
        by_share.append(product)
    whole = [max(sum(column), 1e-300) for column in zip(*by_share, strict=True)]
    total = [value + calm + log(more) for value, more in zip(grid.log_weights(added(crashed)), whole, strict=True)]
    return total, _Other(odds, by_share, whole)
