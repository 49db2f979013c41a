"""The kernel after the culprit: from the core dumps there are, from one more run, or from a launch that blocked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rltop.daemon.bisect_bench import Bench
from rltop.daemon.bisect_kernel import _under_traffic
from rltop.engines.toggle_table import CORE_DUMP
from rltop.engines.trials import Sight
from tests.daemon.bisect_rig import Rig

TOGGLES = ("radix_cache", "overlap_schedule")
STORY = (": found: ", "the kernel is kv_copy_kernel", "back on the original flags")
"""In this order: nobody understands the second before the first."""


@pytest.mark.parametrize("dumping", [True, False])
async def test_the_kernel_of_the_culprit(tmp_path: Path, dumping: bool) -> None:
    rig = Rig(tmp_path, fault="ima:radix_cache:batch=4,kernel=kv_copy_kernel", engines=1, name="run")
    if not dumping:
        del rig.slots[0]["env"][CORE_DUMP]
    async with rig.life():
        try:
            await rig.start()
            await rig.crash()
            before = rig.flags("0")
            cell = await rig.bisection(toggles=TOGGLES, traffic=None)
            assert (cell["state"], cell["verdict"]["culprit"]) == ("found", ["radix_cache"]), rig.story()
            assert cell["traffic"]["source"].startswith("crash dump of engine 0, generation 1"), "what was captured"
            kernel = cell["kernel"]
            assert kernel["name"] == "kv_copy_kernel", rig.story()
            assert kernel["weaker"] is False
            assert "a stand-in wrote it" in kernel["source"]
            runs = [text for text in rig.core.texts() if "once more" in text]
            assert bool(runs) is not dumping, "with a core dump nothing is run again"
            extra = cell["kernel_runs"]
            assert [run["outcome"] for run in extra] == ([] if dumping else ["crashed"])
            assert all("once more, with core dumps" in run["why"] and run["limit_min"] > 0 for run in extra)
            assert (cell["kernel_stage"], cell["unserved"]) == (None, None), "it is over"
            told = rig.core.texts("bisect")
            order = [next(at for at, text in enumerate(told) if word in text) for word in STORY]
            assert order == sorted(order)
            assert ("kv_copy_kernel" in cell["facts"][0]["text"]) is dumping
            if dumping:
                assert "coredump" in cell["facts"][0]["source"]
            assert cell["trials"]
            assert not any("once more" in row["why"] for row in cell["trials"]), "a run for the name is no trial"
            assert rig.flags("0") == before
            assert cell["restored"] == {"0": "original"}
        finally:
            await rig.engines.stop_all(lambda stage: None)


class Dying:
    """The fleet's word on an engine that crashed at second 10 and writes its dump until `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    def sight(self, engine: str, generation: int) -> Sight:
        return Sight(where="coming", generation=generation, since=10.0)

    async def until(self, engine: str, generation: int, done: object) -> Sight:
        await self.gone.wait()
        return Sight(where="crashed", generation=generation, kind="ima", since=10.0)

    def client(self, url: str) -> SimpleNamespace:
        async def close() -> None: ...

        return SimpleNamespace(close=close)


class Quiet:
    """Traffic that goes on until it is stopped."""

    def replay(self, seed: int) -> Quiet:
        return self

    async def run(self, client: object, *, stop: asyncio.Event) -> None:
        await stop.wait()

    def counts(self) -> SimpleNamespace:
        return SimpleNamespace(done=7, failed=1, tokens=70)


async def test_a_run_whose_time_is_over_while_it_writes_its_dump_has_crashed() -> None:
    trials = Dying()
    bench: Any = SimpleNamespace(trials=trials, traffic=Quiet(), clock=lambda: 50.0, scale=1.0, beat_s=0.01)
    run: Any = SimpleNamespace(engine="0", generation=3, minutes=5.0, limit_min=5.0)
    work = asyncio.ensure_future(_under_traffic(bench, run, Sight(where="ready", generation=3)))
    done, _ = await asyncio.wait([work], timeout=0.2)
    assert not done, "its last words are waited for"
    trials.gone.set()
    assert (await work).where == "crashed"


def test_an_engine_that_writes_its_last_words_is_not_quiet() -> None:
    row: Any = SimpleNamespace(engine="0", generation=3, minutes=0.0, requests=0, failed=0, tokens=0)
    bench: Any = SimpleNamespace(live={}, trials=Dying(), clock=lambda: 4.0, scale=1.0)
    Bench.begin(bench, row, Quiet())  # type: ignore[arg-type]  # only its counts are asked for
    bench.clock = lambda: 50.0
    Bench.count(bench, row)
    assert (row.minutes, row.requests) == (6.0, 7), "from second 4 to its crash at 10"
