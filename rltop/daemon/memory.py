"""From a run directory to a daemon's memory: opens the journal and takes over what it holds.

A journal of a newer rltop stops the start. A damaged one is moved aside (never deleted) and a new one begun; a disk
that cannot be written leaves the daemon in memory. Both are said in events, so that every viewer sees them.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rltop import runs
from rltop.daemon import replay, schema
from rltop.daemon.events import RING_SIZE
from rltop.daemon.journal import Journal
from rltop.daemon.series import SeriesStore
from rltop.protocol.messages import Record, Source

_DAMAGE = (sqlite3.DatabaseError, zlib.error, ValueError, EOFError, msgspec.DecodeError)


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened journal (its thread not yet started) and what it remembered."""

    journal: Journal
    restored: replay.Restored
    series: SeriesStore
    records: list[Record]
    remarks: list[tuple[str, str]]
    """(level, sentence) about the opening itself."""


def open_journal(
    run_dir: Path,
    *,
    on_problem: Callable[[str, str], None],
    on_written: Callable[[int], None] = lambda eseq: None,
    on_working: Callable[[bool], None] = lambda works: None,
    connect: Callable[[Path], sqlite3.Connection] = schema.connect,
) -> Opened:
    """Open `<run_dir>/journal.sqlite`, made or migrated if need be, and read it.

    Raises RltopError when it was written by a newer rltop or is some other database.
    """
    path = run_dir / "journal.sqlite"
    wal = not runs.on_network_disk(run_dir)
    remarks: list[tuple[str, str]] = []
    if not wal:
        remarks.append(("warn", f"{run_dir} is on a network disk: the journal does without its write-ahead log"))
    journal = Journal(
        path, wal=wal, on_problem=on_problem, on_written=on_written, on_working=on_working, connect=connect
    )
    series = SeriesStore()
    restored = replay.Restored([], 0, {}, [])
    records: list[Record] = []
    try:
        restored, records = _read(path, series, wal, connect)
    except sqlite3.OperationalError as error:
        remarks.append(("error", f"cannot open {path}: {error}; the daemon goes on in memory and tries again"))
    except _DAMAGE as error:
        aside = path.with_name(f"journal.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.sqlite")
        for suffix in ("", "-wal", "-shm"):
            source = path.with_name(path.name + suffix)
            if source.exists():
                source.rename(aside.with_name(aside.name + suffix))
        remarks.append(("error", f"the journal was damaged ({error}); it was moved to {aside.name}, a new one begins"))
        series = SeriesStore()
    return Opened(journal, restored, series, records, remarks)


def _read(
    path: Path, series: SeriesStore, wal: bool, connect: Callable[[Path], sqlite3.Connection]
) -> tuple[replay.Restored, list[Record]]:
    with closing(connect(path)) as connection:
        schema.prepare(connection, path, wal=wal)
        restored = replay.restore(connection, series, events=RING_SIZE)
        return restored, [_record(*row) for row in replay.kept_records(connection)]


def _record(kind: str, source: str, t: float, payload: dict[str, Any]) -> Record:
    role, _, rank = source.rpartition("/")
    return Record(
        run="",
        source=Source(role=role, rank=int(rank) if rank.isdigit() else 0),
        seq=0,
        mono=0.0,
        wall=t,
        kind=kind,
        payload=payload,
    )
