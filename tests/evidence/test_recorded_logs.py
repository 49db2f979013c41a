"""Logs that real engines wrote, read and judged as `rltop check` does it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rltop.checks.evaluate import evaluate
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
