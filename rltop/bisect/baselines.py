"""What people do today: the guide's checklist, every toggle off once with repetition, and delta debugging.

All three know arms and minutes only. Two of them repeat: `baseline` crashes with everything on tell about how long a
crash takes, and a set of toggles passes when it was quiet for `repeat` mean times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rltop.bisect.simulate import Step
from rltop.bisect.trials import Running, Trial

SOONEST_MIN = 0.5
"""Nobody looks again sooner."""


def all_on(width: int) -> int:
    """The arm of so many toggles, all on."""
    return (1 << width) - 1


def one_off(width: int) -> list[int]:
    """Arms with one toggle off."""
    return [all_on(width) & ~(1 << at) for at in range(width)]


def _exposure(trials: Sequence[Trial], running: Sequence[Running], arm: int) -> float:
    """Quiet minutes of an arm since its last crash; all engines together."""
    minutes = 0.0
    for trial in trials:
        minutes = 0.0 if trial.arm == arm and trial.crashed else minutes + (trial.minutes if trial.arm == arm else 0.0)
    return minutes + sum(one.minutes for one in running if one.arm == arm)


def _crashed(trials: Sequence[Trial], arm: int) -> bool:
    return any(trial.crashed and trial.arm == arm for trial in trials)


@dataclass(frozen=True, slots=True)
class Checklist:
    """The guide's: each toggle off for a while, in order; the first that is quiet is the culprit."""

    width: int
    window_min: float = 60.0

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """The first arm that is not decided and on no other engine."""
        taken = {one.arm for one in running if one.engine != engine}
        for arm in one_off(self.width):
            if not _crashed(trials, arm) and arm not in taken:
                return Step(arm, max(0.05, self.window_min - _exposure(trials, running, arm)))
        return None

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The first of the list that is quiet; none if all crash."""
        del minutes
        for at, arm in enumerate(one_off(self.width)):
            if _crashed(trials, arm):
                continue
            return (1 << at,) if _exposure(trials, running, arm) >= self.window_min - 1e-6 else None
        return (0,)


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Every toggle off, each until it crashes or was quiet for `repeat` mean times; the quiet ones are the culprit.

    The mean time is estimated from `baseline` crashes with everything on, and from every other crash.
    """

    width: int
    baseline: int
    repeat: float

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """Baselines first; then the undecided arm with the fewest engines."""
        others = [one for one in running if one.engine != engine]
        if sum(trial.crashed and trial.arm == all_on(self.width) for trial in trials) < self.baseline:
            return Step(all_on(self.width), 1e6)
        open_arms = [arm for arm in one_off(self.width) if not self._decided(trials, running, arm)]
        if not open_arms:
            return None
        mine = next((one.arm for one in running if one.engine == engine), None)
        load = {arm: sum(one.arm == arm for one in others) for arm in open_arms}
        arm = mine if mine in open_arms and load[mine] == 0 else min(open_arms, key=lambda arm: load[arm])
        left = self._needed(trials) - _exposure(trials, running, arm)
        return Step(arm, max(SOONEST_MIN, left / (load[arm] + 1)))

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The toggles whose arm was quiet; none if all crashed."""
        del minutes
        arms = one_off(self.width)
        if sum(trial.crashed and trial.arm == all_on(self.width) for trial in trials) < self.baseline:
            return None
        if not all(self._decided(trials, running, arm) for arm in arms):
            return None
        return (sum(1 << at for at, arm in enumerate(arms) if not _crashed(trials, arm)),)

    def _needed(self, trials: Sequence[Trial]) -> float:
        crashed = [trial for trial in trials if trial.crashed]
        return self.repeat * statistics.fmean(trial.minutes for trial in crashed)

    def _decided(self, trials: Sequence[Trial], running: Sequence[Running], arm: int) -> bool:
        return _crashed(trials, arm) or _exposure(trials, running, arm) >= self._needed(trials) - 1e-6


@dataclass(slots=True)
class Ddmin:
    """Zeller's ddmin over the toggles that are on; a set passes if it was quiet for `repeat` mean times."""

    width: int
    baseline: int
    repeat: float
    _on: int = -1
    _parts: int = 2
    _at: int = 0
    _tests: list[int] = field(default_factory=list)
    _done: bool = False

    def __post_init__(self) -> None:
        self._on = all_on(self.width)

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """All engines test the same set."""
        del engine
        self._advance(trials, running)
        if self._done:
            return None
        engines = max(1, len(running))
        arm = self._arm(trials)
        left = self._needed(trials) - _exposure(trials, running, arm)
        return Step(arm, 1e6 if arm == all_on(self.width) else max(SOONEST_MIN, left / engines))

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The smallest set that crashes, once it is found."""
        del minutes
        self._advance(trials, running)
        return (self._on,) if self._done else None

    def _needed(self, trials: Sequence[Trial]) -> float:
        return self.repeat * statistics.fmean(trial.minutes for trial in trials if trial.crashed)

    def _arm(self, trials: Sequence[Trial]) -> int:
        short = sum(trial.crashed and trial.arm == all_on(self.width) for trial in trials) < self.baseline
        return all_on(self.width) if short or not self._tests else self._tests[self._at]

    def _advance(self, trials: Sequence[Trial], running: Sequence[Running]) -> None:
        if sum(trial.crashed and trial.arm == all_on(self.width) for trial in trials) < self.baseline:
            return
        while not self._done:
            if not self._tests:
                self._tests, self._at = self._sets(), 0
                if not self._tests:
                    self._done = True
                    return
            arm = self._tests[self._at]
            if _crashed(trials, arm):
                smaller = arm.bit_count() * 2 <= self._on.bit_count() or self._parts == 2
                self._on, self._tests = arm, []
                self._parts = 2 if smaller else max(self._parts - 1, 2)
                if not arm:
                    self._done = True
            elif _exposure(trials, running, arm) >= self._needed(trials) - 1e-6:
                self._at += 1
                if self._at == len(self._tests):
                    if self._parts >= self._on.bit_count():
                        self._done = True
                        return
                    self._parts, self._tests = min(self._on.bit_count(), 2 * self._parts), []
            else:
                return

    def _sets(self) -> list[int]:
        members = [1 << at for at in range(self.width) if self._on >> at & 1]
        if not members:
            return []
        if len(members) == 1:
            return [0]
        size = -(-len(members) // self._parts)
        chunks = [sum(members[at : at + size]) for at in range(0, len(members), size)]
        rest = [self._on & ~chunk for chunk in chunks]
        return list(dict.fromkeys([*chunks, *rest]))
