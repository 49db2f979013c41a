"""What a look at an engine yields, from recorded answers of several versions and from none."""

from __future__ import annotations

import asyncio
import gzip
import pickle
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from rltop.engines.bounded import LIMIT_BYTES
from rltop.engines.client import AsyncEngineClient, EngineClient, EngineUnreachable, EngineUnreadable
from rltop.engines.scrape import SCRAPE_TIMEOUT_S, EngineStats, read_metrics, scrape
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.server import make_app
from tests.client.virtual import run_virtual
from tests.engines.conftest import connect
from tests.engines.contract import PROMPT

DATA = Path(__file__).parents[1] / "data" / "sglang"
INFO = {"model_path": "/m", "weight_version": "12"}


async def _scrape(table: dict[str, httpx.Response | Exception]) -> tuple[EngineStats, list[str]]:
    asked: list[str] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        answer = table.get(request.url.path, httpx.Response(404))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with httpx.AsyncClient(transport=httpx.MockTransport(serve)) as http:
        return await scrape("http://engine/", http), asked


async def test_recorded_metrics_of_a_gpu_engine_with_speculation() -> None:
    text = (DATA / "metrics_0.5.14_ngram.prom").read_text()
    stats, _ = await _scrape(
        {"/metrics": httpx.Response(200, text=text), "/model_info": httpx.Response(200, json=INFO)}
    )
    assert stats.reachable
    assert (stats.running, stats.queued, stats.tokens_per_s) == (0, 0, 0.0)
    assert stats.spec_accept_length == 1.15
    assert (stats.cuda_graph, stats.decode_tokens_total) == (False, 93.0)
    assert (stats.weight_version, stats.model_path, stats.stand_in) == ("12", "/m", False)


async def test_recorded_metrics_without_speculation_have_no_accept_length() -> None:
    text = (DATA / "metrics_0.5.14.prom").read_text()
    stats, _ = await _scrape({"/metrics": httpx.Response(200, text=text)})
    assert stats.spec_accept_length is None
    assert (stats.generation_tokens_total, stats.requests_total, stats.max_total_tokens) == (24.0, 3.0, 21853334)


async def test_a_server_without_metrics_is_read_through_its_loads() -> None:
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "gen_throughput": 100.0, "token_usage": 0.2},
        {"num_running_reqs": 5, "num_waiting_reqs": 0, "gen_throughput": 50.0, "token_usage": 0.4},
    ]
    stats, _ = await _scrape({"/v1/loads": httpx.Response(200, json={"loads": ranks})})
    assert (stats.running, stats.queued, stats.tokens_per_s) == (8, 1, 150.0)
    assert stats.token_usage == pytest.approx(0.3)
    assert stats.cuda_graph is None
    assert "/metrics: status 404" in stats.problem


async def test_an_older_server_is_asked_for_its_older_path() -> None:
    stats, _ = await _scrape({"/get_model_info": httpx.Response(200, json=INFO)})
    assert stats.weight_version == "12"


async def test_an_idle_engine_makes_no_tokens_whatever_its_gauge_remembers() -> None:
    load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "gen_throughput": 900.0}
    stats, _ = await _scrape({"/v1/loads": httpx.Response(200, json={"loads": [load]})})
    assert stats.tokens_per_s == 0.0


async def test_a_dead_engine_is_all_unknown_and_says_why() -> None:
    refused = httpx.ConnectError("refused")
    paths = ("/metrics", "/v1/loads", "/model_info", "/get_model_info")
    stats, _ = await _scrape(dict.fromkeys(paths, refused))
    assert not stats.reachable
    assert "ConnectError" in stats.problem
    assert (stats.running, stats.tokens_per_s, stats.weight_version) == (None, None, None)


async def test_nonsense_is_unknown() -> None:
    nonsense = httpx.Response(200, text="sglang:num_running_reqs{ what")
    paths = ("/metrics", "/v1/loads", "/model_info")
    stats, _ = await _scrape(dict.fromkeys(paths, nonsense))
    assert stats.reachable
    assert (stats.running, stats.weight_version) == (None, None)


async def test_health_is_never_asked() -> None:
    _, asked = await _scrape({})
    assert {"/health", "/health_generate"} & set(asked) == set()


def test_data_parallel_ranks_keep_their_labels() -> None:
    text = "".join(f'sglang:num_running_reqs{{dp_rank="{rank}"}} {rank + 1}.0\n' for rank in range(2))
    assert read_metrics(text) == {"num_running_reqs": [({"dp_rank": "0"}, 1.0), ({"dp_rank": "1"}, 2.0)]}


async def test_the_cpu_engine_is_recognised_as_a_stand_in(engine: Engine) -> None:
    await connect(engine).generate({"text": PROMPT, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(engine))) as http:
        stats = await scrape("http://engine", http)
    assert stats.stand_in
    assert stats.problem == ""
    assert (stats.running, stats.weight_version, stats.cuda_graph) == (0, "default", True)
    assert (stats.generation_tokens_total, stats.decode_tokens_total, stats.requests_total) == (5.0, 4.0, 1.0)


# ---------------------------------------------------------------------- answers that may be anything

DEEP = b"[" * 200_000
ENDLESS_LINE = b"sglang:num_running_reqs{" + b'a="b",' * 200_000 + b"} 1\n"


@pytest.mark.parametrize("path", ["/v1/loads", "/model_info"])
@pytest.mark.parametrize("body", [DEEP, b"\xff\x00", b"[1]", b'{"loads": 1e999}', b'{"a": ' * 5000])
async def test_json_that_cannot_be_read_is_named_and_keeps_nothing_else_from_being_read(path: str, body: bytes) -> None:
    text = "sglang:num_running_reqs 3\n"
    stats, _ = await _scrape({"/metrics": httpx.Response(200, text=text), path: httpx.Response(200, content=body)})
    assert (stats.reachable, stats.running) == (True, 3)
    assert path in stats.garbled
    assert "cannot be read" in stats.garbled
    assert len(stats.garbled) < 300


@pytest.mark.parametrize("body", [ENDLESS_LINE, b"sglang:num_running_reqs 1\n" * 100_000, b"sglang:token_usage{ what"])
async def test_metrics_that_would_take_for_ever_are_not_parsed(body: bytes) -> None:
    stats, _ = await _scrape(
        {"/metrics": httpx.Response(200, content=body), "/model_info": httpx.Response(200, json=INFO)}
    )
    assert "/metrics: cannot be read (ValueError" in stats.garbled
    assert (stats.running, stats.weight_version) == (None, "12")


async def test_numbers_that_are_none_are_unknown() -> None:
    text = "sglang:num_running_reqs NaN\nsglang:num_queue_reqs +Inf\nsglang:num_paused_reqs 2\n"
    loads = b'{"loads": [{"num_running_reqs": [], "num_waiting_reqs": "x", "token_usage": 0.5}, 7]}'
    table: dict[str, httpx.Response | Exception] = {
        "/metrics": httpx.Response(200, text=text),
        "/v1/loads": httpx.Response(200, content=loads),
    }
    stats, _ = await _scrape(table)
    assert (stats.running, stats.queued, stats.token_usage, stats.paused) == (None, None, 0.5, 2)


async def test_an_answer_longer_than_the_limit_is_not_taken_in() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield b"x" * (1 << 20)

    stats, _ = await _scrape({"/metrics": httpx.Response(200, content=endless())})
    assert stats.garbled == "http://engine/metrics: its answer is longer than 8 MiB"
    assert sent == LIMIT_BYTES + (1 << 20)


async def test_a_compressed_answer_is_not_unpacked() -> None:
    read = 0

    async def bomb() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield gzip.compress(bytes(64 << 20))

    packed = httpx.Response(200, headers={"content-encoding": "gzip"}, content=bomb())
    stats, _ = await _scrape({"/metrics": packed})
    assert stats.garbled == "http://engine/metrics: its answer is compressed (gzip), which was not asked for"
    assert read == 0


def test_an_answer_that_drips_is_late_as_a_whole() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(1.0)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stats, _ = await _scrape({"/metrics": httpx.Response(200, content=drip())})
        assert loop.time() - begun == pytest.approx(SCRAPE_TIMEOUT_S, abs=0.01)
        assert "/metrics: no whole answer within 2 s" in stats.problem
        begun = loop.time()
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=drip()))
        async with AsyncEngineClient("http://engine", transport=transport) as client:
            with pytest.raises(EngineUnreachable, match="no whole answer within 60 s"):
                await client.server_info()
        assert loop.time() - begun == pytest.approx(60.0, abs=0.01)

    run_virtual(main)


@pytest.mark.parametrize(("body", "why"), [(DEEP, "RecursionError"), (b"x" * (LIMIT_BYTES + 1), "longer than 8 MiB")])
async def test_both_clients_name_what_they_cannot_read(body: bytes, why: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    with EngineClient("http://engine", transport=transport) as blocking, pytest.raises(EngineUnreadable, match=why):
        blocking.server_info()
    async with AsyncEngineClient("http://engine", transport=transport) as client:
        with pytest.raises(EngineUnreadable, match=why) as caught:
            await client.server_info()
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message
