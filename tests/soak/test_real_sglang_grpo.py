"""Ten GRPO steps through real SGLang on this CPU, weights synced after every one, the step-1 checks on top."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rltop.daemon.live_checks import LiveChecks
from tests.soak.sglang_cpu import SERVER_ARGS, sglang_cpu_environment
from tests.train.local import ingest, records_until_bye

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
STEP_1 = {
    "rollout.text",
    "logprob.ref-equal",
    "logprob.magnitude",
    "logprob.train-rollout",
    "kl.on-policy",
    "train.grad-high",
    "train.grad-zero",
    "train.nan",
}


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_ten_steps_through_real_sglang(tmp_path: Path, transport: str) -> None:
    sglang = sglang_cpu_environment(ROOT)
    flags = [
        *("--engine", "sglang", "--engine-python", str(sglang.python), "--weight-transport", transport),
        *(part for name, value in sglang.env.items() for part in ("--engine-env", f"{name}={value}")),
        *(text.replace("--", "--sglang-", 1) if text.startswith("--") else text for text in SERVER_ARGS),
        *("--num-rollout", "10", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--apply-chat-template"),
        *("--cold-start-steps", "200", "--cold-start-loss", "0.11", "--lr", "1e-3", "--lr-warmup-iters", "5"),
        *("--use-kl-loss", "--kl-loss-coef", "0.001", "--log-probs-pass", "always", "--seed", "1", "--json"),
    ]
    with ingest() as (address, socket):
        done = subprocess.run(
            [sys.executable, "-m", "rltop", "train", *flags],
            capture_output=True,
            text=True,
            env=os.environ | {"RLTOP_INGEST": address, "RLTOP_RUN": "soak", "TMPDIR": str(tmp_path)},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        records = records_until_bye(socket)
    result = json.loads(done.stdout)
    print(f"{transport}: largest mean log-prob gap of a step {result['train_rollout_logprob_abs_diff_max']:.2e}")
    print(f"{transport}: rewards {[round(reward, 3) for reward in result['rewards']]}")
    assert (result["steps"], result["syncs"], result["stand_ins"]) == (10, 11, [])
    assert result["weight_mismatches"] == []
    assert result["train_rollout_logprob_abs_diff_max"] < 1e-4
    syncs = [record.payload for record in records if record.kind == "weights"]
    assert [sync["version"] for sync in syncs] == ["default", *map(str, range(1, 11))]
    assert all(reply["same"] for sync in syncs for reply in sync["engines"].values())
    assert len({sync["digest"] for sync in syncs}) == 11
    checks = LiveChecks()
    for record in records:
        checks.feed(record)
    statuses = {verdict.id: verdict.status for verdict in checks.report().verdicts if verdict.id in STEP_1}
    assert statuses == dict.fromkeys(STEP_1, "pass")
