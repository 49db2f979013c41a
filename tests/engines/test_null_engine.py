"""The null engine: what it starts with, answers, says of itself, and how it dies. Its modules are the CPU engine's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rltop.engines.client import AsyncEngineClient, EngineClient, EngineRefused, EngineUnreachable
from rltop.engines.launch import EngineSpec, launch_engine
from rltop.engines.log import EngineLog
from rltop.train.cpu_engine.faults import VARIABLE
from rltop.train.cpu_engine.process import CRASH_VARIABLE
from rltop.train.null_engine import MARKER, STEP_VARIABLE

PROMPT = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8, "temperature": 0}, "return_logprob": True}


def spec(folder: Path, *args: str, **env: str) -> EngineSpec:
    """A null engine over an empty folder."""
    (folder / "model").mkdir(exist_ok=True)
    return EngineSpec(
        kind="null",
        model_path=folder / "model",
        directory=folder / "engine",
        run="test",
        engine_id="0",
        args=args,
        env={STEP_VARIABLE: "0.002", CRASH_VARIABLE: "0.05", **env},
    )


def test_it_starts_at_once_and_speaks_as_sglang(tmp_path: Path) -> None:
    began = time.monotonic()
    engine = launch_engine(spec(tmp_path, "--speculative-algorithm", "NGRAM"))
    took = time.monotonic() - began
    try:
        with EngineClient(engine.url) as client:
            (answer,) = client.generate(PROMPT, require_version="default")
            assert answer["output_ids"] == list(range(8))
            assert len(answer["meta_info"]["output_token_logprobs"]) == 8
            info = client.server_info()
            assert (info["rltop_engine"], info["speculative_algorithm"]) == (MARKER, "NGRAM")
            assert "stand-in" in client.model_info()["rltop_engine"]
            assert client.loads()["loads"][0]["num_running_reqs"] == 0
            assert 'mode="decode_cuda_graph"' in client.metrics_text()
            before = client.weights_checker("checksum")["ranks"][0]["per_gpu_checksum"]
            (tmp_path / "v7").mkdir()
            (tmp_path / "v7" / "w.safetensors").write_bytes(b"7")
            client.update_weights_from_disk(tmp_path / "v7", "7")
            assert client.weight_version() == "7"
            assert client.weights_checker("checksum")["ranks"][0]["per_gpu_checksum"] != before
            with pytest.raises(EngineRefused, match="nothing to profile"):
                client.profile()
    finally:
        code = engine.stop(5)
    assert code == 0
    assert "rltop null engine, a stand-in for SGLang: it computes nothing" in engine.log_tail(200)
    assert took < 5.0, "half a second on a quiet machine"


def test_it_needs_no_torch() -> None:
    code = "import sys, rltop.train.null_engine.__main__\nassert not {'torch', 'tokenizers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_it_dies_of_an_injected_illegal_access_as_sglang_does(tmp_path: Path) -> None:
    faults = {VARIABLE: "ima:cuda_graph&!radix_cache:batch=4"}
    engine = launch_engine(spec(tmp_path, "--disable-radix-cache", **faults))
    try:
        async with AsyncEngineClient(engine.url) as client:
            with pytest.raises(EngineUnreachable):
                await client.generate(PROMPT)
        assert await asyncio.to_thread(engine.process.wait, 10) == -9
    finally:
        engine.stop(0)
    log = EngineLog()
    log.feed(engine.log.read_bytes(), 0.0)
    crash = log.crash(exit_code=-9, asked=False)
    assert (crash.kind, crash.phase, crash.injected) == ("ima", "decode-graph", "ima")


async def test_a_condition_that_does_not_hold_leaves_it_alone(tmp_path: Path) -> None:
    engine = launch_engine(spec(tmp_path, **{VARIABLE: "ima:cuda_graph&!radix_cache:batch=1"}))
    try:
        async with AsyncEngineClient(engine.url) as client:
            await asyncio.gather(*(client.generate(PROMPT) for _ in range(5)))
            await client.pause("in_place")
            held = asyncio.ensure_future(client.generate(PROMPT))
            await asyncio.wait([held], timeout=0.1)
            assert not held.done()
            await client.resume_generation()
            assert (await held)[0]["meta_info"]["finish_reason"]["type"] == "length"
    finally:
        engine.stop(5)
