"""Injected faults are told apart by what reads a real log: class, phase, kernel, and that it is a rehearsal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from pathlib import Path

import pytest

from rltop.engines.crash import Crash
from rltop.engines.log import EngineLog
from rltop.train.cpu_engine.args import parse_args
from rltop.train.cpu_engine.entry import logging_to
from rltop.train.cpu_engine.faults import VARIABLE
from rltop.train.cpu_engine.start import build
from tests.engines.conftest import connect
from tests.engines.contract import PROMPT

CORE = {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1"}
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
NO_GRAPHS = ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")


def _crash(model: Path, faults: str, args: tuple[str, ...], environ: dict[str, str]) -> None:
    """Run an engine, on the captured standard output, until the fault has ended it."""
    given = parse_args(
        ["--model-path", str(model), "--port", "1", "--decode-log-interval", "1", *args], {VARIABLE: faults}
    )
    with logging_to(sys.stdout, "info"):
        engine = build(given, environ)
        thread = threading.Thread(target=engine.scheduler.run, daemon=True)
        thread.start()
        print("The server is fired up and ready to roll!")
        payload = {"text": PROMPT, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
        with contextlib.suppress(Exception):
            asyncio.run(connect(engine).generate(payload))
        engine.scheduler.stop()
        thread.join(30)
    assert engine.scheduler.fatal


def _explained(text: str, exit_code: int = -9) -> Crash:
    log = EngineLog()
    log.feed(text.encode(), 0.0)
    log.quiet(1.0)
    return log.crash(exit_code=exit_code)


@pytest.mark.parametrize(
    ("faults", "args", "environ", "kind", "phase", "kernel"),
    [
        ("ima:cuda_graph:at=decode,batch=5", (), {}, "ima", "decode-graph", ""),
        ("ima:at=decode,batch=5", NO_GRAPHS, {}, "ima", "decode", ""),
        ("ima:at=prefill", NO_GRAPHS, {}, "ima", "prefill", ""),
        ("ima:at=prefill", NO_GRAPHS, BLOCKING, "ima", "prefill", ""),
        ("ima:at=decode,kernel=paged_kernel", (), CORE, "ima", "decode-graph", "paged_kernel"),
        ("oom:at=decode,batch=5", NO_GRAPHS, {}, "oom", "decode", ""),
        ("oom:at=prefill", NO_GRAPHS, {}, "oom", "prefill", ""),
        ("nccl-timeout:at=decode,batch=5", NO_GRAPHS, {}, "nccl", "serve", ""),
    ],
)
def test_a_rehearsed_crash_is_classified_as_the_real_one(
    model_path: Path,
    tmp_path: Path,
    faults: str,
    args: tuple[str, ...],
    environ: dict[str, str],
    kind: str,
    phase: str,
    kernel: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    core = {"CUDA_COREDUMP_FILE": str(tmp_path / "core")} if environ else {}
    _crash(model_path, faults, args, environ | core)
    found = _explained(capsys.readouterr().out)
    assert (found.kind, found.phase, found.kernel) == (kind, phase, kernel), found
    assert found.injected == faults.split(":")[0]
    assert "A rehearsal: the fault" in found.cause
