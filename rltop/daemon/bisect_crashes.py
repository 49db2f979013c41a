"""Crashes that a bisection hunts, or learns from: which of a run's crashes, and the like ones before and since.

Nothing happens here. Whatever speaks against hunting one is a `Refused` that says why and what to do instead.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltop.bisect.facts import CrashFacts, why_not
from rltop.daemon.bisect_record import Crash, Outside, Record
from rltop.daemon.state import StateTable
from rltop.engines.toggle_table import CORE_DUMP_FILE
from rltop.engines.trials import Trials

MOST_EARLIER = 32
"""Crashes that are looked at for how long it took."""
GPU_FAULTS = frozenset({"ima", "misaligned", "launch-failure", "illegal-instruction"})
"""One wrong address shows as any of them."""
NO_TOGGLE = frozenset(
    {"usage", "import", "checkpoint", "port", "host-oom", "terminated", "stopped", "silent", "released"}
)
"""Ends that no toggle causes."""
TRAINER_CHECK = "train.ima"


class Refused(Exception):
    """It cannot begin."""

    def __init__(self, why: str, do: str = "") -> None:
        super().__init__(why)
        self.why, self.do = why, do


def same_kind(hunted: str, kind: str) -> bool:
    """A crash of this class is the hunted one, as far as classes tell."""
    return kind == hunted or (kind in GPU_FAULTS and hunted in GPU_FAULTS)


def hunted(name: str, trials: Trials, table: StateTable, run_dir: Path) -> tuple[Crash, Mapping[str, Any]]:
    """The newest crash that a toggle may cause, of this engine or of all, and its crash.json. Raises Refused."""
    mine = trials.ids()
    if name and name not in mine:
        if f"engine/{name}" in table:
            raise Refused(
                f"engine {name}: rltop did not start it, so it can not restart it",
                "start it by rltop ([engines]), or give rltop check its logs",
            )
        raise Refused(f"there is no engine {name[:80]!r}", f"there are {', '.join(mine) or 'none'}")
    found: list[tuple[float, str, Mapping[str, Any]]] = []
    for engine in [name] if name else mine:
        cell = table.get(f"engine/{engine}") or {}
        found += [(float(one.get("t") or 0.0), engine, one) for one in cell.get("crashes") or ()]
    fit = [row for row in found if _class(row[2]) in GPU_FAULTS] or [
        row for row in found if name and _class(row[2]) not in NO_TOGGLE
    ]
    if not fit:
        raise Refused(*_nothing(name, found, table))
    _, engine, one = max(fit, key=lambda row: row[0])
    generation = int(one.get("generation") or 0)
    story = story_of(run_dir, engine, generation)
    told = story.get("crash") if isinstance(story.get("crash"), dict) else {}
    assert isinstance(told, dict)
    parts = str(one["fingerprint"]).split("/")
    phase = str(told.get("phase") or (parts[1] if len(parts) > 1 else "serve"))
    return (
        Crash(
            engine=engine,
            generation=generation,
            fingerprint=str(one["fingerprint"]),
            kind=_class(one),
            phase=phase,
            cause=str(told.get("cause") or one.get("cause") or ""),
            kernel=str(told.get("kernel") or ""),
            rank=told.get("rank") if isinstance(told.get("rank"), int) else None,
            minutes=_exposure(story),
            weight_version=str(story.get("weight_version") or ""),
            injected=str(told.get("injected") or ""),
            at_start=phase in ("launch", "load", "capture", "warm-up"),
        ),
        story,
    )


def earlier(
    crash: Crash, story: Mapping[str, Any], trials: Trials, table: StateTable, run_dir: Path
) -> tuple[tuple[str, float], ...]:
    """How often it crashes is what a bisection knows least: every crash of the kind with the same arguments tells."""
    known = [(engine, _generation(one)) for engine, one in _alike(crash, trials, table)]
    found = []
    for engine, generation in known[-MOST_EARLIER:]:
        other = story_of(run_dir, engine, generation)
        minutes, alike = _exposure(other), _launched(other) == _launched(story)
        if (engine, generation) != (crash.engine, crash.generation) and alike and minutes is not None:
            found.append((engine, minutes))
    return tuple(found)


class Since:
    """Crashes of that kind since a bisection began, of engines that serve the run meanwhile."""

    def __init__(self, record: Record, trials: Trials, table: StateTable, run_dir: Path) -> None:
        self._record, self._trials, self._table, self._run_dir = record, trials, table, run_dir
        self._seen = {(one.engine, one.generation) for one in record.outside}
        self._launched = _launched(story_of(run_dir, record.crash.engine, record.crash.generation))

    def new(self) -> list[Outside]:
        """Not told before: with the arguments of the hunted crash, and known exposure."""
        crash, found = self._record.crash, []
        for engine, one in _alike(crash, self._trials, self._table):
            key, t = (engine, _generation(one)), float(one.get("t") or 0.0)
            if key in self._seen or key == (crash.engine, crash.generation) or t < self._record.started:
                continue
            story = story_of(self._run_dir, *key)
            if not story:
                continue  # its evidence is still being written
            self._seen.add(key)
            minutes = _exposure(story)
            if minutes is None or _launched(story) != self._launched:
                continue
            fingerprint = str(one.get("fingerprint"))
            found.append(Outside(engine=engine, generation=key[1], fingerprint=fingerprint, minutes=minutes, t=t))
        return found


def _alike(crash: Crash, trials: Trials, table: StateTable) -> list[tuple[str, Mapping[str, Any]]]:
    """Every known crash of the kind, with its engine."""
    return [
        (engine, one)
        for engine in trials.ids()
        for one in (table.get(f"engine/{engine}") or {}).get("crashes") or ()
        if same_kind(crash.kind, _class(one))
    ]


def _generation(one: Mapping[str, Any]) -> int:
    return int(one.get("generation") or 0)


def _exposure(story: Mapping[str, Any]) -> float | None:
    """Minutes in which it had requests; of an older rltop's crash.json, which does not know that, minutes in which it
    was ready: too many, which asks for more quiet."""
    found = story.get("busy_s", story.get("served_s"))
    return float(found) / 60 if isinstance(found, int | float) else None


def _launched(story: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and environment, without the folder that each generation has of its own."""
    env = dict(story.get("env") or {})
    env.pop(CORE_DUMP_FILE, None)
    return list(story.get("args") or ()), env


def _nothing(name: str, found: Sequence[Any], table: StateTable) -> tuple[str, str]:
    """Why there is no crash to hunt."""
    if fires(table, TRAINER_CHECK):
        return why_not(CrashFacts(owner="trainer")), ""
    if found:
        told = ", ".join(sorted({str(one["fingerprint"]) for _, _, one in found}))
        if name:
            return f"engine {name} crashed of {told}: no toggle causes that", "rltop check reads its log for the cause"
        return f"no engine crashed of an illegal memory access; there were {told}", "name the engine to hunt its crash"
    if name:
        return (
            f"engine {name} has not crashed, as far as is known",
            "leave --engine out to hunt the newest crash of all",
        )
    return "no engine has crashed, as far as is known", "it needs a crash to hunt; rltop drill ima rehearses one"


def _class(one: Mapping[str, Any]) -> str:
    return str(one.get("fingerprint") or "").split("/", 1)[0]


def story_of(run_dir: Path, engine: str, generation: int) -> dict[str, Any]:
    """Its crash.json; empty where there is none (in a Ray cluster it is on the engine's machine)."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run_dir / "engines" / engine / str(generation) / "crash.json").read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def fires(table: StateTable, check: str) -> bool:
    """The check warns or fails now."""
    return (table.get(f"check/{check}") or {}).get("status") in ("fail", "warn")
