"""The setup hook in real Ray workers, and slime's own recovery with an override: `RLTOP_SLIME=DIR make soak`.

Stand-ins are the package of slime's shape (first test) and the engines (second); Ray, its runtime env and, in the
second, slime's server groups are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rltop.integrations.preflight import HOOK
from tests.daemon.util import Viewer, real_daemon
from tests.soak.slime_checkout import BASE, PYTHON, everywhere, explained, needs

pytestmark = [pytest.mark.soak, pytest.mark.train]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "slime_hooks"
FAKE = ROOT / "tests" / "integrations" / "fake_slime"
JOB = """
import json, os, sys
import ray

env = json.loads(sys.argv[1])
ray.init(num_cpus=3, include_dashboard=False, runtime_env=env, log_to_driver=False)

@ray.remote(num_cpus=1)
class RolloutManager:
    def generate(self, rollout):
        from types import SimpleNamespace
        from slime.observability import rollout_metrics
        from slime.rollout import base_types
        args = SimpleNamespace(finetune=True, num_rollout=3)
        made = base_types.call_rollout_fn(lambda *a, evaluation: [], args, rollout, None, evaluation=False)
        rollout_metrics.log_rollout_data(rollout, args, made, {"rollout/x": 0.1 + rollout}, 1.5)
        return os.getpid()

    def dispose(self):
        from slime.observability import logging_utils
        logging_utils.finish_tracking(None)

@ray.remote(num_cpus=1)
class MegatronTrainRayActor:
    def __init__(self, rank):
        os.environ["RANK"] = str(rank)

    def train(self, rollout):
        from types import SimpleNamespace
        from slime.backends.megatron_utils import actor
        one = actor.MegatronTrainRayActor()
        one.init(SimpleNamespace(), "actor")
        one.train(rollout, {}, steps=2)
        return os.getpid()

    def settle(self):
        import rltop.integrations.slime as hooks
        hooks.attach().settle()

per_actor = {"env_vars": {"NCCL_CUMEM_ENABLE": "0"}}  # as slime gives every actor its own
manager = RolloutManager.options(runtime_env=per_actor).remote()
trainer = MegatronTrainRayActor.options(runtime_env=per_actor).remote(0)
pids = [ray.get([manager.generate.remote(i), trainer.train.remote(i)]) for i in range(3)]
ray.get([trainer.settle.remote(), manager.dispose.remote()])
print(json.dumps(pids[0]))
ray.shutdown()
"""


def _environ(tmp_path: Path, *path: Path | str, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RLTOP_", "RAY_"))}
    words = os.pathsep.join(map(str, path))
    return env | {"PYTHONPATH": words, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **more}


def test_actors_that_import_slime_report(tmp_path: Path) -> None:
    with real_daemon(tmp_path / "runs") as run, Viewer(run) as viewer:
        variables = {"RLTOP_INGEST": run.sockets["ingest"], "RLTOP_RUN": run.name, "PYTHONPATH": f"{FAKE}"}
        env = {"env_vars": variables, "worker_process_setup_hook": HOOK, "py_modules": [str(ROOT / "rltop")]}
        argv = [sys.executable, "-W", "ignore", "-c", JOB, json.dumps(env)]
        ended = subprocess.run(
            argv, capture_output=True, text=True, timeout=300, check=False, env=_environ(tmp_path, ROOT), cwd=tmp_path
        )
        assert ended.returncode == 0, ended.stderr
        rollout, trainer = json.loads(ended.stdout)
        viewer.hello()
        state = viewer.until_state(lambda s: s["metric/train/grad_norm"]["step"] == 5 and s["metric/rollout/x"])
        assert (state["metric/rollout/x"]["value"], state["metric/rollout/x"]["rollout_id"]) == (2.1, 2)
        assert state["metric/train/grad_norm"]["rollout_id"] == 2
        assert (state["source/rollout/0"]["pid"], state["source/trainer/0"]["pid"]) == (rollout, trainer)
        assert (state["run"]["framework"], state["run"]["state"]) == ("slime", "done")


ASK = """
import json, sys
from dataclasses import asdict
sys.path.insert(0, sys.argv[1])
from rltop.integrations.preflight import preflight
sys.path.pop(0)
print(json.dumps([asdict(preflight(env, address="local", ingest=at)[0]) for env, at in json.loads(sys.argv[2])]))
"""


def test_the_preflight_asks_a_worker(tmp_path: Path) -> None:
    (tmp_path / "in.sock").touch()
    asked = [
        ({"py_modules": [str(ROOT / "rltop")], "worker_process_setup_hook": HOOK}, f"ipc://{tmp_path}/in.sock"),
        ({"py_modules": [str(ROOT / "rltop")]}, "ipc:///nowhere"),
    ]
    argv = [sys.executable, "-W", "ignore", "-c", ASK, str(ROOT), json.dumps(asked)]
    ended = subprocess.run(
        argv, capture_output=True, text=True, timeout=300, check=False, env=_environ(tmp_path, ""), cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    fine, alone = json.loads(ended.stdout.splitlines()[-1])
    assert fine["problems"] == []
    assert "py_modules_files" in fine["found"]  # the one that the job brings along, not one that is installed
    assert "on another machine" in alone["problems"][0]


@everywhere
def test_an_override_reaches_one_engine_through_slimes_recovery(checkout: str, tmp_path: Path) -> None:
    needs(*BASE)
    wish = tmp_path / "wish.json"
    with real_daemon(tmp_path / "runs") as run, Viewer(run) as viewer:
        more = {"RLTOP_INGEST": run.sockets["ingest"], "RLTOP_RUN": run.name, "RLTOP_SLIME_OVERRIDES": str(wish)}
        ended = subprocess.run(
            [PYTHON, "-W", "ignore", str(HERE / "override.py"), str(wish)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=_environ(tmp_path, HERE, ROOT, checkout, **more),
        )
        assert ended.returncode == 0, explained(ended.stderr)
        told: dict[str, Any] = json.loads(ended.stdout)
        viewer.hello()
        viewer.until_event(kind="log", level="warn")
    assert told["empty"] == [False, True, False]
    assert told["new"] == 1  # what makes slime push the weights
    assert [one["overrides"] for one in told["after"]] == [{}, {"disable_cuda_graph": True}, {}]
    assert [one["blocking"] for one in told["after"]] == [None, "1", None]
    same = [a["pid"] == b["pid"] for a, b in zip(told["before"], told["after"], strict=True)]
    assert same == [True, False, True]
