"""`rltop ps` and `rltop down`: what is said of runs, living and dead, is true at the moment when it is said."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltop.cli.main import main
from rltop.cli.output import size
from rltop.cli.ps import engine_trouble, lines
from rltop.daemon import spawn
from rltop.runs import RunInfo, read_run
from tests.cli.conftest import rltop
from tests.daemon.util import Producer, Viewer, real_daemon, wait_for


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict[str, Any]]:
    """`ps --json` by name."""
    capsys.readouterr()
    assert main(["ps", "--json", *args]) == 0
    return {row["run"]: row for row in json.loads(capsys.readouterr().out)["runs"]}


def trained(run: RunInfo, *, reward: float, grad_norm: float) -> None:
    """Three steps of training, seen by the checks."""
    with Producer(run) as producer, Viewer(run) as viewer:
        producer.send("run", {"framework": "rltop", "args": {}, "mode": "full", "start_rollout_id": 0})
        for step in range(3):
            values = {"train/grad_norm": grad_norm, "train/loss": grad_norm}
            producer.send("metrics", {"values": values, "step": step, "axis": "train", "rollout_id": step})
            producer.metrics(step, rollout__raw_reward=reward)
        viewer.hello()
        wanted = "fail" if grad_norm != grad_norm else "pass"
        viewer.until_state(lambda state: state["check/train.nan"]["status"] == wanted)
        viewer.until_state(lambda state: state["checks"]["summary"][wanted])


def test_dead_runs_tell_how_they_ended(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(runs_dir, "good-1") as run:
        trained(run, reward=0.5, grad_norm=1.0)
        with Producer(run) as producer:
            producer.send("bye", {"reason": "done"})
        with Viewer(run) as viewer:
            viewer.hello()
            viewer.until_state(lambda state: state["run"]["state"] == "done")
    with real_daemon(runs_dir, "bad-2") as run:
        trained(run, reward=0.25, grad_norm=float("nan"))
        assert rows(capsys)["bad-2"]["root_causes"] == ["train.nan"]
        os.kill(run.pid, signal.SIGKILL)
        os.waitpid(run.pid, 0)
    journaled = rows(capsys, "--all")["bad-2"]["ended"]
    os.utime(run.path / "lock", (journaled + 20, journaled + 20))  # it lived on and had nothing to write
    assert rows(capsys) == {}
    found = rows(capsys, "--all")
    good, bad = found["good-1"], found["bad-2"]
    assert (good["state"], good["rollout"], good["reward"], good["fail"]) == ("done", 2, 0.5, 0)
    assert (bad["state"], bad["rollout"], bad["reward"], bad["fail"]) == ("lost", 2, 0.25, 1)
    assert bad["root_causes"] == ["train.nan"]
    assert "the daemon was killed" in bad["text"]
    assert bad["ended"] == journaled + 20
    for row in (good, bad):
        assert row["started"] <= row["ended"] <= row["started"] + 60
        assert row["bytes"] >= (Path(row["path"]) / "journal.sqlite").stat().st_size
        assert not row["alive"]
    assert main(["ps", "--all"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in shown[1:]] == [["bad-2", "lost", "2", "0.25"], ["good-1", "done", "2", "0.5"]]
    assert "1 fail: train.nan" in shown[1]


def test_one_unreadable_journal_costs_only_its_own_row(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a-1", "b-2"):
        with real_daemon(runs_dir, name):
            pass
    (runs_dir / "runs" / "a-1" / "journal.sqlite").write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    found = rows(capsys, "--all")
    assert (found["a-1"]["state"], found["a-1"]["problem"]) == ("dead", "cannot read the journal")
    assert found["b-2"]["problem"] is None


def test_down_is_said_when_nobody_sees_the_run_any_more(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(5):
        run = spawn.start_daemon(f"t-{number}", trainer=["sleep", "600"])
        process = psutil.Process(run.pid)
        assert rltop("down", run.name).stderr == f"run {run.name} is down\n"
        assert rows(capsys) == {}
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        os.waitpid(run.pid, 0)


def test_down_waits_for_a_daemon_that_is_just_starting(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is taken before it says its pid: that is not "no daemon"."""
    with real_daemon(runs_dir, "t-1") as run:
        lock = run.path / "lock"
        said = lock.read_text()
        lock.write_text("")
        naps: list[float] = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            lock.write_text(said)

        monkeypatch.setattr("rltop.daemon.spawn.time.sleep", nap)
        spawn.stop_daemon(run)
        assert naps
        found = read_run(run.path)
        assert found is not None
        assert not found.alive


def test_down_ends_a_trainer_that_outlived_its_daemon(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(runs_dir, "orphan-1", trainer=["sleep", "600"]) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            pid = viewer.until_state(lambda state: state["trainer"]["state"] == "running")["trainer"]["pid"]
        wait_for(lambda: rltop("get", "events", "--run", "orphan-1").returncode == 0)
        os.kill(run.pid, signal.SIGKILL)
        os.waitpid(run.pid, 0)
    assert rows(capsys, "--all")["orphan-1"]["state"] == "orphaned"
    assert main(["down", "orphan-1"]) == 0
    assert f"its trainer (process {pid}) is stopped" in capsys.readouterr().err
    wait_for(lambda: rows(capsys, "--all")["orphan-1"]["state"] == "interrupted")
    assert main(["down", "orphan-1"]) == 0
    assert "is not running" in capsys.readouterr().err


def test_in_a_narrow_terminal_the_reason_goes_below_its_run() -> None:
    why = "the daemon was killed\x1bor its machine"
    row = ["a-1", "lost", 3, 0.5, "1 fail: train.nan", "2m ago", "1 MB", None, why]
    wide, narrow = lines([row], None), lines([row], 70)
    assert len(wide) == 2
    assert wide[1].endswith("the daemon was killed or its machine")
    assert narrow[1].split()[:2] == ["a-1", "lost"]
    assert narrow[2] == "    the daemon was killed or its machine"
    assert all(len(line) <= 40 for line in lines([row], 40))
    flag = [*row[:-1], "exit code 2: unrecognized arguments: --load-debug-rollout-data"]
    assert lines([flag], 50)[-1] == "    --load-debug-rollout-data"
    assert lines([], 10)[0].startswith("run")


def test_an_engine_that_hangs_or_is_given_up_is_named_with_what_brings_it_back() -> None:
    state = {
        "engine/0": {"owner": "rltop", "state": "SUSPECT", "hung": True},
        "engine/1": {"owner": "rltop", "state": "QUARANTINED", "hung": False},
        "engine/2": {"owner": "rltop", "state": "HEALTHY", "hung": False},
        "engine/3": {"owner": "other", "state": "SUSPECT", "hung": True},
    }
    first, second = engine_trouble(state)
    assert first == "engine 0 hangs (rltop engine restart --engine 0)"
    assert second.endswith("(rltop engine start --engine 1)")


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_540_000, "1.5 MB"), (345_000_000, "345 MB")],
)
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text
