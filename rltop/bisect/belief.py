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

from rltop.bisect.hazard import laws, log_sum, stray_log
from rltop.bisect.space import OTHER, Space


@dataclass(frozen=True, slots=True)
class Trial:
    """One engine with one set of toggles, under the captured traffic."""

    arm: int
    """Mask of the toggles that were on, effectively (after what SGLang rewrites)."""
    minutes: float
    """Exposure: from ready to the crash, or to now."""
    crashed: bool
    counts: bool = True
    """False: it localises only (launch blocking), or was lost for another reason. It changes nothing."""


@dataclass(frozen=True, slots=True)
class Belief:
    """Posterior over the culprits of a space."""

    space: Space
    probability: tuple[float, ...]
    """Per culprit, in the order of `space.culprits`; sums to 1."""
    hazard: tuple[tuple[float, ...], ...]
    """Per culprit: the weights of the laws, given that it is the one; each sums to 1."""
    crashes: Mapping[int, float]
    """Per arm that was tried: the probability that it can crash, if the culprit is `OTHER`."""

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
        """Expected minutes to a crash in an arm where it may come, over everything believed (median law's mean)."""
        weights = [0.0] * len(laws())
        for chance, hazard in zip(self.probability, self.hazard, strict=True):
            for at, weight in enumerate(hazard):
                weights[at] += chance * weight
        from_log = sum(weight * log(law.scale_min) for weight, law in zip(weights, laws(), strict=True))
        return exp(from_log)


def believe(space: Space, trials: Iterable[Trial]) -> Belief:
    """The posterior after these trials, whatever their order."""
    counted = [trial for trial in trials if trial.counts]
    grid = laws()
    base = [log(law.belief) for law in grid]
    rows = [_row(trial) for trial in counted]
    quiet = [stray_log(trial.crashed, trial.minutes) for trial in counted]
    cache: dict[tuple[int, ...], list[float]] = {}
    crashes: dict[int, float] = {}
    logs: list[float] = []
    hazards: list[list[float]] = []
    for culprit, prior in zip(space.culprits, space.prior, strict=True):
        if culprit == OTHER:
            evidence, hazard, crashes = _other(counted, rows, quiet, base)
        else:
            active = tuple(at for at, trial in enumerate(counted) if culprit & trial.arm == culprit)
            found = cache.get(active)
            if found is None:
                found = cache[active] = _over_laws(base, rows, active)
            hazard = found
            inside = set(active)
            evidence = log_sum(hazard) + sum(value for at, value in enumerate(quiet) if at not in inside)
        logs.append(evidence + log(prior) if prior > 0 else float("-inf"))
        hazards.append(hazard)
    top = log_sum(logs)
    normal: dict[int, tuple[float, ...]] = {}
    for hazard in hazards:
        if id(hazard) not in normal:
            whole = log_sum(hazard)
            normal[id(hazard)] = tuple(exp(value - whole) for value in hazard)
    chances = tuple(exp(value - top) for value in logs)
    return Belief(space, chances, tuple(normal[id(hazard)] for hazard in hazards), crashes)


def _row(trial: Trial) -> list[float]:
    if trial.crashed:
        return [law.log_density(trial.minutes) for law in laws()]
    return [law.log_survival(trial.minutes) for law in laws()]


def _over_laws(base: Sequence[float], rows: Sequence[Sequence[float]], active: Iterable[int]) -> list[float]:
    total = list(base)
    for at in active:
        total = [value + more for value, more in zip(total, rows[at], strict=True)]
    return total


def _other(
    trials: Sequence[Trial], rows: Sequence[Sequence[float]], quiet: Sequence[float], base: Sequence[float]
) -> tuple[float, list[float], dict[int, float]]:
    """Every arm that was tried crashes or does not, with even chance, for a reason that no culprit of ours can say."""
    arms: dict[int, list[int]] = {}
    for at, trial in enumerate(trials):
        arms.setdefault(trial.arm, []).append(at)
    total, hit, calm = list(base), {}, {}
    for arm, members in arms.items():
        calm[arm] = sum(quiet[at] for at in members) - log(2.0)
        hit[arm] = [sum(rows[at][law] for at in members) - log(2.0) for law in range(len(base))]
        total = [value + log_sum([one, calm[arm]]) for value, one in zip(total, hit[arm], strict=True)]
    whole = log_sum(total)
    crashes: dict[int, float] = {}
    for arm, values in hit.items():
        with_it = [t - log_sum([one, calm[arm]]) + one for t, one in zip(total, values, strict=True)]
        crashes[arm] = exp(log_sum(with_it) - whole)
    return whole, total, crashes
