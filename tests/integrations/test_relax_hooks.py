"""The hooks for Relax in a process of their own, around a stand-in package of Relax's shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.listener import listening, python

DRIVE = Path(__file__).parent / "fake_relax" / "drive.py"


def _drive(tmp_path: Path, how: str, role: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with listening(tmp_path) as listener:
        chain = {"RLTOP_SLIME_SETUP_PATH": "rltop.integrations.relax.setup"} if how == "env" else {}
        ended = python(DRIVE, how, role, ingest=listener.address, RLTOP_RUN="r-1", **chain)
        assert ended.returncode == 0, ended.stderr
        seen = json.loads(ended.stdout)
        assert seen["errors"] == 0, seen["last_error"]
        assert seen["heavy"] == []
        return seen, listener.take()


def _rows(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    found = [(r["source"]["role"], r["payload"]) for r in records if r["kind"] == "metrics"]
    keys = ("axis", "step", "rollout_id", "step_in_rollout")
    return [(role, *(p.get(key) for key in keys), sorted(p["values"])) for role, p in found]


@pytest.mark.parametrize("how", ["launch", "flags", "both", "env"])
def test_the_rollout_side_tells_once_however_it_is_attached(tmp_path: Path, how: str) -> None:
    seen, records = _drive(tmp_path, how, "rollout")
    perf = ["perf/rollout_time", "rollout/response_len/mean"]
    # The first flag is read inside the function that knows the rollout: there the step alone tells it.
    known = None if how == "flags" else 0
    rows = [("rollout", "rollout", 0, known, None, perf), ("rollout", "rollout", 1, 1, None, perf)]
    assert _rows(records) == [*rows, ("rollout", "rollout", 1, 1, None, ["eval/aime"])]
    assert seen["logged"] == 3
    runs = [r["payload"] for r in records if r["kind"] == "run"]
    assert [(run["framework"], run["backend"], run["num_rollout"]) for run in runs] == [
        ("relax", "relax on Megatron (attached)", 3)
    ]
    assert [r["payload"]["total"] for r in records if r["kind"] == "samples"] == [1, 1]
    assert seen["filtered"] == (0 if how == "flags" else 1), "the hook that Relax's launcher had there"


def test_the_actor_tells_its_steps_phases_and_weights(tmp_path: Path) -> None:
    _, records = _drive(tmp_path, "launch", "actor")
    train = ["train/grad_norm", "train/loss"]
    rows: list[Any] = []
    for rollout in (0, 1):
        rows.append(("trainer", "rollout", rollout, rollout, None, ["rollout/raw_reward"]))
        rows += [("trainer", "train", 2 * rollout + step, rollout, step, train) for step in (0, 1)]
    assert _rows(records) == rows
    phases = [(r["payload"]["name"], r["payload"]["edge"]) for r in records if r["kind"] == "phase"]
    assert phases == [("train", "enter"), ("train", "leave")] * 2, "no timer of a single micro-batch"
    weights = [r["payload"] for r in records if r["kind"] == "weights"]
    assert [(one["version"], one["rollout_id"], one["ok"]) for one in weights] == [("1", 1, True), ("2", 2, True)]


@pytest.mark.parametrize("role", ["actor_fwd", "reference"])
def test_times_of_a_role_without_an_optimizer_are_its_own(tmp_path: Path, role: str) -> None:
    _, records = _drive(tmp_path, "launch", role)
    name = f"perf/{role}/log_probs_time"
    assert _rows(records) == [(role, "rollout", rollout, None, None, [name]) for rollout in (0, 1)]
    assert {r["source"]["role"] for r in records} == {role}


def test_without_an_address_nothing_is_wrapped() -> None:
    ended = python(DRIVE, "both", "rollout")
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert (seen["wrapped"], seen["errors"], seen["filtered"], seen["logged"]) == (False, None, 1, 3)
