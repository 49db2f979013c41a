"""What the CPU engine does with requests, pauses and weight updates, through rltop's own client."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from rltop.engines.client import AsyncEngineClient, EngineRefused, WrongWeightVersion
from rltop.engines.weights import checksum_differences, publish
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.server import make_app
from rltop.train.tiny_model import initial_weights
from tests.engines.conftest import connect, running
from tests.engines.contract import MODEL, PROMPT, other_weights

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"max_new_tokens": 400, "ignore_eos": True}


async def _started(client: AsyncEngineClient, **params: Any) -> asyncio.Task[list[Any]]:
    """A long generation that has its first tokens."""
    task = asyncio.create_task(client.generate({"text": "x", "sampling_params": LONG | params}))
    while (await client.loads())["loads"][0]["num_running_reqs"] == 0:
        assert not task.done()
        await asyncio.sleep(0)  # lets the task run; requests within this process never wait for anything
    return task


async def _tokens(client: AsyncEngineClient) -> list[int]:
    """What the weights of now say to the prompt."""
    answer = (await client.generate({"text": PROMPT, "sampling_params": GREEDY}))[0]
    tokens: list[int] = answer["output_ids"]
    return tokens


# ---------------------------------------------------------------------- endings


async def test_a_stop_string_ends_the_response_and_is_cut_off(client: AsyncEngineClient) -> None:
    async def ask(**params: Any) -> dict[str, Any]:
        # Seeded sampling: an untrained model says the same thing over and over when greedy.
        seeded = {"sampling_seed": 1, "max_new_tokens": 60, "ignore_eos": True}
        answer: dict[str, Any] = (await client.generate({"text": PROMPT, "sampling_params": seeded | params}))[0]
        return answer

    whole = (await ask())["text"]
    found = re.search(r"[!-~]{2}", whole[5:])
    assert found is not None
    stop, before = found.group(), whole[: whole.index(found.group())]
    cut = await ask(stop=["never said", stop])
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert cut["text"] == before
    assert (await ask(stop=stop, no_stop_trim=True))["text"] == before + stop


async def test_a_stop_token_ends_the_response_and_is_not_in_its_text(client: AsyncEngineClient) -> None:
    ids = (await client.generate({"text": PROMPT, "sampling_params": GREEDY}))[0]["output_ids"]
    params = GREEDY | {"stop_token_ids": [ids[0]], "ignore_eos": False}
    answer = (await client.generate({"text": PROMPT, "sampling_params": params}))[0]
    assert (answer["output_ids"], answer["text"]) == (ids[:1], "")
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[0]}


async def test_without_max_new_tokens_a_response_ends_with_the_context(client: AsyncEngineClient) -> None:
    answer = (await client.generate({"text": "x" * 1000, "sampling_params": GREEDY | {"max_new_tokens": None}}))[0]
    assert answer["meta_info"]["completion_tokens"] == 24
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 24}


async def test_more_samples_than_places_are_queued_and_all_answered(model_path: Path) -> None:
    with running(model_path, "--max-running-requests", "3", "--max-total-tokens", "64") as engine:
        answers = await connect(engine).generate({"text": [PROMPT] * 20, "sampling_params": GREEDY})
    assert len({answer["text"] for answer in answers}) == 1
    assert len(answers) == 20


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "x", "sampling_params": {"n": 0}}, "n must be a positive integer"),
        ({"text": "x", "sampling_params": {"repetition_penalty": 1.1}}, "does not implement 'repetition_penalty'"),
        ({"text": "x", "lora_path": "a"}, "does not implement 'lora_path'"),
        ({"text": ""}, "no tokens"),
        ({"input_ids": [260]}, "input_ids must be in [0, 259]"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        ({"text": "x", "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1]"),
        ({"text": "x", "sampling_params": {"sampling_seed": "1"}}, "sampling_seed must be an integer"),
    ],
)
async def test_a_bad_request_is_refused_with_its_reason(
    client: AsyncEngineClient, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineRefused, match="status 400") as refused:
        await client.generate(body)
    assert message in refused.value.message


async def test_a_body_that_is_not_json_is_refused(engine: Engine) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://engine") as http:
        response = await http.post("/generate", content=b"{nonsense")
    assert response.status_code == 400
    assert "JSON decode error" in response.json()["message"]


# ---------------------------------------------------------------------- streaming and clients that leave


async def test_a_stream_grows_token_by_token_and_ends_like_the_plain_answer(engine: Engine) -> None:
    events = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine)), base_url="http://engine") as http:
        body = {"text": PROMPT, "sampling_params": GREEDY, "stream": True}
        async with http.stream("POST", "/generate", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    answers = [json.loads(event) for event in events]
    assert [len(answer["output_ids"]) for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert [bool(answer["meta_info"]["finish_reason"]) for answer in answers] == [False] * 5 + [True]
    assert answers[-1]["output_ids"] == await _tokens(connect(engine))


async def test_a_client_that_leaves_frees_its_place(engine: Engine) -> None:
    closed = asyncio.Event()
    body = json.dumps({"text": "x", "sampling_params": LONG}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b"", "raw_path": b""}
    request = asyncio.create_task(make_app(engine)(scope, receive, send))
    while engine.scheduler.stats.running == 0:  # noqa: ASYNC110 - a number of another thread
        await asyncio.sleep(0)
    closed.set()
    await request
    assert await engine.do(engine.scheduler.idle)
    assert engine.scheduler.stats.aborted == 1


# ---------------------------------------------------------------------- pauses


async def test_abort_pause_answers_what_runs_and_holds_what_comes(client: AsyncEngineClient) -> None:
    running_one = await _started(client)
    await client.pause()
    cut = (await running_one)[0]
    assert cut["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert 0 < cut["meta_info"]["completion_tokens"] == len(cut["output_ids"]) < 400
    held = asyncio.create_task(client.generate({"text": PROMPT, "sampling_params": GREEDY}))
    await client.flush_cache()
    await client.update_weights_from_tensor(other_weights().items(), "1")
    assert not held.done()
    await client.resume_generation()
    assert (await held)[0]["meta_info"]["weight_version"] == "1"


async def test_in_place_pause_goes_on_and_tells_which_tokens_had_which_weights(client: AsyncEngineClient) -> None:
    task = await _started(client)
    await client.pause("in_place")
    await client.update_weights_from_tensor(other_weights().items(), "1", flush=False)
    await client.resume_generation()
    meta = (await task)[0]["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"], meta["weight_version"]) == ("default", "1", "1")
    assert first["start"] == 0 < first["end"] == second["start"] < second["end"] == 400


async def test_in_place_pause_refuses_to_flush(client: AsyncEngineClient) -> None:
    task = await _started(client)
    await client.pause("in_place")
    with pytest.raises(EngineRefused, match="Flush cache failed"):
        await client.flush_cache()
    with pytest.raises(EngineRefused, match="cache was not flushed"):
        await client.update_weights_from_tensor(other_weights().items(), "1")
    await client.resume_generation()
    await client.abort()
    await task


async def test_retract_pause_computes_the_sample_anew_after_an_update(client: AsyncEngineClient) -> None:
    task = await _started(client)
    await client.pause("retract")
    assert (await client.loads())["loads"][0]["queues"]["retracted"] == 1
    await client.update_weights_from_tensor(other_weights().items(), "1")
    await client.resume_generation()
    meta = (await task)[0]["meta_info"]
    assert (meta["num_retractions"], meta["completion_tokens"]) == (1, 400)


async def test_an_update_waits_for_what_runs_and_holds_what_comes(client: AsyncEngineClient) -> None:
    task = await _started(client, max_new_tokens=200)
    update = asyncio.create_task(client.update_weights_from_tensor(other_weights().items(), "1"))
    late = asyncio.create_task(client.generate({"text": PROMPT, "sampling_params": GREEDY}))
    assert (await task)[0]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 200}]
    await update
    assert (await late)[0]["meta_info"]["weight_version"] == "1"


async def test_health_of_a_paused_engine_is_bad(engine: Engine) -> None:
    client = connect(engine)
    assert await client.health()
    await client.pause()
    patience, engine.health_timeout_s = engine.health_timeout_s, 0.05
    assert not await client.health()
    engine.health_timeout_s = patience
    await client.resume_generation()
    assert await client.health()


# ---------------------------------------------------------------------- weights


async def test_an_update_flushes_the_prompt_cache_unless_told_not_to(client: AsyncEngineClient) -> None:
    async def cached() -> int:
        answer = (await client.generate({"text": PROMPT, "sampling_params": GREEDY}))[0]
        tokens: int = answer["meta_info"]["cached_tokens"]
        return tokens

    assert [await cached(), await cached()] == [0, 28]
    await client.update_weights_from_tensor(other_weights().items(), "1")
    assert [await cached(), await cached()] == [0, 28]
    # Keys and values of the old weights under the new: SGLang's behaviour, and why flushing is the default.
    await client.update_weights_from_tensor(initial_weights(MODEL).items(), "2", flush=False)
    assert await cached() == 28


async def test_both_transports_give_the_same_weights(
    client: AsyncEngineClient, model_path: Path, tmp_path: Path
) -> None:
    before, new = await _tokens(client), other_weights()
    await client.update_weights_from_tensor(new.items(), "1")
    by_tensor, by_checker = await _tokens(client), await client.weights_checker("checksum")
    assert checksum_differences(new.items(), by_checker) == []
    assert checksum_differences(initial_weights(MODEL).items(), by_checker) != []
    await client.update_weights_from_disk(model_path, "2")
    assert await _tokens(client) == before
    await client.update_weights_from_disk(publish(tmp_path, 3, new.items(), checkpoint=model_path), "3")
    assert await _tokens(client) == by_tensor != before
    assert await client.weights_checker("checksum") == by_checker
    assert await client.weight_version() == "3"


async def test_an_update_of_some_tensors_keeps_the_others(client: AsyncEngineClient) -> None:
    old, new = initial_weights(MODEL), other_weights()
    name = "model.layers.1.mlp.up_proj.weight"
    await client.update_weights_from_tensor([(name, new[name])], "1")
    answer = await client.weights_checker("checksum")
    assert checksum_differences((old | {name: new[name]}).items(), answer) == []


async def test_a_bad_update_changes_nothing_and_keeps_the_version(client: AsyncEngineClient, tmp_path: Path) -> None:
    before = await _tokens(client)
    new = other_weights()
    name = "model.norm.weight"
    with pytest.raises(EngineRefused, match="has another shape"):
        await client.update_weights_from_tensor([*new.items(), (name, new[name][:1])], "1")
    with pytest.raises(EngineRefused, match=r"no tensor 'model\.nonsense'"):
        await client.update_weights_from_tensor([("model.nonsense", new[name])], "1")
    with pytest.raises(EngineRefused, match="no such directory"):
        await client.update_weights_from_disk(tmp_path / "nothing", "1")
    assert (await _tokens(client), await client.weight_version()) == (before, "default")


async def test_the_client_takes_no_sample_of_another_version(client: AsyncEngineClient) -> None:
    payload = {"text": PROMPT, "sampling_params": GREEDY}
    await client.update_weights_from_tensor(other_weights().items(), "2")
    assert (await client.generate(payload, require_version="2"))[0]["meta_info"]["weight_version"] == "2"
    with pytest.raises(WrongWeightVersion) as wrong:
        await client.generate(payload, require_version="3")
    assert (wrong.value.required, wrong.value.found) == ("3", "2")


async def test_the_checker_sees_a_changed_weight_and_can_destroy_all(
    client: AsyncEngineClient, model_path: Path
) -> None:
    before = await _tokens(client)
    await client.weights_checker("snapshot")
    await client.weights_checker("compare")
    with pytest.raises(EngineRefused, match='"message":""'):  # 0.5.23 forgets the snapshot once all was equal
        await client.weights_checker("compare")
    await client.weights_checker("snapshot")
    await client.weights_checker("reset_tensors")
    assert await _tokens(client) != before
    with pytest.raises(EngineRefused, match=r"name=model\.embed_tokens\.weight max_abs_err="):
        await client.weights_checker("compare")
    await client.update_weights_from_disk(model_path, "default")
    await client.weights_checker("compare")
    assert await _tokens(client) == before


async def test_released_weights_are_gone_until_the_next_update(model_path: Path) -> None:
    with running(model_path, "--enable-memory-saver") as engine:
        client = connect(engine)
        before = await _tokens(client)
        await client.release_memory()
        with pytest.raises(EngineRefused, match="status 503"):
            await client.generate({"text": PROMPT, "sampling_params": GREEDY})
        assert not await client.health()
        await client.resume_memory()
        # What a real engine gives when nobody updates it after a resume.
        assert await _tokens(client) == [0] * 6
        await client.update_weights_from_disk(model_path, "1")
        assert await _tokens(client) == before


async def test_a_failure_in_the_loop_ends_the_engine_with_its_cause(engine: Engine) -> None:
    client = connect(engine)
    engine.scheduler.live.packed = None  # type: ignore[attr-defined]  # planted in the CPU engine's weights
    answer = (await client.generate({"text": "x", "sampling_params": GREEDY}))[0]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert "AttributeError" in engine.scheduler.fatal
    engine.scheduler.fatal = ""  # seen: the fixture asserts that there was none


async def test_a_profile_of_some_batches_is_a_trace_in_the_directory(client: AsyncEngineClient, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
        await client.profile(steps=1)
        await client.generate({"text": PROMPT, "sampling_params": GREEDY | {"max_new_tokens": 3}})
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name.endswith("-TP-0.trace.json.gz")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)
