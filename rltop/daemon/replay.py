"""What a journal remembers: read at the start of a daemon, and asked for older events while it runs."""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import msgspec

from rltop.daemon import schema
from rltop.daemon.events import Event
from rltop.daemon.journal import unpack
from rltop.daemon.series import SeriesStore

_unpack = msgspec.msgpack.decode


@dataclass(frozen=True, slots=True)
class Restored:
    """Everything a new daemon takes over from an old one."""

    events: list[Event]
    """Newest events, oldest first."""
    head: int
    """Sequence of the newest event, 0 when there is none."""
    state: dict[str, Any]
    operations: list[dict[str, Any]]
    """Newest operations, oldest first, with the columns of the table as keys."""


def restore(connection: sqlite3.Connection, store: SeriesStore, *, events: int, operations: int = 1000) -> Restored:
    """Read the newest `events` events and `operations` operations, the state table, and all series into `store`.

    Raises sqlite3.DatabaseError, zlib.error, ValueError or msgspec.DecodeError on a damaged file.
    """
    newest = connection.execute("SELECT * FROM events ORDER BY eseq DESC LIMIT ?", (events,)).fetchall()
    state = {key: _unpack(value) for key, value in connection.execute("SELECT key, value FROM state ORDER BY t")}
    _restore_series(connection, store)
    return Restored(
        events=[_event(row) for row in reversed(newest)],
        head=newest[0][0] if newest else 0,
        state=state,
        operations=_operations(connection, operations),
    )


def _restore_series(connection: sqlite3.Connection, store: SeriesStore) -> None:
    rows = connection.execute("SELECT key, n, rising, cut, steps, vals FROM series ORDER BY id")
    for key, count, rising, cut, steps, values in rows:
        if cut is not None:
            store.cut(key, cut)
        if count:
            store.extend(key, unpack(steps), unpack(values), rising=bool(rising))
    for key, step, value in connection.execute("SELECT key, step, value FROM points ORDER BY key, n"):
        store.append(key, step, nan if value is None else value)
    store.summarise()


def _operations(connection: sqlite3.Connection, limit: int) -> list[dict[str, Any]]:
    cursor = connection.execute("SELECT * FROM operations ORDER BY t DESC LIMIT ?", (limit,))
    names = [column[0] for column in cursor.description]
    found = [dict(zip(names, row, strict=True)) for row in cursor]
    for row in found:
        for column in ("args", "plan"):
            row[column] = _unpack(row[column]) if row[column] is not None else None
    return found[::-1]


def _event(row: Sequence[Any]) -> Event:
    eseq, t, kind, level, text, source, more = row
    event = {"eseq": eseq, "t": t, "kind": kind, "level": level, "text": text, "source": source}
    if more is not None:
        event.update(_unpack(more))
    return event


def older_events(
    path: Path, *, lo: int, hi: int, kinds: Sequence[str], text: str, limit: int, immutable: bool = False
) -> tuple[list[Event], bool]:
    """The newest `limit` matching events with lo <= eseq <= hi, oldest first, and whether earlier ones matched too.

    Opens its own read-only connection: to be called in a thread. Raises sqlite3.Error.
    """
    where = ["eseq BETWEEN ? AND ?"]
    values: list[Any] = [lo, hi]
    if kinds:
        where.append(f"kind IN ({','.join('?' * len(kinds))})")
        values += kinds
    if text:
        where.append("instr(fold(text), ?)")
        values.append(text.casefold())
    with closing(schema.connect(path, read_only=True, immutable=immutable)) as connection:
        connection.create_function("fold", 1, lambda value: str(value).casefold(), deterministic=True)
        rows = connection.execute(
            f"SELECT * FROM events WHERE {' AND '.join(where)} ORDER BY eseq DESC LIMIT ?", (*values, limit + 1)
        ).fetchall()
    return [_event(row) for row in reversed(rows[:limit])], len(rows) > limit


def points(connection: sqlite3.Connection, key: str) -> tuple[array[float], array[float]]:
    """All points of one series in order of arrival, float64, before and after restarts alike."""
    steps, values = array("d"), array("d")
    for packed_steps, packed_values in connection.execute(
        "SELECT steps, vals FROM series WHERE key = ? AND n > 0 ORDER BY id", (key,)
    ):
        steps.extend(unpack(packed_steps))
        values.extend(unpack(packed_values))
    for step, value in connection.execute("SELECT step, value FROM points WHERE key = ? ORDER BY n", (key,)):
        steps.append(step)
        values.append(nan if value is None else value)
    return steps, values


def kept_records(connection: sqlite3.Connection) -> list[tuple[str, str, float, Any]]:
    """Records kept since the newest start of the run, oldest first: (kind, source, wall clock, payload).

    A start is a `run` record of a trainer or the `attempt` of a daemon, whichever came last.
    """
    rows = connection.execute(
        "SELECT kind, source, t, payload FROM records "
        "WHERE n >= coalesce((SELECT max(n) FROM records WHERE kind IN ('run', 'attempt')), 0) ORDER BY n"
    )
    return [(kind, source, t, _unpack(payload)) for kind, source, t, payload in rows]
