"""A damaged journal: what is whole is opened, what is broken is kept, and both are said."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rltop.daemon import salvage, schema, wal
from rltop.daemon.journal import Journal
from rltop.daemon.memory import Opened, open_journal
from rltop.errors import RltopError
from tests.daemon.test_journal import Problems, event, load, operation, values

EVENTS, POINTS = 3000, 1200


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed journal of several hundred pages."""
    path = tmp_path_factory.mktemp("whole") / "journal.sqlite"
    journal = Journal(path)
    journal.start()
    for eseq in range(1, EVENTS + 1):
        journal.event(event(eseq, f"line {eseq} " + "x" * 200))
    for step in range(POINTS):
        journal.point("a", step, float(step))
    journal.operation(operation("1", "done"))
    journal.state(1.0, "run", {"state": "running"})
    assert journal.close()
    return path


WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
from rltop.daemon.journal import Journal
written = []
journal = Journal(Path(sys.argv[1]), on_written=written.append)
journal.start()
for eseq in range(1, 301):
    journal.event({"eseq": eseq, "t": 0.0, "kind": "log", "level": "info", "text": f"line {eseq}", "source": "s"})
    while eseq % 50 == 0 and (not written or written[-1] < eseq):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal whose daemon was killed: six commits are in its write-ahead log."""
    path = tmp_path_factory.mktemp("killed") / "journal.sqlite"
    done = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("journal.sqlite-wal").stat().st_size > 0
    return path


def copy(journal: Path, to: Path) -> Path:
    for suffix in ("", "-wal"):
        if (source := journal.with_name(journal.name + suffix)).exists():
            shutil.copyfile(source, to / source.name)
    return to / journal.name


def opened(path: Path) -> Opened:
    return open_journal(path.parent, on_problem=lambda level, text: None)


def seqs(found: Opened) -> list[int]:
    return [event["eseq"] for event in found.restored.events]


def aside(path: Path) -> list[str]:
    return sorted(found.name.split("-")[-1] for found in path.parent.glob("journal.damaged-*"))


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_journal_gives_what_is_still_there(whole: Path, tmp_path: Path, part: float) -> None:
    path = copy(whole, tmp_path)
    os.truncate(path, int(path.stat().st_size * part))
    before = path.read_bytes()
    found = opened(path)
    ((level, text),) = found.remarks
    assert level == "error"
    assert "damaged" in text
    (kept,) = tmp_path.glob("journal.damaged-*.sqlite")
    assert kept.name in text
    assert kept.read_bytes() == before, "the damaged file is kept as it was"
    if part == 0.999:
        assert len(found.restored.events) >= EVENTS * 0.9
    elif part >= 0.5:
        assert found.restored.events, text
    assert all(event["text"].startswith(f"line {event['eseq']} ") for event in found.restored.events)
    assert opened(path).remarks == [], "the new one is whole"
    assert seqs(opened(path)) == seqs(found)


def test_a_broken_page_in_the_middle_costs_its_rows_and_no_others(whole: Path, tmp_path: Path) -> None:
    path = copy(whole, tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(os.urandom(4096))
    found = opened(path)
    got = seqs(found)
    assert 1 in got or found.series.keys() == ["a"]
    assert len(got) + len(values(found.series, "a")) >= (EVENTS + POINTS) * 0.9
    assert got == sorted(got)
    assert "are gone" in found.remarks[0][1]


@pytest.mark.parametrize("size", [0, 3000, 100_000])
def test_a_journal_of_garbage_is_kept_and_a_new_one_begun(tmp_path: Path, size: int) -> None:
    path = tmp_path / "journal.sqlite"
    garbage = os.urandom(size)
    path.write_bytes(garbage)
    found = opened(path)
    ((level, text),) = found.remarks
    assert level == "error"
    if size:
        (kept,) = tmp_path.glob("journal.damaged-*.sqlite")
        assert kept.read_bytes() == garbage
        assert "nothing of it could be read" in text
    else:
        assert "empty" in text
    assert opened(path).remarks == []


# ---------------------------------------------------------------- the write-ahead log


def test_a_log_that_a_killed_daemon_left_is_read_whole_and_in_silence(killed: Path, tmp_path: Path) -> None:
    found = opened(copy(killed, tmp_path))
    assert found.remarks == []
    assert seqs(found) == list(range(1, 301))


def test_a_reused_log_with_frames_of_an_earlier_generation_is_not_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(schema.connect(path)) as connection:
        schema.prepare(connection, path, wal=True)
        connection.execute("PRAGMA wal_autocheckpoint=0")
        for eseq in range(60):
            connection.execute("INSERT INTO events VALUES (?, 0, 'log', 'info', ?, 's', NULL)", (eseq, "x" * 900))
        connection.execute("PRAGMA wal_checkpoint(FULL)")
        connection.execute("INSERT INTO events VALUES (1000, 0, 'log', 'info', 'next generation', 's', NULL)")
        log = path.with_name("journal.sqlite-wal")
        assert log.stat().st_size > 100_000
        assert wal.inspect(log) is None
        # The same log with one bit turned in its newest frame is.
        data = bytearray(log.read_bytes())
        data[32 + 24 + 100] ^= 1
        torn = tmp_path / "torn-wal"
        torn.write_bytes(data)
        assert wal.inspect(torn) is not None


def half(data: bytes) -> bytes:
    return data[: len(data) - 2000]


def zeros(data: bytes) -> bytes:
    return data[:-3000] + bytes(3000)


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


def garbage(data: bytes) -> bytes:
    return os.urandom(len(data))


@pytest.mark.parametrize(("damage", "least"), [(half, 250), (zeros, 250), (flipped, 0), (garbage, 0)])
def test_a_torn_log_gives_its_whole_transactions_and_is_kept(
    killed: Path, tmp_path: Path, damage: Callable[[bytes], bytes], least: int
) -> None:
    path = copy(killed, tmp_path)
    log = path.with_name("journal.sqlite-wal")
    broken = damage(log.read_bytes())
    log.write_bytes(broken)
    found = opened(path)
    ((level, text),) = found.remarks
    assert (level, "torn" in text) == ("error", True)
    (kept,) = tmp_path.glob("journal.damaged-*-wal")
    assert kept.name in text
    assert kept.read_bytes() == broken
    got = seqs(found)
    assert got == list(range(1, len(got) + 1))
    assert len(got) % 50 == 0, "transactions are whole or not there"
    assert len(got) >= least
    assert opened(path).remarks == []


# ---------------------------------------------------------------- newer, and other


def test_a_newer_journal_with_a_log_is_not_touched(killed: Path, tmp_path: Path) -> None:
    path = copy(killed, tmp_path)
    with closing(schema.connect(path)) as connection:
        schema.set_meta(connection, "schema_version", 99)
        data = {suffix: path.with_name(path.name + suffix).read_bytes() for suffix in ("", "-wal")}
    for suffix, content in data.items():  # as if its daemon had been killed: closing has tidied up
        path.with_name(path.name + suffix).write_bytes(content)
    with pytest.raises(RltopError, match="newer rltop"):
        opened(path)
    for suffix, content in data.items():
        assert path.with_name(path.name + suffix).read_bytes() == content, suffix


# ---------------------------------------------------------------- while it runs, and half mended


def test_a_journal_that_breaks_while_it_is_written_is_mended_at_once(whole: Path, tmp_path: Path) -> None:
    path, problems = copy(whole, tmp_path), Problems()
    found = open_journal(tmp_path, on_problem=problems)
    with path.open("r+b") as file:  # everything but the first page
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    found.journal.start()
    for eseq in range(EVENTS + 1, EVENTS + 11):
        found.journal.event(event(eseq))
    assert found.journal.close()
    assert "kept as" in problems.seen[0][1]
    assert [e["eseq"] for e in load(path)[0].events][-10:] == list(range(EVENTS + 1, EVENTS + 11))
    assert len(list(tmp_path.glob("journal.damaged-*.sqlite"))) == 1


@pytest.mark.parametrize("moved", [False, True])
def test_a_daemon_killed_while_it_mends_loses_nothing(whole: Path, tmp_path: Path, moved: bool) -> None:
    path = copy(whole, tmp_path)
    fresh = path.with_name("journal.mending.sqlite")
    if moved:  # the damaged one is aside, the new one is finished, but not in its place
        path.rename(fresh)
    else:
        fresh.write_bytes(b"half of a file")
    found = opened(path)
    assert found.remarks == []
    assert len(values(found.series, "a")) == POINTS
    assert not fresh.exists()


def test_when_the_new_one_can_not_be_written_the_damaged_one_stays(whole: Path, tmp_path: Path) -> None:
    path = copy(whole, tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    before = path.read_bytes()

    def full(path: Path) -> sqlite3.Connection:
        connection = schema.connect(path)
        connection.execute("PRAGMA max_page_count = 30")
        return connection

    with pytest.raises(sqlite3.OperationalError, match="full"):
        salvage.mend(path, wal=True, connect=full)
    assert path.read_bytes() == before
    assert aside(path) == []
