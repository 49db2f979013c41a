"""Scraping engines: numbers or a gap, never an old or made-up value."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rltop.daemon.sources import EngineScraper
from rltop.engines.scrape import EngineStats
from tests.daemon.fakes import FakeCore


class Fleet:
    """Engines by url: an answer, or an exception."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.answers: dict[str, EngineStats | Exception] = {}
        self.asked: list[str] = []
        self.scraper = EngineScraper(self.core, self.scrape)

    async def scrape(self, url: str) -> EngineStats:
        self.asked.append(url)
        answer = self.answers[url]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add(self, name: str, state: str = "HEALTHY", **fields: Any) -> None:
        url = f"http://h:{name}"
        self.core.set(f"engine/{name}", {"url": url, "state": state, "running": None, "error": None, **fields})
        self.answers[url] = EngineStats(url=url, reachable=True, running=2, tokens_per_s=90.5, weight_version="7")

    def engine(self, name: str) -> Any:
        return self.core.table.get(f"engine/{name}")


async def test_a_good_scrape_fills_in_what_is_known_and_leaves_the_rest_unknown() -> None:
    fleet = Fleet()
    fleet.add("0")
    await fleet.scraper.once()
    engine = fleet.engine("0")
    assert (engine["running"], engine["tokens_per_s"], engine["weight_version"]) == (2, 90.5, "7")
    assert (engine["queued"], engine["cuda_graph"], engine["error"], engine["seen"]) == (None, None, None, 1000.0)


async def test_a_paused_engine_makes_no_tokens_whatever_its_gauge_says_until_its_counter_moves() -> None:
    fleet = Fleet()
    fleet.add("0", paused={"by": "ana", "since": 999.0})
    for now, tokens, paused in (
        (1000.0, 10.0, True),
        (1002.0, 12.0, True),
        (1006.0, 12.0, True),
        (1008.0, 15.0, False),
    ):
        fleet.core.time = now
        fleet.answers["http://h:0"] = EngineStats(
            url="", reachable=True, running=2, tokens_per_s=90.5, decode_tokens_total=tokens
        )
        await fleet.scraper.once()
        engine = fleet.engine("0")
        assert (engine["tokens_per_s"], bool(engine["paused"])) == ((0.0, True) if paused else (90.5, False)), now


@pytest.mark.parametrize(
    "answer", [OSError("connection refused"), EngineStats(url="", reachable=False, problem="connection refused")]
)
async def test_a_failed_scrape_is_a_gap_with_its_reason(answer: EngineStats | Exception) -> None:
    fleet = Fleet()
    fleet.add("0")
    await fleet.scraper.once()
    fleet.answers["http://h:0"] = answer
    fleet.core.time = 1002.0
    await fleet.scraper.once()
    engine = fleet.engine("0")
    assert (engine["running"], engine["tokens_per_s"]) == (None, None)
    assert "connection refused" in engine["error"]
    assert engine["seen"] == 1000.0
    assert engine["weight_version"] == "7", "what an engine holds does not change by not answering"


async def test_one_broken_engine_does_not_hide_the_others() -> None:
    fleet = Fleet()
    for name in ("0", "1", "2"):
        fleet.add(name)
    fleet.answers["http://h:1"] = RuntimeError("odd")
    await fleet.scraper.once()
    assert [fleet.engine(name)["running"] for name in ("0", "1", "2")] == [2, None, 2]


@pytest.mark.parametrize("state", ["STOPPED", "CRASHED", "OFFLOADED", "LAUNCHING"])
async def test_engines_that_must_not_or_cannot_answer_are_left_alone(state: str) -> None:
    fleet = Fleet()
    fleet.add("0", state, running=5, error="old")
    await fleet.scraper.once()
    assert fleet.asked == []
    assert (fleet.engine("0")["running"], fleet.engine("0")["error"]) == (None, None)


async def test_an_answer_for_an_engine_that_moved_meanwhile_is_dropped() -> None:
    fleet = Fleet()
    fleet.add("0")

    async def moves(url: str) -> EngineStats:
        fleet.core.update("engine/0", url="http://elsewhere:1")
        return EngineStats(url=url, reachable=True, running=99)

    await EngineScraper(fleet.core, moves).once()
    assert fleet.engine("0")["running"] is None


async def test_it_goes_on_every_two_seconds() -> None:
    fleet = Fleet()
    fleet.add("0")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await EngineScraper(fleet.core, fleet.scrape, sleep=sleep).run()
    assert (len(fleet.asked), slept) == (3, [2.0, 2.0, 2.0])
