"""Where a bisection is read from: the daemon's cell while a daemon is there, else the record that it left on disk.

Failure policy: a record that cannot be read is said by name, and the others are looked at; over ssh only the newest
bisection can be had, for the records lie on the other machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rltop.bisect.story import Story, story_of
from rltop.cli.connect import Place, ask, here
from rltop.cli.output import note
from rltop.client import Client
from rltop.errors import RltopError

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


def find(place: Place, bisection: str = "") -> Found:
    """The bisection with this id; "": the one that runs or ran last. Raises RltopError: there is none."""
    run = None if place.remote else here(place.target)
    if run is None or run.alive:
        name, state, now = ask(place, _look, want=WANT)
        cell = state.get("bisect") or {}
        story = story_of(cell)
        if story is not None and bisection in ("", story.id):
            record = _record(run.path, story.id) if run is not None else None
            return Found(name, cell, story, now, record, hosts_of(state))
        if run is None:
            has = f"the daemon has bisection {story.id}" if story is not None else "the daemon shows none"
            raise _none(name, bisection, has)
    record = _record(run.path, bisection)
    if record is None:
        raise _none(run.name, bisection, f"there is no record of it in {run.path / 'bisect'}")
    cell = cell_of(record)
    story = story_of(cell)
    assert story is not None, "a record is a bisection"
    return Found(run.name, cell, story, time.time(), record, (run.host,) if run.host else ())


async def _look(client: Client) -> tuple[str, Mapping[str, Any], float]:
    return client.mirror.run, dict(client.mirror.state), client.mirror.server_time


def hosts_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of hosts in the state of a run."""
    cells = [value for key, value in state.items() if key == "daemon" or key.startswith("engine/")]
    return tuple(sorted({str(cell["host"]) for cell in cells if isinstance(cell, Mapping) and cell.get("host")}))


def _none(run: str, bisection: str, why: str) -> RltopError:
    what = f"bisection {bisection!r}" if bisection else "no bisection"
    told = f"run {run!r} has {what if not bisection else 'no ' + what}"
    return RltopError(told, where="bisect", why=why, do="rltop bisect start begins one", exit_code=1)


def _record(run_dir: Any, bisection: str) -> Record | None:
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
