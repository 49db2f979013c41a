"""A bisection's record in the planner's terms: space, planner, evidence, and what is believed. Nothing happens here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rltop.bisect.belief import Belief, Trial
from rltop.bisect.facts import CrashFacts, Tables, weigh
from rltop.bisect.planner import Budget, Planner, Running
from rltop.bisect.space import OTHER, Space, space
from rltop.daemon.bisect_record import Outside, Record, TrialRow
from rltop.engines.ground import NOT_NAMED, arm
from rltop.engines.slots import differences

LONGEST_TRIAL_MIN = 120.0
MOST_POSTERIOR = 12
MOST_TRIALS = 400
"""Trials in the cell; older ones are in the record."""


class Model:
    """Of one record."""

    def __init__(self, record: Record, tables: Tables) -> None:
        self.record, self._tables = record, tables
        self._argv: dict[tuple[str, ...], list[str]] = {}
        self.refresh()

    def refresh(self) -> None:
        """The record has other restart times, other arms, or another fact."""
        record = self.record
        self.space: Space = space(record.ground.toggles, self._tables.priors, factors=record.factors)
        self.planner = self._made()

    def learn_kernel(self, kernel: str, source: str) -> str:
        """A trial's core dump names the kernel that the hunted crash did not: what that moves, in words."""
        record = self.record
        factors, moved = weigh(CrashFacts(kernel=kernel), record.ground.toggles, self._tables)
        record.kernel = kernel
        record.factors = {
            name: record.factors.get(name, 1.0) * factors.get(name, 1.0) for name in {*record.factors, *factors}
        }
        told = [{"text": one.fact, "source": source, "moves": dict(one.factors)} for one in moved]
        record.facts = (*record.facts, *told)
        self.refresh()
        return "; ".join(one.text() for one in moved)

    def _made(self) -> Planner:
        record, known = self.record, self.space
        budget = Budget(
            minutes=record.budget_min,
            restart_min=max(record.restart_min, 1e-3),
            longest_trial_min=min(LONGEST_TRIAL_MIN, record.budget_min),
        )
        together = {known.mask([name]): known.mask(others) for name, others in self.together().items()}
        return Planner(
            known,
            budget=budget,
            fixed=known.mask(self.fixed()),
            together=together,
            seed=record.seed,
            barred=frozenset(known.mask(names) for names in record.barred),
            exposure="start" if record.crash.at_start else "load",
            engines=max(1, len(record.engines)),
            untried=tuple(name for name, why in record.ground.left_out.items() if why == NOT_NAMED),
        )

    def fixed(self) -> dict[str, str]:
        """Toggles that are never off, and why."""
        return {**self.record.ground.fixed, **self.record.stuck}

    def together(self) -> dict[str, tuple[str, ...]]:
        """Toggle -> those that go off with it."""
        found = dict(self.record.ground.together)
        for name, others in self.record.goes_with.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *others)))
        return found

    def evidence(self) -> list[Trial]:
        """The crash that is hunted, and every trial that ended and counts."""
        crash, found, on = self.record.crash, list[Trial](), self.space.all_on
        if crash.at_start:
            found.append(Trial(on, 0.0, crashed=True, engine=crash.engine))
        elif crash.minutes is not None:
            minutes = crash.minutes * self.record.time_scale
            found.append(Trial(on, minutes, crashed=True, engine=crash.engine))
        scale = self.record.time_scale
        found += [Trial(on, minutes * scale, crashed=True, engine=name) for name, minutes in self.record.earlier]
        found += [
            Trial(on, 0.0 if crash.at_start else one.minutes * scale, crashed=True, engine=one.engine)
            for one in self.record.outside
        ]
        rows = [row for row in self.record.trials if row.outcome in ("crashed", "quiet", "aborted") and row.counts]
        return [
            *found,
            *(Trial(self.arm_of(row), row.minutes, row.outcome == "crashed", engine=row.engine) for row in rows),
        ]

    def running(self) -> list[Running]:
        """Trials under way, with the minutes that the record has."""
        rows = [row for row in self.record.trials if row.outcome == "running" and row.counts]
        return [Running(row.engine, self.arm_of(row), row.minutes) for row in rows]

    def arm_of(self, row: TrialRow) -> int:
        """What is on, in effect where that was seen."""
        return self.space.mask(row.asked_on if row.on is None else row.on)

    def argv_of(self, row: TrialRow) -> list[str]:
        """How its arguments and variables differ from those with everything on: `- --flag`, `+ NAME=value`."""
        if row.asked_on not in self._argv:
            base = self.record.ground
            made = arm(self.record.subject, base, [name for name in base.toggles if name not in row.asked_on])
            self._argv[row.asked_on] = [] if made.config is None else differences(base.config, made.config)
        return self._argv[row.asked_on]

    def names(self, culprit: int | None) -> tuple[str, ...]:
        """Of a culprit; none of "something else"."""
        return () if culprit is None or culprit == OTHER else self.planner.space.names(culprit)

    def words(self, culprit: int | None) -> str:
        """A culprit for people."""
        return "" if culprit is None else self.planner.space.words(culprit)

    def named(self, pairs: Sequence[tuple[int, float]]) -> tuple[tuple[tuple[str, ...], float], ...]:
        """Culprits with their probabilities, by name."""
        return tuple((("something else",) if one == OTHER else self.names(one), p) for one, p in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What is believed now, and what comes next: costs the planner a while to find out."""

    posterior: tuple[Mapping[str, Any], ...] = ()
    involved: Mapping[str, float] | None = None
    next: tuple[Mapping[str, Any], ...] = ()
    left_min: tuple[float, float] | None = None


def outlook(model: Model, trials: Sequence[Trial], running: Sequence[Running], engines: Sequence[str]) -> Outlook:
    """For the cell. engines: that take part."""
    belief = model.planner.believe(trials, running)
    rows = belief.ranking(0.0)[:MOST_POSTERIOR]
    posterior = [{"culprit": list(model.names(one)), "words": model.words(one), "p": round(p, 4)} for one, p in rows]
    involved = {name: round(p, 4) for name, p in belief.involved().items()}
    coming, left = [], None
    if engines and model.record.verdict is None:
        engine = min(engines, key=lambda name: sum(one.minutes for one in running if one.engine == name))
        then = model.planner.choose(trials, running, engine=engine)
        on = model.space.names(then.arm)
        coming.append(
            {
                "engine": engine,
                "on": list(on),
                "off": [name for name in model.space.toggles if name not in on],
                "minutes": round(then.minutes, 2),
                "crash": round(then.crash, 3),
                "bits": round(then.bits, 3),
                "why": then.why,
            }
        )
        left = _left(model, belief, then.bits, then.minutes, len(engines))
    return Outlook(posterior=tuple(posterior), involved=involved, next=tuple(coming), left_min=left)


def _left(model: Model, belief: Belief, bits: float, minutes: float, engines: int) -> tuple[float, float] | None:
    """Expected minutes left, low and high: what is unknown over what a trial tells, and the confirmation.

    A rough estimate: the bits per minute of the next trial, which fall towards the end, on so many engines.
    """
    record = model.record
    confirm = record.restart_min + belief.mean_minutes()
    open_bits = belief.entropy_bits()
    rate = bits / max(minutes + record.restart_min, 1e-6) * engines
    search = open_bits / rate if rate > 1e-4 else 0.0
    spent = max(0.0, record.budget_min - record.minutes)
    return round(min(spent, 0.5 * search + 0.5 * confirm), 1), round(min(spent, 2.5 * search + 2.5 * confirm), 1)


def cell(model: Model, seen: Outlook) -> dict[str, Any]:
    """The cell `bisect`: plain values (docs/protocol.md)."""
    record, base, crash = model.record, model.record.ground, model.record.crash
    ending = record.verdict
    return {
        "id": record.id,
        "state": record.state,
        "mode": record.mode,
        "engines": list(record.engines),
        "dropped": dict(record.dropped),
        "toggles": list(base.toggles),
        "fixed": list(model.fixed()),
        "aliases": {name: list(others) for name, others in model.together().items()},
        "started": record.started,
        "ended": record.ended,
        "minutes": round(record.minutes, 2),
        "budget_min": record.budget_min,
        "time_scale": record.time_scale,
        "left_min": list(seen.left_min) if seen.left_min is not None else None,
        "error": record.error or None,
        "crash": {
            "engine": crash.engine,
            "generation": crash.generation,
            "fingerprint": crash.fingerprint,
            "cause": crash.cause,
            "kernel": crash.kernel or None,
            "phase": crash.phase,
            "weight_version": record.weights.version,
            "injected": crash.injected or None,
        },
        "facts": [_fact(one) for one in record.facts],
        "traffic": {name: record.traffic.get(name) for name in ("source", "requests", "concurrency")},
        "posterior": [dict(one) for one in seen.posterior],
        "involved": dict(seen.involved or {}),
        "counts": counts(record.trials),
        "outside": [_outside(record, one) for one in record.outside],
        "trials": [_trial(model, row) for row in record.trials[-MOST_TRIALS:]],
        "next": [dict(one) for one in seen.next],
        "verdict": None
        if ending is None
        else {
            "state": ending.state,
            "culprit": None if ending.culprit is None else list(ending.culprit),
            "words": ending.words,
            "p": round(ending.p, 4),
            "text": ending.text,
            "left": [[list(names), round(p, 4)] for names, p in ending.left],
        },
        "kernel": dict(record.located) if record.located is not None else _kernel(crash.kernel or record.kernel),
        "kernel_stage": record.kernel_stage or None,
        "kernel_runs": [msgspec.structs.asdict(one) for one in record.kernel_runs],
        "unserved": record.unserved or None,
        "cut_off": record.cut_off,
        "restored": dict(record.restored),
        "notes": list(record.notes),
        "reason": record.reason,
        "who": record.who,
    }


def _kernel(name: str) -> dict[str, Any] | None:
    """Before the kernel stage: the name that a log's `coredump:` lines gave."""
    rest = {"place": None, "exception": None}
    return {"name": name, "block": None, "source": "core dump", "weaker": False, **rest} if name else None


def counts(rows: Sequence[TrialRow]) -> dict[str, int]:
    """Trials by outcome. crashed: of the hunted kind; other: crashes that count for nothing."""
    found = dict.fromkeys(("trials", "crashed", "other", "quiet", "lost", "aborted", "running"), 0)
    found["trials"] = len(rows)
    for row in rows:
        found["other" if row.outcome == "crashed" and not row.counts else row.outcome] += 1
    return found


def _outside(record: Record, one: Outside) -> dict[str, Any]:
    return {**msgspec.structs.asdict(one), "minutes": round(one.minutes * record.time_scale, 2)}


def _fact(one: Mapping[str, Any]) -> dict[str, Any]:
    moves = [[[name], factor] for name, factor in (one.get("moves") or {}).items()]
    return {"text": one.get("text"), "source": one.get("source"), "moves": moves}


def _trial(model: Model, row: TrialRow) -> dict[str, Any]:
    on = row.asked_on if row.on is None else row.on
    return {
        "n": row.n,
        "engine": row.engine,
        "generation": row.generation,
        "on": list(on),
        "off": [name for name in model.space.toggles if name not in on],
        "outcome": row.outcome,
        "minutes": round(row.minutes, 2),
        "planned": round(row.planned, 2),
        "started": row.started,
        "ended": row.ended,
        "ready": row.ready,
        "why": row.why,
        "counts": row.counts,
        "fingerprint": row.fingerprint or None,
        "kernel": row.kernel or None,
        "log": row.log or None,
        "note": row.note,
        "requests": row.requests,
        "failed": row.failed,
        "argv": model.argv_of(row),
    }
