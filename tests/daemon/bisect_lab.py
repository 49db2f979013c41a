"""A bisection over engines without processes, on a virtual clock: the real fleet, planner and runner, invented bugs.

The replay of an engine on trial draws when the bug strikes from the engine's own arguments: a bug is the set of toggles
that must be on, and its mean time. Minutes cost nothing, so hundreds of lives can be played.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rltop.daemon import bisect_start
from rltop.daemon.bisect_crashes import Since
from rltop.daemon.bisect_record import Record, Records
from rltop.daemon.bisect_run import Runner
from rltop.daemon.engine_view import crashes
from rltop.daemon.state import StateTable
from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import EngineSlot, Fleet, FleetPolicy, StartEngines
from rltop.engines.toggles import read_argv
from rltop.engines.traffic import Cycle, Replay, ReplayCounts
from rltop.evidence.priors import load
from rltop.protocol.messages import Command
from tests.engines.fleet_world import Behaviour, FakeProcess, World

ARGS = ("--speculative-algorithm", "NGRAM", "--chunked-prefill-size", "8192")
TOGGLES = ("speculative", "overlap_schedule", "radix_cache", "chunked_prefill")
POLICY = FleetPolicy(
    drain_s=5, abort_s=1, term_s=4, kill_s=2, reclaim_s=5, start_s=30, launch_s=10, lost_s=20, dying_s=5, keep_serving=0
)
START = Behaviour(load_s=0.4, capture_s=0.2, term_s=0.1)
"""A virtual second costs the test some milliseconds, and every trial begins with a start."""
IMA = (
    "Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/s/sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process',
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
)
OOM = (*IMA[:2], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
FINGERPRINT = "ima/decode/000000"


class Lab:
    """A run whose engines have a bug."""

    def __init__(self, folder: Path, bug: Sequence[str] | None, *, mean_s: float = 1.0, seed: int = 0) -> None:
        """bug: toggles that must all be on; None: it never strikes. mean_s: to the crash, virtual seconds."""
        self.world = World(folder, policy=POLICY)
        self.world.launcher.behaviour = START
        self.bug, self.mean_s = bug, mean_s
        self.rng = random.Random(seed)
        self.events: list[tuple[str, str]] = []
        self.records = Records(folder)
        self.last_words: Callable[[FakeProcess], Sequence[str]] = lambda process: IMA
        self.shown = 0
        self.crashed = 0
        self.table = StateTable()
        """What viewers are shown, as far as a bisection looks at it: the crashes of engines."""
        self.refuses = False
        """Engines refuse every request."""
        self.before_crash: Callable[[FakeProcess], bool] = lambda process: True
        """False: this time it does not end by the bug; the test did something else to it."""

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        async with self.world.fleet() as fleet:
            yield fleet

    def see_crashes(self, engine: str) -> list[dict[str, Any]]:
        """Of an engine's cell by now, as the daemon tells them."""
        key, cell = f"engine/{engine}", self.world.cells.get(engine, {})
        before = self.table.get(key) or {}
        known = crashes(before, cell, self.world.launcher.now() + 1.8e9, None)
        self.table.set(key, {**cell, "crashes": known})
        return known

    async def start(self, fleet: Fleet, count: int) -> None:
        slots = tuple(
            EngineSlot(id=str(number), kind="cpu", model_path="/m", python="py", args=ARGS) for number in range(count)
        )
        await self.world.do(fleet, StartEngines(slots=slots))
        for number in range(count):
            await self.world.until_state(str(number), "HEALTHY")

    def record(self, fleet: Fleet, *, crashed_after_s: float = 1.0, **args: Any) -> Record:
        """Of a bisection that could begin: engine 0 crashed of the bug."""
        crash = {"number": 1, "generation": 1, "t": 1.0, "fingerprint": FINGERPRINT, "cause": "it died"}
        self.table.set("engine/0", {"crashes": [crash]})
        story = self.world.folder / "engines" / "0" / "1" / "crash.json"
        if not story.exists():
            spec = self.world.launcher.at("0").spec
            story.parent.mkdir(parents=True, exist_ok=True)
            story.write_text(json.dumps({"args": list(spec.args), "env": dict(spec.env)}))
        given = {"toggles": list(TOGGLES), "mode": "exclusive", "time_scale": 60.0, **args}
        record, _ = bisect_start.plan(
            Command("bisect-start", "", given),
            "ana",
            trials=fleet.trials,
            table=self.table,
            run_dir=self.world.folder,
            keep=0,
            bisection_id=self.records.next_id(),
            now=1.8e9,
        )
        self.records.write(record)
        return record

    def runner(self, fleet: Fleet, record: Record) -> Runner:
        return Runner(
            record,
            trials=fleet.trials,
            records=self.records,
            traffic=self,
            tables=load(),
            tell=lambda level, text, **more: self.events.append((level, text)),
            changed=self._changed,
            clock=self.world.launcher.now,
            wall=lambda: self.world.launcher.now() + 1.8e9,
            since=Since(record, fleet.trials, self.table, self.world.folder),
        )

    def _changed(self) -> None:
        self.shown += 1
        for engine in self.world.cells:
            self.see_crashes(engine)

    def told(self, level: str) -> list[str]:
        return [text for found, text in self.events if found == level]

    # ---------------------------------------------------------------- traffic

    def replay(self, seed: int, cycle: Cycle | None = None) -> Replay:
        """Implements `rltop.daemon.bisect_bench.Traffic`."""
        return _Play(self)

    def process(self, client: AsyncEngineClient) -> FakeProcess:
        port = int(client.url.rsplit(":", 1)[1])
        return next(one for one in self.world.launcher.processes.values() if one.port == port)

    def may_strike(self, process: FakeProcess) -> bool:
        if self.bug is None:
            return False
        on = read_argv(() if process.how.deaf else process.spec.args, process.spec.env, version="0.5.23")
        return all(on.get(name, "on") != "off" for name in self.bug)

    def strike(self, process: FakeProcess) -> None:
        process.say(*self.last_words(process))
        process.end(-9)
        self.crashed += 1

    def args(self, engine: str) -> tuple[str, ...]:
        """Of the process that lives now."""
        return self.world.launcher.at(engine).spec.args


class _Play:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def counts(self) -> ReplayCounts:
        return ReplayCounts(9, 0, 9, 0) if self._lab.refuses else ReplayCounts(1, 1, 0, 1)

    async def run(self, client: AsyncEngineClient, *, stop: asyncio.Event) -> ReplayCounts:
        lab = self._lab
        process = lab.process(client)
        due = lab.rng.expovariate(1 / lab.mean_s) if lab.may_strike(process) else None
        stopped = asyncio.ensure_future(stop.wait())
        try:
            now = lab.world.launcher.now
            end = None if due is None else now() + due
            while process.alive and not stop.is_set():
                await asyncio.wait([stopped], timeout=0.2 if end is None else max(0.0, min(0.2, end - now())))
                if end is not None and now() >= end and process.alive and not stop.is_set():
                    if lab.before_crash(process):
                        lab.strike(process)
                    end = None
            return self.counts()
        finally:
            stopped.cancel()
