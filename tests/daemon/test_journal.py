"""The journal: what was told is there after a restart; versions; disks that are full, read-only or damaged."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from itertools import accumulate
from math import inf, isnan, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.daemon import replay, schema
from rltop.daemon.journal import CHUNK_POINTS, Journal, pack_times, unpack_times
from rltop.daemon.memory import open_journal
from rltop.daemon.replay import Restored
from rltop.daemon.series import SeriesStore
from rltop.errors import RltopError


def load(path: Path, **limits: int) -> tuple[Restored, SeriesStore]:
    store = SeriesStore()
    with closing(schema.connect(path, read_only=True)) as connection:
        return replay.restore(connection, store, **{"events": 1000, **limits}), store


def event(eseq: int, text: str = "x", **more: Any) -> dict[str, Any]:
    return {"eseq": eseq, "t": float(eseq), "kind": "log", "level": "info", "text": text, "source": "s", **more}


def values(store: SeriesStore, key: str) -> list[tuple[float, float]]:
    found = store.query(key, None, None, 10_000)
    assert found is not None
    return list(zip(found.step, found.last, strict=True))


def operation(op: str, state: str, **more: Any) -> dict[str, Any]:
    row = {"op": op, "cmd_id": f"id-{op}", "t": 1.0, "name": "note", "target": "", "args": {"text": "x"}, "who": "ana"}
    return {**row, "role": "control", "reason": "r", "state": state, "stage": "", "percent": None, "text": "", **more}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_everything_told_is_there_afterwards(path: Path) -> None:
    journal = Journal(path)
    journal.start()
    journal.event(event(1, "é", id="0", to="CRASHED"))
    journal.event(event(2))
    journal.state(1.0, "run", {"state": "running"})
    journal.state(2.0, "run", {"state": "done", "value": nan})
    journal.state(2.0, "gone", 1)
    journal.state(3.0, "gone", None)
    journal.operation(operation("1", "queued", plan=["p"]))
    journal.operation(operation("1", "done", ended=2.0))
    journal.point("a", 0, 1.5)
    journal.point("a", 1, nan)
    journal.point("a", 2, -inf)
    journal.verdict(1.0, {"id": "train.nan", "status": "fail"}, "pass")
    journal.record(1.0, "weights", "trainer/0", {"version": "3"})
    journal.client(1.0, "hello", "view", "ana", "rltop/0")
    assert journal.close()
    restored, store = load(path)
    assert restored.events == [event(1, "é", id="0", to="CRASHED"), event(2)]
    assert restored.head == 2
    assert restored.state["run"]["state"] == "done"
    assert isnan(restored.state["run"]["value"])
    assert list(restored.state) == ["run"]
    (row,) = restored.operations
    assert (row["state"], row["ended"], row["args"], row["who"]) == ("done", 2.0, {"text": "x"}, "ana")
    found = store.query("a", None, None, 10)
    assert found is not None
    assert list(found.nan) == [0, 1, 1]
    assert found.last[0] == 1.5
    with closing(schema.connect(path, read_only=True)) as connection:
        steps, raw = replay.points(connection, "a")
        assert list(steps) == [0, 1, 2]
        assert isnan(raw[1])
        assert raw[2] == -inf
        assert connection.execute("SELECT what, who FROM clients").fetchall() == [("hello", "ana")]
        assert connection.execute("SELECT id, status, was FROM verdicts").fetchall() == [("train.nan", "fail", "pass")]


def test_points_are_packed_and_come_back_in_order_over_several_daemons(path: Path) -> None:
    wanted = []
    for daemon in range(3):
        journal = Journal(path)
        journal.start()
        for index in range(CHUNK_POINTS):
            step = daemon * CHUNK_POINTS * 2 + index
            value = nan if index == 7 else float(step)
            journal.point("a", step, value)
            journal.point("b", step, 1.0) if index < 10 else None
            wanted.append((float(step), value))
        assert journal.close()
    _, store = load(path)
    assert str(values(store, "a")) == str(wanted), "NaN is equal to itself only in words"
    assert len(values(store, "b")) == 30
    with closing(schema.connect(path, read_only=True)) as connection:
        assert connection.execute("SELECT count(*) FROM series WHERE key = 'a'").fetchone() == (3,)
        assert connection.execute("SELECT count(*) FROM points WHERE key = 'a'").fetchone() == (0,)


def test_a_restart_of_the_run_is_the_same_after_a_replay(path: Path) -> None:
    store = SeriesStore()
    journal = Journal(path)
    journal.start()

    def tell(step: int, value: float) -> None:
        if store.append("a", step, value):
            journal.cut("a", step)
        journal.point("a", step, value)

    for step in range(20):
        tell(step, 1.0)
    store.restart()
    for step in (12, 14, 13):
        tell(step, 2.0)
    assert journal.close()
    _, loaded = load(path)
    assert values(loaded, "a") == values(store, "a")
    with closing(schema.connect(path, read_only=True)) as connection:
        assert len(replay.points(connection, "a")[0]) == 23, "the journal keeps the tail that was cut"


async def test_committed_means_on_disk(path: Path) -> None:
    journal = Journal(path)
    journal.start()
    journal.event(event(1))
    assert await journal.committed()
    assert load(path)[0].head == 1
    await asyncio.to_thread(journal.close)


def test_older_events_are_found_behind_the_ring(path: Path) -> None:
    journal = Journal(path)
    journal.start()
    for eseq in range(1, 101):
        journal.event({**event(eseq, f"Étape {eseq}"), "kind": "op" if eseq % 10 == 0 else "log"})
    assert journal.close()
    found, more = replay.older_events(path, lo=0, hi=60, kinds=[], text="", limit=5)
    assert ([e["eseq"] for e in found], more) == ([56, 57, 58, 59, 60], True)
    found, more = replay.older_events(path, lo=15, hi=60, kinds=["op"], text="éTAPE", limit=10)
    assert ([e["eseq"] for e in found], more) == ([20, 30, 40, 50, 60], False)


def test_only_the_newest_records_of_a_kind_are_kept(path: Path) -> None:
    journal = Journal(path)
    journal.start()
    for number in range(250):
        journal.record(float(number), "samples", "trainer/0", {"rollout_id": number})
        journal.record(float(number), "weights", "trainer/0", {"version": str(number)})
    assert journal.close()
    with closing(schema.connect(path, read_only=True)) as connection:
        kept = [t for (t,) in connection.execute("SELECT t FROM records WHERE kind = 'samples' ORDER BY n")]
        assert kept[-1] == 249.0
        assert 100 <= len(kept) <= 111
        assert connection.execute("SELECT count(*) FROM records WHERE kind = 'weights'").fetchone() == (250,)


# ---------------------------------------------------------------- versions


def test_a_newer_journal_is_refused_and_left_alone(tmp_path: Path, path: Path) -> None:
    with closing(schema.connect(path)) as connection:
        schema.prepare(connection, path, wal=True)
        schema.set_meta(connection, "schema_version", 99)
    before = path.read_bytes()
    with pytest.raises(RltopError, match="newer rltop") as caught:
        open_journal(tmp_path, on_problem=lambda level, text: None)
    assert "99" in caught.value.why
    assert path.read_bytes() == before


def test_an_older_journal_is_migrated_and_keeps_its_rows(path: Path) -> None:
    with closing(schema.connect(path)) as connection:
        schema.prepare(connection, path, wal=True)
        connection.execute("INSERT INTO events VALUES (1, 0, 'log', 'info', 'old', 's', NULL)")
    newer = (*schema.MIGRATIONS, ("ALTER TABLE events ADD COLUMN extra TEXT",))
    with closing(schema.connect(path)) as connection:
        assert schema.prepare(connection, path, wal=True, migrations=newer) == len(schema.MIGRATIONS)
        assert connection.execute("SELECT text, extra FROM events").fetchall() == [("old", None)]
        assert schema.version(connection, path) == len(newer)


@given(st.lists(st.none() | st.floats(0, 4e9, allow_nan=False).map(lambda one: round(one, 3)), max_size=40))
def test_times_come_back_to_a_millisecond(times: list[float | None]) -> None:
    packed = pack_times(times)
    assert times == (unpack_times(packed) if packed is not None else [None] * len(times))


def test_the_times_of_a_usual_curve_take_a_few_bytes_each() -> None:
    random = Random(1)
    times = list(accumulate((random.gauss(60, 5) for _ in range(CHUNK_POINTS)), initial=1.7e9))
    packed = pack_times(times[1:])
    assert packed is not None
    assert len(packed) < 4 * CHUNK_POINTS


def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    with closing(schema.connect(path)) as connection:
        schema.prepare(connection, path, wal=True)
        broken = (*schema.MIGRATIONS, ("ALTER TABLE events ADD COLUMN extra TEXT", "SELECT nonsense FROM nowhere"))
        with pytest.raises(sqlite3.OperationalError):
            schema.prepare(connection, path, wal=True, migrations=broken)
        assert schema.version(connection, path) == schema.SCHEMA_VERSION
        assert "extra" not in [row[1] for row in connection.execute("PRAGMA table_info(events)")]


def test_some_other_database_is_not_taken_for_a_journal(tmp_path: Path, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (x)")
    with pytest.raises(RltopError, match="not a journal") as caught:
        open_journal(tmp_path, on_problem=lambda level, text: None)
    assert "photos" in caught.value.why


@pytest.mark.parametrize("damage", ["not a database at all " * 100, ""])
def test_a_damaged_journal_is_moved_aside_and_a_new_one_begun(tmp_path: Path, path: Path, damage: str) -> None:
    if damage:
        path.write_text(damage)
    else:
        journal = Journal(path)
        journal.start()
        journal.state(0.0, "run", {"x": 1})
        assert journal.close()
        with closing(schema.connect(path)) as connection:
            connection.execute("UPDATE state SET value = x'c1'")
    opened = open_journal(tmp_path, on_problem=lambda level, text: None)
    assert opened.restored.head == 0
    ((level, text),) = opened.remarks
    assert level == "error"
    assert "kept as journal.damaged-" in text
    assert len(list(tmp_path.glob("journal.damaged-*.sqlite"))) == 1
    opened.journal.start()
    opened.journal.event(event(1))
    assert opened.journal.close()
    assert load(path)[0].head == 1


# ---------------------------------------------------------------- disks


class Disk:
    """Connections to a disk whose free space the test decides: SQLite itself then says that it is full."""

    def __init__(self) -> None:
        self.full = False
        self.tried = threading.Event()

    def connect(self, path: Path) -> sqlite3.Connection:
        self.tried.set()
        connection = schema.connect(path)
        if self.full:
            connection.execute("PRAGMA max_page_count = 1")
        return connection


class Problems:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.error = threading.Event()
        self.well = threading.Event()

    def __call__(self, level: str, text: str) -> None:
        self.seen.append((level, text))
        (self.well if "works again" in text else self.error).set()


def test_a_full_disk_is_said_once_and_nothing_is_lost_when_it_has_room_again(path: Path) -> None:
    disk, problems = Disk(), Problems()
    disk.full = True
    journal = Journal(path, on_problem=problems, connect=disk.connect, retry_s=0.05)
    journal.start()
    for eseq in range(1, 200):
        journal.event(event(eseq, "x" * 500))
    assert problems.error.wait(10)
    for eseq in range(200, 300):
        journal.event(event(eseq))
    disk.full = False
    assert problems.well.wait(10)
    assert journal.close()
    assert "full" in problems.seen[0][1]
    assert problems.seen[0][0] == "error"
    assert [level for level, _ in problems.seen] == ["error", "warn"]
    assert [e["eseq"] for e in load(path)[0].events] == list(range(1, 300))


async def test_a_disk_that_hangs_costs_the_oldest_rows_and_not_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rltop.daemon.journal.BACKLOG_ROWS", 100)
    hangs, goes_on = threading.Event(), threading.Event()

    def connect(path: Path) -> sqlite3.Connection:
        hangs.set()
        goes_on.wait(20)
        return schema.connect(path)

    problems = Problems()
    journal = Journal(path, on_problem=problems, connect=connect)
    journal.start()
    journal.event(event(1))
    await asyncio.to_thread(hangs.wait, 10)
    waiting = asyncio.create_task(journal.committed())
    await asyncio.sleep(0)
    for eseq in range(2, 303):
        journal.event(event(eseq))
    assert await waiting is False
    goes_on.set()
    assert await asyncio.to_thread(journal.close)
    assert [e["eseq"] for e in load(path)[0].events] == [1, *range(203, 303)]
    assert problems.seen == [("warn", "the disk hung: 201 rows of the journal were lost meanwhile")]


async def test_on_a_full_disk_waiting_for_the_journal_ends_with_no(path: Path) -> None:
    disk = Disk()
    disk.full = True
    journal = Journal(path, connect=disk.connect, retry_s=60)
    journal.start()
    journal.event(event(1))
    assert await journal.committed() is False
    assert await journal.committed() is False
    assert await asyncio.to_thread(journal.close) is False


def test_a_disk_that_cannot_be_opened_leaves_the_daemon_in_memory(tmp_path: Path) -> None:
    def connect(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    problems = Problems()
    opened = open_journal(tmp_path, on_problem=problems, connect=connect)
    ((level, text),) = opened.remarks
    assert level == "error"
    assert "readonly" in text
    opened.journal.start()
    opened.journal.event(event(1))
    assert opened.journal.close() is False


def test_one_row_that_cannot_be_written_does_not_hold_up_the_rest(path: Path) -> None:
    problems = Problems()
    journal = Journal(path, on_problem=problems)
    journal.start()
    journal.event(event(1))
    journal.event(event(1, "the same sequence again"))
    journal.event(event(2, "\ud800 is no UTF-8"))
    journal.event(event(3))
    assert journal.close()
    assert [e["eseq"] for e in load(path)[0].events] == [1, 3]
    assert problems.seen[0][0] == "warn"
    assert "2 rows" in problems.seen[0][1]


def test_without_wal_the_journal_is_one_file(path: Path) -> None:
    journal = Journal(path, wal=False)
    journal.start()
    journal.event(event(1))
    assert journal.close()
    with closing(schema.connect(path, read_only=True)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() != ("wal",)
