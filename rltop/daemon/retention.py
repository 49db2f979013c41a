"""How much a journal keeps: rows, age and bytes per table, applied by the writer thread while it writes.

The limits are rows of the table `retention`, so a journal carries its own; the user's settings replace them when a
daemon opens it. A limit is applied after a tenth of it was written since the last time, so a table is at most a tenth
over its limit. What goes is the oldest, and each time it is said how much of what went.

`series` counts packed chunks: the newest points of every curve are never dropped. Space is used again by SQLite, the
file does not shrink.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

from rltop.settings import JournalLimit

LOOK_S = 60.0
"""How often a limit of age is applied, when anything is written at all."""
_ROW_BYTES = 48
"""What a row costs beside its texts and blobs, roughly."""
_SIZE = {
    "events": "length(text) + coalesce(length(more), 0)",
    "verdicts": "length(verdict)",
    "operations": "length(text) + coalesce(length(args), 0) + coalesce(length(plan), 0)",
    "clients": "length(who) + length(client)",
    "records": "length(payload)",
    "series": "length(steps) + length(vals) + coalesce(length(times), 0)",
}


class Retention:
    """Counts what is written and prunes. One per connection of the writer.

    now: wall clock, seconds. told: called with a sentence when something was dropped.
    """

    def __init__(
        self, connection: sqlite3.Connection, *, now: Callable[[], float], told: Callable[[str], None]
    ) -> None:
        rows = connection.execute("SELECT kind, max_rows, max_age_s, max_bytes FROM retention")
        self._limits = {kind: JournalLimit(*limits) for kind, *limits in rows}
        self._now = now
        self._told = told
        self._rows: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._looked: dict[str, float] = {}

    def wrote(self, connection: sqlite3.Connection, kind: str, size: int = 0) -> None:
        """A row of `kind` (a table, or `records:<kind>`) with about `size` bytes was written."""
        limit = self._limits.get(kind)
        if limit is None:
            return
        rows = self._rows[kind] = self._rows.get(kind, 0) + 1
        written = self._bytes[kind] = self._bytes.get(kind, 0) + size + _ROW_BYTES
        due = (
            kind not in self._looked  # the first row after opening: what an earlier daemon left may be too much
            or (limit.rows is not None and rows > limit.rows // 10)
            or (limit.bytes is not None and written > limit.bytes // 10)
            or (limit.age_s is not None and self._now() - self._looked[kind] >= LOOK_S)
        )
        if due:
            self._rows[kind] = self._bytes[kind] = 0
            self._looked[kind] = self._now()
            if dropped := prune(connection, kind, limit, now=self._now()):
                self._told(f"the journal dropped its {dropped} oldest {_words(kind)} ({_why(limit)})")


def set_limits(connection: sqlite3.Connection, limits: Mapping[str, JournalLimit]) -> None:
    """Replace limits in the journal's own table."""
    for kind, limit in limits.items():
        connection.execute(
            "INSERT OR REPLACE INTO retention (kind, max_rows, max_age_s, max_bytes) VALUES (?, ?, ?, ?)",
            (kind, limit.rows, limit.age_s, limit.bytes),
        )


def prune(connection: sqlite3.Connection, kind: str, limit: JournalLimit, *, now: float) -> int:
    """Apply a limit; returns how many rows went."""
    table, _, record_kind = kind.partition(":")
    order = "t" if table == "operations" else {"events": "eseq", "series": "id"}.get(table, "n")
    where, having = ("WHERE kind = ?", (record_kind,)) if record_kind else ("", ())
    edges = []
    if limit.rows is not None:
        newest = f"SELECT {order} FROM {table} {where} ORDER BY {order} DESC LIMIT 1 OFFSET ?"
        edges.append(connection.execute(newest, (*having, limit.rows)).fetchone())
    if limit.age_s is not None:
        old = f"SELECT max({order}) FROM {table} {where} {'AND' if where else 'WHERE'} t < ?"
        edges.append(connection.execute(old, (*having, now - limit.age_s)).fetchone())
    if limit.bytes is not None:
        sizes = f"SELECT {order} AS edge, sum({_SIZE[table]} + {_ROW_BYTES}) OVER (ORDER BY {order} DESC) AS total"
        over = f"SELECT max(edge) FROM ({sizes} FROM {table} {where}) WHERE total > ?"
        edges.append(connection.execute(over, (*having, limit.bytes)).fetchone())
    found = [edge[0] for edge in edges if edge is not None and edge[0] is not None]
    if not found:
        return 0
    extra = "AND kind = ?" if record_kind else ""
    return connection.execute(f"DELETE FROM {table} WHERE {order} <= ? {extra}", (max(found), *having)).rowcount


def _words(kind: str) -> str:
    table, _, record_kind = kind.partition(":")
    return f"records of kind {record_kind}" if record_kind else {"series": "chunks of curves"}.get(table, table)


def _why(limit: JournalLimit) -> str:
    told = [f"{limit.rows} rows"] if limit.rows is not None else []
    told += [f"{limit.age_s / 86400:g} days"] if limit.age_s is not None else []
    told += [f"{limit.bytes / 1e6:g} MB"] if limit.bytes is not None else []
    return "kept: " + ", ".join(told)
