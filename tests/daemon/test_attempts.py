"""A name that is started again: a new attempt, in which nothing of the one before stands as if it were new."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rltop.runs import RunInfo
from tests.cli.conftest import rltop, runs_dir
from tests.daemon.util import Producer, Viewer, real_daemon

__all__ = ["runs_dir"]
RUN = {"framework": "rltop", "args": {}, "mode": "full", "start_rollout_id": 0}
SLEEP = ["sleep", "600"]


def bad_steps(run: RunInfo, steps: int = 3) -> None:
    """Training with NaN, until its verdict is there and on disk."""
    with Producer(run) as producer, Viewer(run) as viewer:
        producer.send("run", RUN)
        for step in range(steps):
            values = {"train/grad_norm": float("nan"), "train/loss": 1.0}
            producer.send("metrics", {"values": values, "step": step, "axis": "train", "rollout_id": step})
            producer.metrics(step, rollout__raw_reward=0.25)
        viewer.hello()
        viewer.until_state(lambda state: state["checks"]["summary"]["fail"])
        viewer.until_event(kind="verdict", id="train.nan")


def kill(run: RunInfo) -> None:
    os.kill(run.pid, signal.SIGKILL)
    os.waitpid(run.pid, 0)


def standing(viewer: Viewer) -> list[str]:
    """Keys that say something about a trainer."""
    kinds = ("check/", "metric/", "engine/", "source/", "checks", "samples", "weights", "phase")
    return [key for key in viewer.state if key.startswith(kinds)]


def test_a_new_attempt_begins_with_no_verdict_of_the_one_before(runs_dir: Path) -> None:
    with real_daemon(runs_dir, "again-1", trainer=SLEEP) as run:
        bad_steps(run)
    with real_daemon(runs_dir, "again-1", trainer=SLEEP) as run, Viewer(run) as viewer:
        viewer.hello()
        viewer.until_state(lambda state: state["trainer"]["state"] == "running")
        assert standing(viewer) == []
        assert viewer.state["run"]["attempt"] == 2
        assert viewer.state["run"]["state"] == "waiting"
        before = viewer.state["previous"]
        assert (before["attempt"], before["state"], before["rollout"]) == (1, "interrupted", 2)
        assert before["root_causes"] == ["train.nan"]
        told = viewer.until_event(kind="run", attempt=2)["text"]
        assert told.startswith("attempt 2 of this run begins; attempt 1 interrupted (")
        assert told.endswith("its verdicts are put away: 1 fail (train.nan)")
        # Its history is still there, and the new curve begins where the new trainer does.
        assert [event["id"] for event in viewer.event_page(kinds=["verdict"]).events].count("train.nan") >= 1
        assert len(viewer.series(["rollout/raw_reward"])[0].cols) == 1
        with Producer(run) as producer:
            producer.send("run", RUN)
            producer.metrics(0, rollout__raw_reward=0.75)
        viewer.until_state(lambda state: state["metric/rollout/raw_reward"]["value"] == 0.75)
        assert viewer.state["metric/rollout/raw_reward"]["nan"] == 0
        assert viewer.series(["rollout/raw_reward"])[0].cols["rollout/raw_reward"]["n"] == 1
        viewer.until_state(lambda state: state["checks"])
        assert viewer.state["check/train.nan"]["status"] == "skip"
    assert "attempt 2; the one before: interrupted" in rltop("attach", "--once", "again-1").stdout


def test_a_killed_daemon_in_a_new_attempt_brings_back_nothing_of_the_old_one(runs_dir: Path) -> None:
    """The trainer of attempt 2 has said nothing yet when its daemon dies and the next one adopts it."""
    with real_daemon(runs_dir, "again-1", trainer=SLEEP) as run:
        bad_steps(run)
    with real_daemon(runs_dir, "again-1", trainer=SLEEP) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            viewer.until_state(lambda state: state["trainer"]["state"] == "running")
            viewer.until_event(kind="run", attempt=2)
            pid = viewer.state["trainer"]["pid"]
        kill(run)
    with real_daemon(runs_dir, "again-1", trainer=SLEEP) as run, Viewer(run) as viewer:
        viewer.hello()
        viewer.until_state(lambda state: state["trainer"]["state"] == "running")
        assert viewer.state["trainer"]["pid"] == pid, "adopted: the same attempt goes on"
        assert viewer.state["run"]["attempt"] == 2
        with Producer(run) as producer:
            producer.send("run", RUN)
            producer.metrics(1, rollout__raw_reward=0.5)
        viewer.until_state(lambda state: state["checks"])
        assert viewer.state["check/train.nan"]["status"] == "skip"
        assert viewer.series(["rollout/raw_reward"])[0].cols["rollout/raw_reward"]["n"] == 2, "steps 0 and 1"


@pytest.mark.parametrize("trainer", [None, SLEEP])
def test_a_daemon_that_only_comes_back_goes_on_with_the_attempt(runs_dir: Path, trainer: list[str] | None) -> None:
    with real_daemon(runs_dir, "again-1", trainer=trainer) as run:
        bad_steps(run)
        kill(run)
    with real_daemon(runs_dir, "again-1", trainer=trainer) as run, Viewer(run) as viewer:
        viewer.hello()
        viewer.until_state(lambda state: state["check/train.nan"]["status"] == "fail")
        assert viewer.state["run"]["attempt"] == 1
        assert "previous" not in viewer.state
