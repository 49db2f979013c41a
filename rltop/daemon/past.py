"""The journal of a run whose daemon is gone: opened without changing it, and what it says of the run and its end.

Failure policy: nothing in the run directory is written. A write-ahead log that a killed daemon left is read where it
lies when SQLite can (its index beside it must be writable), else in a private copy; so is a journal of an older schema,
which is migrated in the copy. What cannot be read is one RltopError that names the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rltop.checks.verdict import Evidence, Verdict
from rltop.daemon import schema
from rltop.daemon.engines_left import left_engines
from rltop.daemon.trainer_job import adopt_trainer, how_it_ended, read_record
from rltop.errors import RltopError
from rltop.runs.leftovers import owned_dir
from rltop.runs.lock import last_sign, lock_holder

DAMAGE = (sqlite3.DatabaseError, zlib.error, ValueError, EOFError, msgspec.DecodeError)
"""What reading a broken journal raises."""
_OVER = frozenset({"done", "failed", "interrupted", "lost"})


@dataclass(frozen=True, slots=True)
class Past:
    """An opened journal of a dead run."""

    connection: sqlite3.Connection
    path: Path
    """The file that is read: the run's own, or a copy that lives as long as this."""
    immutable: bool
    """Nothing writes to it, so SQLite needs no lock and no index file."""


@contextlib.contextmanager
def open_past(
    run_dir: Path, *, temp: Path | None = None, living: bool = False, migrated: bool = True
) -> Iterator[Past]:
    """The journal of a dead run.

    temp: where a copy may lie, default the system's temporary directory. living: a daemon writes to it at this moment.
    migrated: its tables must be the newest ones; `state` and `events` are the same since the first.

    Raises RltopError: there is none, it is of a newer rltop, it is damaged.
    """
    path = run_dir / "journal.sqlite"
    if not path.is_file():
        raise RltopError(
            f"run {run_dir.name!r} left no journal",
            where=str(run_dir),
            why="its daemon died before it wrote one, or the file was removed",
            exit_code=1,
        )
    with contextlib.ExitStack() as stack:
        try:
            if living:
                past = Past(schema.connect(path, read_only=True), path, False)
                stack.callback(past.connection.close)
                schema.readable_version(past.connection, path)
                yield past
            else:
                yield _open(path, temp, stack, migrated=migrated)
        except DAMAGE as error:
            raise RltopError(
                "cannot read the journal",
                where=str(path),
                why=f"{error}",
                do=f"rltop check {run_dir} reads the logs beside it",
                exit_code=1,
            ) from error


def _open(path: Path, temp: Path | None, stack: contextlib.ExitStack, *, migrated: bool) -> Past:
    unfinished = any(_size(path.with_name(path.name + suffix)) for suffix in ("-wal", "-journal"))
    if not unfinished:
        past = Past(schema.connect(path, read_only=True, immutable=True), path, True)
        stack.callback(past.connection.close)
        if _is_newest(past, path) or not migrated:
            return past
    elif _size(path.with_name(path.name + "-wal")) and os.access(path.parent, os.W_OK):
        past = Past(schema.connect(path, read_only=True), path, False)
        stack.callback(past.connection.close)
        if _is_newest(past, path) or not migrated:
            return past
    copy = stack.enter_context(owned_dir("rltop-past-", temp)) / path.name
    for suffix in ("", "-wal", "-journal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            shutil.copyfile(source, copy.with_name(copy.name + suffix))
    connection = schema.connect(copy)
    stack.callback(connection.close)
    schema.prepare(connection, copy, wal=False)
    return Past(connection, copy, False)


def _is_newest(past: Past, path: Path) -> bool:
    return schema.readable_version(past.connection, path, schema.SCHEMA_VERSION) == schema.SCHEMA_VERSION


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class Judged:
    """What the daemon said of the run's newest attempt."""

    verdicts: tuple[Verdict, ...]
    """The newest of every check, as the dashboard showed it; each names the journal in its evidence."""
    injected_faults: tuple[str, ...]
    """Faults that were planted on purpose."""


def judged(run_dir: Path) -> Judged:
    """The daemon's verdicts, whether it lives or not. One that cannot be read is left out.

    Raises RltopError: there is no journal, it is of a newer rltop, it is damaged.
    """
    found: list[Verdict] = []
    with open_past(run_dir, living=lock_holder(run_dir) is not None, migrated=False) as past:
        rows = past.connection.execute("SELECT value FROM state WHERE key GLOB 'check/*' ORDER BY key").fetchall()
        run = state_of(past.connection, ("run",)).get("run") or {}
        for (packed,) in rows:
            with contextlib.suppress(msgspec.ValidationError):
                found.append(msgspec.convert(msgspec.msgpack.decode(packed), Verdict))
    here = Evidence("journal.sqlite", None, "the daemon's verdict, from what the run reported to it")
    faults = run.get("injected_faults")
    return Judged(
        tuple(msgspec.structs.replace(verdict, evidence=(*verdict.evidence, here)) for verdict in found),
        tuple(map(str, faults)) if isinstance(faults, list) else (),
    )


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended, as far as its journal and the processes of this machine tell."""

    state: str
    """done, failed, interrupted or lost; `orphaned`: the daemon is gone, its trainer or engines still run."""
    text: str
    ended: float | None
    """Wall clock; None when it has not ended."""


def state_of(connection: sqlite3.Connection, keys: Sequence[str]) -> dict[str, Any]:
    """Values of some state keys; what is not there is left out."""
    marks = ",".join("?" * len(keys))
    rows = connection.execute(f"SELECT key, value FROM state WHERE key IN ({marks})", tuple(keys))
    return {key: msgspec.msgpack.decode(value) for key, value in rows}


def end_of(connection: sqlite3.Connection, run_dir: Path) -> End:
    """How the run ended: what its journal says, and what its trainer's keeper wrote when no daemon was there."""
    state = state_of(connection, ("run", "trainer"))
    last = connection.execute("SELECT max(t) FROM (SELECT max(t) AS t FROM events UNION SELECT max(t) FROM state)")
    row = connection.execute(
        "SELECT text FROM events WHERE kind = 'run' AND source = 'daemon' ORDER BY eseq DESC LIMIT 1"
    ).fetchone()
    said = row[0] if row is not None and row[0].endswith("and stops") else ""
    newest: float | None = last.fetchone()[0]
    if not said and (seen := last_sign(run_dir)) is not None:  # it may have lived on without a word
        newest = max(newest or 0.0, seen)
    end = end_from(state.get("run") or {}, state.get("trainer") or {}, run_dir, last=newest, daemon_said=said)
    if end.state != "orphaned" and (left := left_engines(run_dir)):
        text = f"its daemon is gone, engine {', '.join(left)} still runs; the run was {end.state}"
        return End("orphaned", f"{text}: {end.text}" if end.text else text, None)
    return end


def end_from(
    run: Mapping[str, Any], trainer: Mapping[str, Any], run_dir: Path, *, last: float | None, daemon_said: str = ""
) -> End:
    """As `end_of`, from the state keys `run` and `trainer`.

    last: wall clock of the newest thing in the journal. daemon_said: the daemon's last words, if it had any.
    """
    said = str(run.get("state") or "waiting")
    if said in _OVER:
        return End(said, str(run.get("text") or ""), run.get("ended"))
    record = read_record(run_dir)
    if record is not None and adopt_trainer(record, run_dir) is not None:
        return End("orphaned", f"its daemon is gone, its trainer (process {record.pid}) still runs", None)
    if record is not None and record.code is not None and record.marker == trainer.get("marker"):
        end = how_it_ended(record.code, asked=False, log=run_dir / "trainer.log")
        words = "the trainer ended while no daemon was there"
        return End(end.state, f"{words}: {end.text}" if end.text else words, record.ended or None)
    if daemon_said and record is None and (said == "waiting" or _watched(run_dir)):
        # Nobody's end was missed: there was no trainer, or rltop only looked on.
        what = "it had no trainer" if said == "waiting" else "rltop only watched it, and it may go on"
        return End("done", f"{daemon_said}; {what}", last)
    how = daemon_said or "the daemon was killed or its machine went down"
    return End("lost", f"{how}; the run was {said} then, and nobody saw its end", last)


def _watched(run_dir: Path) -> bool:
    """Others own the run: `rltop watch` looked on."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool((json.loads((run_dir / "run.json").read_bytes()).get("config") or {}).get("watch"))
    return False
