"""Rows of the fault table: viewers that are slow, stuck, far behind or dead, beside one that is none of that."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from rltop.daemon.events import RING_SIZE
from rltop.daemon.ingest import LOG_LINES_PER_S
from rltop.protocol.messages import Ack, Delta, EventsQuery, SeriesQuery, Snap
from rltop.runs import RunInfo
from tests.daemon.util import PATIENCE_S, Producer, Viewer, real_daemon
from tests.faults.table import Row
from tests.faults.world import Trainer, kill, missing, seen

_EVENTS = EventsQuery(limit=2000)


class World:
    """One daemon with its trainer for all rows of this file."""

    def __init__(self, run: RunInfo, trainer: Trainer) -> None:
        self.run = run
        self.trainer = trainer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("viewers")
    trainer = Trainer(folder)
    with real_daemon(folder, trainer=trainer.argv) as run:
        yield World(run, trainer)


def test_a_slow_viewer(world: World, row: Row) -> None:
    row.begin("slow viewer", "a frame every 2 s beside a viewer of 30 a second")
    sizes: dict[str, list[int]] = {"slow": [], "quick": []}
    with Viewer(world.run) as slow, Viewer(world.run) as quick:
        slow.hello(fps=0.5)
        quick.hello(fps=30.0)
        deadline = time.monotonic() + PATIENCE_S
        while len(sizes["quick"]) < 30 or len(sizes["slow"]) < 1:
            assert time.monotonic() < deadline, sizes
            for name, viewer in (("slow", slow), ("quick", quick)):
                message = viewer.receive(0.01)
                if message is not None and isinstance(message.body, Delta):
                    sizes[name].append(len(message.body.events))
        newest = quick.eseq
        slow.until(lambda message: slow.eseq >= newest)
        known = {event["eseq"]: event["text"] for event in quick.events}
        taken = {event["eseq"]: event["text"] for event in slow.events}
        both = known.keys() & taken.keys()
        assert len(both) > 20
        assert {eseq: taken[eseq] for eseq in both} == {eseq: known[eseq] for eseq in both}
        assert slow.gaps == []
        step = world.trainer.step
        slow.until_state(lambda s: s["metric/rollout/raw_reward"]["step"] >= step)
        assert missing(slow, world.run.path) == []
    frames = {name: len(found) for name, found in sizes.items()}
    mean = {name: sum(found) / max(1, len(found)) for name, found in sizes.items()}
    assert frames["slow"] < frames["quick"] / 2
    assert mean["slow"] > mean["quick"] * 2
    row.say(
        went_on=f"yes, at step {step}",
        kept="all, and it ends on the true state",
        message=f"{frames['slow']} frames of {mean['slow']:.0f} events beside {frames['quick']} of {mean['quick']:.0f}",
    )


def test_a_stuck_viewer(world: World, row: Row) -> None:
    row.begin("stuck viewer", "it asks for more and more and reads nothing")
    daemon = psutil.Process(world.run.pid)
    with Viewer(world.run, rcvhwm=1) as stuck, Viewer(world.run) as neighbour:
        neighbour.hello()
        seen(neighbour, 50)
        before = daemon.memory_info().rss
        stuck.hello()
        slowest = 0.0
        # Queries need no credit: their answers fill its pipe until the daemon may send it nothing more.
        refused = neighbour.state["daemon"]["refused"]
        for turn in range(60):
            for number in range(20):
                message_id = f"s{turn}-{number}"
                stuck.send("events?", _EVENTS, message_id=message_id)
                stuck.send("series?", SeriesQuery(["rollout/raw_reward"], buckets=10_000), message_id=message_id)
            began = time.monotonic()
            neighbour.until(lambda message: isinstance(message.body, Delta))
            slowest = max(slowest, time.monotonic() - began)
            if neighbour.state["daemon"]["refused"] > refused + 20:
                break
        neighbour.until_state(lambda s: s["daemon"]["refused"] > refused)
        grown = (daemon.memory_info().rss - before) / 2**20
        steps = world.trainer.goes_on()
        assert slowest < 2.0, "the neighbour must not wait for it"
        assert grown < 64, "memory is bounded"
        assert missing(neighbour, world.run.path) == []
        dropped = neighbour.state["daemon"]["refused"] - refused
    row.say(
        went_on=f"yes, {steps} steps; neighbour's longest wait {slowest * 1000:.0f} ms",
        kept=f"all; the daemon grew by {grown:.0f} MiB",
        message=f"key daemon: {dropped} answers refused by its full pipe",
    )


def test_a_viewer_that_fell_off_the_ring(world: World, row: Row) -> None:
    row.begin("viewer off the ring", f"no acknowledgement while more than {RING_SIZE} events came")
    sources = RING_SIZE // LOG_LINES_PER_S + 4
    with Viewer(world.run) as behind, Viewer(world.run) as neighbour:
        behind.acking = False
        behind.hello()
        neighbour.hello()
        behind.until(lambda message: isinstance(message.body, Snap))
        start = behind.eseq
        for rank in range(sources):
            with Producer(world.run, role="flood", rank=rank, pid=rank + 1) as producer:
                for number in range(LOG_LINES_PER_S - 10):
                    producer.send("log", {"level": "info", "text": f"flood {rank} {number}"})
        neighbour.until(lambda message: neighbour.eseq > start + RING_SIZE + 1000)
        while behind.seq < 2:
            behind.receive()
        held = behind.eseq
        behind.acking = True
        behind.send("ack", Ack(behind.seq))
        behind.until(lambda message: bool(behind.gaps))
        ((first, last),) = behind.gaps
        assert first == held + 1
        following = next(event["eseq"] for event in behind.events if event["eseq"] > held)
        assert following == last + 1, "the gap is named exactly"
        page = behind.event_page(lo=first, hi=last, limit=2000)
        assert page.more or len(page.events) == last - first + 1
        assert page.events[-1]["eseq"] == last, "the journal has what left the ring"
        steps = world.trainer.goes_on()
        assert missing(neighbour, world.run.path) == []
    row.say(
        went_on=f"yes, {steps} steps",
        kept="all in the journal, asked back from there",
        message=f"gap: events {first} to {last} left the ring",
    )


_VIEWER = """
import sys
from rltop import runs
from pathlib import Path
from tests.daemon.util import Viewer
viewer = Viewer(runs.read_run(Path(sys.argv[1])), name="victim")
viewer.hello()
while True:
    viewer.receive()
    print(viewer.eseq, flush=True)
"""


def test_a_viewer_killed(world: World, row: Row) -> None:
    row.begin("viewer kill -9", "while frames were on their way to it")
    argv = [sys.executable, "-c", _VIEWER, str(world.run.path)]
    with Viewer(world.run) as neighbour, subprocess.Popen(argv, stdout=subprocess.PIPE) as victim:
        neighbour.hello()
        assert victim.stdout is not None
        for _ in range(5):
            assert victim.stdout.readline()
        neighbour.until(lambda message: neighbour.tick is not None and neighbour.tick.viewers >= 2)
        with_it = neighbour.tick.viewers if neighbour.tick is not None else 0
        kill(victim.pid)
        before = len(neighbour.events)
        neighbour.until(lambda message: neighbour.tick is not None and neighbour.tick.viewers < with_it)
        steps = world.trainer.goes_on()
        neighbour.until(lambda message: len(neighbour.events) - before > 10)
        came = len(neighbour.events) - before
        assert neighbour.gaps == []
        assert missing(neighbour, world.run.path) == []
        left = neighbour.tick.viewers if neighbour.tick is not None else 0
    row.say(
        went_on=f"yes, {steps} steps",
        kept=f"all, {came} reached the neighbour meanwhile",
        message=f"viewers: {with_it} -> {left}",
    )
