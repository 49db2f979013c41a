"""What a bisection costs and how often it is right, beside what people do today, on the same bugs and engines.

    python -m benchmarks.bisect [--bugs 2000] [--engines 1 4 8 32] [--jobs 2]

Four strategies: rltop's planner; the guide's checklist (one toggle off after the other, stop at the first quiet arm);
every toggle off once, with repetition, until its members are known as surely as ours (tuned on other bugs than it is
measured on); delta debugging (ddmin) with repetition. The bugs are random conjunctions of up to three of five toggles
with 5 to 60 minutes to the crash, which nobody is told, and not only exponential (`rltop.bisect.simulate`).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from rltop.bisect.belief import Trial
from rltop.bisect.planner import Budget, Planner, Running
from rltop.bisect.simulate import Bug, Ours, Outcome, Step, Strategy, bisect, bugs
from rltop.bisect.space import space
from rltop.evidence.priors import load

TOGGLES = ("cuda_graph", "speculative", "overlap_schedule", "deepep", "prefill_graph")
PRIORS = load().priors
SPACE = space(TOGGLES, PRIORS)
RESTART_MIN = 2.0
BUDGET_MIN = 14 * 24 * 60.0
"""None of them is cut short: what it costs is the question."""
RIGHT = {1: 0.95, 4: 0.95, 8: 0.98, 32: 0.98}
"""Goals."""


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

    window_min: float = 60.0

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """The first arm that is not decided and on no other engine."""
        taken = {one.arm for one in running if one.engine != engine}
        for arm in self._arms():
            if not _crashed(trials, arm) and arm not in taken:
                return Step(arm, max(0.05, self.window_min - _exposure(trials, running, arm)))
        return None

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The first of the list that is quiet; none if all crash."""
        del minutes
        for at, arm in enumerate(self._arms()):
            if _crashed(trials, arm):
                continue
            return (1 << at,) if _exposure(trials, running, arm) >= self.window_min - 1e-6 else None
        return (0,)

    @staticmethod
    def _arms() -> list[int]:
        return [SPACE.all_on & ~(1 << at) for at in range(len(TOGGLES))]


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Every toggle off, each until it crashes or was quiet for `repeat` mean times; the quiet ones are the culprit.

    The mean time is estimated from `baseline` crashes with everything on, and from every other crash.
    """

    baseline: int
    repeat: float

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """Baselines first; then the undecided arm with the fewest engines."""
        others = [one for one in running if one.engine != engine]
        if sum(trial.crashed and trial.arm == SPACE.all_on for trial in trials) < self.baseline:
            return Step(SPACE.all_on, 1e6)
        open_arms = [arm for arm in Checklist._arms() if not self._decided(trials, running, arm)]
        if not open_arms:
            return None
        mine = next((one.arm for one in running if one.engine == engine), None)
        load = {arm: sum(one.arm == arm for one in others) for arm in open_arms}
        arm = mine if mine in open_arms and load[mine] == 0 else min(open_arms, key=lambda arm: load[arm])
        left = self._needed(trials) - _exposure(trials, running, arm)
        return Step(arm, max(0.05, left / (load[arm] + 1)))

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The toggles whose arm was quiet; none if all crashed."""
        del minutes
        arms = Checklist._arms()
        if sum(trial.crashed and trial.arm == SPACE.all_on for trial in trials) < self.baseline:
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

    baseline: int
    repeat: float
    _on: int = SPACE.all_on
    _parts: int = 2
    _at: int = 0
    _tests: list[int] = field(default_factory=list)
    _done: bool = False

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """All engines test the same set."""
        del engine
        self._advance(trials, running)
        if self._done:
            return None
        engines = max(1, len(running))
        arm = self._arm(trials)
        left = self._needed(trials) - _exposure(trials, running, arm)
        return Step(arm, 1e6 if arm == SPACE.all_on else max(0.05, left / engines))

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        """The smallest set that crashes, once it is found."""
        del minutes
        self._advance(trials, running)
        return (self._on,) if self._done else None

    def _needed(self, trials: Sequence[Trial]) -> float:
        return self.repeat * statistics.fmean(trial.minutes for trial in trials if trial.crashed)

    def _arm(self, trials: Sequence[Trial]) -> int:
        short = sum(trial.crashed and trial.arm == SPACE.all_on for trial in trials) < self.baseline
        return SPACE.all_on if short or not self._tests else self._tests[self._at]

    def _advance(self, trials: Sequence[Trial], running: Sequence[Running]) -> None:
        if sum(trial.crashed and trial.arm == SPACE.all_on for trial in trials) < self.baseline:
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
        members = [1 << at for at in range(len(TOGGLES)) if self._on >> at & 1]
        if not members:
            return []
        if len(members) == 1:
            return [0]
        size = -(-len(members) // self._parts)
        chunks = [sum(members[at : at + size]) for at in range(0, len(members), size)]
        rest = [self._on & ~chunk for chunk in chunks]
        return list(dict.fromkeys([*chunks, *rest]))


def ours(seed: int, kernel: bool = False, bug: Bug | None = None) -> Ours:
    """The planner; with `kernel`, it was told a kernel of one of the culprit's toggles (right four times in five)."""
    factors: dict[str, float] = {}
    if kernel and bug is not None:
        draw = random.Random(f"kernel/{seed}")
        members = SPACE.names(bug.needs[0])
        told = draw.choice(members) if members and draw.random() < 0.8 else draw.choice(TOGGLES)
        factors = {told: 15.0}
    planner = Planner(space(TOGGLES, PRIORS, factors=factors), Budget(BUDGET_MIN, RESTART_MIN), seed=seed)
    return Ours(planner)


def one(seed: int, bug: Bug, engines: int, make: Callable[[int, Bug], Strategy]) -> tuple[bool, Outcome]:
    """One bisection: whether the name was right, and what it cost."""
    outcome = bisect(
        bug,
        make(seed, bug),
        all_on=SPACE.all_on,
        engines=engines,
        restart_min=RESTART_MIN,
        draw=random.Random(f"world/{seed}"),
        budget_min=BUDGET_MIN,
    )
    return outcome.culprit == bug.needs[0], outcome


def _make(what: str, knobs: tuple[float, ...], seed: int, bug: Bug) -> Strategy:
    match what:
        case "rltop":
            return ours(seed)
        case "rltop, kernel known":
            return ours(seed, True, bug)
        case "checklist":
            return Checklist()
        case "exhaustive":
            return Exhaustive(int(knobs[0]), knobs[1])
        case _:
            return Ddmin(int(knobs[0]), knobs[1])


def _run(job: tuple[int, Bug, int, str, tuple[float, ...]]) -> tuple[bool, float]:
    seed, bug, engines, what, knobs = job
    right, outcome = one(seed, bug, engines, partial(_make, what, knobs))
    return right, outcome.minutes


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy on one number of engines."""

    what: str
    engines: int
    right: float
    mean: float
    median: float


def measure(
    pool: ProcessPoolExecutor,
    what: str,
    engines: int,
    found: Sequence[Bug],
    *,
    first: int,
    knobs: tuple[float, ...] = (),
) -> Row:
    """Play all bugs with one strategy."""
    jobs = [(first + at, bug, engines, what, knobs) for at, bug in enumerate(found)]
    ended = list(pool.map(_run, jobs, chunksize=8))
    minutes = [row[1] for row in ended]
    right = sum(row[0] for row in ended) / len(ended)
    return Row(what, engines, right, statistics.fmean(minutes), statistics.median(minutes))


def tuned(pool: ProcessPoolExecutor, what: str, engines: int, right: float, found: Sequence[Bug]) -> tuple[float, ...]:
    """The cheapest (baseline crashes, repetitions) that is right as often as `right`; else the most often right."""
    tried = [
        (measure(pool, what, engines, found, first=10**6, knobs=(baseline, repeat)), (baseline, repeat))
        for baseline in (1.0, 2.0, 4.0)
        for repeat in (2.0, 3.0, 4.0, 6.0, 9.0)
    ]
    enough = [pair for pair in tried if pair[0].right >= right]
    if enough:
        return min(enough, key=lambda pair: pair[0].mean)[1]
    return max(tried, key=lambda pair: (pair[0].right, -pair[0].mean))[1]


def rows(count: int = 2000, engines: Sequence[int] = (1, 4, 8, 32), jobs: int = 2) -> list[tuple[str, str, str]]:
    """(what, measured, budget) for the table of all benchmarks."""
    found = list(bugs(TOGGLES, SPACE.mask, count=count, seed=1))
    others = list(bugs(TOGGLES, SPACE.mask, count=max(100, count // 5), seed=2))
    table: list[tuple[str, str, str]] = []
    with ProcessPoolExecutor(jobs) as pool:
        for number in engines:
            mine = measure(pool, "rltop", number, found, first=0)
            told = measure(pool, "rltop, kernel known", number, found, first=0)
            peers = [measure(pool, "checklist", number, found, first=0)]
            for what in ("exhaustive", "ddmin"):
                knobs = tuned(pool, what, number, mine.right, others)
                row = measure(pool, what, number, found, first=0, knobs=knobs)
                peers.append(Row(f"{what} ({knobs[0]:.0f} baselines, x{knobs[1]:g})", *_rest(row)))
            exhaustive = peers[1].mean
            for row in (mine, told, *peers):
                goal = ""
                if row is mine:
                    goal = f">= {RIGHT.get(number, 0.95):.0%} right, <= 1.0 x exhaustive"
                elif row is told:
                    goal = "<= 0.5 x exhaustive"
                took = f"{row.mean:.0f} min (median {row.median:.0f}), {row.mean / exhaustive:.2f} x"
                table.append((f"{number} engines, {row.what}", f"{row.right:.1%} right, {took}", goal))
    return table


def _rest(row: Row) -> tuple[int, float, float, float]:
    return row.engines, row.right, row.mean, row.median


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bisect", description=__doc__)
    parser.add_argument("--bugs", type=int, default=2000)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    for what, text, goal in rows(given.bugs, given.engines, given.jobs):
        print(f"{what:<48}  {text:<58}  {goal}")


if __name__ == "__main__":
    main()
