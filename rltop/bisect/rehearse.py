"""The planner in the simulator: what a bisection would have done about a bug that is known.

A rehearsal is for people: every step with its reason, and at the end whether it was right. Nothing is measured on an
engine here, and nothing learned about one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rltop.bisect.planner import Planner, Verdict
from rltop.bisect.simulate import Bug, Happened, Outcome, Step, bisect
from rltop.bisect.trials import Running, Trial


@dataclass(frozen=True, slots=True)
class Ours:
    """The planner as a strategy."""

    planner: Planner

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        """The planner's choice."""
        then = self.planner.choose(trials, running, engine=engine)
        return Step(then.arm, then.minutes, then.why)

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


@dataclass(slots=True)
class _Watched:
    """Keeps the last verdict, for its words."""

    ours: Ours
    last: Verdict

    def step(self, trials: Sequence[Trial], running: Sequence[Running], engine: str) -> Step | None:
        return self.ours.step(trials, running, engine)

    def verdict(self, trials: Sequence[Trial], running: Sequence[Running], minutes: float) -> tuple[int | None] | None:
        self.last = self.ours.planner.verdict(trials, running, minutes=minutes)
        return self.ours.verdict(trials, running, minutes)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One bisection, step by step."""

    steps: tuple[Happened, ...]
    outcome: Outcome
    verdict: Verdict
    right: bool
    """The bug was named; or, of several bugs at once or of one that is no conjunction of three, nothing wrong was."""


def rehearse(planner: Planner, bug: Bug, *, engines: int, seed: int) -> Rehearsal:
    """Play it."""
    steps: list[Happened] = []
    watched = _Watched(Ours(planner), planner.verdict([]))
    outcome = bisect(
        bug,
        watched,
        all_on=planner.space.all_on,
        engines=engines,
        restart_min=planner.budget.restart_min,
        draw=random.Random(f"world/{seed}"),
        budget_min=planner.budget.minutes,
        told=steps.append,
    )
    named = {planner.stands_for(mask) for mask in bug.needs}
    nameable = len(named) == 1 and named <= set(planner.space.culprits)
    right = {outcome.culprit} == named if nameable else outcome.culprit is None
    return Rehearsal(tuple(steps), outcome, watched.last, right)
