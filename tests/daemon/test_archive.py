"""A run whose daemon is gone is shown from its journal, by nothing that stays, and nothing in its directory changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rltop.client import Client, local_client
from rltop.daemon import schema, spawn
from rltop.daemon.journal import Journal
from rltop.daemon.past import end_from, end_of, open_past, state_of
from rltop.errors import RltopError
from rltop.runs import RunInfo, read_run
from tests.cli.conftest import rltop, runs_dir
from tests.daemon.util import PATIENCE_S, Producer, real_daemon, wait_for

__all__ = ["runs_dir"]


def killed(run: RunInfo) -> RunInfo:
    """The run after its daemon was killed."""
    os.kill(run.pid, signal.SIGKILL)
    os.waitpid(run.pid, 0)
    found = read_run(run.path)
    assert found is not None
    return found


@pytest.fixture
def dead(runs_dir: Path) -> Iterator[RunInfo]:
    """A run with 600 points and one verdict, whose daemon was killed in the middle of it."""
    with real_daemon(runs_dir, "dead-1") as run:
        with Producer(run) as producer:
            producer.send("run", {"framework": "rltop", "args": {"lr": 0.1}, "mode": "full", "start_rollout_id": 0})
            for step in range(600):
                producer.metrics(step, rollout__raw_reward=step / 600, train__grad_norm=0.5)
            producer.send("log", {"level": "info", "text": "the last line"})
        wait_for(lambda: "the last line" in rltop("get", "events", "--run", "dead-1").stdout)
        yield killed(run)


def files(run: RunInfo) -> dict[str, int]:
    """Name -> size of what a reader must not change; the index of a write-ahead log is SQLite's own."""
    return {
        str(path.relative_to(run.path)): path.stat().st_size
        for path in run.path.rglob("*")
        if path.is_file() and not path.name.endswith("-shm")
    }


def test_what_a_killed_daemon_left_is_shown_and_not_changed(dead: RunInfo) -> None:
    before = files(dead)
    shown = rltop("attach", "--once", "dead-1")
    assert shown.returncode == 0, shown.stderr
    assert "run dead-1  lost  rltop  full" in shown.stdout
    assert "the daemon was killed or its machine went down; the run was running then" in shown.stdout
    assert "the last line" in shown.stdout
    answer = json.loads(rltop("get", "series", "rollout/raw_reward", "--run", "dead-1", "--json").stdout)
    assert answer["run"] == "dead-1"
    assert answer["series"]["rollout/raw_reward"]["last"][-1] == pytest.approx(599 / 600)
    state = json.loads(rltop("attach", "--once", "--json", "dead-1").stdout)["state"]
    assert state["archive"]["state"] == state["run"]["state"] == "lost"
    assert state["run"]["ended"] == pytest.approx(state["run"]["started"], abs=60)
    assert files(dead) == before


def test_a_dead_run_cannot_be_controlled(dead: RunInfo) -> None:
    ended = rltop("proxy", "--stdio", "--role", "control", "dead-1")
    assert ended.returncode == 1
    assert "nothing to control" in ended.stderr


def test_its_viewer_goes_over_to_the_daemon_that_takes_the_run_up_and_back(dead: RunInfo) -> None:
    async def until_archive(client: Client, expected: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while client.status != "live" or ("archive" in client.mirror.state) is not expected:
                await client.wait_change()

    async def look() -> None:
        client = local_client(dead)
        task = asyncio.ensure_future(client.run())
        try:
            await until_archive(client, True)
            run = await asyncio.to_thread(spawn.start_daemon, "dead-1")
            await until_archive(client, False)
            assert client.mirror.state["metric/rollout/raw_reward"]["step"] == 599
            await asyncio.to_thread(killed, run)
            await until_archive(client, True)
        finally:
            await client.close()
            await task

    asyncio.run(look())


def test_a_log_that_cannot_be_read_in_place_is_read_in_a_copy(
    dead: RunInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a read-only disk; root may write anywhere
    before = files(dead)
    with open_past(dead.path, temp=tmp_path) as opened:
        assert tmp_path in opened.path.parents
        assert state_of(opened.connection, ["metric/rollout/raw_reward"])["metric/rollout/raw_reward"]["step"] == 599
    assert list(tmp_path.iterdir()) == []
    assert files(dead) == before


def test_a_journal_of_an_older_schema_is_migrated_in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "old-1"
    run.mkdir()
    journal = Journal(run / "journal.sqlite")
    journal.start()
    journal.state(1.0, "run", {"state": "done", "text": "", "ended": 1.0})
    assert journal.close()
    newer = (*schema.MIGRATIONS, ["CREATE TABLE of_the_future (x)"])
    monkeypatch.setattr(schema, "SCHEMA_VERSION", len(newer))
    monkeypatch.setitem(schema.prepare.__kwdefaults__ or {}, "migrations", newer)
    with open_past(run, temp=tmp_path) as opened:
        assert opened.path != run / "journal.sqlite"
        assert end_of(opened.connection, run).state == "done"
        assert opened.connection.execute("SELECT count(*) FROM of_the_future").fetchone() == (0,)
    with closing(schema.connect(run / "journal.sqlite", read_only=True)) as connection:
        assert schema.version(connection, run) == len(newer) - 1


def test_a_trainer_that_outlived_its_daemon_is_no_dead_run(runs_dir: Path) -> None:
    with real_daemon(runs_dir, "orphan-1", trainer=["sleep", "600"]) as run:
        wait_for(lambda: '"trainer"' in rltop("attach", "--once", "--json", "orphan-1").stdout)
        killed(run)
        with open_past(run.path) as opened:
            trainer = state_of(opened.connection, ["trainer"])["trainer"]
            assert end_of(opened.connection, run.path).state == "orphaned"
        os.kill(trainer["pid"], signal.SIGKILL)
        with open_past(run.path) as opened:
            wait_for(lambda: end_of(opened.connection, run.path).state == "failed")
            end = end_of(opened.connection, run.path)
        assert end.text == "the trainer ended while no daemon was there: the trainer ended with SIGKILL"


@pytest.mark.parametrize(
    ("run", "config", "state", "words"),
    [
        ({}, {}, "done", "it had no trainer"),
        ({"state": "running"}, {"watch": {"engines": []}}, "done", "rltop only watched it, and it may go on"),
        ({"state": "running"}, {}, "lost", "nobody saw its end"),
    ],
)
def test_a_run_that_had_no_end_to_miss_is_not_lost(
    tmp_path: Path, run: dict[str, str], config: dict[str, object], state: str, words: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    end = end_from(run, {}, tmp_path, last=7.0, daemon_said="the daemon got SIGTERM and stops")
    assert (end.state, end.ended) == (state, 7.0)
    assert words in end.text
    assert end_from(run, {}, tmp_path, last=7.0).state == "lost", "killed: nobody was asked to stop it"


@pytest.mark.parametrize("broken", ["missing", "damaged", "foreign", "newer"])
def test_a_journal_that_cannot_be_read_is_one_error(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "journal.sqlite"
    match broken:
        case "damaged":
            path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
        case "foreign":
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("CREATE TABLE cats (name)")
        case "newer":
            with closing(schema.connect(path)) as connection:
                schema.prepare(connection, path, wal=False)
                schema.set_meta(connection, "schema_version", 999)
    with pytest.raises(RltopError) as caught, open_past(tmp_path) as opened:
        end_of(opened.connection, tmp_path)
    assert str(tmp_path) in caught.value.where
    assert caught.value.why
