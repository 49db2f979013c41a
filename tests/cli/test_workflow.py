"""The workflow in `examples/`: it parses, and its command lines do on evidence what `docs/checks.md` says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rltop.checks.catalogue import STEP1
from rltop.cli.main import main

WORKFLOW = Path(__file__).parents[2] / "examples" / "github-actions-check.yml"
TRAINER, ROLLOUT = "(MegatronTrainRayActor pid=4101)", "(RolloutManager pid=3990)"
ANSWER = "Let me set up the equation: the train covers 60 km in 45 minutes, so its speed is 80 km/h."


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    (job,) = workflow["jobs"].values()
    found: list[dict[str, Any]] = job["steps"]
    return found


def commands(workflow: dict[str, Any], word: str) -> list[list[str]]:
    """argv behind `rltop` of every line that runs `rltop WORD`, with the workflow's variables filled in."""
    found = []
    for step in steps(workflow):
        for line in step.get("run", "").splitlines():
            if line.startswith(f"rltop {word}"):
                plain = re.split(r" [|>]", line)[0]
                filled = re.sub(r"\$(\w+)", lambda match: workflow["env"][match[1]], plain)
                found.append(shlex.split(filled)[1:])
    return found


def write_evidence(folder: Path, *, grad_norm: float = 0.3, reference: bool = True) -> None:
    """What two healthy rollouts of slime print."""
    folder.mkdir(parents=True)
    lines = []
    for i in range(2):
        at = f"[2026-03-02 10:0{i}:00]"
        ref = ", 'rollout/ref_log_probs': -0.31" if reference else ""
        kl = ", 'train/kl_loss': 0.0" if reference else ""
        lines += [
            f"{ROLLOUT} {at} sglang_rollout.py:447 - Finish rollout: ['{ANSWER}'], label: 80, reward: 1",
            f"{ROLLOUT} {at} rollout.py:1193 - rollout {i}: {{'rollout/raw_reward': 0.4, 'rollout/log_probs': -0.31, "
            f"'rollout/rollout_log_probs': -0.312{ref}}}",
            f"{TRAINER} {at} model.py:918 - step {i}: {{'train/loss': 0.02, 'train/grad_norm': {grad_norm}, "
            f"'train/ppo_kl': 1e-10, 'train/train_rollout_logprob_abs_diff': 0.01{kl}, 'train/step': {i}}}",
        ]
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def test_it_is_a_workflow_that_fails_when_the_job_or_the_checks_do(workflow: dict[str, Any]) -> None:
    assert set(workflow) - {True} == {"name", "permissions", "env", "jobs"}  # YAML 1.1 reads `on` as true
    (job,) = workflow["jobs"].values()
    assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step), step
        if "|" in step.get("run", ""):
            assert step["shell"] == "bash", "only bash is started with pipefail: a pipe to tee would hide the exit code"
    assert workflow["env"]["JOB"].endswith(".sh")


def test_its_gate_passes_what_is_healthy_and_nothing_else(
    workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, for_scripts = commands(workflow, "check")
    assert gate == ["check", "--require", "step1", "evidence"]
    for name, evidence, code in (
        ("healthy", {}, 0),
        ("norm", {"grad_norm": 4000.0}, 1),
        ("untested", {"reference": False}, 1),
    ):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        write_evidence(Path("evidence"), **evidence)
        assert main(gate) == code, (name, capsys.readouterr())
        capsys.readouterr()
    monkeypatch.chdir(tmp_path / "healthy")
    assert main(for_scripts) == 0
    report = json.loads(capsys.readouterr().out)
    passed = {verdict["id"] for verdict in report["verdicts"] if verdict["status"] == "pass"}
    assert set(STEP1) <= passed
    monkeypatch.chdir(tmp_path / "untested")
    assert main(gate) == 1
    assert "logprob.ref-equal is required and was not tested" in capsys.readouterr().err


def test_it_judges_the_launch_script_first(
    workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (argv,) = commands(workflow, "doctor")
    script = tmp_path / argv[-1]
    script.parent.mkdir(parents=True)
    flags = "--rollout-batch-size 4 --n-samples-per-prompt 8 --num-rollout 2"
    monkeypatch.chdir(tmp_path)
    for size, code in ((32, 0), (64, 1)):
        script.write_text(f'#!/bin/bash\npython3 train.py {flags} --global-batch-size {size} "$@"\n')
        assert main(argv) == code, capsys.readouterr()
        capsys.readouterr()
