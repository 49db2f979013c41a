"""Traffic that is kept, and replayed: the ring on disk, its sources, waves of odd sizes, sleeps between them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rltop.engines.calls import Call, EngineRefused, EngineUnreachable
from rltop.engines.launcher import CRASH_DUMP_FOLDER
from rltop.engines.traffic import CYCLE_WAVES, SYNTHETIC, Cycle, Traffic, captured, check_dump, in_flight, kept
from rltop.engines.traffic_ring import FOLDER, SEGMENTS, Ring, read_ring
from rltop.errors import RltopError
from rltop.train.cpu_engine.crash_dump import CrashDump

BODY = {"input_ids": [[1, 2, 3], [4]], "sampling_params": [{"max_new_tokens": 3}, {"temperature": 0.5}]}


def fill(folder: Path, *, engine: str = "0", generation: int = 2) -> None:
    ring = Ring(folder)
    with ring.request(engine, generation, BODY):
        pass
    with pytest.raises(EngineUnreachable), ring.request(engine, generation, {"input_ids": [9], "sampling_params": {}}):
        raise EngineUnreachable("http://x", Call("POST", "/generate"), "gone")
    with ring.request("other", generation, {"input_ids": [7]}):
        pass
    ring.close()
    assert (ring.lost, ring.problem) == (0, "")


# ---------------------------------------------------------------------- the ring


def test_the_ring_keeps_what_was_asked(tmp_path: Path) -> None:
    fill(tmp_path)
    found = read_ring(tmp_path, "0", 2)
    assert [one.body.get("input_ids") for one in found] == [[[1, 2, 3], [4]], [9]]
    assert [one.ended is None for one in found] == [False, True], "the second was in flight when its engine went"
    assert not read_ring(tmp_path, "0", 3)
    assert (tmp_path / SEGMENTS[-1]).stat().st_mode & 0o077 == 0, "it has prompts"


def test_the_ring_is_bounded(tmp_path: Path) -> None:
    ring = Ring(tmp_path, most_bytes=20_000)
    for number in range(200):
        with ring.request("0", 1, {"input_ids": [number] * 50}):
            pass
        while ring._lines.qsize() > 100:  # the queue is short on purpose; this test is not about it
            os.sched_yield()
    ring.close()
    assert ring.lost == 0
    assert sum((tmp_path / name).stat().st_size for name in SEGMENTS) <= 20_000
    kept_now = [one.body["input_ids"][0] for one in read_ring(tmp_path, "0", 1)]
    assert kept_now[-1] == 199
    assert kept_now == list(range(kept_now[0], 200)), "the newest, without a gap"
    assert ring._put({"t": 0.0, "body": {"input_ids": [1] * 20_000}}) is None
    assert "larger" in ring.problem


def test_a_full_disk_is_counted_and_stops_nobody(tmp_path: Path) -> None:
    ring = Ring(Path("/dev/full") / "no" / "folder")
    for _ in range(5):
        with ring.request("0", 1, BODY):
            pass
    ring.close()
    assert ring.lost == 10, "five questions and five answers"
    assert "/dev/full" in ring.problem


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first, second = Ring(tmp_path), Ring(tmp_path)
    for ring in (first, second):
        with ring.request("0", 1, BODY):
            pass
        while ring._lines.qsize():
            os.sched_yield()
    second.close()
    first.close()
    assert (first.lost, second.lost) == (0, 2)
    assert "another process" in second.problem


def test_torn_lines_are_passed_over(tmp_path: Path) -> None:
    fill(tmp_path)
    with (tmp_path / SEGMENTS[-1]).open("ab") as file:
        file.write(b'{"n": 99, "t": 1, "engine": "0", "gener')
    assert len(read_ring(tmp_path, "0", 2)) == 2


# ---------------------------------------------------------------------- where traffic comes from


def test_the_best_source_is_taken(tmp_path: Path) -> None:
    assert captured(tmp_path, "0", 2) is None
    assert kept(tmp_path, "0", 2) == SYNTHETIC
    fill(tmp_path / FOLDER)
    ring = captured(tmp_path, "0", 2)
    assert ring is not None
    assert ring.source == "the trainer's requests to engine 0, generation 2 (1 in flight when it crashed)"
    assert ring.requests == (
        {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}},
        {"input_ids": [4], "sampling_params": {"temperature": 0.5}},
        {"input_ids": [9], "sampling_params": {}},
    ), "prompt by prompt, so that batches can have odd sizes"
    folder = tmp_path / "engines" / "0" / "2" / CRASH_DUMP_FOLDER
    dump = CrashDump(str(folder), {})
    with dump.request({"input_ids": [5, 6], "sampling_params": {}}):
        written = dump.write()
    assert written is not None
    best = captured(tmp_path, "0", 2)
    assert best is not None
    assert best.source == "crash dump of engine 0, generation 2 (1 in flight when it crashed)"
    assert in_flight(folder) == 1
    written.write_bytes(written.read_bytes()[:40])
    worse = captured(tmp_path, "0", 2)
    assert worse is not None
    assert worse.requests == ring.requests
    assert "can not be read" in worse.notes[0]


def test_a_dump_that_is_none_is_said_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="cannot read this dump"):
        check_dump(tmp_path / "none.pt")
    lines = tmp_path / "rollout.jsonl"
    lines.write_text('{"tokens": [1, 2, 3, 4], "response_length": 2, "reward": 1.0}\n' * 3)
    found = Traffic.from_dump(lines)
    assert (found.source, found.concurrency, len(found.requests)) == ("dump rollout.jsonl", 3, 3)
    assert found.requests[0]["input_ids"] == [1, 2]
    assert found.requests[0]["sampling_params"] == {"max_new_tokens": 2, "ignore_eos": True}
    lines.write_text('{"prompt": "no tokens", "reward": 1.0}\n')
    with pytest.raises(RltopError, match="no sample that could be asked for again"):
        Traffic.from_dump(lines)


# ---------------------------------------------------------------------- replay


class Client:
    """An engine that answers when it is told to, and remembers."""

    def __init__(self, *, dies_after: int = 10**9, stop: asyncio.Event) -> None:
        self.calls: list[str] = []
        self.prompts: list[int] = []
        self.sizes: list[int] = []
        self.open = 0
        self.dies_after, self.stop, self.flushes_refused = dies_after, stop, 0

    async def generate(self, body: Mapping[str, Any]) -> list[Any]:
        if len(self.prompts) >= self.dies_after:
            raise EngineUnreachable("http://x", Call("POST", "/generate"), "gone")
        self.prompts.append(body["input_ids"][0])
        self.open += 1
        self.sizes.append(self.open)
        await asyncio.sleep(0)
        self.open -= 1
        if len(self.prompts) >= 400:
            self.stop.set()
        return [{"meta_info": {"completion_tokens": 2}}]

    async def abort(self) -> None:
        self.calls.append("abort")

    async def flush_cache(self) -> None:
        assert not self.open, "no request runs"
        self.calls.append("flush")
        if self.flushes_refused:
            self.flushes_refused -= 1
            raise EngineRefused("http://x", Call("POST", "/flush_cache"), 400, "busy")

    async def release_memory(self, tags: Iterable[str] | None = None) -> None:
        self.calls.append("release")

    async def resume_memory(self, tags: Iterable[str] | None = None) -> None:
        self.calls.append("resume " + "+".join(tags or ()))

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        self.calls.append(f"update {path} {version}")


def traffic(count: int = 10, concurrency: int = 7) -> Traffic:
    requests = tuple({"input_ids": [at], "sampling_params": {}} for at in range(count))
    return Traffic(source="test", requests=requests, concurrency=concurrency)


async def test_the_order_and_the_concurrency_of_the_original() -> None:
    stop = asyncio.Event()
    client = Client(stop=stop)
    counts = await traffic().replay(3).run(client, stop=stop)  # type: ignore[arg-type]  # as much of one as is used
    assert counts.sent >= counts.done >= 400
    assert counts.failed == 0
    first = client.prompts[0]
    assert client.prompts[:30] == [(first + at) % 10 for at in range(30)]
    assert max(client.sizes) == 7
    assert {1, 3, 5} <= set(client.sizes)
    assert Traffic(source="", requests=(), concurrency=1).replay(1) is not None


async def test_two_seeds_begin_elsewhere_and_one_does_not() -> None:
    async def begin(seed: int) -> int:
        stop = asyncio.Event()
        client = Client(stop=stop)
        await traffic(100).replay(seed).run(client, stop=stop)  # type: ignore[arg-type]
        return client.prompts[0]

    assert await begin(1) == await begin(1)
    assert len({await begin(seed) for seed in range(6)}) > 1


async def test_a_dead_engine_ends_it() -> None:
    stop = asyncio.Event()
    client = Client(stop=stop, dies_after=20)
    counts = await traffic().replay(0).run(client, stop=stop)  # type: ignore[arg-type]
    assert counts.done == 20
    assert counts.failed
    assert not stop.is_set()


@pytest.mark.parametrize("kind", ["sleep", "sync"])
async def test_between_waves_it_sleeps_in_the_only_order_that_sglang_survives(kind: str) -> None:
    stop = asyncio.Event()
    client = Client(stop=stop)
    client.flushes_refused = 1
    seen: list[str] = []

    async def back() -> None:
        seen.append("back")

    lend = lambda: client.calls.append("lend")  # noqa: E731
    cycle = Cycle(kind=kind, version="7", path="/w", lend=lend, back=back)  # type: ignore[arg-type]
    counts = await traffic().replay(0, cycle).run(client, stop=stop)  # type: ignore[arg-type]
    assert counts.cycles >= 2
    assert len(seen) == client.calls.count("lend")
    update = ["update /w 7"]
    sleep = ["release", "resume weights", *update, "resume kv_cache+cuda_graph"]
    once = ["lend", "flush", "flush", *(sleep if kind == "sleep" else update)]
    assert client.calls[: len(once)] == once
    assert CYCLE_WAVES > 1
