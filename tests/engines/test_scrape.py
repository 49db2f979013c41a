"""What a look at an engine yields, from recorded answers of several versions and from none."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from rltop.engines.scrape import EngineStats, read_metrics, scrape
from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.server import make_app
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
