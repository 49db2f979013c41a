"""The CPU engine's numbers: right, and the same whoever shares the batch."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rltop.engines.client import AsyncEngineClient
from rltop.train.cpu_engine.checkpoint import read_config
from rltop.train.cpu_engine.model import Qwen3, Slab, pack_weights
from rltop.train.cpu_engine.params import SamplingParams, stream_of
from rltop.train.cpu_engine.sampling import draw, uniforms
from rltop.train.tiny_model import TinyModelConfig, initial_weights, make_tiny_model
from tests.engines.conftest import connect, running
from tests.engines.contract import MODEL, PROMPT

SEEDED = {"max_new_tokens": 12, "ignore_eos": True}


def _prompts(count: int) -> list[str]:
    """Distinct, of several lengths."""
    return [
        PROMPT.replace("3 1 2", " ".join(str(index + step) for step in range(1 + index % 4))) for index in range(count)
    ]


def _result(answer: dict[str, Any]) -> tuple[list[int], list[Any]]:
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


async def test_log_probs_agree_with_transformers(client: AsyncEngineClient, model_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    temperature = 0.7
    answers = await client.generate(
        {
            "text": _prompts(5),
            "sampling_params": SEEDED | {"temperature": temperature, "sampling_seed": 3, "max_new_tokens": 40},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )
    for answer in answers:
        meta = answer["meta_info"]
        prompt = [token for _, token, _ in meta["input_token_logprobs"]]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + answer["output_ids"]])).logits[0, :-1]
        plain, scaled = logits.log_softmax(-1), (logits / temperature).log_softmax(-1)
        expected = plain[range(len(prompt) - 1), prompt[1:]].tolist()
        assert [value for value, _, _ in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-4)
        expected = scaled[range(len(prompt) - 1, len(logits)), answer["output_ids"]].tolist()
        assert [value for value, _, _ in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-4)


async def test_seeded_samples_are_bitwise_the_same_in_any_batch(model_path: Path) -> None:
    prompts = _prompts(70)
    params = [SEEDED | {"sampling_seed": index, "temperature": 0.8 + index % 3 / 10} for index in range(70)]
    order = random.Random(0).sample(range(70), 70)
    with running(model_path, "--disable-radix-cache") as engine:
        client = connect(engine)
        together = await client.generate({"text": prompts, "sampling_params": params, "return_logprob": True})
        shuffled = await client.generate(
            {
                "text": [prompts[index] for index in order],
                "sampling_params": [params[index] for index in order],
                "return_logprob": True,
            }
        )
        alone = [
            (await client.generate({"text": prompts[i], "sampling_params": params[i], "return_logprob": True}))[0]
            for i in (0, 33, 69)
        ]
    assert [_result(shuffled[order.index(index)]) for index in range(70)] == [_result(answer) for answer in together]
    assert [_result(answer) for answer in alone] == [_result(together[index]) for index in (0, 33, 69)]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(MODEL, id="the tiny model"),
        pytest.param(replace(MODEL, hidden_size=80, intermediate_size=72, head_dim=12), id="odd widths"),
        pytest.param(replace(MODEL, num_heads=3, num_kv_heads=1, intermediate_size=96), id="one key head"),
    ],
)
def test_a_row_has_the_same_bits_beside_any_number_of_others(config: TinyModelConfig, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    shape = read_config(make_tiny_model(tmp_path / "model", config))
    model, weights = Qwen3(shape, 256), pack_weights(shape, initial_weights(config))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 256, (40, 21), generator=generator)
    alone = [model.prefill(weights, prompt[None])[0] for prompt in prompts]
    at_once = model.prompts_per_prefill
    shared = [item for at in range(0, 40, at_once) for item in model.prefill(weights, prompts[at : at + at_once])]
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(alone, shared, strict=True))

    def logits_of_first(count: int) -> torch.Tensor:
        slab = Slab(shape, 64)
        for prefill in alone[:count]:
            slab.add(prefill)
        rows = model.padded_rows(count)
        ids, positions = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        positions[:count] = 21
        return model.decode(weights, slab, ids, positions)[0].log_softmax(-1)

    single = logits_of_first(1)
    assert all(torch.equal(single, logits_of_first(count)) for count in (2, 3, 17, 31, 32, 33, 40))


async def test_the_prompt_cache_changes_no_bit(client: AsyncEngineClient) -> None:
    payload = {"text": PROMPT, "sampling_params": SEEDED | {"sampling_seed": 5}, "return_logprob": True}
    first = (await client.generate(payload))[0]
    second = (await client.generate(payload))[0]
    assert (first["meta_info"]["cached_tokens"], second["meta_info"]["cached_tokens"]) == (0, 28)
    assert _result(first) == _result(second)


async def test_samples_with_other_limits_in_the_batch_change_no_bit(client: AsyncEngineClient) -> None:
    mine = SEEDED | {"sampling_seed": 1}
    alone = (await client.generate({"text": PROMPT, "sampling_params": mine, "return_logprob": True}))[0]
    crowd = [mine, mine | {"max_new_tokens": 300, "sampling_seed": 2}, mine | {"max_new_tokens": 1}]
    together = await client.generate({"text": [PROMPT] * 3, "sampling_params": crowd, "return_logprob": True})
    assert _result(together[0]) == _result(alone)


async def test_samples_of_one_request_differ_and_repeat(client: AsyncEngineClient) -> None:
    payload = {"text": "abc", "sampling_params": SEEDED | {"n": 4, "sampling_seed": 9}}
    first = [answer["output_ids"] for answer in await client.generate(payload)]
    second = [answer["output_ids"] for answer in await client.generate(payload)]
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4


def _draws(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    rows = logits.repeat(32, 1)
    return Counter(
        token
        for seed in range(count // 32)
        for token in draw(rows, [(params, stream_of(seed, index), 0) for index in range(32)]).tokens
    )


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1e9])
    counts = _draws(logits, SamplingParams(temperature=2.0), 32_000)
    chances = (logits / 2.0).softmax(-1).tolist()
    for token, chance in enumerate(chances):
        # Five standard deviations of a binomial count.
        assert abs(counts[token] - 32_000 * chance) <= 5 * math.sqrt(32_000 * chance * (1 - chance)) + 1e-6


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.6), {2}),
        (SamplingParams(top_p=0.7), {1, 2}),
        (SamplingParams(min_p=0.2), {1, 2}),
        (SamplingParams(top_k=1), {2}),
    ],
)
def test_filters_keep_what_sglang_keeps(params: SamplingParams, kept: set[int]) -> None:
    # Chances 0.09, 0.24, 0.67.
    assert set(_draws(torch.tensor([0.0, 1.0, 2.0]), params, 3_200)) == kept


def test_a_filter_does_not_change_the_reported_log_prob() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(32, 1)
    drawn = draw(logits, [(SamplingParams(top_k=2), stream_of(0, index), 0) for index in range(32)])
    assert drawn.logprobs == pytest.approx([logits[0].log_softmax(-1)[token].item() for token in drawn.tokens])


def test_streams_are_uniform_and_independent_of_each_other() -> None:
    numbers = uniforms([stream_of(seed, 0) for seed in range(1000)], [0] * 1000)
    steps = uniforms([stream_of(7, 1)] * 1000, list(range(1000)))
    for values in (numbers, steps):
        assert values.min() >= 0
        assert values.max() < 1
        assert abs(values.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 1000)
    assert abs(float(((numbers - 0.5) * (steps - 0.5)).mean())) < 5 / 12 / math.sqrt(1000)
