"""A daemon's bisections over real null engines, in one process: engines, fleet, commands, and a first crash.

`Rig.life()` is one daemon's life over the run's folder; what it leaves behind when it is cut off is what a daemon that
is killed leaves: engines, slot files, records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltop.daemon.bisect import Bisections
from rltop.daemon.commands import Actions, Commands, Stage
from rltop.daemon.engine_commands import EngineCommands
from rltop.daemon.engines import EngineOptions, Engines
from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import Fleet, FleetPolicy
from rltop.engines.launcher import Launcher
from rltop.engines.local import LocalLauncher
from rltop.engines.toggle_table import CORE_DUMP
from rltop.engines.traffic import Traffic
from rltop.protocol.messages import Accepted, Command, Rejected
from rltop.train.cpu_engine.faults import VARIABLE
from rltop.train.cpu_engine.process import CRASH_VARIABLE
from rltop.train.null_engine import STEP_VARIABLE
from tests.daemon.fakes import FakeCore

POLICY = FleetPolicy(
    drain_s=1,
    abort_s=0.5,
    term_s=3,
    kill_s=3,
    reclaim_s=10,
    start_s=30,
    backoff_s=0.1,
    backoff_max_s=0.2,
    flap_crashes=99,
    keep_serving=0,
)
SCALE = 120.0
"""A second of clock is two minutes of exposure."""
PATIENCE_S = 240.0
LONG_S = 1800.0
"""For a whole bisection on a busy machine, or with engines that import torch."""


class Rig:
    """A run with null engines that have a fault."""

    def __init__(
        self,
        folder: Path,
        *,
        fault: str,
        engines: int = 1,
        args: Sequence[str] = (),
        kind: str = "null",
        name: str = "",
    ) -> None:
        (folder / "model").mkdir(exist_ok=True, parents=True)
        self.run_dir = folder / name
        self.run_dir.mkdir(exist_ok=True)
        self.slots: list[dict[str, Any]] = [
            {
                "id": str(number),
                "kind": kind,
                "model_path": str(folder / "model"),
                "args": list(args),
                # With core dumps, as SGLang has them by default: the kernel is known without one more run for it.
                "env": {VARIABLE: fault, CRASH_VARIABLE: "0.02", STEP_VARIABLE: "0.05", CORE_DUMP: "1"},
            }
            for number in range(engines)
        ]
        self.core = FakeCore()
        self.lives = False
        # One that imports torch, beside three others, on a machine that is busy with other tests.
        self.policy = replace(POLICY, start_s=300, kill_s=20) if kind == "cpu" else POLICY

    # ---------------------------------------------------------------- a daemon's life

    @asynccontextmanager
    async def life(self, *, begin: bool = True) -> AsyncIterator[Rig]:
        """Cut off at the end, as by kill -9: whatever was going on is left as it is. begin: bisections go on."""
        self.core = FakeCore()
        options = EngineOptions.of({"engines": {"keep_serving": 0}})
        self.engines = Engines(
            self.core, options, run_dir=self.run_dir, trainer_lives=lambda: self.lives, make=self._make
        )
        self.bisections = Bisections(self.core, self.engines)
        actions = Actions(
            stop_trainer=self._nothing,
            shutdown=self._nothing,
            trainer_running=lambda: False,
            committed=self._committed,
            mute=lambda check_id, reason, who, since: None,
            unmute=lambda check_id: False,
            engines=EngineCommands(self.core.table, self.engines, self._ask),
            bisections=self.bisections,
        )
        self.commands = Commands(self.core, actions, epoch="e1")
        self._ids = 0
        task = asyncio.create_task(self.engines.run())
        await self.engines.begin(stale=False)
        if begin:
            self.bisections.begin()
        try:
            yield self
        finally:
            await self.bisections.close()
            await self.commands.finish()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.engines.close()

    def _make(self, engines: Engines, launchers: MutableMapping[str, Launcher]) -> Fleet:
        launchers["local"] = LocalLauncher()
        return Fleet(
            run=self.run_dir.name,
            run_dir=self.run_dir,
            launchers=launchers,
            http=AsyncEngineClient,
            policy=self.policy,
            clock=time.monotonic,
            wall=time.time,
            publish=engines.publish,
            event=engines.event,
            required=engines.required,
            updating=engines.updating,
            safe_point=engines.safe_point,
        )

    async def _nothing(self, stage: Stage) -> str:
        return ""

    async def _committed(self) -> bool:
        return True

    async def _ask(self, url: str, action: str) -> str:
        return action

    # ---------------------------------------------------------------- what a test does

    async def take(self, name: str, target: str = "", **fields: Any) -> Accepted | Rejected:
        self._ids += 1
        return await self.commands.take(Command(name, target, **fields), f"c{self._ids}", who="ana", role="control")

    async def begin(self, name: str, target: str = "", **fields: Any) -> str:
        """A command that is taken; its operation."""
        answer = await self.take(name, target, **fields)
        assert isinstance(answer, Accepted), answer
        return answer.op

    async def ended(self, op: str) -> dict[str, Any]:
        over = lambda: self.cell(f"op/{op}").get("state") not in ("queued", "running")  # noqa: E731
        await self.until(over, f"operation {op}", LONG_S)
        return self.cell(f"op/{op}")

    def cell(self, key: str) -> dict[str, Any]:
        return dict(self.core.table.get(key) or {})

    def bisect(self) -> dict[str, Any]:
        return self.cell("bisect")

    async def until(self, what: Callable[[], Any], why: str = "", limit_s: float = PATIENCE_S) -> Any:
        end = time.monotonic() + limit_s
        while not (found := what()):
            assert time.monotonic() < end, f"{why}: {self.story()}"
            await asyncio.sleep(0.02)
        return found

    def story(self) -> str:
        """What happened, for a test that failed."""
        cells = {key: self.cell(key).get("state") for key in self.core.table.keys("engine/")}
        events = self.core.texts()[-25:]
        return "\n".join([str(cells), *events])

    async def start(self) -> None:
        """Its engines, serving."""
        op = await self.begin("engines-start", args={"slots": self.slots})
        assert (await self.ended(op))["state"] == "done", self.story()
        for slot in self.slots:
            await self.serving(str(slot["id"]))

    async def serving(self, engine: str) -> None:
        await self.until(lambda: self.cell(f"engine/{engine}").get("state") == "HEALTHY", f"engine {engine} serves")

    async def crash(self, engine: str = "0") -> None:
        """Ask an engine until it dies, and let it come back."""
        stop = asyncio.Event()
        traffic = Traffic.synthetic()

        async def ask() -> None:
            seed = 0
            while not stop.is_set():
                seed += 1
                url = self.cell(f"engine/{engine}").get("url")
                if url:
                    async with AsyncEngineClient(url) as client:
                        await traffic.replay(seed).run(client, stop=stop)
                await asyncio.sleep(0.02)

        asking = asyncio.create_task(ask())
        await self.until(lambda: self.cell(f"engine/{engine}").get("crashes"), "the first crash")
        stop.set()
        await asking
        generation = self.cell(f"engine/{engine}")["crashes"][-1]["generation"]
        story = self.run_dir / "engines" / engine / str(generation) / "crash.json"
        await self.until(story.exists, "its evidence")
        await self.serving(engine)

    async def bisection(self, *, toggles: Sequence[str], **args: Any) -> dict[str, Any]:
        """From the command to the end; the cell.

        Traffic is synthetic unless a test says otherwise: what was captured may be the one request of an early crash.
        """
        given = {"toggles": list(toggles), "time_scale": SCALE, "mode": "exclusive", "traffic": "synthetic", **args}
        op = await self.ended(await self.begin("bisect-start", args=given))
        assert op["state"] == "done", f"{op['text']}\n{self.story()}"
        return self.bisect()

    def flags(self, engine: str) -> Mapping[str, Any]:
        """What the engine runs with, as its slot file says."""
        import json

        found = json.loads((self.run_dir / "engines" / engine / "slot.json").read_text())
        return {"args": found["running"]["args"], "trial": found["trial"], "next": found["config"]["args"]}
