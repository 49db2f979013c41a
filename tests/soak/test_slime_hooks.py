"""rltop in slime's own code: `RLTOP_SLIME=DIR[:DIR…] make soak`, each a checkout of slime.

Without a GPU: SGLang and Megatron's training package are stand-ins (`slime_hooks/stubs.py`), everything that computes
or logs a metric is slime's.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rltop.cli.main import main
from rltop.evidence.collect import collect
from tests.daemon.util import Viewer, real_daemon
from tests.soak.slime_checkout import BASE, PYTHON, ROLLOUT, everywhere, explained, needs

pytestmark = pytest.mark.soak

HERE = Path(__file__).parent / "slime_hooks"
CONTRACTS = {
    "test_plugin_runtime_hook_contracts": {
        "--custom-rollout-log-function-path": "shim.log_rollout_data",
        "--custom-eval-rollout-log-function-path": "shim.log_eval_rollout_data",
        "--rollout-data-postprocess-path": "shim.rollout_data_postprocess",
    },
    # rltop replaces none of what these are about; with it attached they must pass as before.
    "test_plugin_rollout_contracts": {},
    "test_plugin_generate_contracts": {},
    "test_plugin_path_loading_contracts": {},
}


def _run(checkout: str, *argv: str, ingest: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(HERE), str(Path(__file__).parents[2]), checkout])
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLTOP_")}
    env |= {"PYTHONPATH": path, "RLTOP_INGEST": ingest, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", **environ}
    argv = (PYTHON, "-W", "ignore", *argv)
    return subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False, env=env, cwd=checkout)


@everywhere
@pytest.mark.parametrize("contract", CONTRACTS)
def test_slimes_own_contract_tests_pass(checkout: str, contract: str, tmp_path: Path) -> None:
    needs(*(ROLLOUT if not CONTRACTS[contract] else BASE))
    flags = [word for pair in CONTRACTS[contract].items() for word in pair]
    ended = _run(
        checkout, f"tests/plugin_contracts/{contract}.py", *flags, "-q", ingest=f"ipc://{tmp_path}/nobody.sock"
    )
    assert ended.returncode == 0, ended.stdout + explained(ended.stderr)
    assert re.search(r"\d+ passed", ended.stdout)
    assert "failed" not in ended.stdout


@everywhere
def test_every_metric_arrives_and_the_printed_lines_say_the_same(checkout: str, tmp_path: Path) -> None:
    needs(*BASE)
    sent = tmp_path / "sent.json"
    with real_daemon(tmp_path / "runs") as run, Viewer(run) as viewer:
        ended = _run(checkout, str(HERE / "drive.py"), str(sent), ingest=run.sockets["ingest"], RLTOP_RUN=run.name)
        assert ended.returncode == 0, explained(ended.stderr)
        viewer.hello()
        viewer.until_state(lambda state: state["run"]["state"] == "done" and state["metric/eval/aime-pass@2"])
        wanted = _by_step(json.loads(sent.read_text()))
        for name, values in wanted.items():
            assert _series(viewer, name) == pytest.approx(values, rel=1e-6, nan_ok=True), name
        assert sum(map(len, wanted.values())) > 150
        state = viewer.state
        facts = ("framework", "mode", "start_rollout_id", "fresh_start", "num_rollout")
        assert [state["run"][name] for name in facts] == ["slime", "full", 0, True, 4]
        assert (state["samples"]["rollout_id"], state["samples"]["total"]) == (3, 4)
        assert {name: state[f"source/{name}"]["lost"] for name in ("rollout/0", "trainer/0")} == {
            "rollout/0": 0,
            "trainer/0": 0,
        }
        equal = _series(viewer, "rollout/token_gap/actor_ref/max")
        assert equal == pytest.approx({0: 0.0, 1: 0.02, 2: 0.02}, abs=1e-6)  # rollout 3 reuses the training forward
        gap = _series(viewer, "rollout/token_gap/actor_engine/mean")
        assert gap == pytest.approx(dict.fromkeys(range(3), 0.001), abs=1e-6)
        viewer.until_state(lambda state: state["check/logprob.ref-equal"])
        assert state["check/train.nan"]["status"] == "fail"
    log = tmp_path / "job.log"
    log.write_text(ended.stderr)
    printed: dict[str, dict[int, float]] = defaultdict(dict)
    for row in collect([log]).metrics:
        for name, value in row.values.items():
            printed[name][row.step] = value
    # A line has no step inside its rollout: where train/step repeats, the later one is what a reader of lines keeps.
    plain = _by_step(json.loads(sent.read_text()), lift=False)
    for name, values in plain.items():
        assert printed[name] == pytest.approx(values, rel=1e-12, nan_ok=True), name


GROUPS = """
import json, sys
from types import SimpleNamespace
import stubs
stubs.install()
from slime.backends.sglang_utils.sglang_config import SglangConfig
config = SglangConfig.from_yaml(sys.argv[1])
for model in config.models:
    model.resolve(SimpleNamespace(rollout_num_gpus_per_engine=1, hf_checkpoint="/m"))
(model,) = config.models
print(json.dumps([config.total_num_gpus, model.update_weights, [group.overrides for group in model.server_groups]]))
"""


@everywhere
def test_slime_reads_the_groups_of_an_ab(checkout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs(*BASE)
    assert main(["slime-flags", "cuda_graph=off", "--ab", "8", "--gpus-per-engine", "2"]) == 0
    (tmp_path / "ab.yaml").write_text(capsys.readouterr().out)
    ended = _run(checkout, "-c", GROUPS, str(tmp_path / "ab.yaml"), ingest="")
    assert ended.returncode == 0, explained(ended.stderr)
    off = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled", "model_path": "/m"}
    assert json.loads(ended.stdout) == [8, True, [{"model_path": "/m"}, off]]


def _by_step(rows: list[dict[str, Any]], *, lift: bool = True) -> dict[str, dict[int, float]]:
    """Name -> step -> value of what slime handed to W&B. lift: a step that was there already is counted on."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    last = -1
    for row in rows:
        key = next(one for one in ("train/step", "rollout/step", "eval/step") if one in row)
        step = row.pop(key)
        if key == "train/step" and lift:
            step = last = step if step > last else last + 1
        for name, value in row.items():
            found[name][step] = float(value)
    return found


def _series(viewer: Viewer, name: str) -> dict[int, float]:
    answer, blobs = viewer.series([name])
    cols = answer.cols[name]
    steps = np.frombuffer(blobs[cols["step"]], "<f8").tolist()
    last = np.frombuffer(blobs[cols["last"]], "<f4").tolist()
    nan = np.frombuffer(blobs[cols["nan"]], "<u4").tolist()
    return {int(s): math.nan if n else v for s, v, n in zip(steps, last, nan, strict=True)}
