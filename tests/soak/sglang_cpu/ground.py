"""A fleet of real SGLang servers on this machine, in a thread: for plain test functions that share one server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import EngineSlot, Fleet, FleetPlan, FleetPolicy, Refused
from rltop.engines.launcher import Launched
from rltop.engines.local import LocalLauncher
from rltop.engines.requests import Request, Required
from tests.soak.sglang_cpu import SERVER_ARGS, SglangCpu

PATIENCE_S = 900.0
"""For one start on a crowded machine."""
ARGS = tuple(word for word in SERVER_ARGS if word != "--enable-metrics")
BASE = Required(version="default", source="base")


class Ground:
    """The fleet, and what it told."""

    def __init__(self, run_dir: Path, policy: FleetPolicy) -> None:
        self.run_dir = run_dir
        self.cells: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[float, str, str, str, str]] = []
        """Time, text, engine, state before, state after."""
        self.required = BASE
        self.updating = False
        self.launcher = LocalLauncher()
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet")
        self._thread.start()
        begun: tuple[asyncio.Task[None], Fleet] = self.await_(self._begin(policy))
        self._running, self.fleet = begun

    async def _begin(self, policy: FleetPolicy) -> tuple[asyncio.Task[None], Fleet]:
        fleet = Fleet(
            run="soak",
            run_dir=self.run_dir,
            launchers={"local": self.launcher},
            http=AsyncEngineClient,
            policy=policy,
            clock=time.monotonic,
            wall=time.time,
            publish=self._publish,
            event=self._event,
            required=lambda: self.required,
            updating=lambda: self.updating,
        )
        return asyncio.ensure_future(fleet.run()), fleet

    def end(self) -> None:
        """Stop every engine; nothing is left of any."""
        self.updating = False
        try:
            self.await_(self.fleet.stop_all(lambda stage: None))
        finally:
            self.await_(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _stop(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.launcher.close()

    # ------------------------------------------------------------------ asking

    def await_(self, work: Coroutine[Any, Any, Any], timeout_s: float = PATIENCE_S) -> Any:
        """The result of a coroutine of the fleet's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def plan(self, request: Request) -> FleetPlan | Refused:
        """What a request would do."""

        async def ask() -> FleetPlan | Refused:
            return self.fleet.plan(request)

        plan: FleetPlan | Refused = self.await_(ask())
        return plan

    def do(self, request: Request) -> list[str]:
        """Plan and carry out; the stages that were told."""
        plan = self.plan(request)
        assert isinstance(plan, FleetPlan), plan
        stages: list[str] = []
        self.await_(self.fleet.carry_out(plan, stages.append))
        return stages

    def begin(self, request: Request) -> Any:
        """Plan, and carry out meanwhile; a future."""
        plan = self.plan(request)
        assert isinstance(plan, FleetPlan), plan
        return asyncio.run_coroutine_threadsafe(self.fleet.carry_out(plan, lambda stage: None), self._loop)

    def until(self, right: Callable[[Mapping[str, Any]], bool], engine_id: str = "0") -> dict[str, Any]:
        """The engine's cell when it is right."""
        with self._changed:
            done = self._changed.wait_for(lambda: right(self.cells.get(engine_id, {})), PATIENCE_S)
            assert done, (self.cells.get(engine_id), self.events[-8:])
            return dict(self.cells[engine_id])

    def state(self, wanted: str, engine_id: str = "0") -> dict[str, Any]:
        """The engine's cell when it is in that state."""
        return self.until(lambda cell: cell.get("state") == wanted, engine_id)

    def states(self, since: float, engine_id: str = "0") -> list[str]:
        """The states it came to since a moment (monotonic)."""
        return [
            after for at, _, name, before, after in self.events if name == engine_id and at >= since and before != after
        ]

    def launched(self, engine_id: str = "0") -> Launched:
        """Its processes."""
        process: Launched | None = self.fleet._engines[engine_id].process
        assert process is not None
        return process

    def _publish(self, engine_id: str, cell: dict[str, Any] | None) -> None:
        with self._changed:
            self.cells[engine_id] = cell or {}
            self._changed.notify_all()

    def _event(self, level: str, text: str, engine_id: str, before: str, after: str) -> None:
        self.events.append((time.monotonic(), text, engine_id, before, after))


def slot(environment: SglangCpu, model: Path, *, engine_id: str = "0", **fields: Any) -> EngineSlot:
    """A server with the arguments that a CPU needs."""
    values: dict[str, Any] = {
        "kind": "sglang",
        "model_path": str(model),
        "python": str(environment.python),
        "args": (*ARGS, "--decode-log-interval", "10"),
        "env": dict(environment.env),
    }
    return EngineSlot(id=engine_id, **(values | fields))
