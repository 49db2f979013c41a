"""A health check of a released engine, as a real SGLang server logs it: from lines to the verdict."""

from __future__ import annotations

from pathlib import Path

from rltop.checks.evaluate import evaluate
from rltop.evidence.collect import collect

LOG = """[2026-11-29 17:04:59] INFO:     127.0.0.1:45310 - "POST /update_weights_from_disk HTTP/1.1" 200 OK
[2026-11-29 17:05:02] INFO:     127.0.0.1:45388 - "POST /generate HTTP/1.1" 200 OK
[2026-11-29 17:05:02] INFO:     127.0.0.1:45404 - "POST /release_memory_occupation HTTP/1.1" 200 OK
[2026-11-29 17:05:03] Scheduler hit an exception: Traceback (most recent call last):
  File "/site/sglang/srt/managers/scheduler.py", line 4227, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/site/sglang/srt/mem_cache/common.py", line 140, in write_cache_indices
    write_req_to_token_pool_triton[(req_pool_indices_tensor.shape[0],)](
ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)

[2026-11-29 17:05:03] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
"""


def test_the_wrong_order_is_the_root_and_the_death_follows(tmp_path: Path) -> None:
    (tmp_path / "engine_1.log").write_text(LOG)
    report = evaluate(collect([tmp_path]))
    assert report.root_causes[0] == "engine.resume-order"
    (order,) = [v for v in report.verdicts if v.id == "engine.resume-order"]
    assert "engine_1.log:9" in {f"{one.source}:{one.line}" for one in order.evidence}
    (death,) = [v for v in report.verdicts if v.id == "engine.died" and v.status == "fail"]
    assert death.consequence_of == ("engine.resume-order",)


def test_the_same_error_without_a_release_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "engine_1.log").write_text("\n".join(line for line in LOG.split("\n") if "release" not in line))
    report = evaluate(collect([tmp_path]))
    assert "engine.resume-order" not in report.root_causes
