"""Real SGLang 0.5.23 on this CPU, through the launcher and the client that also drive the CPU engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from rltop.engines.client import AsyncEngineClient, EngineClient, WrongWeightVersion
from rltop.engines.launch import EngineProcess, launch_engine
from rltop.engines.resend import ready, recorded, sample_again, score
from rltop.engines.scrape import scrape
from rltop.engines.weights import checksum_differences, publish
from rltop.evidence.dump_sample import make_sample
from rltop.train.tiny_model import initial_weights
from tests.engines.conftest import connect, running
from tests.engines.contract import MODEL, PROMPT, ask, contract_model, other_weights, shape
from tests.engines.test_resend import drawn
from tests.evidence.dump_files import save
from tests.soak.sglang_cpu import SglangCpu, sglang_cpu_environment
from tests.soak.sglang_cpu.record import DATA, trim

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
TEXTS = [PROMPT, "hello", "The quick brown fox jumps over the lazy dog. " * 5, "日本語のテキスト"]


@pytest.fixture(scope="module")
def environment() -> SglangCpu:
    """Built once per checkout."""
    return sglang_cpu_environment(ROOT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint."""
    return contract_model(tmp_path_factory.mktemp("model"))


PARENT = """
import sys
from pathlib import Path
from rltop.engines.launch import launch_engine
from tests.engines.test_resend import drawn
from tests.evidence.dump_files import save
from tests.soak.sglang_cpu import sglang_cpu_environment
environment = sglang_cpu_environment(Path(sys.argv[1]))
engine = launch_engine(environment.spec(Path(sys.argv[2]), Path(sys.argv[3]), run="soak", engine_id="orphan"))
print(engine.pid, flush=True)
sys.stdin.read()
"""


def test_sglang_does_not_outlive_its_launcher(environment: SglangCpu, model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(ROOT), str(model), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        family = [engine, *engine.children(recursive=True)]
        parent.kill()
        _, left = psutil.wait_procs(family, timeout=60)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture(scope="module")
def sglang(environment: SglangCpu, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """A running server."""
    directory = tmp_path_factory.mktemp("sglang")
    engine = launch_engine(environment.spec(model, directory, run="soak", engine_id="sglang"))
    yield engine
    children = psutil.Process(engine.pid).children(recursive=True)
    assert len(children) >= 2, "a scheduler and a detokenizer"
    assert engine.stop(timeout_s=60) == 0, engine.log_tail()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def _prompt_log_probs(answers: list[Any]) -> torch.Tensor:
    """Of every prompt token but each prompt's first."""
    return torch.tensor(
        [value for answer in answers for value, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]
    )


async def test_both_engines_agree_on_log_probs_before_and_after_an_update(
    sglang: EngineProcess, model: Path, tmp_path: Path
) -> None:
    payload = {
        "text": TEXTS,
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.8},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    published = publish(tmp_path, 2, other_weights().items(), checkpoint=model)
    gaps = []
    with running(model) as stand_in:
        async with connect(stand_in) as here, AsyncEngineClient(sglang.url) as there:
            for directory, version in ((model, "1"), (published, "2")):
                for client in (here, there):
                    await client.update_weights_from_disk(directory, version)
                answers = [await client.generate(payload, require_version=version) for client in (here, there)]
                gaps.append((_prompt_log_probs(answers[0]) - _prompt_log_probs(answers[1])).abs().max().item())
                # SGLang's sampled continuation, scored by the stand-in: the temperature-scaled log-probs agree too.
                for answer in answers[1]:
                    meta = answer["meta_info"]
                    ids = [token for _, token, _ in meta["input_token_logprobs"]] + answer["output_ids"]
                    scored = await here.generate(
                        {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
                        | {"logprob_start_len": 0, "top_logprobs_num": 260}
                    )
                    gaps.append(_scaled_gap(scored[0], meta, len(ids) - len(answer["output_ids"]), temperature=0.8))
    print(f"largest log-prob gap between the CPU engine and SGLang: {max(gaps):.2e}")
    assert max(gaps) < 1e-4


def _scaled_gap(scored: Any, meta: Any, prompt: int, *, temperature: float) -> float:
    """Largest gap between SGLang's output log-probs and the stand-in's distributions, scaled."""
    gaps: list[float] = []
    for position, (value, token, _) in enumerate(meta["output_token_logprobs"]):
        top = scored["meta_info"]["input_top_logprobs"][prompt + position]
        logits = torch.full((260,), -torch.inf)
        for logprob, other, _ in top:
            logits[other] = logprob
        gaps.append(abs((logits / temperature).log_softmax(-1)[token].item() - value))
    return max(gaps)


async def test_saved_samples_put_to_it_again(sglang: EngineProcess, tmp_path: Path) -> None:
    """`rltop dump send`: its own tokens get their log-probs again, a greedy answer too; wrong ones are found."""
    async with AsyncEngineClient(sglang.url) as client:
        version = await client.weight_version()
        await ready(client)
        rows = await drawn(client, 6)
        scored = [
            await score(client, recorded(make_sample(at, row)), version=version, timeout_s=60)
            for at, row in enumerate(rows)
        ]
        greedy = recorded(make_sample(0, (await drawn(client, 1, temperature=0.0))[0]))
        again = await sample_again(client, greedy, greedy.params, version=version, timeout_s=60)
    print(f"largest gap of teacher-forced log-probs to SGLang's own: {max(one.max_gap for one in scored):.2e}")
    assert [len(one.gaps) for one in scored] == [8] * 6
    assert max(one.max_gap for one in scored) < 1e-4
    assert again.same
    save(tmp_path / "3.pt", {"rollout_id": 3, "samples": rows})
    command = [sys.executable, "-m", "rltop", "dump", "send", sglang.url, str(tmp_path / "3.pt"), "--json"]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["compared"], told["differ"], told["engine"]["stand_in"]) == (6, 0, None)
    assert told["engine"]["vocab_size"] == 260
    rows[2]["rollout_log_probs"] = [one - 1.0 for one in rows[2]["rollout_log_probs"]]
    save(tmp_path / "3.pt", {"rollout_id": 3, "samples": rows})
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert (ended.returncode, json.loads(ended.stdout)["worst"][0]["at"]) == (1, 2)


def test_tensors_by_value_arrive_bit_for_bit(sglang: EngineProcess) -> None:
    with EngineClient(sglang.url) as client:
        for version, weights in (("11", other_weights()), ("12", initial_weights(MODEL))):
            client.update_weights_from_tensor(weights.items(), version)
            assert checksum_differences(weights.items(), client.weights_checker("checksum")) == []
            assert client.weight_version() == version
        assert checksum_differences(other_weights().items(), client.weights_checker("checksum")) != []


def test_tensors_may_come_while_paused(sglang: EngineProcess) -> None:
    with EngineClient(sglang.url) as client:
        client.pause()
        client.flush_cache()
        client.update_weights_from_tensor(initial_weights(MODEL).items(), "13")
        client.resume_generation()
        payload = {"text": PROMPT, "sampling_params": {"max_new_tokens": 3}}
        assert client.generate(payload, require_version="13")[0]["meta_info"]["weight_version"] == "13"
        with pytest.raises(WrongWeightVersion):
            client.generate(payload, require_version="14")


async def test_scrape_knows_the_real_engine(sglang: EngineProcess) -> None:
    async with httpx.AsyncClient() as http:
        stats = await scrape(sglang.url, http)
    assert stats.reachable
    assert not stats.stand_in
    assert (stats.problem, stats.running, stats.queued, stats.cuda_graph) == ("", 0, 0, False)
    assert stats.weight_version is not None
    assert stats.decode_tokens_total is not None


def test_live_answers_have_the_recorded_shapes(sglang: EngineProcess, model: Path) -> None:
    with httpx.Client(base_url=sglang.url, timeout=120) as http:
        live = ask(http, model)
    trim(live)
    recorded = json.loads((DATA / "answers_0.5.23_cpu.json").read_text())
    assert live.keys() == recorded.keys(), "record again: python -m tests.soak.sglang_cpu.record"
    for name, answer in recorded.items():
        if name.startswith("generate: "):
            continue  # what is cached depends on the tests before; the statuses are compared below
        assert (
            shape(live[name]).items()
            >= {key: kind for key, kind in shape(answer).items() if "null" not in kind}.items()
        )
    assert {name: answer["status"] for name, answer in live.items()} == {
        name: answer["status"] for name, answer in recorded.items()
    }
