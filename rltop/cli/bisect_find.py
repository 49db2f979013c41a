"""Where a bisection is read from: the daemon's cell while a daemon is there, else the record that it left on disk.

Without a name it is the newest living run's; where none is alive, the one of the newest run that has any. Which run is
meant is said.

Failure policy: a record that cannot be read is said by name, and the others are looked at; over ssh only the newest
bisection can be had, for the records lie on the other machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltop.bisect.story import Story
from rltop.bisect.story_of import story_of
from rltop.cli.connect import Place, ask, here, what_goes_on
from rltop.cli.output import note
from rltop.client import Client
from rltop.errors import RltopError
from rltop.runs import RunInfo, list_runs

if TYPE_CHECKING:
    from rltop.daemon.bisect_record import Record

WANT = ("run", "daemon", "archive", "fleet", "bisect", "op/*", "engine/*")


@dataclass(frozen=True, slots=True)
class Found:
    """One bisection."""

    run: str
    cell: Mapping[str, Any]
    story: Story
    now: float
    """Wall clock of whoever said it."""
    record: Record | None = None
    """On this machine's disk."""
    hosts: tuple[str, ...] = ()
    """Hosts of the run, as far as they are known."""
    path: Path | None = None
    """The run directory, on this machine."""
    gone: str = ""
    """Nobody goes on with it, and why; "": it is over, or its daemon is there."""
    chosen: str = ""
    """Why this run; "": it was named."""


def find(place: Place, bisection: str = "") -> Found:
    """The bisection with this id; "": the one that runs or ran last. Raises RltopError: there is none."""
    run = None if place.remote else _run(place.target)
    if run is None or run.alive:
        name, state, now = ask(place, _look, want=WANT)
        cell = state.get("bisect") or {}
        story = story_of(cell)
        if story is not None and bisection in ("", story.id):
            record = _record(run.path, story.id) if run is not None else None
            path = run.path if run is not None else None
            chosen = "" if place.target is not None or place.remote else "the newest living run"
            return Found(name, cell, story, now, record, hosts_of(state), path, chosen=chosen)
        if run is None:
            raise _none(name, bisection, [story.id] if story is not None else [], remote=True)
    record = _record(run.path, bisection)
    if record is None:
        raise _none(run.name, bisection, ids(run.path), named=place.target is not None)
    cell = cell_of(record)
    story = story_of(cell)
    assert story is not None, "a record is a bisection"
    gone = chosen = ""
    if not run.alive and record.ended is None:
        left = what_goes_on(run)
        gone = f"its daemon is gone{', ' + left if left else ''}; rltop up CONFIG --name {run.name} goes on with it"
    if place.target is None:
        chosen = "the newest living run" if run.alive else "no run is alive; the newest that has one"
    hosts = (run.host,) if run.host else ()
    return Found(run.name, cell, story, time.time(), record, hosts, run.path, gone, chosen)


def _run(name: str | None) -> RunInfo:
    """As everywhere; where no run is alive, the newest that has a bisection. Raises RltopError: neither is there."""
    if name is not None or any(run.alive for run in list_runs()):
        return here(name)
    return next(iter(_with_bisections()), None) or here(None)


def _with_bisections() -> list[RunInfo]:
    """Runs on this machine that left the record of one, the newest first."""
    return [run for run in list_runs() if ids(run.path)]


def ids(run_dir: Path) -> list[str]:
    """Of the bisections of a run, by their records on disk; oldest first."""
    found = [path.parent.name for path in run_dir.glob("bisect/*/record.json") if path.parent.name.isdecimal()]
    return sorted(found, key=int)


async def _look(client: Client) -> tuple[str, Mapping[str, Any], float]:
    return client.mirror.run, dict(client.mirror.state), client.mirror.server_time


def hosts_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of hosts in the state of a run."""
    cells = [value for key, value in state.items() if key == "daemon" or key.startswith("engine/")]
    return tuple(sorted({str(cell["host"]) for cell in cells if isinstance(cell, Mapping) and cell.get("host")}))


def _none(run: str, bisection: str, known: Sequence[str], *, remote: bool = False, named: bool = True) -> RltopError:
    """There is none: which there are instead."""
    if bisection:
        what = f"run {run!r} has no bisection {bisection!r}"
        why = f"it has {', '.join(known)}" if known else "it has none"
        why += "; over ssh only the newest can be read" if remote else ""
        do = f"--id {known[-1]}, or none for the newest" if known else "rltop bisect start begins one"
        return RltopError(what, where="bisect --id", why=why, do=do, exit_code=1)
    do = "rltop bisect start begins one, after a crash; rltop drill ima rehearses one"
    others = [] if named or remote else [one for one in _with_bisections() if one.name != run]
    if others:
        do = f"--run {others[0].name} is the newest run that has one; {do}"
    why = f"their records can not be read: {', '.join(known)}" if known else "none was begun in it"
    return RltopError(f"run {run!r} has no bisection", where="bisect", why=why, do=do, exit_code=1)


def _record(run_dir: Path, bisection: str) -> Record | None:
    """From disk, the newest without a name; damaged ones are said."""
    from rltop.daemon.bisect_record import Records

    records, problems = Records(run_dir).read_all()
    for problem in problems:
        note(f"rltop: {problem}")
    chosen = [record for record in records if bisection in ("", record.id)]
    return chosen[-1] if chosen else None


def cell_of(record: Record) -> dict[str, Any]:
    """What a daemon would show of a record; a bisection that no daemon goes on with is shown as it was left."""
    from rltop.daemon.bisect_model import Model, cell, outlook
    from rltop.evidence.priors import load
    from rltop.settings import priors_path

    try:
        tables = load(priors_path())
    except RltopError as error:
        note(f"rltop: {error}")
        tables = load()
    model = Model(record, tables)
    return cell(model, outlook(model, model.evidence(), [], ()))
