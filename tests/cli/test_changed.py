"""`rltop changed` on real runs: an external trainer, its arguments, environment and code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from rltop.daemon.past import open_past, state_of
from tests.cli.conftest import rltop
from tests.daemon.util import Viewer, real_daemon, wait_for

TRAINER = """
import sys, time
from rltop.reporter import Reporter
bad = "--bad" in sys.argv
with Reporter(role="trainer") as report:
    report.run(framework="mine", args={"lr": 1.0 if bad else 1e-6}, mode="full", start_rollout_id=0)
    for step in range(3):
        norm = float("nan") if bad else 0.5
        report.metrics({"train/grad_norm": norm, "train/loss": 1.0}, step=step, axis="train", rollout_id=step)
        report.metrics({"rollout/raw_reward": 0.3}, step=step)
    time.sleep(600)
"""


def trained(root: Path, name: str, *flags: str, **env: str) -> None:
    """A run of the trainer, judged and then stopped."""
    script = root / "train.py"
    script.write_text(TRAINER)
    command = [sys.executable, str(script), *flags]
    manifest = root / "runs" / name / "manifest.json"
    of_the_attempt_before = manifest.read_bytes() if manifest.exists() else b""
    with real_daemon(root, name, trainer=command, env=env, config={"env": list(env)}) as run:
        with Viewer(run) as viewer:
            viewer.hello()
            viewer.until_state(
                lambda state: state["check/train.nan"]["status"] == ("fail" if "--bad" in flags else "pass")
            )
            viewer.until_state(lambda state: state["metric/rollout/raw_reward"]["step"] == 2)
            if name == "bad-3":  # compared again when the checks found the cause
                viewer.until_state(lambda state: "train.nan" in state["changed"]["changes"][0]["why"])
        assert manifest.parent == run.path
        wait_for(lambda: manifest.exists() and manifest.read_bytes() != of_the_attempt_before)


def changed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["changed", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_since_the_last_good_run_and_between_attempts(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(runs_dir, "good-1", NCCL_DEBUG="WARN", HF_TOKEN="s3cret-one")
    trained(runs_dir, "bad-2", "--bad")
    trained(runs_dir, "bad-3", "--bad", NCCL_DEBUG="INFO", HF_TOKEN="s3cret-two")
    found = changed(capsys, "bad-3")
    assert (found["before"], found["after"]) == ("good-1", "bad-3")
    assert "no failed one" in found["chosen"]
    first = found["changes"][0]
    assert (first["kind"], first["name"], first["before"], first["after"]) == ("argument", "lr", 1e-6, 1.0)
    assert first["explains"] == ["train.nan"]
    by_name = {change["name"]: change for change in found["changes"]}
    assert (by_name["NCCL_DEBUG"]["before"], by_name["NCCL_DEBUG"]["after"]) == ("WARN", "INFO")
    assert by_name["HF_TOKEN"]["after"] == "(secret)"
    assert by_name["bad"]["after"] is True
    text = rltop("changed", "bad-3").stdout
    assert text.splitlines()[2] == "bad-3 fails: train.nan"
    assert "  1  argument --lr" in text
    assert "s3cret" not in text

    with open_past(runs_dir / "runs" / "bad-3") as past:
        told = state_of(past.connection, ["changed"])["changed"]
    assert (told["before"], told["after"]) == ("good-1", "bad-3"), "the dashboard shows the same"
    assert told["changes"][0]["name"] == "lr"

    trained(runs_dir, "good-1", "--bad")  # its second attempt
    again = changed(capsys, "good-1")
    assert (again["before"], again["after"]) == ("good-1#1", "good-1")
    assert changed(capsys, "good-1#1", "good-1")["changes"]


def test_errors(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with real_daemon(runs_dir, "only-1"):
        pass
    for args, said in (
        (["only-1"], "no good run before 'only-1'"),
        (["only-1#7", "only-1"], "has no attempt 7"),
        (["only-1#x", "only-1"], "is no attempt of a run"),
        (["nosuch"], "there is no run 'nosuch'"),
    ):
        assert main(["changed", *args]) == 2
        assert said in capsys.readouterr().err
