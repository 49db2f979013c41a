"""The journal on disk: one writer thread takes what the daemon tells it, in batches; nothing here blocks the loop.

Failure policy: a disk that is full, read-only or gone is said loudly once, the daemon goes on in memory, and the same
batch is tried again and again: what fits into the backlog is not lost when the disk comes back, what does not is
counted. A single row that cannot be written (a value that has no encoding) is counted and left out; it never holds up
the rest. What was committed survives the death of the process at any moment (write-ahead log).
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from rltop.daemon import schema
from rltop.daemon.events import Event
from rltop.daemon.retention import Retention, set_limits
from rltop.errors import RltopError
from rltop.settings import JournalLimit

BATCH_S = 0.05
"""What a daemon that is killed may lose of state and points. A commit costs well under a millisecond: WAL syncs only at
checkpoints."""
EVENT_S = 0.01
"""An event waits for no more company than this: viewers are shown it when it is written, not before."""
BATCH_ROWS = 2000
FIRST_RETRY_S = 1.0
RETRY_S = 5.0
"""A disk that refused is tried again after one second, then two, four, and every five."""
BACKLOG_ROWS = 100_000
"""Of what the disk does not take so much is kept in memory, and as much again while one write hangs."""
CHUNK_POINTS = 512
"""Points of one series in a packed chunk: 4 KiB a column, and at most so many single rows per series."""

_pack = msgspec.msgpack.Encoder(enc_hook=str).encode
_OPERATION = (
    "op",
    "cmd_id",
    "t",
    "name",
    "target",
    "args",
    "who",
    "role",
    "reason",
    "state",
    "stage",
    "percent",
    "text",
)
_OPERATION_ALL = (*_OPERATION, "ended", "plan")
_ROW_ERRORS = (
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
)
"""The row is at fault, not the disk: without it the transaction goes through."""
_DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_DAMAGED = "the file was damaged and is mended"
_EVENT_COLUMNS = frozenset({"eseq", "t", "kind", "level", "text", "source"})


@dataclass(frozen=True, slots=True)
class _Row:
    """One thing to write: `what` chooses the statement in `_write`."""

    what: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Sync:
    """Calls `done(True)` once everything before it is committed, `done(False)` when the disk refuses."""

    done: Callable[[bool], None]
    last: bool = False


class Journal:
    """Takes rows from the daemon's loop; a thread writes them.

    on_problem: called from the writer thread with a level (warn, error) and a sentence when writing fails, works again,
        or a row was left out.
    on_written: called from the writer thread with the sequence of the newest event that is on disk.
    on_working: called from the writer thread when writing begins to fail (False), and when it works again (True).
    mend: puts a mended file in the place of a damaged one and says what it did; None: damage is a problem like others.
    limits: how much is kept, in place of what the journal itself says.
    connect: makes the connection (tests inject a failing disk).
    """

    def __init__(
        self,
        path: Path,
        *,
        wal: bool = True,
        on_problem: Callable[[str, str], None] = lambda level, text: None,
        on_written: Callable[[int], None] = lambda eseq: None,
        on_working: Callable[[bool], None] = lambda works: None,
        mend: Callable[[BaseException], str] | None = None,
        limits: Mapping[str, JournalLimit] = MappingProxyType({}),
        connect: Callable[[Path], sqlite3.Connection] = schema.connect,
        retry_s: float = RETRY_S,
    ) -> None:
        self.path = path
        self._wal = wal
        self._on_problem = on_problem
        self._on_written = on_written
        self._on_working = on_working
        self._mend = mend
        self._connect = connect
        self._retry_s = retry_s
        self._queue: queue.SimpleQueue[_Row | _Sync] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rltop-journal", daemon=True)
        self._started = False
        self._overrun = 0
        """Rows that went because the thread did not come for them. Counted in the loop, told in the thread."""
        self._connection: sqlite3.Connection | None = None
        self._points: dict[str, int] = {}
        self._limits = dict(limits)
        self._retention: Retention | None = None

    def start(self) -> None:
        """Start the writer thread."""
        self._started = True
        self._thread.start()

    # ---------------------------------------------------------------- what the loop tells

    def event(self, event: Event) -> None:
        """Append an event."""
        more = {key: value for key, value in event.items() if key not in _EVENT_COLUMNS}
        self._put(
            "event", event["eseq"], event["t"], event["kind"], event["level"], event["text"], event["source"], more
        )

    def state(self, t: float, key: str, value: Any) -> None:
        """Newest value of a state key; None: the key is gone."""
        self._put("state", key, t, value)

    def verdict(self, t: float, verdict: dict[str, Any], was: str | None) -> None:
        """A verdict whose status changed from `was`."""
        self._put("verdict", t, verdict["id"], verdict["status"], was, verdict)

    def operation(self, row: dict[str, Any]) -> None:
        """Insert or update an operation (keys as the columns of the table)."""
        self._put("operation", *(row.get(column) for column in _OPERATION_ALL))

    def point(self, key: str, step: float, value: float, t: float | None = None) -> None:
        """Append a point to a series. t: wall clock when it came; None: not known."""
        self._put("point", key, step, value, t)

    def cut(self, key: str, step: float) -> None:
        """The run restarted: points of this series from `step` on, so far, are of the time before."""
        self._put("cut", key, step)

    def record(self, t: float, kind: str, source: str, payload: Any) -> None:
        """Keep a whole record (the newest of each kind, see the table `retention`)."""
        self._put("record", t, kind, source, payload)

    def client(self, t: float, what: str, role: str, who: str, client: str) -> None:
        """Audit: a client came or went."""
        self._put("client", t, what, role, who, client)

    async def committed(self) -> bool:
        """Wait until everything told so far is on disk; False when the disk does not take it (the daemon goes on)."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def settle(ok: bool) -> None:
            if not future.done():
                future.set_result(ok)

        def done(ok: bool) -> None:
            loop.call_soon_threadsafe(settle, ok)

        self._queue.put(_Sync(done))
        return await future

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what is left and stop the thread; False when it was not done in time or the disk refused."""
        if not self._started:
            return True
        answers: list[bool] = []
        self._queue.put(_Sync(answers.append, last=True))
        self._thread.join(timeout_s)
        return answers == [True]

    def _put(self, what: str, *values: Any) -> None:
        if self._queue.qsize() >= BACKLOG_ROWS:
            self._drop_oldest()
        self._queue.put(_Row(what, values))

    def _drop_oldest(self) -> None:
        """The thread hangs in the disk: memory may not grow for it."""
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, _Row):
            self._overrun += 1
        elif item.last:
            self._queue.put(item)
        else:
            item.done(False)

    # ---------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        backlog: list[_Row] = []
        failed_at: float | None = None
        pause, lost, overrun = 0.0, 0, 0
        while True:
            waiting = self._collect(backlog, timeout=None if failed_at is None else pause)
            if len(backlog) > BACKLOG_ROWS:
                lost += len(backlog) - BACKLOG_ROWS
                del backlog[: len(backlog) - BACKLOG_ROWS]
            last = any(sync.last for sync in waiting)
            if failed_at is None or last or time.monotonic() - failed_at >= pause:
                problem = self._commit(backlog)
                if problem is _DAMAGED:
                    problem = self._commit(backlog)
                if problem is None:
                    newest = next((row.values[0] for row in reversed(backlog) if row.what == "event"), None)
                    backlog.clear()
                    if newest is not None:
                        self._on_written(newest)
                    fresh = self._overrun - overrun
                    overrun += fresh
                    if failed_at is not None:
                        self._on_problem("warn", f"the journal works again; {lost + fresh} rows were lost meanwhile")
                        self._on_working(True)
                    elif fresh:
                        self._on_problem("warn", f"the disk hung: {fresh} rows of the journal were lost meanwhile")
                    failed_at, pause, lost = None, 0.0, 0
                else:
                    if failed_at is None:
                        self._on_problem("error", f"{problem}; the daemon goes on in memory and tries again")
                        self._on_working(False)
                    failed_at = time.monotonic()
                    pause = min(max(FIRST_RETRY_S, 2 * pause), self._retry_s)
            for sync in waiting:
                sync.done(failed_at is None)
            if last:
                self._disconnect()
                return

    def _collect(self, backlog: list[_Row], timeout: float | None) -> list[_Sync]:
        """Move what is queued into the backlog: wait for the first row, then `BATCH_S` for company, `EVENT_S` when an
        event is among them."""
        deadline: float | None = None
        hurried = False
        while len(backlog) < BACKLOG_ROWS + BATCH_ROWS:
            left = timeout if deadline is None else deadline - time.monotonic()
            try:
                item = self._queue.get(timeout=left) if left is None or left > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _Sync):
                return [item]
            backlog.append(item)
            if item.what == "event" and not hurried:
                hurried = True
                soon = time.monotonic() + EVENT_S
                deadline = soon if deadline is None else min(deadline, soon)
            elif deadline is None:
                deadline = time.monotonic() + BATCH_S
        return []

    def _commit(self, backlog: Sequence[_Row]) -> str | None:
        """Write the backlog in one transaction. Returns what is wrong with the disk, None when it was written, _DAMAGED
        when the file was, and is mended by now: try once more."""
        try:
            connection = self._connection or self._open()
            refused: list[str] = []
            connection.execute("BEGIN IMMEDIATE")
            for row in _newest_states(backlog):
                try:
                    self._write(connection, row)
                except _ROW_ERRORS as error:
                    refused.append(f"{row.what}: {error}")
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError, RltopError) as error:
            self._disconnect()
            if self._mend is not None and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE_CODES:
                try:
                    self._on_problem("error", self._mend(error))
                except (sqlite3.Error, OSError, RltopError) as worse:
                    error = worse
                else:
                    return _DAMAGED
            return f"cannot write {self.path}: {error}"
        if refused:
            self._on_problem("warn", f"{len(refused)} rows could not be put into the journal ({refused[0]})")
        return None

    def _open(self) -> sqlite3.Connection:
        connection = self._connect(self.path)
        try:
            schema.prepare(connection, self.path, wal=self._wal)
            self._points = dict(connection.execute("SELECT key, max(n) + 1 FROM points GROUP BY key"))
            set_limits(connection, self._limits)
            self._retention = Retention(connection, now=time.time, told=lambda text: self._on_problem("info", text))
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # the disk is the reason why we are here; it is already reported
            finally:
                connection.close()

    def _write(self, connection: sqlite3.Connection, row: _Row) -> None:
        values = row.values
        match row.what:
            case "point":
                self._write_point(connection, *values)
            case "cut":
                key, step = values
                self._pack_points(connection, key)
                connection.execute(
                    "INSERT INTO series (key, n, rising, cut, steps, vals) VALUES (?, 0, 1, ?, x'', x'')", (key, step)
                )
            case "event":
                *columns, more = values
                packed = _pack(more) if more else None
                connection.execute("INSERT INTO events VALUES (?,?,?,?,?,?,?)", (*columns, packed))
                self._count(connection, "events", len(columns[4]) + len(packed or b""))
            case "state":
                key, t, value = values
                if value is None:
                    connection.execute("DELETE FROM state WHERE key = ?", (key,))
                else:
                    connection.execute("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", (key, t, _pack(value)))
            case "verdict":
                packed = _pack(values[4])
                connection.execute("INSERT INTO verdicts VALUES (NULL,?,?,?,?,?)", (*values[:4], packed))
                self._count(connection, "verdicts", len(packed))
            case "operation":
                fields = dict(zip(_OPERATION_ALL, values, strict=True))
                fields["args"], fields["plan"] = _pack(fields["args"]), _pack(fields["plan"])
                marks = ",".join("?" * len(fields))
                connection.execute(f"INSERT OR REPLACE INTO operations VALUES ({marks})", tuple(fields.values()))
                self._count(connection, "operations", len(fields["args"]) + len(fields["plan"]) + len(fields["text"]))
            case "record":
                t, kind, source, payload = values
                packed = _pack(payload)
                connection.execute("INSERT INTO records VALUES (NULL,?,?,?,?)", (t, kind, source, packed))
                self._count(connection, f"records:{kind}", len(packed))
            case "client":
                connection.execute("INSERT INTO clients VALUES (NULL,?,?,?,?,?)", values)
                self._count(connection, "clients", sum(len(value) for value in values[3:]))
            case _:
                raise ValueError(f"unknown row {row.what!r}")

    def _write_point(
        self, connection: sqlite3.Connection, key: str, step: float, value: float, t: float | None
    ) -> None:
        number = self._points.get(key, 0)
        row = (key, number, step, value, t)
        connection.execute("INSERT INTO points (key, n, step, value, t) VALUES (?, ?, ?, ?, ?)", row)
        self._points[key] = number + 1
        if number + 1 >= CHUNK_POINTS:
            self._pack_points(connection, key)

    def _pack_points(self, connection: sqlite3.Connection, key: str) -> None:
        rows = connection.execute("SELECT step, value, t FROM points WHERE key = ? ORDER BY n", (key,)).fetchall()
        if rows:
            steps = array("d", [row[0] for row in rows])
            values = array("d", [nan if row[1] is None else row[1] for row in rows])
            size = insert_chunk(connection, key, steps, values, times=[row[2] for row in rows], t=time.time())
            self._count(connection, "series", size)
            connection.execute("DELETE FROM points WHERE key = ?", (key,))
        self._points[key] = 0

    def _count(self, connection: sqlite3.Connection, kind: str, size: int = 0) -> None:
        if self._retention is not None:
            self._retention.wrote(connection, kind, size)


def insert_chunk(
    connection: sqlite3.Connection,
    key: str,
    steps: array[float],
    values: array[float],
    *,
    times: Sequence[float | None] = (),
    t: float | None = None,
) -> int:
    """Append a packed chunk (float64 columns of equal length, in order of arrival) to a series; returns its bytes.

    times: wall clock of each point, None where it is not known; empty: of none. t: of its newest, for a limit of age.
    """
    finite = [value for value in values if isfinite(value)]
    rising = all(earlier < later for earlier, later in pairwise(steps))
    packed = pack(steps), pack(values), pack_times(times)
    connection.execute(
        "INSERT INTO series (key, n, lo, hi, rising, steps, vals, times, t) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (key, len(steps), min(finite, default=None), max(finite, default=None), rising, *packed, t),
    )
    return sum(len(column) for column in packed if column is not None)


def pack(column: array[float]) -> bytes:
    """float64 column -> zlib of its little-endian bytes."""
    little = array("d", column)
    if _BIG_ENDIAN:
        little.byteswap()
    return zlib.compress(little.tobytes(), 1)


def unpack(blob: bytes) -> array[float]:
    """Inverse of `pack`. Raises zlib.error or ValueError on damaged bytes."""
    column = array("d")
    column.frombytes(zlib.decompress(blob))
    if _BIG_ENDIAN:
        column.byteswap()
    return column


def pack_times(times: Sequence[float | None]) -> bytes | None:
    """Wall clocks -> zlib of little-endian int64: milliseconds since the one before, `_UNKNOWN` where there is none.
    Some 2 to 4 bytes a point. None: there is none at all."""
    if all(one is None for one in times):
        return None
    column, before = array("q"), 0
    for one in times:
        now = before if one is None else round(one * 1000)
        column.append(_UNKNOWN if one is None else now - before)
        before = now
    if _BIG_ENDIAN:
        column.byteswap()
    return zlib.compress(column.tobytes(), 1)


def unpack_times(blob: bytes) -> list[float | None]:
    """Inverse of `pack_times`, to a millisecond. Raises zlib.error or ValueError on damaged bytes."""
    column = array("q")
    column.frombytes(zlib.decompress(blob))
    if _BIG_ENDIAN:
        column.byteswap()
    found: list[float | None] = []
    before = 0
    for one in column:
        before += 0 if one == _UNKNOWN else one
        found.append(None if one == _UNKNOWN else before / 1000)
    return found


_UNKNOWN = -(1 << 63)
_BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"


def _newest_states(backlog: Sequence[_Row]) -> list[_Row]:
    """The backlog without state rows that a later one replaces."""
    newest = {row.values[0]: index for index, row in enumerate(backlog) if row.what == "state"}
    return [row for index, row in enumerate(backlog) if row.what != "state" or newest[row.values[0]] == index]
