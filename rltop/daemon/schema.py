"""The journal's tables and how a file of another version is met: a newer one is refused, an older one is migrated.

Each entry of `MIGRATIONS` takes the file from the version before to its own, in one transaction; a new file starts at
version 0 and runs all of them, so creation and migration are the same code.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltop.errors import RltopError

Migration = Sequence[str]
"""SQL statements."""

_VERSION_1: Migration = (
    # What people and `rltop changed` ask about the file itself.
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # more: MessagePack map of the keys that only this kind of event has.
    """CREATE TABLE events (eseq INTEGER PRIMARY KEY, t REAL NOT NULL, kind TEXT NOT NULL, level TEXT NOT NULL,
        text TEXT NOT NULL, source TEXT NOT NULL, more BLOB)""",
    # Newest value of every state key, so that a new daemon shows the old picture at once. value: MessagePack.
    "CREATE TABLE state (key TEXT PRIMARY KEY, t REAL NOT NULL, value BLOB NOT NULL) WITHOUT ROWID",
    # One row per change of a verdict's status. verdict: MessagePack map.
    """CREATE TABLE verdicts (n INTEGER PRIMARY KEY, t REAL NOT NULL, id TEXT NOT NULL, status TEXT NOT NULL,
        was TEXT, verdict BLOB NOT NULL)""",
    # Who did what when and why; written before it runs. cmd_id makes a command idempotent across daemons.
    """CREATE TABLE operations (op TEXT PRIMARY KEY, cmd_id TEXT UNIQUE, t REAL NOT NULL, name TEXT NOT NULL,
        target TEXT NOT NULL, args BLOB, who TEXT NOT NULL, role TEXT NOT NULL, reason TEXT NOT NULL,
        state TEXT NOT NULL, stage TEXT NOT NULL, percent REAL, text TEXT NOT NULL, ended REAL, plan BLOB)""",
    # Newest points, one row each, in order of arrival (n). NaN is NULL: SQLite has no NaN.
    """CREATE TABLE points (key TEXT NOT NULL, n INTEGER NOT NULL, step REAL NOT NULL, value REAL,
        PRIMARY KEY (key, n)) WITHOUT ROWID""",
    # Older points, packed: zlib of little-endian float64. rising: the steps are strictly increasing.
    # cut: before this chunk, drop everything of the series from that step on (the run restarted there).
    """CREATE TABLE series (id INTEGER PRIMARY KEY, key TEXT NOT NULL, n INTEGER NOT NULL, lo REAL, hi REAL,
        rising INTEGER NOT NULL, cut REAL, steps BLOB NOT NULL, vals BLOB NOT NULL)""",
    # Whole records of the kinds run, weights, engine, samples. payload: MessagePack.
    """CREATE TABLE records (n INTEGER PRIMARY KEY, t REAL NOT NULL, kind TEXT NOT NULL, source TEXT NOT NULL,
        payload BLOB NOT NULL)""",
    "CREATE INDEX records_by_kind ON records (kind, n)",
    # Who looked and who could act: hello, bye, lease.
    """CREATE TABLE clients (n INTEGER PRIMARY KEY, t REAL NOT NULL, what TEXT NOT NULL, role TEXT NOT NULL,
        who TEXT NOT NULL, client TEXT NOT NULL)""",
    # How much is kept. kind: a table, or records:<kind>. NULL: no limit of that sort.
    """CREATE TABLE retention (kind TEXT PRIMARY KEY, max_rows INTEGER, max_age_s REAL, max_bytes INTEGER)
        WITHOUT ROWID""",
    """INSERT INTO retention (kind, max_rows) VALUES ('events', 200000), ('verdicts', 20000), ('operations', 10000),
        ('clients', 10000), ('records:run', 50), ('records:weights', 1000), ('records:engine', 1000),
        ('records:samples', 100)""",
)

_VERSION_2: Migration = (
    # t: wall clock when the chunk was packed; NULL in those of version 1.
    "ALTER TABLE series ADD COLUMN t REAL",
    "UPDATE retention SET max_bytes = 256000000 WHERE kind = 'events'",
    "UPDATE retention SET max_bytes = 64000000 WHERE kind IN ('records:samples', 'records:weights')",
    "INSERT OR IGNORE INTO retention (kind, max_bytes) VALUES ('series', 1000000000)",
)

_VERSION_3: Migration = (
    # Wall clock when a point came, NULL where that is not known: one a row, and packed beside steps and values
    # (`journal.pack_times`).
    "ALTER TABLE points ADD COLUMN t REAL",
    "ALTER TABLE series ADD COLUMN times BLOB",
)

MIGRATIONS: Sequence[Migration] = (_VERSION_1, _VERSION_2, _VERSION_3)
SCHEMA_VERSION = len(MIGRATIONS)


def connect(path: Path, *, read_only: bool = False, immutable: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode (transactions are written out), usable from any one thread at a time.

    immutable: nobody writes to the file, so it is read without a lock and without an index file beside it.
    """
    mode = ("ro" if read_only else "rwc") + ("&immutable=1" if immutable else "")
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=5.0
    )


def prepare(
    connection: sqlite3.Connection, path: Path, *, wal: bool, migrations: Sequence[Migration] = MIGRATIONS
) -> int:
    """Bring the file to the newest version; returns the version that was found (0: a new file).

    wal: use write-ahead logging; False on network disks, where its shared memory does not work.
    Raises RltopError for a newer journal or a file that is none; sqlite3.Error when the disk or the file is broken.
    """
    found = readable_version(connection, path, len(migrations))
    connection.execute(f"PRAGMA journal_mode={'WAL' if wal else 'TRUNCATE'}")
    # Safe against the death of the process at any moment; a power cut may lose the last transactions, not the file.
    connection.execute("PRAGMA synchronous=NORMAL")
    for number, statements in enumerate(migrations[found:], start=found + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in statements:
                connection.execute(statement)
            set_meta(connection, "schema_version", number)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    return found


def readable_version(connection: sqlite3.Connection, path: Path, newest: int = SCHEMA_VERSION) -> int:
    """As `version`. Raises RltopError for a journal of a newer rltop too."""
    found = version(connection, path)
    if found > newest:
        raise RltopError(
            "this journal was written by a newer rltop",
            where=str(path),
            why=f"its schema version is {found}, this build reads up to {newest}",
            do="pip install --upgrade rltop, or start the run under another name",
        )
    return found


def version(connection: sqlite3.Connection, path: Path) -> int:
    """Schema version of an open file, 0 when it is empty. Raises RltopError when it is some other database."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return 0
    row = None
    if "meta" in tables:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if row is None or not str(row[0]).isdigit():
        raise RltopError(
            "is not a journal of rltop", where=str(path), why=f"it has the tables {', '.join(sorted(tables))}"
        )
    return int(row[0])


def set_meta(connection: sqlite3.Connection, key: str, value: Any) -> None:
    """Set one row of `meta`."""
    connection.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, str(value)))
