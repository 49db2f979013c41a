"""How much a journal keeps: rows, age and bytes, for every table, by default and by the user's settings."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rltop.daemon import replay, schema
from rltop.daemon.journal import CHUNK_POINTS, Journal
from rltop.daemon.retention import prune
from rltop.settings import JournalLimit

TABLES = ["events", "verdicts", "operations", "clients", "series", "records:samples"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def event(eseq: int, text: str = "x", t: float = 1.0) -> dict[str, Any]:
    return {"eseq": eseq, "t": t, "kind": "log", "level": "info", "text": text, "source": "s"}


def write(path: Path, limits: dict[str, JournalLimit], *, times: int, pad: int = 0) -> list[str]:
    """A row into every table `times` times; returns what the journal said."""
    said: list[str] = []
    journal = Journal(path, limits=limits, on_problem=lambda level, text: said.append(f"{level} {text}"))
    journal.start()
    fill = "x" * pad
    for number in range(1, times + 1):
        t = float(number)
        journal.event(event(number, fill, t))
        journal.verdict(t, {"id": "train.nan", "status": "fail", "cause": fill}, None)
        journal.operation(
            {"op": str(number), "cmd_id": str(number), "t": t, "name": "note", "target": "", "args": {}, "who": "a"}
            | {"role": "control", "reason": "", "state": "done", "stage": "", "percent": None, "text": fill}
        )
        journal.client(t, "hello", "view", "ana" + fill, "x")
        journal.record(t, "samples", "trainer/0", {"text": fill})
        for point in range(CHUNK_POINTS):
            journal.point("a", number * CHUNK_POINTS + point, 1.0)
    assert journal.close(60)
    return said


def counts(path: Path) -> dict[str, int]:
    with closing(schema.connect(path, read_only=True)) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table.partition(':')[0]}").fetchone()[0]
            for table in TABLES
        }


def test_rows(path: Path) -> None:
    said = write(path, {table: JournalLimit(rows=20) for table in TABLES}, times=50)
    assert all(20 <= count <= 23 for count in counts(path).values()), counts(path)
    assert any(
        text.startswith("info the journal dropped its ") and "oldest events (kept: 20 rows)" in text for text in said
    )
    with closing(schema.connect(path, read_only=True)) as connection:
        assert connection.execute("SELECT max(eseq) FROM events").fetchone() == (50,), "the newest stay"
        steps, _ = replay.points(connection, "a")
        assert steps[-1] == 51 * CHUNK_POINTS - 1


def test_bytes(path: Path) -> None:
    write(path, {table: JournalLimit(bytes=20_000) for table in TABLES}, times=60, pad=1000)
    for table, count in counts(path).items():
        if table != "series":  # a chunk of equal values is small
            assert 15 <= count <= 24, (table, count)


@pytest.mark.parametrize("table", TABLES)
def test_age(path: Path, table: str) -> None:
    write(path, {}, times=10)
    with closing(schema.connect(path)) as connection:
        connection.execute("UPDATE series SET t = id")
        assert prune(connection, table, JournalLimit(age_s=4.5), now=10.0) == 5
        assert prune(connection, table, JournalLimit(age_s=4.5), now=10.0) == 0
    assert counts(path)[table] == 5


def test_no_limit_drops_nothing(path: Path) -> None:
    assert write(path, {table: JournalLimit() for table in TABLES}, times=30) == []
    assert set(counts(path).values()) == {30}


def test_a_journal_has_limits_of_its_own(path: Path) -> None:
    write(path, {}, times=1)
    with closing(schema.connect(path, read_only=True)) as connection:
        kept = {row[0]: row[1:] for row in connection.execute("SELECT * FROM retention")}
    assert kept["events"] == (200_000, None, 256_000_000)
    assert kept["series"] == (None, None, 1_000_000_000)


def test_what_an_earlier_daemon_left_over_the_limit_goes_with_the_first_row(path: Path) -> None:
    write(path, {}, times=30)
    journal = Journal(path, limits={"events": JournalLimit(rows=10)})
    journal.start()
    journal.event(event(31))
    assert journal.close()
    assert counts(path)["events"] == 10
