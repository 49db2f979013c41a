"""A damaged journal: kept aside whole, and what can still be read of it brought into a new one.

Nothing is ever deleted. Each table is read from its beginning until the first page that is broken, then from its end
until the same place; a row whose packed columns cannot be read is left out and counted.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rltop.daemon import schema
from rltop.daemon.journal import unpack

SUFFIXES = ("", "-wal", "-shm")
_KEYS = {
    "events": ("eseq",),
    "state": ("key",),
    "verdicts": ("n",),
    "operations": ("op",),
    "series": ("id",),
    "points": ("key", "n"),
    "records": ("n",),
    "clients": ("n",),
    "retention": ("kind",),
}
_PACKED = frozenset({"more", "value", "verdict", "args", "plan", "payload"})
_ZLIB = frozenset({"steps", "vals", "times"})


@dataclass(slots=True)
class Salvaged:
    """What came of it."""

    rows: int = 0
    events: int = 0
    left_out: int = 0
    """Rows that were there but made no sense."""
    broken: list[str] = field(default_factory=list)
    """Tables of which some or all is gone."""

    def __str__(self) -> str:
        if not self.rows:
            return "nothing of it could be read"
        lost = f"; parts of {', '.join(self.broken)} are gone" if self.broken else ""
        odd = f"; {self.left_out} rows made no sense" if self.left_out else ""
        return f"{self.rows} rows of it were read ({self.events} events){lost}{odd}"


def set_aside(path: Path, *, now: Callable[[], float] = time.time) -> Path:
    """Move a journal with its log to `journal.damaged-<time>.sqlite`; returns that path. Raises OSError."""
    aside = _free(path, now)
    for suffix in SUFFIXES:
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(aside.with_name(aside.name + suffix))
    return aside


def copy_log_aside(path: Path, *, now: Callable[[], float] = time.time) -> Path:
    """Copy a torn write-ahead log to `journal.damaged-<time>.sqlite-wal`; returns that path. Raises OSError."""
    aside = _free(path, now)
    target = aside.with_name(aside.name + "-wal")
    shutil.copyfile(path.with_name(path.name + "-wal"), target)
    return target


def _free(path: Path, now: Callable[[], float]) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now()))
    for number in itertools.count(1):
        more = "" if number == 1 else f"-{number}"
        aside = path.with_name(f"{path.stem}.damaged-{stamp}{more}{path.suffix}")
        if not any(aside.with_name(aside.name + suffix).exists() for suffix in SUFFIXES):
            return aside
    raise AssertionError("numbers do not end")


def mend(
    path: Path,
    *,
    wal: bool,
    connect: Callable[[Path], sqlite3.Connection] = schema.connect,
    now: Callable[[], float] = time.time,
) -> tuple[Path, Salvaged]:
    """Put a new journal with everything readable in the place of a damaged one; returns where that one is kept.

    Killed at any moment, the next start finds either the damaged journal or the finished new one (`finish`).
    Raises sqlite3.Error or OSError when the disk does not take the new one: then the damaged one is where it was.
    """
    fresh = _fresh(path)
    _remove(fresh)
    with closing(connect(fresh)) as connection:
        schema.prepare(connection, fresh, wal=False)  # one file, so that it moves into place at once
        found = salvage(path, connection)
        if wal:
            connection.execute("PRAGMA journal_mode=WAL")
    aside = set_aside(path, now=now)
    fresh.rename(path)
    return aside, found


def finish(path: Path) -> None:
    """Complete what a daemon that was killed in the middle of `mend` left. Raises OSError."""
    fresh = _fresh(path)
    if not fresh.exists():
        return
    if path.exists():
        _remove(fresh)
    else:
        fresh.rename(path)


def _fresh(path: Path) -> Path:
    return path.with_name(f"{path.stem}.mending{path.suffix}")


def _remove(path: Path) -> None:
    for suffix in (*SUFFIXES, "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def salvage(damaged: Path, into: sqlite3.Connection) -> Salvaged:
    """Copy every readable row of `damaged`, which is only read, into a new, prepared journal, in one transaction.

    Raises sqlite3.Error when the new one cannot be written.
    """
    found = Salvaged()
    try:
        source = schema.connect(damaged, read_only=True)
    except sqlite3.Error:
        found.broken = list(_KEYS)
        return found
    with closing(source):
        # Without this SQLite refuses to read anything of a file that is shorter than it should be. It is only read.
        source.execute("PRAGMA writable_schema = ON")
        source.text_factory = lambda raw: raw.decode(errors="replace")
        into.execute("BEGIN IMMEDIATE")
        try:
            for table in _KEYS:
                _copy(source, into, table, found)
            into.execute("COMMIT")
        except BaseException:
            if into.in_transaction:
                into.execute("ROLLBACK")
            raise
    return found


def _copy(source: sqlite3.Connection, into: sqlite3.Connection, table: str, found: Salvaged) -> None:
    ours = [row[1] for row in into.execute(f"PRAGMA table_info({table})")]
    try:
        columns = [row[1] for row in source.execute(f"PRAGMA table_info({table})") if row[1] in ours]
    except sqlite3.Error:
        columns = []
    if not columns:
        found.broken.append(table)
        return
    names = ", ".join(columns)
    insert = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({', '.join('?' * len(columns))})"
    whole = True
    for direction in ("ASC", "DESC"):
        order = ", ".join(f"{key} {direction}" for key in _KEYS[table])
        with closing(_rows(source, f"SELECT {names} FROM {table} ORDER BY {order}")) as rows:
            odd, whole = _pour(rows, into, insert, columns)
        if direction == "ASC":
            found.left_out += odd
        if whole:
            break
    if not whole:
        found.broken.append(table)
    if table != "retention":  # it has rows from the beginning
        (count,) = into.execute(f"SELECT count(*) FROM {table}").fetchone()
        found.rows += count
        found.events += count if table == "events" else 0


class _Broken(Exception):
    """The table cannot be read any further."""


def _rows(source: sqlite3.Connection, select: str) -> Generator[Sequence[Any], None, None]:
    try:
        yield from source.execute(select)
    except (sqlite3.Error, OverflowError, MemoryError) as error:
        raise _Broken from error


def _pour(
    rows: Iterator[Sequence[Any]], into: sqlite3.Connection, insert: str, columns: Sequence[str]
) -> tuple[int, bool]:
    """Insert rows until the end or a broken page; how many made no sense, and whether it was the end."""
    odd = 0
    try:
        for row in rows:
            try:
                if not _sound(columns, row):
                    raise ValueError
                into.execute(insert, row)
            except (ValueError, OverflowError, sqlite3.IntegrityError):
                odd += 1
    except _Broken:
        return odd, False
    return odd, True


def _sound(columns: Sequence[str], row: Sequence[Any]) -> bool:
    try:
        for column, value in zip(columns, row, strict=True):
            if column in _PACKED and value is not None:
                msgspec.msgpack.decode(value)
            elif column in _ZLIB and value:
                unpack(value)
    except (zlib.error, ValueError, TypeError, msgspec.DecodeError):
        return False
    return True
