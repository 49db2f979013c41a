"""The hooks in a process of their own, around a stand-in package of slime's shape."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from rltop.integrations import relax, slime
from tests.integrations.listener import listening, python

DRIVE = Path(__file__).parent / "fake_slime" / "drive.py"


def _drive(tmp_path: Path, how: str, **environ: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with listening(tmp_path) as listener:
        ended = python(DRIVE, how, ingest=listener.address, RLTOP_RUN="r-1", **environ)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout), [*listener.take("bye"), *listener.take()]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a process that the setup hook attached says, and what came of it."""
    return _drive(tmp_path_factory.mktemp("launch"), "launch")


def _metrics(records: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(r["source"]["role"], r["payload"]) for r in records if r["kind"] == "metrics"]


def test_every_metric_comes_once_with_its_step(launched: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    seen, records = launched
    assert seen["errors"] == 0, seen["last_error"]
    assert seen["wrapped"]
    assert seen["after_setup"] == []
    rows = [
        (role, p["axis"], p["step"], p.get("rollout_id"), p.get("step_in_rollout"), sorted(p["values"]))
        for role, p in _metrics(records)
    ]
    train = ["train/grad_norm", "train/loss", "train/ppo_kl"]
    perf = ["perf/rollout_time", "rollout/custom", "rollout/response_len/mean"]
    wanted: list[Any] = []
    for rollout in (0, 1):
        wanted.append(("rollout", "rollout", rollout, rollout, None, perf))
        wanted.append(("trainer", "rollout", rollout, rollout, None, ["rollout/kl", "rollout/raw_reward"]))
        # Two steps in rollout 0 (0 and 1), then one in rollout 1, which slime numbers 1 again.
        wanted += [("trainer", "train", rollout + i, rollout, i, train) for i in range(2 - rollout)][rollout:]
        if rollout:
            wanted.append(("trainer", "train", 2, 1, 0, train))
        wanted.append(("trainer", "rollout", rollout, rollout, None, ["perf/step_time"]))
    wanted.append(("rollout", "rollout", 1, 1, None, ["eval/aime"]))
    assert sorted(map(str, rows)) == sorted(map(str, wanted))
    assert len(rows) == seen["logged"]
    assert {r["source"]["pid"] for r in records} == {seen["pid"]}
    assert any("unequal numbers of optimizer steps" in r["payload"].get("text", "") for r in records)


def test_the_run_its_phases_weights_samples_and_engines_are_told(
    launched: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    _, records = launched
    runs = [r["payload"] for r in records if r["kind"] == "run"]
    assert len(runs) == 1
    assert {**runs[0], "args": 0} == {
        "framework": "slime",
        "args": 0,
        "mode": "full",
        "backend": "slime on Megatron (attached)",
        "start_rollout_id": 0,
        "fresh_start": True,
        "num_rollout": 7,
        "vocab_size": None,
    }
    assert runs[0]["args"]["lr"] == 1e-6
    assert runs[0]["args"]["wandb_key"] == "***"
    phases = [(r["payload"]["name"], r["payload"]["edge"]) for r in records if r["kind"] == "phase"]
    assert phases.count(("rollout", "enter")) == phases.count(("rollout", "leave")) == 2
    assert phases.count(("train", "enter")) == phases.count(("train", "leave")) == 2
    assert phases.count(("eval", "leave")) == 1
    assert all(r["payload"].get("elapsed_s", 0.0) >= 0 for r in records if r["kind"] == "phase")
    weights = [r["payload"] for r in records if r["kind"] == "weights"]
    syncs = [(one["version"], one["rollout_id"], one["ok"]) for one in weights]
    assert syncs == [("1", 0, True), ("2", 1, True), ("3", 2, True), ("4", 2, False)]
    samples = [r["payload"] for r in records if r["kind"] == "samples"]
    assert [(one["rollout_id"], one["total"], len(one["samples"])) for one in samples] == [(0, 16, 8), (1, 16, 8)]
    assert samples[0]["samples"][0] == {
        "index": 0,
        "group_index": 0,
        "prompt": "2+2=",
        "response": "4 ",
        "response_length": 2,
        "reward": 1.0,
        "label": "4",
        "status": "completed",
        "weight_versions": ["1"],
        "weight_version": "1",
        "token_ids": [3, 10],
        "last_token_id": 10,
        "rollout_log_probs": [-0.5, -0.25],
    }
    engines = [r["payload"] for r in records if r["kind"] == "engine"]
    states = ["HEALTHY", "OFFLOADED", "HEALTHY", "OFFLOADED", "HEALTHY"]
    assert [one["state"] for one in engines] == states
    assert {(one["id"], one["url"], one["pid"]) for one in engines} == {("3", "http://10.0.0.1:15000", 4711)}
    assert [r["payload"]["reason"] for r in records if r["kind"] == "bye"] == ["done"]


def test_both_ways_in_report_once_and_a_users_hook_goes_on(
    launched: tuple[dict[str, Any], list[dict[str, Any]]], tmp_path: Path
) -> None:
    alone, once = launched
    both, twice = _drive(tmp_path, "both")
    assert both["chained"] == [["rollout", 0], ["rollout", 1]]
    assert both["raised"] == "'mine'"  # the user's hook raised, and slime got what it raised
    assert both["errors"] == 0, both["last_error"]
    # All the same, but for the evaluation that the user's hook prevented.
    kinds = [sorted(r["kind"] for r in records if r["kind"] != "log") for records in (once, twice)]
    assert len(kinds[0]) == len(kinds[1]) + 1
    assert alone["logged"] == both["logged"] + 1


def test_the_flags_alone_attach_the_process(tmp_path: Path) -> None:
    seen, records = _drive(tmp_path, "flags")
    assert seen["errors"] == 0, seen["last_error"]
    assert len(_metrics(records)) == seen["logged"]
    assert [r["payload"]["start_rollout_id"] for r in records if r["kind"] == "run"] == [0]
    assert len([r for r in records if r["kind"] == "samples"]) == 2


def test_without_an_address_nothing_is_wrapped() -> None:
    ended = python(DRIVE, "launch")
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert (seen["wrapped"], seen["errors"], seen["after_setup"]) == (False, None, [])


def test_a_daemon_that_is_not_there_costs_nothing(tmp_path: Path) -> None:
    ended = python(DRIVE, "launch", ingest=f"ipc://{tmp_path}/nobody.sock")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["errors"] == 0


@pytest.mark.parametrize("ingest", ["rubbish", "tcp://127.0.0.1:1", "curve://no@where:1/x.key"])
def test_an_address_that_is_none_hurts_nobody(ingest: str) -> None:
    ended = python(DRIVE, "both", ingest=ingest)
    assert ended.returncode == 0, ended.stderr


def test_bare_args_are_enough(tmp_path: Path) -> None:
    script = """
import rltop.integrations.slime as hooks
bare = type("Args", (), {})()
assert hooks.log_rollout_data(3, bare, [object()], None, 0.5) is False
assert hooks.log_eval_rollout_data(4, bare, {}, None) is False
assert hooks.rollout_data_postprocess(bare, 0, {}) is None
assert hooks.megatron_init(bare) is None
assert hooks.before_train_step(bare, 0, 0, None, None, None) is None
for odd in (None, 7, object()):
    hooks.log_rollout_data(odd, odd, odd, odd, odd), hooks.rollout_data_postprocess(odd, odd, odd)
assert hooks.attach().errors == 0, hooks.attach().last_error
"""
    ended = python(script, ingest=f"ipc://{tmp_path}/nobody.sock")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("framework", ["slime", "relax"])
def test_a_module_that_cannot_be_changed_is_told(tmp_path: Path, framework: str) -> None:
    script = f"""
import sys, types
class Sealed(type):
    def __setattr__(cls, name, value):
        raise TypeError("sealed")
class Timer(metaclass=Sealed):
    def start(self, name): pass
    def end(self, name): pass
name = "{framework}.utils.timer"
sys.modules[name] = types.ModuleType(name)
sys.modules[name].Timer = Timer
import rltop.integrations.{framework} as hooks
assert hooks.attach().errors == 0
hooks.attach().settle()
"""
    with listening(tmp_path) as listener:
        ended = python(script, ingest=listener.address, RLTOP_RUN="r-1")
        assert ended.returncode == 0, ended.stderr
        [told] = [r["payload"] for r in listener.take() if r["kind"] == "log"]
    assert told["level"] == "warn"
    assert told["text"].startswith(f"{framework}.utils.timer is not as it was known and is left alone: TypeError")


def test_a_hook_inside_a_function_that_travels_is_that_of_the_other_process() -> None:
    for hooks in (slime, relax):
        assert pickle.loads(pickle.dumps(hooks.log_rollout_data)) == hooks.log_rollout_data
        assert pickle.loads(pickle.dumps(hooks.HOOKS)) is hooks.HOOKS


def test_a_setup_hook_that_was_there_runs_and_may_raise(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def up():\n    print('theirs')\n\ndef bad():\n    raise OSError('theirs')\n")
    root = Path(__file__).parents[2]
    script = "import rltop.integrations.slime as hooks; hooks.setup()"
    path = f"{root}:{tmp_path}"
    fine = python(script, RLTOP_SLIME_SETUP_PATH="theirs.up", PYTHONPATH=path)
    assert (fine.returncode, fine.stdout) == (0, "theirs\n"), fine.stderr
    bad = python(script, RLTOP_SLIME_SETUP_PATH="theirs.bad", PYTHONPATH=path)
    assert "OSError: theirs" in bad.stderr
