"""`rltop bisect simulate`: one bisection of a known bug step by step, or a table of strategies on many bugs.

Nothing here touches a run or an engine; the clock is the simulator's.
"""

from __future__ import annotations

import random
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from rltop.bisect.baselines import Checklist, Ddmin, Exhaustive
from rltop.bisect.facts import PART_OF, CrashFacts, Tables, weigh
from rltop.bisect.planner import Budget, Planner
from rltop.bisect.rehearse import Ours, Rehearsal, rehearse
from rltop.bisect.simulate import Bug, Happened, Law, Mix, Outcome, Strategy, bisect, bugs
from rltop.bisect.space import Space, space
from rltop.bisect.story import arm_words
from rltop.checks.phrase import count
from rltop.cli.output import print_json
from rltop.engines.ground import NEVER
from rltop.engines.toggle_table import TOGGLES
from rltop.errors import RltopError
from rltop.evidence.priors import load
from rltop.settings import priors_path

BASELINE, REPEAT = 3, 8.0
"""Of the two strategies that repeat: crashes with everything on, and mean times to be quiet for. As often right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What was asked for on the command line."""

    toggles: tuple[str, ...]
    engines: int
    seed: int
    law: Literal["mixed", "steady", "waves", "wear", "early", "start"]
    restart_min: float
    budget_min: float
    priors: Path | None
    kernel: str = ""

    def space(self) -> Space:
        """All culprits. Raises RltopError: a table of priors that can not be used, toggles that can not be bisected."""
        tables = self._tables()
        where = "bisect simulate --toggles"
        known = sorted({*TOGGLES, *tables.priors.weights} - {*NEVER})
        for name in self.toggles:
            if name not in known:
                near = get_close_matches(name, known, n=3) or known
                raise RltopError(f"there is no toggle {name!r}", where=where, do=f"use some of: {', '.join(near)}")
        try:
            return space(self.toggles, tables.priors, factors=weigh(self._facts(), self.toggles, tables)[0])
        except RltopError as error:
            raise RltopError(error.what, where=where, why=error.why, do=error.do) from None

    def moved(self) -> list[str]:
        """What the facts of the first crash moved, for people."""
        return [one.text() for one in weigh(self._facts(), self.toggles, self._tables())[1]]

    def _tables(self) -> Tables:
        try:
            return load(self.priors or priors_path())
        except RltopError as error:
            do = error.do or "--priors FILE.toml of the shape that docs/bisect.md shows, or leave it out"
            raise RltopError(error.what, where=error.where, why=error.why, do=do) from None

    def _facts(self) -> CrashFacts:
        return CrashFacts(kernel=self.kernel)

    def planner(self, found: Space, seed: int) -> Planner:
        """As a daemon would make it."""
        exposure: Literal["load", "start"] = "start" if self.law == "start" else "load"
        budget = Budget(self.budget_min, self.restart_min)
        # `rltop.engines.ground` asks SGLang's rules; here no engine is.
        along = {
            found.mask([whole]): found.mask([part])
            for part, whole in PART_OF.items()
            if whole in found.toggles and part in found.toggles
        }
        return Planner(found, budget, together=along, seed=seed, exposure=exposure, engines=self.engines)


def _known(asked: Asked, found: Space, bug: str, mean_min: float) -> Bug:
    """The bug of `--bug`: it needs what it names, and that without which this is not on."""
    names = [] if bug == "none" else [name.strip() for name in bug.split("+")]
    if len(set(names)) < len(names):
        raise RltopError(f"{bug!r} names a toggle twice", where="bisect simulate --bug", do="A+B, each once")
    law: Law = "steady" if asked.law == "mixed" else asked.law
    needs = asked.planner(found, asked.seed).stands_for(_mask(found, names))
    return Bug((needs,), mean_min, law, chance=0.5)


def rehearsal(asked: Asked, bug: str, mean_min: float, *, as_json: bool) -> int:
    """Plays one. Exit code 0, also where the planner was wrong: that is what a rehearsal is for."""
    found = asked.space()
    known = _known(asked, found, bug, mean_min)
    played = rehearse(asked.planner(found, asked.seed), known, engines=asked.engines, seed=asked.seed)
    if as_json:
        print_json({"rehearsal": _rehearsal_json(found, known, played)})
        return 0
    how = "half of the starts" if known.law == "start" else f"a crash every {mean_min:g} min on average ({known.law})"
    print(f"A rehearsal, no engine is touched.\nThe bug: {_words(asked, found, known)}, {how}.")
    print(f"{len(found.toggles)} toggles, {count(asked.engines, 'engine')}, {asked.restart_min:g} min per restart.")
    print("".join(f"Known of the first crash: {one}.\n" for one in asked.moved()))
    print("     min  engine")
    for step in played.steps:
        print("\n".join(_step(found, step)))
    end = played.verdict
    trials = count(played.outcome.trials, "trial")
    print(f"\n{end.state} after {played.outcome.minutes:.0f} min and {trials} ({end.probability:.0%} sure):")
    print(textwrap.fill(end.text, 110, initial_indent="  ", subsequent_indent="  "))
    print("That is right." if played.right else "That is wrong." if played.outcome.culprit is not None else "No name.")
    return 0


def table(asked: Asked, plays: int, *, bug: str | None = None, mean_min: float = 20.0, as_json: bool) -> int:
    """Plays many with each strategy: random bugs, or so many times this one."""
    found = asked.space()
    mix = Mix() if asked.law == "mixed" else Mix(laws={asked.law: 1.0}, chance=(0.2, 1.0))
    if bug is not None:
        known = [_known(asked, found, bug, mean_min)] * plays
    else:
        known = list(bugs(found.toggles, _needs(asked, found), count=plays, seed=asked.seed, mix=mix))
    width = len(found.toggles)
    makers: dict[str, Callable[[int], Strategy]] = {"rltop": lambda seed: Ours(asked.planner(found, seed))}
    if asked.law != "start":
        again = f"{BASELINE} crashes first, {REPEAT:g} mean times"
        makers |= {
            "checklist, stops at the first quiet arm": lambda _: Checklist(width),
            f"every toggle off, {again}": lambda _: Exhaustive(width, BASELINE, REPEAT),
            f"delta debugging, {again}": lambda _: Ddmin(width, BASELINE, REPEAT),
        }
    rows = [_row(what, make, known, asked, found.all_on) for what, make in makers.items()]
    if as_json:
        print_json({"bugs": plays, "bug": bug, "engines": asked.engines, "law": known[0].law if bug else asked.law,
                    "strategies": rows})  # fmt: skip
        return 0
    fleet = f"{count(asked.engines, 'engine')}, {asked.restart_min:g} min per restart"
    if bug is not None:
        how = "half of the starts" if known[0].law == "start" else f"a crash every {mean_min:g} min on average"
        print(f"{count(plays, 'bisection')} of one bug, {_words(asked, found, known[0])}, {how} ({known[0].law});")
        print(f"{width} toggles, {fleet}.")
    else:
        print(f"{plays} simulated bugs of {width} toggles, {fleet}, law {asked.law}.")
    print(f"{'':<52}{'right':>8}{'wrong':>8}{'no name':>9}{'minutes':>9}{'median':>8}")
    for row in rows:
        shares = f"{row['right']:>8.1%}{row['wrong']:>8.1%}{row['no_name']:>9.1%}"
        print(f"{row['strategy']:<52}{shares}{_minutes(row['minutes']):>9}{_minutes(row['median_minutes']):>8}")
    print("\nMinutes are wall time from the first crash to the verdict, on average. Few bugs tell little: 50 of them")
    print("tell a share to about 6 in 100. The pinned benchmark is `python -m benchmarks.bisect` in the sources.")
    return 0


def _shown(text: str) -> None:
    """How far it is, on one line of a terminal; nowhere else."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _row(
    what: str,
    make: Callable[[int], Strategy],
    known: Sequence[Bug],
    asked: Asked,
    all_on: int,
    progress: Callable[[str], None] = _shown,
) -> dict[str, Any]:
    ended: list[tuple[Bug, Outcome]] = []
    for at, bug in enumerate(known):
        progress(f"{what}: {at} of {len(known)} bugs")
        draw = random.Random(f"world/{asked.seed}/{at}")
        outcome = bisect(
            bug,
            make(asked.seed + at),
            all_on=all_on,
            engines=asked.engines,
            restart_min=asked.restart_min,
            draw=draw,
            budget_min=asked.budget_min,
        )
        ended.append((bug, outcome))
    progress("")
    right = sum({end.culprit} == set(bug.needs) for bug, end in ended)
    silent = sum(end.culprit is None for _, end in ended)
    minutes = [end.minutes for _, end in ended]
    return {
        "strategy": what,
        "right": right / len(ended),
        "wrong": (len(ended) - right - silent) / len(ended),
        "no_name": silent / len(ended),
        "minutes": statistics.fmean(minutes),
        "median_minutes": statistics.median(minutes),
        "engine_minutes": statistics.fmean(end.busy_min for _, end in ended),
    }


def _minutes(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def _needs(asked: Asked, found: Space) -> Callable[[Sequence[str]], int]:
    """Toggles of a random bug as a mask, with that without which they are not on."""
    planner = asked.planner(found, asked.seed)
    return lambda names: planner.stands_for(found.mask(names))


def _words(asked: Asked, found: Space, known: Bug) -> str:
    """The bug for people."""
    needs = known.needs[0]
    return asked.planner(found, asked.seed).space.words(needs) if needs else "no toggle"


def _mask(found: Space, names: Sequence[str]) -> int:
    try:
        return found.mask(names)
    except RltopError as error:
        do = f"{error.do}; --toggles takes others"
        raise RltopError(error.what, where="bisect simulate --bug", do=do) from None


def _step(found: Space, step: Happened) -> list[str]:
    head = f"{step.minutes:>8.1f}  {step.engine:<6}  "
    if step.what in ("started", "goes on"):
        return [textwrap.fill(step.why, 110, initial_indent=head, subsequent_indent=" " * len(head))]
    where = arm_words(found.names(step.arm), found.names(found.all_on & ~step.arm))
    where = f"with {where}" if where.startswith("everything") else where
    return [f"{head}{step.what.upper() if step.what == 'crashed' else step.what} {where}, {step.exposure:.1f} min"]


def _rehearsal_json(found: Space, known: Bug, played: Rehearsal) -> dict[str, Any]:
    return {
        "bug": {"needs": list(found.names(known.needs[0])), "mean_min": known.mean_min, "law": known.law},
        "steps": [
            {
                "minutes": step.minutes,
                "engine": step.engine,
                "what": step.what,
                "on": list(found.names(step.arm)),
                "exposure_min": step.exposure,
                "why": step.why,
            }
            for step in played.steps
        ],
        "state": played.verdict.state,
        "culprit": None if played.outcome.culprit is None else list(found.names(played.outcome.culprit)),
        "probability": played.verdict.probability,
        "text": played.verdict.text,
        "minutes": played.outcome.minutes,
        "trials": played.outcome.trials,
        "right": played.right,
    }
