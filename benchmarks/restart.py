"""What rltop itself adds to a restart, and how soon it knows of a dead engine: the fleet over the CPU engine.

    python -m benchmarks.restart [--restarts N]

A restart is timed from the request until the engine is back in the rotation with the required weights. Taken off are
the engine's own two parts: its exit (SIGTERM sent until its keeper saw it end) and its start-up (its process exists
until it listens). What is left is rltop's: plan, drain of an idle engine, seeing the end, clearing up, spawning,
seeing that it serves, verifying its arguments, loading and verifying weights. A dead engine is one whose leader was
killed: the time from the kill until the fleet has taken it out of the rotation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import EngineSlot, Fleet, FleetPlan, FleetPolicy, Restart, StartEngines
from rltop.engines.launcher import PORT, RECORD, Launched, LaunchSpec
from rltop.engines.local import LocalLauncher
from rltop.engines.requests import Request, Required
from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

BUDGET_S = 1.0
_PATIENCE_S = 120.0
Row = tuple[str, str, str]


class _Timed(LocalLauncher):
    """Notes when an engine is asked to end."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: Launched | None = None
        self.asked = 0.0

    async def start(self, spec: LaunchSpec) -> Launched:
        self.newest = await super().start(spec)
        return self.newest

    async def terminate(self, launched: Launched) -> None:
        self.asked = time.time()
        await super().terminate(launched)


@dataclass(frozen=True, slots=True)
class Timed:
    """One restart. Seconds."""

    whole: float
    exit: float
    startup: float
    to_term: float
    """Of rltop's part: request to SIGTERM."""
    to_spawn: float
    """End of the old process to the new one."""
    to_serving: float
    """The engine listens to HEALTHY."""

    @property
    def overhead(self) -> float:
        """What is rltop's."""
        return self.whole - self.exit - self.startup


class Bench:
    """A fleet of one engine."""

    def __init__(self, run_dir: Path) -> None:
        self.launcher = _Timed()
        self.state = ""
        self.changed = asyncio.Event()
        self.fleet = Fleet(
            run="bench",
            run_dir=run_dir,
            launchers={"local": self.launcher},
            http=AsyncEngineClient,
            policy=FleetPolicy(restart="never"),
            clock=time.monotonic,
            wall=time.time,
            publish=self._publish,
            event=lambda level, text, engine_id, before, after: None,
            required=lambda: Required(version="default", source="base"),
            updating=lambda: False,
        )

    def _publish(self, engine_id: str, cell: dict[str, Any] | None) -> None:
        self.state = str((cell or {}).get("state", ""))
        self.changed.set()

    async def until(self, right: Callable[[str], bool]) -> float:
        """Wall time at which the engine's state was first right."""
        async with asyncio.timeout(_PATIENCE_S):
            while not right(self.state):
                self.changed.clear()
                await self.changed.wait()
        return time.time()

    async def do(self, request: Request) -> None:
        """Plan and carry out."""
        plan = self.fleet.plan(request)
        if not isinstance(plan, FleetPlan):
            raise RuntimeError(plan.why)
        await self.fleet.carry_out(plan, lambda stage: None)

    async def restart(self) -> Timed:
        """One restart, in its parts."""
        old = self.launcher.newest
        assert old is not None
        began = time.time()
        await self.do(Restart())
        done = await self.until(lambda state: state == "HEALTHY")
        new = self.launcher.newest
        assert new is not None
        ended = json.loads((Path(old.directory) / RECORD).read_text())["ended"]
        listening = (Path(new.directory) / PORT).stat().st_mtime
        return Timed(
            whole=done - began,
            exit=ended - self.launcher.asked,
            startup=listening - new.started,
            to_term=self.launcher.asked - began,
            to_spawn=new.started - ended,
            to_serving=done - listening,
        )

    async def kill(self, after_s: float) -> float:
        """Kill the engine's leader; seconds from the kill until the fleet knows."""
        launched = self.launcher.newest
        assert launched is not None
        await asyncio.sleep(after_s)  # at any point between two glances
        killed = time.time()
        os.kill(launched.pid, signal.SIGKILL)
        seen = await self.until(lambda state: state != "HEALTHY")
        await self.until(lambda state: state in ("CRASHED", "QUARANTINED"))
        return seen - killed


async def measure(restarts: int) -> tuple[list[Timed], list[float]]:
    """`restarts` restarts after one that warms up, then deaths."""
    with tempfile.TemporaryDirectory(prefix="rltop-") as folder:
        model = make_tiny_model(Path(folder) / "model", TinyModelConfig())
        bench = Bench(Path(folder))
        running = asyncio.ensure_future(bench.fleet.run())
        try:
            slot = EngineSlot(id="0", kind="cpu", model_path=str(model), python=sys.executable)
            await bench.do(StartEngines(slots=(slot,)))
            await bench.until(lambda state: state == "HEALTHY")
            timed = [await bench.restart() for _ in range(restarts + 1)][1:]
            deaths = []
            deaths_wanted = max(4, restarts)
            for at in range(deaths_wanted):
                deaths.append(await bench.kill(1.0 + at / deaths_wanted))
                await bench.do(Restart())
                await bench.until(lambda state: state == "HEALTHY")
            return timed, deaths
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if bench.launcher.newest is not None:
                await bench.launcher.kill(bench.launcher.newest)
            await bench.launcher.close()


def rows(restarts: int = 10) -> list[Row]:
    """(what, measured, budget) for the table of all benchmarks."""
    timed, deaths = asyncio.run(measure(restarts))

    def told(values: list[float]) -> str:
        return f"{statistics.median(values) * 1e3:.0f} ms median, {max(values) * 1e3:.0f} ms worst of {len(values)}"

    return [
        ("restart, rltop's own part", told([one.overhead for one in timed]), f"<= {BUDGET_S:.0f} s"),
        ("  request to SIGTERM", told([one.to_term for one in timed]), ""),
        ("  its end to the new process", told([one.to_spawn for one in timed]), ""),
        ("  it listens to HEALTHY", told([one.to_serving for one in timed]), ""),
        ("  (the engine's own exit)", told([one.exit for one in timed]), ""),
        ("  (the engine's own start-up)", told([one.startup for one in timed]), ""),
        ("a dead engine is known after its end", told(deaths), f"<= {BUDGET_S:.0f} s"),
    ]


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__)
    parser.add_argument("--restarts", type=int, default=10)
    for row in rows(parser.parse_args(argv).restarts):
        print("  ".join(row))


if __name__ == "__main__":
    main()
