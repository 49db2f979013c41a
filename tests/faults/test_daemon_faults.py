"""Rows of the fault table: the daemon dies, stops, and finds its journal or another daemon in its way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rltop import runs
from rltop.client import local_client
from rltop.daemon import schema, spawn
from rltop.daemon.journal import Journal
from rltop.daemon.trainer_job import MARKER, RECORD
from tests.daemon.util import Viewer, real_daemon, wait_for
from tests.faults.table import Row
from tests.faults.world import Trainer, alive, journal_events, journal_message, kill, kill_daemon, missing, seen
from tests.faults.world import stop_process as sigstop

STOP_S = 3.0
CALL_S = 1.0
"""Bound for one step's reports on a machine that may be very busy; waiting for the daemon would take all of STOP_S."""


def test_daemon_killed_and_started_again(tmp_path: Path, row: Row) -> None:
    row.begin("daemon kill -9", "twice at a random moment under load, then started again")
    trainer, shown = Trainer(tmp_path), 0
    with real_daemon(tmp_path, trainer=trainer.argv) as run:
        pid = 0
        for life in range(2):
            with Viewer(run) as viewer:
                viewer.hello()
                shown += seen(viewer, 60 + 17 * life)
                viewer.until_state(lambda s: s["trainer"]["state"] == "running" and "engine/0" in s)
                assert viewer.state["trainer"]["pid"] == (pid or viewer.state["trainer"]["pid"])
                pid = viewer.state["trainer"]["pid"]
                kill_daemon(run)
                assert missing(viewer, run.path) == [], "an event that was shown must be on disk"
            steps = trainer.goes_on()
            run = spawn.start_daemon("t-1", trainer=trainer.argv)
        with Viewer(run) as viewer:
            viewer.hello()
            again = viewer.until_event(kind="run", text=f"found the trainer again: process {pid}")
            started = next(e["text"] for e in viewer.events if "from its journal" in e["text"])
            viewer.until_state(lambda s: s["engine/0"]["state"] == "HEALTHY")
            kill(pid)
            failed = viewer.until_state(lambda s: s["run"]["state"] == "failed")
            assert failed["trainer"]["exit_code"] == -9, "also an adopted trainer has an exit code"
        spawn.stop_daemon(run)
    row.say(
        went_on=f"yes, {steps} steps without a daemon; trainer and its engine adopted",
        kept=f"all of {shown} shown",
        message=f"{started}; {again['text']}",
    )


def test_a_reused_pid_is_left_alone(tmp_path: Path, row: Row) -> None:
    row.begin("daemon kill -9, pid reused", "the trainer's pid and marker given to another process")
    trainer = Trainer(tmp_path)
    with real_daemon(tmp_path, trainer=trainer.argv) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            seen(viewer, 10)
            viewer.until_state(lambda s: s.get("trainer", {}).get("state") == "running")
            old = viewer.state["trainer"]["pid"]
            kill_daemon(run)
        record = json.loads((run.path / RECORD).read_text())
        kill(old)
        wait_for(lambda: "code" in json.loads((run.path / RECORD).read_text()))
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, MARKER: record["marker"]}
        ) as stranger:
            # As if the machine had gone down before the keeper could write: the record is that of a living trainer.
            (run.path / RECORD).write_text(json.dumps({**record, "pid": stranger.pid}))
            run = spawn.start_daemon("t-1")
            with Viewer(run) as viewer:
                viewer.hello()
                viewer.until_state(lambda s: s["run"]["state"] == "lost")
                assert viewer.state["trainer"]["state"] == "gone"
                text = viewer.state["run"]["text"]
            spawn.stop_daemon(run)
            assert stranger.poll() is None, "the stranger must not be touched"
            stranger.kill()
    row.say(went_on="the stranger, yes: not adopted, not stopped", kept="all", message=text)


async def test_daemon_stopped_and_continued(tmp_path: Path, row: Row) -> None:
    row.begin("daemon SIGSTOP", f"for {STOP_S:.0f} s, then SIGCONT")
    trainer = Trainer(tmp_path)
    with real_daemon(tmp_path, trainer=trainer.argv) as run:
        client = local_client(run)
        task = asyncio.ensure_future(client.run())
        try:
            await client.wait_live(20)
            async with asyncio.timeout(20):
                while "metric/rollout/raw_reward" not in client.mirror.state:
                    await client.wait_change()
            sigstop(run.pid)
            step = trainer.step
            await asyncio.sleep(STOP_S)  # what is tested is a stop of that length
            age = time.monotonic() - client.since
            steps = trainer.step - step
            os.kill(run.pid, signal.SIGCONT)
            assert age > STOP_S - 1.5, "the viewer knows how old its picture is"
            newest = trainer.step
            async with asyncio.timeout(20):
                while client.mirror.state["metric/rollout/raw_reward"]["step"] < newest:
                    await client.wait_change()
            assert client.status == "live"
            assert time.monotonic() - client.since < 2
            async with asyncio.timeout(20):
                while client.mirror.state["source/trainer/0"]["records"] < 3 * newest:
                    await client.wait_change()
            source = client.mirror.state["source/trainer/0"]
            assert (source["lost"], client.mirror.gaps) == (0, [])
        finally:
            await client.close()
            task.cancel()
        assert steps > 10, "the trainer does not wait"
        assert trainer.slowest_s < CALL_S
        assert trainer.errors == 0
    row.say(
        went_on=f"yes, {steps} steps meanwhile, slowest report {trainer.slowest_s * 1000:.0f} ms",
        kept="all (0 records lost)",
        message=f"picture is {age:.1f} s old, then live again",
    )


# ---------------------------------------------------------------- its journal


def cut_short(journal: Path) -> None:
    with closing(schema.connect(journal)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.truncate(journal, journal.stat().st_size * 3 // 4)


def torn(journal: Path) -> None:
    log = journal.with_name(journal.name + "-wal")
    os.truncate(log, log.stat().st_size - 1500)


def garbage(journal: Path) -> None:
    journal.write_bytes(os.urandom(journal.stat().st_size))


@pytest.mark.parametrize(
    ("fault", "done", "damage", "words", "least"),
    [
        ("journal: torn log", "kill -9, last 1,500 bytes of the log cut off", torn, "torn", 0.9),
        ("journal: truncated file", "kill -9, last quarter of the file cut off", cut_short, "damaged", 0.3),
        ("journal: garbage", "kill -9, file overwritten with noise", garbage, "damaged", 0.0),
    ],
)
def test_a_broken_journal(
    tmp_path: Path, row: Row, fault: str, done: str, damage: Callable[[Path], None], words: str, least: float
) -> None:
    row.begin(fault, done)
    trainer = Trainer(tmp_path)
    fill(tmp_path / "runs" / "t-1")
    with real_daemon(tmp_path, trainer=trainer.argv) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            viewer.until(lambda message: viewer.eseq > 2080)
            before = journal_events(run.path)
            pid = viewer.until_state(lambda s: s["trainer"]["pid"])["trainer"]["pid"]
            kill_daemon(run)
        journal = run.path / "journal.sqlite"
        damage(journal)
        run = spawn.start_daemon("t-1", trainer=trainer.argv)
        with Viewer(run) as viewer:
            viewer.hello()
            message = journal_message(viewer, words)
            viewer.until_state(lambda s: s["trainer"]["state"] == "running" and s["daemon"]["journal"] == "ok")
            assert viewer.state["trainer"]["pid"] == pid, "the trainer is found though its journal is gone"
            steps = trainer.goes_on()
        aside = list(run.path.glob("journal.damaged-*"))
        assert aside
        assert any(path.name in message for path in aside)
        after = journal_events(run.path)
        kept = sum(after.get(eseq) == text for eseq, text in before.items())
        assert kept >= len(before) * least, message
        spawn.stop_daemon(run)
    where = f"{kept} of {len(before)}, the rest is in {aside[0].name}"
    row.say(went_on=f"yes, {steps} steps", kept=where, message=message)


def fill(run_dir: Path) -> None:
    """A history of some hundred pages, so that a part of it is something."""
    run_dir.mkdir(parents=True, mode=0o700)
    journal = Journal(run_dir / "journal.sqlite")
    journal.start()
    for eseq in range(1, 2001):
        text = f"long ago {eseq}"
        journal.event({"eseq": eseq, "t": 0.0, "kind": "log", "level": "info", "text": text, "source": "s"})
    assert journal.close()


def test_a_newer_journal(tmp_path: Path, row: Row) -> None:
    row.begin("journal: newer schema", "a journal of schema version 99")
    run_dir = runs.private_dir(tmp_path / "t-1")
    journal = run_dir / "journal.sqlite"
    with closing(schema.connect(journal)) as connection:
        schema.prepare(connection, journal, wal=True)
        schema.set_meta(connection, "schema_version", 99)
    before = journal.read_bytes()
    argv = [sys.executable, "-m", "rltop.daemon", "--run-dir", str(run_dir)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "newer rltop" in done.stderr
    assert journal.read_bytes() == before
    assert not list(run_dir.glob("journal.damaged*"))
    row.say(went_on="refused, exit 2", kept="the file is untouched", message=" ".join(done.stderr.split()))


def test_two_daemons(tmp_path: Path, row: Row) -> None:
    row.begin("two daemons", "a second one started for the same run")
    trainer = Trainer(tmp_path)
    with real_daemon(tmp_path, trainer=trainer.argv) as run, Viewer(run) as viewer:
        viewer.hello()
        seen(viewer, 5)
        argv = [sys.executable, "-m", "rltop.daemon", "--run-dir", str(run.path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert f"process {run.pid}" in done.stderr
        seen(viewer, 20)
        steps = trainer.goes_on()
        assert missing(viewer, run.path) == []
    row.say(went_on=f"yes, {steps} steps; the second: exit 2", kept="all", message=" ".join(done.stderr.split()))


def test_the_trainer_ends_while_no_daemon_is_there(tmp_path: Path, row: Row) -> None:
    row.begin("trainer ends, no daemon", "daemon kill -9, then the trainer exits with code 3, then a new daemon")
    argv = [sys.executable, "-c", "print('out of luck'); input_ = __import__('time').sleep(1.5); raise SystemExit(3)"]
    with real_daemon(tmp_path, trainer=argv) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            pid = viewer.until_state(lambda s: s["trainer"]["state"] == "running")["trainer"]["pid"]
            viewer.until(lambda message: message.header.t == "tick")
            kill_daemon(run)
        wait_for(lambda: not alive(pid))
        run = spawn.start_daemon("t-1")
        with Viewer(run) as viewer:
            viewer.hello()
            viewer.until_state(lambda s: s["run"]["state"] == "failed")
            assert viewer.state["trainer"]["exit_code"] == 3
            text = viewer.state["run"]["text"]
            assert "code 3" in text
            assert "out of luck" in text
        spawn.stop_daemon(run)
    row.say(went_on="it had ended", kept="all, and the exit code", message=text)


@pytest.mark.soak
def test_a_journal_that_somebody_locks_withholds_nothing(tmp_path: Path) -> None:
    """No row of its own: a disk that hangs, as far as a test can make one."""
    trainer = Trainer(tmp_path)
    with real_daemon(tmp_path, trainer=trainer.argv) as run, Viewer(run) as viewer:
        viewer.hello()
        seen(viewer, 5)
        with closing(sqlite3.connect(run.path / "journal.sqlite", isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            viewer.until_state(lambda s: s["daemon"]["journal"] != "ok")
            seen(viewer, 20)
            connection.execute("ROLLBACK")
        viewer.until_state(lambda s: s["daemon"]["journal"] == "ok")
        wait_for(lambda: not missing(viewer, run.path))
