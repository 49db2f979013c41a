"""Bugs whose culprit is known, engines that crash by them, and a clock that costs nothing.

Written apart from the planner's model: here a crash needs a batch that the bug does not like, under traffic that comes
in waves; the planner knows neither batches nor waves. What a bisection costs is counted as an operator would: wall
minutes from the first crash to the verdict, restarts included, on so many engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rltop.bisect.belief import Trial
from rltop.bisect.planner import Planner, Running

Law = Literal["steady", "waves", "wear", "early", "start"]
"""When batches of the bad kind come: any time; in waves of hot minutes; ever more often; mostly soon after a start; at
the very start."""
HOT_MIN, COLD_MIN = 4.0, 12.0
"""Length of a wave and of the calm between two."""
NEVER = 1e12


@dataclass(frozen=True, slots=True)
class Bug:
    """What is wrong, and how often it shows."""

    needs: tuple[int, ...]
    """Masks: it can crash in an arm that has every toggle of at least one of them. More than one: several bugs."""
    mean_min: float
    """Mean minutes to a crash where it can."""
    law: Law = "steady"

    def possible(self, arm: int) -> bool:
        """Whether it can crash in this arm."""
        return any(arm & mask == mask for mask in self.needs)

    def minutes(self, draw: random.Random) -> float:
        """Minutes from ready to the crash, in an arm where it can."""
        match self.law:
            case "steady":
                return draw.expovariate(1.0 / self.mean_min)
            case "wear":
                return draw.gammavariate(4.0, self.mean_min / 4.0)
            case "early":
                short = draw.random() < 0.6
                return draw.expovariate(1.0 / (self.mean_min * (0.3 if short else 2.05)))
            case "start":
                return draw.uniform(0.05, 0.3)
            case "waves":
                return self._waves(draw)

    def _waves(self, draw: random.Random) -> float:
        """Only hot minutes hurt: the same mean, in lumps."""
        rate = (HOT_MIN + COLD_MIN) / HOT_MIN / self.mean_min
        now, left = draw.uniform(0.0, HOT_MIN + COLD_MIN), draw.expovariate(rate)
        began = now
        while True:
            phase = now % (HOT_MIN + COLD_MIN)
            if phase < HOT_MIN:
                hot = HOT_MIN - phase
                if left <= hot:
                    return now + left - began
                left -= hot
                now += hot
            else:
                now += HOT_MIN + COLD_MIN - phase


@dataclass(frozen=True, slots=True)
class Step:
    """What a strategy wants of a free engine: an arm, and when to ask again."""

    arm: int
    minutes: float


class Strategy(Protocol):
    """Somebody who bisects."""

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """For a free engine, or one whose time is over (its trial is in `running`); None: leave it idle."""
        ...

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """`(culprit,)`, `(None,)` for "can not be told", or None: go on."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """The planner as a strategy."""

    planner: Planner

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """The planner's choice."""
        then = self.planner.choose(trials, running, engine=engine)
        return Step(then.arm, then.minutes)

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The planner's verdict."""
        found = self.planner.verdict(trials, running, minutes=minutes)
        match found.state:
            case "open":
                return None
            case "found" | "none":
                return (found.culprit,)
            case _:
                return (None,)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one bisection ended."""

    culprit: int | None
    minutes: float
    trials: int
    busy_min: float
    """Engine minutes, restarts included."""


@dataclass(slots=True)
class _Live:
    arm: int
    began: float
    crash: float
    look: float


def bisect(
    bug: Bug,
    strategy: Strategy,
    *,
    all_on: int,
    engines: int,
    restart_min: float,
    draw: random.Random,
    budget_min: float,
) -> Outcome:
    """Play one bisection from the first crash to the verdict.

    The first crash has happened when the clock starts; its trial is the first. An engine whose arm changes, or that
    crashed, is ready again `restart_min` later.
    """
    trials = [Trial(all_on, bug.minutes(draw), crashed=True)]
    live: dict[int, _Live] = {}
    now, started = 0.0, 0

    def ended(culprit: int | None) -> Outcome:
        return Outcome(culprit, now, started, started * restart_min + sum(trial.minutes for trial in trials))

    while now < budget_min:
        running = [Running(str(at), one.arm, max(0.0, now - one.began)) for at, one in sorted(live.items())]
        if (end := strategy.verdict(trials, running, now)) is not None:
            return ended(end[0])
        for engine in range(engines):
            one = live.get(engine)
            if one is not None and one.look > now:
                continue
            running = [Running(str(at), other.arm, max(0.0, now - other.began)) for at, other in sorted(live.items())]
            then = strategy.step(trials, running, str(engine))
            if one is not None and then is not None and then.arm == one.arm:
                one.look = now + max(then.minutes, 0.05)
                continue
            if one is not None:
                trials.append(Trial(one.arm, max(0.0, now - one.began), crashed=False))
                del live[engine]
            if then is None:
                continue
            began = now + restart_min
            crash = began + bug.minutes(draw) if bug.possible(then.arm) else NEVER
            live[engine] = _Live(then.arm, began, crash, began + then.minutes)
            started += 1
        if not live:
            return ended(None)
        now = min(min(one.crash, one.look) for one in live.values())
        for engine in [at for at, one in live.items() if one.crash <= now]:
            one = live.pop(engine)
            trials.append(Trial(one.arm, one.crash - one.began, crashed=True))
    return ended(None)


def bugs(
    toggles: Sequence[str], mask: Callable[[Sequence[str]], int], *, count: int, seed: int, law: Law | None = None
) -> Iterator[Bug]:
    """Random bugs: none 8 %, singles 58 %, pairs 26 %, triples 8 %; mean 5 to 60 minutes, evenly on a log scale.

    Which toggles: by rank, the first named most often. law: None mixes steady (half), waves, wear and early.
    """
    draw = random.Random(f"bugs/{seed}")
    weights = [1.0 / (rank + 1.5) for rank in range(len(toggles))]
    for _ in range(count):
        size = draw.choices((0, 1, 2, 3), (0.08, 0.58, 0.26, 0.08))[0]
        chosen: set[str] = set()
        while len(chosen) < min(size, len(toggles)):
            chosen.add(draw.choices(list(toggles), weights)[0])
        kind: Law = law or draw.choices(("steady", "waves", "wear", "early"), (0.5, 0.2, 0.15, 0.15))[0]
        yield Bug((mask(sorted(chosen)),), 5.0 * 12.0 ** draw.random(), kind)
