"""From a run directory to a daemon's memory: opens the journal and takes over what it holds.

A journal of a newer rltop stops the start and is not touched. Of a damaged one everything that can be read goes into a
new one, and the damaged file is kept aside (`rltop.daemon.salvage`); a disk that cannot be written leaves the daemon in
memory. All of that is said in events, so that every viewer sees it.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from rltop import runs
from rltop.daemon import replay, schema
from rltop.daemon.events import RING_SIZE
from rltop.daemon.journal import Journal
from rltop.daemon.salvage import copy_log_aside, finish, mend, set_aside
from rltop.daemon.series import SeriesStore
from rltop.daemon.wal import inspect
from rltop.protocol.messages import Record, Source
from rltop.settings import JournalLimit

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
    limits: Mapping[str, JournalLimit] = MappingProxyType({}),
    connect: Callable[[Path], sqlite3.Connection] = schema.connect,
) -> Opened:
    """Open `<run_dir>/journal.sqlite`, made or migrated if need be, and read it.

    Raises RltopError when it was written by a newer rltop or is some other database.
    """
    path = run_dir / "journal.sqlite"
    _refuse_what_is_not_ours(path)
    wal = not runs.on_network_disk(run_dir)
    remarks: list[tuple[str, str]] = []
    if not wal:
        remarks.append(("warn", f"{run_dir} is on a network disk: the journal does without its write-ahead log"))

    def mended(error: BaseException) -> str:
        aside, found = mend(path, wal=wal, connect=connect)
        return f"the journal was damaged ({error}); {found}; the damaged file is kept as {aside.name}"

    journal = Journal(
        path,
        wal=wal,
        on_problem=on_problem,
        on_written=on_written,
        on_working=on_working,
        mend=mended,
        limits=limits,
        connect=connect,
    )
    series = SeriesStore()
    restored = replay.Restored([], 0, {}, [])
    records: list[Record] = []
    try:
        remarks += _look_before(path)
        try:
            restored, records = _read(path, series, wal, connect)
        except sqlite3.OperationalError:
            raise
        except _DAMAGE as error:
            remarks.append(("error", mended(error)))
            series = SeriesStore()
            restored, records = _read(path, series, wal, connect)
    except (sqlite3.Error, OSError) as error:
        remarks.append(("error", f"cannot open {path}: {error}; the daemon goes on in memory and tries again"))
    return Opened(journal, restored, series, records, remarks)


def _refuse_what_is_not_ours(path: Path) -> None:
    """Raise RltopError for a journal of a newer rltop or some other database, before anything is written to it."""
    try:
        if path.stat().st_size:
            with closing(schema.connect(path, read_only=True)) as connection:
                schema.readable_version(connection, path)
    except (sqlite3.Error, OSError):
        pass  # there is none, or it is damaged: opening it in earnest says so


def _look_before(path: Path) -> list[tuple[str, str]]:
    """What SQLite would pass over without a word: an emptied file, a broken write-ahead log. Copies are kept."""
    finish(path)
    log = path.with_name(path.name + "-wal")
    if path.exists() and not path.stat().st_size:
        kept = f"; its log is kept as {set_aside(path).name}-wal" if log.exists() else ""
        return [("error", f"the journal was empty (0 bytes): what it held is gone{kept}; a new one begins")]
    torn = inspect(log)
    if torn is None:
        return []
    kept = copy_log_aside(path).name
    text = (
        f"the journal's log was torn: {torn.commits} transactions of it were read, the {torn.bytes} bytes behind them"
    )
    return [("error", f"{text} could not be; they are kept in {kept}")]


def _read(
    path: Path, series: SeriesStore, wal: bool, connect: Callable[[Path], sqlite3.Connection]
) -> tuple[replay.Restored, list[Record]]:
    _check_length(path)
    with closing(connect(path)) as connection:
        schema.prepare(connection, path, wal=wal)
        if (said := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(" ".join(said.split()))
        restored = replay.restore(connection, series, events=RING_SIZE)
        return restored, [_record(*row) for row in replay.kept_records(connection)]


def _check_length(path: Path) -> None:
    """SQLite reads a last page that is cut short as if it ended in zeros."""
    try:
        with path.open("rb") as file:
            header = file.read(18)
        size = path.stat().st_size
    except OSError:
        return
    page = int.from_bytes(header[16:18], "big")
    if len(header) == 18 and size % (65536 if page == 1 else max(page, 512)):
        raise sqlite3.DatabaseError("the file ends in the middle of a page")


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
