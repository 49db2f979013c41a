"""The CPU engine's memory really goes on a release and comes back on a resume; its weights are not in it then."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rltop.engines.client import EngineClient, EngineRefused
from rltop.engines.launch import EngineSpec, launch_engine
from rltop.train.cpu_engine.memory import Arena
from tests.engines.conftest import running
from tests.engines.contract import MODEL, PROMPT

POOL_TOKENS = 131_072
MIB = 1 << 20
ASK = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8, "sampling_seed": 3, "ignore_eos": True}}


def resident(pid: int | str) -> int:
    """Bytes, from /proc/PID/statm."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def served(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineClient, int, float]]:
    """A real engine process: its client, its pid, and GiB of weights and KV pool in its own words."""
    spec = EngineSpec(
        kind="cpu",
        model_path=model_path,
        directory=tmp_path_factory.mktemp("engine"),
        run="memory",
        engine_id="0",
        args=("--enable-memory-saver", "--max-total-tokens", str(POOL_TOKENS)),
        env={"OMP_NUM_THREADS": "1"},
    )
    process = launch_engine(spec)
    try:
        with EngineClient(process.url) as client:
            usage = client.server_info()["internal_states"][0]["memory_usage"]
            yield client, process.pid, usage["weight"] + usage["kvcache"]
    finally:
        process.stop(5.0)


def test_memory_is_unmapped_and_mapped_again_and_the_weights_are_not_restored(
    served: tuple[EngineClient, int, float], model_path: Path
) -> None:
    client, pid, gigabytes = served
    pool = gigabytes * 2**30
    assert pool > 40 * MIB, "too small to be told from noise"
    tokens = client.generate(ASK)[0]["output_ids"]
    before = resident(pid)
    for cycle in ("1", "2"):
        client.flush_cache()
        client.release_memory()
        assert before - resident(pid) > 0.9 * pool
        with pytest.raises(EngineRefused, match="status 503"):
            client.generate(ASK)
        with pytest.raises(EngineRefused, match="memory is released"):
            client.update_weights_from_disk(model_path, cycle)
        client.resume_memory(["weights"])
        assert before - resident(pid) > 0.8 * pool, "only the weights are back"
        client.update_weights_from_disk(model_path, cycle)
        client.resume_memory(["kv_cache", "cuda_graph"])
        assert abs(resident(pid) - before) < 0.1 * pool
        assert client.generate(ASK)[0]["output_ids"] == tokens
    # A resume without an update, as 0.5.14 on an H200: no error, the label as it was, all tokens equally likely.
    client.release_memory()
    client.resume_memory()
    answer = client.generate({**ASK, "return_logprob": True})[0]
    values = {round(triple[0], 5) for triple in answer["meta_info"]["output_token_logprobs"]}
    assert values == {round(-math.log(MODEL.vocab_size), 5)}
    greedy = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
    assert client.generate(greedy)[0]["output_ids"] == [0] * 8
    assert client.weight_version() == "2"
    client.update_weights_from_disk(model_path, "3")
    assert client.generate(ASK)[0]["output_ids"] == tokens


def test_the_memory_saver_changes_no_weight_and_no_token(model_path: Path) -> None:
    with running(model_path) as plain, running(model_path, "--enable-memory-saver") as saving:
        for engine in (plain, saving):
            engine.scheduler.live.load_directory(model_path)
        own, other = (engine.scheduler.live.check("checksum")[1] for engine in (plain, saving))
        assert own == other
        assert (plain.scheduler.pool_gigabytes, saving.scheduler.pool_gigabytes > 0) == (0.0, True)


def test_an_arena_hands_out_zeros_once_and_says_when_it_is_full() -> None:
    arena = Arena(1 << 16)
    first = arena.zeros((16, 16))
    second = arena.zeros((3,), torch.int64)
    assert first is not None
    assert second is not None
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    assert arena.zeros((1 << 14,)) is None
    first.fill_(1.0)
    second.fill_(7)
    arena.release()
    arena.resume()
    assert not first.any()
    assert not second.any()
    arena.empty()
    again = arena.zeros((1 << 14,))
    assert again is not None
    assert not again.any()
