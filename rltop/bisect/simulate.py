"""Bugs whose culprit is known, engines that crash by them, and a clock that costs nothing.

Written apart from the planner's model, of which it imports nothing: here a crash needs a batch that the bug does not
like, under traffic that comes in waves; it may come on one engine only, or more seldom once something is off. What a
bisection costs is counted as an operator would: wall minutes from the first crash to the verdict, restarts included, on
so many engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rltop.bisect.trials import Running, Trial

Law = Literal["steady", "waves", "wear", "early", "start"]
"""When batches of the bad kind come: any time; in waves of hot minutes; ever more often; mostly soon after a start; at
the very start, before any request."""
HOT_MIN, COLD_MIN = 4.0, 12.0
"""Length of a wave and of the calm between two."""
NEVER = 1e12


@dataclass(frozen=True, slots=True)
class Bug:
    """What is wrong, and how often it shows."""

    needs: tuple[int, ...]
    """Masks: it can crash in an arm that has every toggle of at least one of them. More than one: several bugs at once,
    each of which shows as often as the bug alone."""
    mean_min: float
    """Mean minutes to a crash where it can. Of the law `start`: unused."""
    law: Law = "steady"
    first: float = 1.0
    """The first crash, which the traffic was captured from, came so many times later than those of the replays do."""
    off: float = 1.0
    """With anything off the crash takes so many times longer."""
    host: int | None = None
    """It comes on this engine only: its hardware is broken."""
    again: bool = True
    """False: whatever made it crash is gone."""
    chance: float = 1.0
    """Of a crash at a start, of the law `start`."""

    def possible(self, arm: int) -> bool:
        """Whether it can crash in this arm."""
        return any(arm & mask == mask for mask in self.needs)

    def minutes(self, draw: random.Random, arm: int, *, all_on: int, engine: int = 0) -> float:
        """Minutes from ready to the crash; 0 at a start; `NEVER`."""
        if not self.again or (self.host is not None and engine != self.host):
            return NEVER
        slower = self.off if arm != all_on else 1.0
        times = [self.drawn(draw) * slower for mask in self.needs if arm & mask == mask]
        return min(times, default=NEVER)

    def drawn(self, draw: random.Random) -> float:
        """Minutes to a crash where nothing is different."""
        match self.law:
            case "steady":
                return draw.expovariate(1.0 / self.mean_min)
            case "wear":
                return draw.gammavariate(4.0, self.mean_min / 4.0)
            case "early":
                short = draw.random() < 0.6
                return draw.expovariate(1.0 / (self.mean_min * (0.3 if short else 2.05)))
            case "start":
                return 0.0 if draw.random() < self.chance else NEVER
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
    """What a strategy wants of a free engine: an arm, and when to ask again. 0 minutes: as soon as it is ready."""

    arm: int
    minutes: float
    why: str = ""


class Strategy(Protocol):
    """Somebody who bisects."""

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """For a free engine, or one whose time is over (its trial is in `running`); None: leave it idle."""
        ...

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """`(culprit,)`, `(None,)` for "can not be told", or None: go on."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one bisection ended."""

    culprit: int | None
    minutes: float
    trials: int
    busy_min: float
    """Engine minutes, restarts included."""


@dataclass(frozen=True, slots=True)
class Happened:
    """One thing that happened in a bisection, for people."""

    minutes: float
    engine: int
    what: Literal["started", "goes on", "crashed", "quiet"]
    arm: int
    exposure: float
    why: str = ""


@dataclass(slots=True)
class _Live:
    arm: int
    began: float
    crash: float
    look: float


@dataclass(slots=True)
class _World:
    """The fleet, its clock, and what came out so far."""

    bug: Bug
    all_on: int
    restart_min: float
    draw: random.Random
    told: Callable[[Happened], None] | None
    trials: list[Trial]
    live: dict[int, _Live] = field(default_factory=dict)
    now: float = 0.0
    started: int = 0

    def running(self) -> list[Running]:
        return [Running(str(at), one.arm, max(0.0, self.now - one.began)) for at, one in sorted(self.live.items())]

    def end(self, engine: int, *, crashed: bool) -> None:
        one = self.live.pop(engine)
        exposure = one.crash - one.began if crashed else max(0.0, self.now - one.began)
        if exposure > 0.0 or crashed or one.look <= self.now:
            self.trials.append(Trial(one.arm, exposure, crashed=crashed, engine=str(engine)))
            self.tell(engine, "crashed" if crashed else "quiet", one.arm, exposure)

    def start(self, engine: int, step: Step) -> None:
        began = self.now + self.restart_min
        took = self.bug.minutes(self.draw, step.arm, all_on=self.all_on, engine=engine)
        self.live[engine] = _Live(step.arm, began, began + took, began + step.minutes)
        self.started += 1
        self.tell(engine, "started", step.arm, 0.0, step.why)

    def tell(
        self,
        engine: int,
        what: Literal["started", "goes on", "crashed", "quiet"],
        arm: int,
        exposure: float,
        why: str = "",
    ) -> None:
        if self.told is not None:
            self.told(Happened(self.now, engine, what, arm, exposure, why))


def bisect(
    bug: Bug,
    strategy: Strategy,
    *,
    all_on: int,
    engines: int,
    restart_min: float,
    draw: random.Random,
    budget_min: float,
    told: Callable[[Happened], None] | None = None,
) -> Outcome:
    """Play one bisection from the first crash to the verdict.

    The first crash has happened when the clock starts; its trial is the first. An engine whose arm changes, or that
    crashed, is ready again `restart_min` later.
    """
    first = 0.0 if bug.law == "start" else bug.drawn(draw) * bug.first
    world = _World(
        bug, all_on, restart_min, draw, told, [Trial(all_on, first, crashed=True, engine=str(bug.host or 0))]
    )
    world.tell(bug.host or 0, "crashed", all_on, first)

    def ended(culprit: int | None) -> Outcome:
        busy = world.started * restart_min + sum(trial.minutes for trial in world.trials)
        return Outcome(culprit, world.now, world.started, busy)

    while world.now < budget_min:
        if (end := strategy.verdict(world.trials, world.running(), world.now)) is not None:
            return ended(end[0])
        for engine in range(engines):
            one = world.live.get(engine)
            if one is not None and one.look > world.now:
                continue
            if one is not None and one.look <= one.began:
                world.end(engine, crashed=False)
                one = None
            step = strategy.step(world.trials, world.running(), str(engine))
            if one is not None and step is not None and step.arm == one.arm:
                one.look = world.now + max(step.minutes, 0.05)
                world.tell(engine, "goes on", one.arm, world.now - one.began, step.why)
                continue
            if one is not None:
                world.end(engine, crashed=False)
            if step is not None:
                world.start(engine, step)
        if not world.live:
            return ended(None)
        world.now = min(min(one.crash, one.look) for one in world.live.values())
        for engine in [at for at, one in world.live.items() if one.crash <= world.now]:
            world.end(engine, crashed=True)
    end = strategy.verdict(world.trials, world.running(), world.now)
    return ended(end[0] if end is not None else None)


@dataclass(frozen=True, slots=True)
class Mix:
    """Which bugs there are."""

    sizes: Mapping[int, float] = field(default_factory=lambda: {0: 0.08, 1: 0.58, 2: 0.26, 3: 0.08})
    """How many toggles have to be on together -> share."""
    mean_min: tuple[float, float] = (5.0, 60.0)
    """Evenly on a log scale."""
    laws: Mapping[Law, float] = field(
        default_factory=lambda: {"steady": 0.5, "waves": 0.2, "wear": 0.15, "early": 0.15}
    )
    at_once: int = 1
    """So many bugs at once, none of which needs all that another needs."""
    first: float = 1.0
    off: float = 1.0
    hosts: int = 0
    """Above 0: each bug comes on one of the first so many engines only."""
    again: bool = True
    chance: tuple[float, float] = (1.0, 1.0)
    """Of a crash at a start, evenly."""


def bugs(
    toggles: Sequence[str], mask: Callable[[Sequence[str]], int], *, count: int, seed: int, mix: Mix | None = None
) -> Iterator[Bug]:
    """Random bugs. Which toggles: by rank, the first named most often."""
    mix = mix or Mix()
    draw = random.Random(f"bugs/{seed}")
    low, high = mix.mean_min
    for _ in range(count):
        needs: list[int] = []
        while len(needs) < mix.at_once:
            one = mask(_chosen(toggles, mix, draw))
            if all(one & other not in (one, other) for other in needs):
                needs.append(one)
        law = draw.choices(list(mix.laws), list(mix.laws.values()))[0]
        yield Bug(
            tuple(needs),
            low * (high / low) ** draw.random(),
            law,
            mix.first,
            mix.off,
            draw.randrange(mix.hosts) if mix.hosts else None,
            mix.again,
            draw.uniform(*mix.chance),
        )


def _chosen(toggles: Sequence[str], mix: Mix, draw: random.Random) -> list[str]:
    weights = [1.0 / (rank + 1.5) for rank in range(len(toggles))]
    size = draw.choices(list(mix.sizes), list(mix.sizes.values()))[0]
    chosen: set[str] = set()
    while len(chosen) < min(size, len(toggles)):
        chosen.add(draw.choices(list(toggles), weights)[0])
    return sorted(chosen)
