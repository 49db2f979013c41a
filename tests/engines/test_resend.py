"""Recorded samples put to an engine again: the CPU engine's own samples, and what is changed of them here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rltop.engines.calls import WrongWeightVersion
from rltop.engines.client import AsyncEngineClient
from rltop.engines.resend import (
    NotServing,
    Recorded,
    Unsendable,
    examine,
    input_log_probs,
    params_of,
    ready,
    recorded,
    sample_again,
    score,
    tokens_of,
)
from rltop.engines.weights import publish
from rltop.evidence.dump_sample import DumpSample, make_sample
from tests.engines.contract import PROMPT, other_weights

EXACT = 1e-5
"""fp32: prefill and decode of one model round differently in the last bits."""
T = 60.0


async def drawn(client: AsyncEngineClient, count: int = 3, **params: Any) -> list[dict[str, Any]]:
    """Samples as a dump has them, drawn from this engine."""
    rows = []
    for at in range(count):
        given = {"temperature": 1.0, "max_new_tokens": 8, "sampling_seed": 40 + at, "ignore_eos": True} | params
        body = {"text": PROMPT, "sampling_params": given, "return_logprob": True, "logprob_start_len": 0}
        answer = (await client.generate(body))[0]
        meta = answer["meta_info"]
        prompt = [triple[1] for triple in meta["input_token_logprobs"]]
        triples = meta["output_token_logprobs"]
        rows.append(
            {
                "index": at,
                "group_index": 0,
                "prompt": PROMPT,
                "tokens": prompt + [triple[1] for triple in triples],
                "response": answer["text"],
                "response_length": len(triples),
                "rollout_log_probs": [triple[0] for triple in triples],
                "reward": 0.0,
                "status": "truncated",
                "weight_versions": [meta["weight_version"]],
                "metadata": {"sampling_params": given},
            }
        )
    return rows


async def test_the_engine_gives_its_own_tokens_the_log_probs_of_the_dump(client: AsyncEngineClient) -> None:
    for row in await drawn(client):
        found = await score(client, recorded(make_sample(0, row)), version="default", timeout_s=T)
        assert len(found.gaps) == row["response_length"]
        assert found.max_gap < EXACT


async def test_one_changed_log_prob_is_found_with_its_place(client: AsyncEngineClient) -> None:
    row = (await drawn(client, 1))[0]
    row["rollout_log_probs"][5] += 0.5
    found = await score(client, recorded(make_sample(0, row)), version="default", timeout_s=T)
    assert found.worst_at == 5
    assert found.worst[0] == row["tokens"][-3]
    assert found.gaps[5] == pytest.approx(-0.5, abs=EXACT)
    assert found.mean_gap == pytest.approx(0.5 / 8, abs=EXACT)


async def test_tokens_that_no_engine_drew_are_not_compared(client: AsyncEngineClient) -> None:
    row = (await drawn(client, 1))[0]
    row["rollout_log_probs"][3] = 0.0
    row["loss_mask"] = [1, 1, 1, 0, 1, 1, 1, 1]
    found = await score(client, recorded(make_sample(0, row)), version="default", timeout_s=T)
    assert len(found.gaps) == 7
    assert found.max_gap < EXACT


async def test_a_log_prob_that_is_nan_is_the_worst(client: AsyncEngineClient) -> None:
    row = (await drawn(client, 1))[0]
    row["rollout_log_probs"][2] = math.nan
    found = await score(client, recorded(make_sample(0, row)), version="default", timeout_s=T)
    assert found.worst_at == 2
    assert math.isnan(found.mean_gap)
    assert math.isnan(found.max_gap)


async def test_other_weights_are_seen(client: AsyncEngineClient, tmp_path: Path, model_path: Path) -> None:
    row = (await drawn(client, 1))[0]
    published = publish(tmp_path / "other", 2, other_weights().items(), checkpoint=model_path)
    await client.update_weights_from_disk(published, "2")
    with pytest.raises(WrongWeightVersion):
        await score(client, recorded(make_sample(0, row)), version="default", timeout_s=T)
    found = await score(client, recorded(make_sample(0, row)), version="2", timeout_s=T)
    assert found.mean_gap > 0.01


async def test_with_its_parameters_and_seed_the_answer_is_the_same(client: AsyncEngineClient) -> None:
    row = (await drawn(client, 1))[0]
    one = recorded(make_sample(0, row))
    found = await sample_again(client, one, one.params, version="default", timeout_s=T)
    assert found.same
    assert found.response_ids == one.response_ids
    assert max(map(abs, found.gaps)) < EXACT
    other = await sample_again(client, one, {**one.params, "sampling_seed": 1}, version="default", timeout_s=T)
    assert other.diverges_at is not None
    assert len(other.gaps) == other.diverges_at


async def test_the_first_other_token(client: AsyncEngineClient) -> None:
    row = (await drawn(client, 1))[0]
    row["tokens"][-4] ^= 1
    one = recorded(make_sample(0, row))
    found = await sample_again(client, one, one.params, version="default", timeout_s=T)
    assert (found.diverges_at, found.recorded_length, found.same) == (4, 8, False)


async def test_an_answer_that_only_ends_earlier_is_not_the_same(client: AsyncEngineClient) -> None:
    row = (await drawn(client, 1))[0]
    one = recorded(make_sample(0, row))
    found = await sample_again(client, one, {**one.params, "max_new_tokens": 5}, version="default", timeout_s=T)
    assert (found.diverges_at, len(found.response_ids), found.same) == (None, 5, False)


async def test_what_an_engine_says_of_itself(client: AsyncEngineClient, model_path: Path) -> None:
    facts = await examine(client)
    assert (facts.version, facts.vocab_size, facts.memory_saver) == ("default", 260, False)
    assert facts.vocab_from == str(model_path / "config.json")
    assert "stand-in" in facts.stand_in
    assert await tokens_of(client, PROMPT, version="default") == (await drawn(client, 1))[0]["tokens"][:-8]


async def test_a_paused_engine_is_not_ready(client: AsyncEngineClient) -> None:
    await ready(client)
    await client.pause("in_place")
    with pytest.raises(NotServing) as caught:
        await ready(client)
    assert "/ready" in caught.value.why
    await client.resume_generation()
    await ready(client)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({}, "no tokens"),
        ({"tokens": [], "response_length": 0}, "no tokens"),
        ({"tokens": [1, 2], "response_length": 3}, "response length is 3 of 2"),
        ({"tokens": [1, 2]}, "response length is None of 2"),
    ],
)
def test_samples_that_can_not_be_sent(row: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsendable, match=why):
        recorded(make_sample(0, row))


async def test_nothing_to_score(client: AsyncEngineClient) -> None:
    no_values = Recorded((1,), (2,), None, (True,), {}, "")
    with pytest.raises(Unsendable, match="rollout_log_probs"):
        await score(client, no_values, version="default", timeout_s=T)
    only_a_tool = Recorded((1,), (2,), (0.0,), (False,), {}, "")
    with pytest.raises(Unsendable, match="drew"):
        await score(client, only_a_tool, version="default", timeout_s=T)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({}, "of none"),
        ({"meta_info": {"input_token_logprobs": [[None, 1, None]]}}, "of 1 positions, not of 2"),
        ({"meta_info": {"input_token_logprobs": [[None, 2, None], [-1.0, 9, None]]}}, "of other tokens"),
    ],
)
def test_answers_that_say_nothing_of_the_tokens(answer: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsendable, match=why):
        input_log_probs(answer, [1, 2, 3], 1)


def test_where_sampling_parameters_are_kept() -> None:
    assert params_of(DumpSample(0)) == {}
    assert params_of(DumpSample(0, metadata={"sampling_params": {"top_p": 0.9, "stop": None}})) == {"top_p": 0.9}
    assert params_of(DumpSample(0, extra={"sampling_params": {"temperature": 0.7}})) == {"temperature": 0.7}
