"""A fleet in a process of its own, that a test can kill: `python -m tests.engines.fleet_driver RUN RUN_DIR`.

Obeys one JSON object per line on stdin: `{"do": NAME, ...}` with the fields of the request, or `{"cancel": true}`.
Writes what happens to RUN_DIR/told.jsonl, one JSON list per line, so that nothing of it is lost when this is killed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from rltop.engines.client import AsyncEngineClient
from rltop.engines.fleet import (
    EngineSlot,
    Fleet,
    FleetPolicy,
    Refused,
    Request,
    Required,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
)
from rltop.engines.local import LocalLauncher
from rltop.errors import RltopError

POLICY = FleetPolicy(
    drain_s=3,
    abort_s=1,
    term_s=8,
    kill_s=5,
    reclaim_s=20,
    start_s=90,
    backoff_s=0.1,
    backoff_max_s=0.5,
    flap_crashes=99,
)
REQUESTS: dict[str, Any] = {"set": SetToggles, "restart": Restart, "stop": Stop, "start": Start, "revert": Revert}


class Driver:
    """The fleet, its command line, and its file."""

    def __init__(self, run: str, folder: Path) -> None:
        self.file = (folder / "told.jsonl").open("a", buffering=1)
        self.launcher = LocalLauncher()
        self.work: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(
            run=run,
            run_dir=folder,
            launchers={"local": self.launcher},
            http=AsyncEngineClient,
            policy=POLICY,
            clock=time.monotonic,
            wall=time.time,
            publish=lambda engine_id, cell: self.tell("cell", engine_id, cell),
            event=lambda level, text, engine_id, before, after: self.tell("event", engine_id, before, after, text),
            required=lambda: Required(version="default", source="base"),
            updating=lambda: False,
        )

    def tell(self, *what: Any) -> None:
        """One line."""
        self.file.write(json.dumps([time.time(), *what]) + "\n")

    async def main(self) -> None:
        """Obey until stdin ends."""
        task = asyncio.create_task(self.fleet.run())
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order = json.loads(line)
            if "cancel" in order:
                for work in self.work:
                    work.cancel()
                continue
            number = order["number"]
            work = asyncio.create_task(self._obey(order.pop("do"), order))
            self.work.add(work)
            work.add_done_callback(functools.partial(self._ended, number))
            work.add_done_callback(self.work.discard)
        task.cancel()
        await asyncio.gather(task, *self.work, return_exceptions=True)

    def _ended(self, number: int, work: asyncio.Task[None]) -> None:
        """Also one that was called off before it had begun has ended."""
        if work.cancelled():
            self.tell("done", number, "cancelled", "", "")

    async def _obey(self, name: str, fields: dict[str, Any]) -> None:
        number = fields.pop("number")
        try:
            if name == "stop-all":
                answer = await self.fleet.stop_all(lambda stage: None)
            else:
                plan = self.fleet.plan(self._request(name, fields))
                if isinstance(plan, Refused):
                    return self.tell("done", number, "refused", plan.code, plan.why)
                answer = await self.fleet.carry_out(plan, lambda stage: self.tell("stage", number, stage))
            self.tell("done", number, "done", "", answer)
        except RltopError as error:
            self.tell("done", number, "failed", "", str(error))
        return None

    def _request(self, name: str, fields: dict[str, Any]) -> Request:
        if name == "have":
            return StartEngines(slots=tuple(EngineSlot(**slot) for slot in fields["slots"]))
        fields["targets"] = tuple(fields.get("targets", ()))
        request: Request = REQUESTS[name](**fields)
        return request


if __name__ == "__main__":
    asyncio.run(Driver(sys.argv[1], Path(sys.argv[2])).main())
