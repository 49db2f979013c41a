"""`demo --headless` follows a run to its end and judges it; here a producer plays the trainer for a real daemon."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rltop.cli.headless import Outcome, Progress, follow
from rltop.cli.main import main
from rltop.client import Mirror
from tests.client.model import ModelDaemon, messages
from tests.client.router import small_run
from tests.daemon.util import Producer, real_daemon


def play(producer: Producer, *, reason: str, text: str = "") -> None:
    """A run of three rollouts."""
    producer.send("run", {"framework": "rltop", "num_rollout": 3, "stand_ins": ["CPU engine"]})
    producer.send("phase", {"name": "start", "edge": "enter"})
    for step in range(3):
        values = {"rollout/raw_reward": 0.25 * (step + 1), "train/ppo_kl": 0.0 if step == 0 else 0.5}
        producer.send("metrics", {"values": values, "step": step, "axis": "rollout", "rollout_id": step})
    producer.send("bye", {"reason": reason, "text": text})


def test_a_run_that_is_done_is_0_and_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(tmp_path) as run, Producer(run) as producer:
        play(producer, reason="done")
        assert follow(run, began=time.monotonic(), as_json=True) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["schema"], found["run"], found["state"]) == (1, "t-1", "done")
    assert found["rewards"] == [0.25, 0.5, 0.75]
    assert found["final_reward"] == 0.5
    assert found["first_rollout"]["ppo_kl"] == 0.0
    assert found["first_rollout"]["ref_log_probs"] is None, "not reported is not zero"
    assert found["stand_ins"] == ["CPU engine"]
    assert "run t-1 is done after" in err
    assert "rollout 2 of 3  reward 0.75" in err


def test_a_run_that_failed_is_1_and_its_log_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(tmp_path) as run, Producer(run) as producer:
        (run.path / "trainer.log").write_text("loading\nOut of memory: 3 GiB asked\n")
        play(producer, reason="failed", text="worker died")
        assert follow(run, began=time.monotonic(), as_json=False) == 1
    err = capsys.readouterr().err
    assert "run t-1 is failed" in err
    assert "  Out of memory: 3 GiB asked" in err


def test_a_failed_check_is_1_even_when_the_run_is_done() -> None:
    checks = {"train.nan": {"status": "fail"}, "kl.on-policy": {"status": "pass"}}
    outcome = Outcome("a", "done", "", 1.0, [0.9], checks, [], {})
    assert outcome.failed == ["train.nan"]
    assert not outcome.ok


def test_progress_tells_everything_once() -> None:
    daemon, mirror = ModelDaemon(), Mirror()
    small_run(daemon)
    for message in messages(daemon.welcome()):
        mirror.apply(message)
    progress = Progress(began=100.0)
    assert progress.lines(mirror, 112.0) == ["   12 s  rollout 3 of 10  reward 0.5  grad_norm NaN"]
    assert progress.lines(mirror, 113.0) == []


def test_without_a_terminal_the_demo_says_headless(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 2
    assert "rltop demo --headless" in capsys.readouterr().err
