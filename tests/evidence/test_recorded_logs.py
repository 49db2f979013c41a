"""Logs that real engines wrote, read and judged as `rltop check` does it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rltop.checks.evaluate import evaluate
from rltop.checks.observe import Observations
from rltop.checks.verdict import Verdict
from rltop.evidence.collect import collect

LOGS = Path(__file__).parents[1] / "data" / "logs"


def judged(name: str, tmp_path: Path) -> dict[str, Verdict]:
    """Firing verdicts on a folder that holds this log only."""
    shutil.copy(LOGS / name, tmp_path / "engine.log")
    report = evaluate(collect([tmp_path]))
    assert not [v for v in report.verdicts if isinstance(v.value, dict) and "rule_error" in v.value]
    return {v.id: v for v in report.verdicts if v.status in ("warn", "fail")}


@pytest.mark.parametrize("name", ["sglang_healthy.log", "sglang_cpu_0_5_23.log"])
def test_an_engine_that_starts_and_serves_raises_no_alarm(name: str, tmp_path: Path) -> None:
    assert judged(name, tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "phase", "kernel"),
    [
        ("sglang_ima_async_graphs.log", "decode", None),
        ("sglang_ima_blocking.log", "prefill", None),
        ("sglang_ima_coredump.log", "prefill", "test_oob_gather_kernel"),
    ],
)
def test_an_illegal_access_of_a_server_is_the_root_and_its_death_the_consequence(
    name: str, phase: str, kernel: str | None, tmp_path: Path
) -> None:
    found = judged(name, tmp_path)
    assert set(found) == {"engine.ima", "engine.died"}
    fault = found["engine.ima"]
    assert (fault.value["phase"], fault.value.get("kernel")) == (phase, kernel)
    assert found["engine.died"].consequence_of == ("engine.ima",)
    assert "CUDA error" in found["engine.died"].cause


def test_a_server_that_does_not_start_names_what_its_scheduler_raised(tmp_path: Path) -> None:
    found = judged("sglang_start_fails.log", tmp_path)
    assert set(found) == {"engine.died"}
    assert "before it was ready" in found["engine.died"].cause
    assert "prefill_cuda_graph_runner.py" in found["engine.died"].cause


def test_a_scheduler_exception_after_a_release_is_no_illegal_access(tmp_path: Path) -> None:
    found = judged("sglang_health_after_release.log", tmp_path)
    assert "engine.ima" not in found
    assert "ValueError" in found["engine.died"].cause


def recorded(name: str, tmp_path: Path) -> Observations:
    """A run of real SGLang 0.5.14 and Megatron-Core 0.19.2 on an H200, or on two."""
    (tmp_path / "engines" / "0" / "1").mkdir(parents=True)
    shutil.copy(LOGS / f"{name}.trainer.log", tmp_path / "trainer.log")
    shutil.copy(LOGS / f"{name}.engine.log", tmp_path / "engines" / "0" / "1" / "stdout.log")
    return collect([tmp_path])


def colocated(name: str, tmp_path: Path) -> dict[str, Verdict]:
    return {v.id: v for v in evaluate(recorded(f"colocate/{name}", tmp_path)).verdicts}


def test_weights_that_came_over_nccl_are_seen_in_both_logs(tmp_path: Path) -> None:
    """Trainer and engine on a GPU each; the engine joins a group, takes three updates, and nothing differs."""
    seen = recorded("distributed/decoupled", tmp_path)
    calls = [str(event.data["path"]) for event in seen.events if event.kind == "http"]
    assert calls.count("/init_weights_update_group") == 1
    assert calls.index("/init_weights_update_group") < calls.index("/update_weights_from_distributed")
    assert calls.count("/update_weights_from_distributed") == 3 + 5  # three turns, then the push alone five times
    found = {v.id: v for v in evaluate(seen).verdicts}
    assert found["weights.update-failed"].status == found["engine.stale-kv"].status == "pass"
    compared = found["weights.compare"]
    assert (compared.status, compared.evidence[0].source.rpartition("/")[2]) == ("pass", "trainer.log")
    assert "pushed weights version default and found every tensor equal" in compared.cause
    # Random weights: log-probs of a guess, and answers that end at their limit. Nothing else is wrong.
    assert {v.id for v in found.values() if v.status == "fail"} == {"logprob.magnitude", "rollout.truncated"}


def test_a_real_run_that_takes_turns_passes(tmp_path: Path) -> None:
    found = colocated("two_turns", tmp_path)
    assert found["train.colocate-swap"].status == found["engine.resume-order"].status == "pass"
    assert not [v for v in found.values() if v.status in ("warn", "fail")]


def test_a_real_engine_without_weights_is_named_as_that(tmp_path: Path) -> None:
    """Its text is garbage and its log-probs are all -ln(512): the planted fault, not the sync."""
    found = colocated("no_update", tmp_path)
    swap = found["train.colocate-swap"]
    assert (swap.status, swap.rollout, swap.engine) == ("fail", 1, "0")
    assert "gave every token the log-prob -6.2383 in all 64 of its samples of rollout 1" in swap.cause
    assert swap.consequence_of == ("engine.resume-order",)
    assert found["logprob.train-rollout"].consequence_of == ("engine.resume-order", "train.colocate-swap")


def test_a_real_late_release_is_named_with_process_and_size(tmp_path: Path) -> None:
    swap = colocated("late_release", tmp_path)["train.colocate-swap"]
    assert (swap.status, swap.engine, swap.consequence_of) == ("fail", "0", ())
    assert "memory of device gpu was still held by engine 0 (pid 1236: 1.441 GB), 3 s after the release" in swap.cause
