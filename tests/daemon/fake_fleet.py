"""A fleet without processes, for tests of what stands around a fleet: requests, cells, operations.

It remembers its slots in the run directory as the real one does, so that a second fleet over it can go on. `gate`:
an operation waits there in each of its stages; by default it is open.

`python -m tests.daemon.fake_fleet ARGS` is a daemon over it (`rltop.daemon`'s arguments), for tests of the command
line; `RLTOP_FAKE_PACE` is how long each stage takes, in seconds, and a file `hold` in the run directory holds them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from rltop.daemon.engines import Engines, Stage
from rltop.engines.requests import (
    Ab,
    AbEnd,
    EngineSlot,
    FleetPlan,
    Http,
    Refused,
    Request,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
    Synced,
)
from rltop.errors import RltopError


class FakeFleet:
    """Implements `rltop.daemon.engines.Fleet`."""

    def __init__(self, engines: Engines, *, pace: float = 0.0) -> None:
        self.engines = engines
        self.pace = pace
        self.gate = asyncio.Event()
        self.gate.set()
        self.slots: dict[str, dict[str, Any]] = {}
        self.saw: list[tuple[str, int, bool, str]] = []
        self.told: list[str] = []
        self.requests: list[Request] = []
        for file in sorted((engines.run_dir / "engines").glob("*/slot.json")):
            self.slots[file.parent.name] = json.loads(file.read_text())

    # ---------------------------------------------------------------- as the real one

    async def run(self) -> None:
        """Publish what there is, then nothing."""
        for name in self.slots:
            self._publish(name)
        await asyncio.Event().wait()

    def ids(self) -> list[str]:
        return sorted(self.slots)

    def owns(self, engine_id: str) -> bool:
        return engine_id in self.slots

    def launch(self, engine_id: str) -> tuple[tuple[str, ...], dict[str, str], str]:
        return tuple(self.slots[engine_id]["argv"]), {}, "0.5.23"

    def ab(self) -> dict[str, Any] | None:
        return None

    def trainer_saw(self, engine_id: str, generation: int, ok: bool, text: str) -> None:
        self.saw.append((engine_id, generation, ok, text))

    def not_synced(self, engine_id: str, why: str) -> None:
        self.told.append(f"engine {engine_id} not synced: {why}")

    def sampled(self, engine_id: str, rollout_id: int, gap: float, tokens: int) -> None:
        self.told.append(f"engine {engine_id}, rollout {rollout_id}: {gap:.3f} over {tokens}")

    def rollout_done(self) -> None:
        self.told.append("rollout done")

    def released(self, engine_id: str) -> None:
        self.told.append(f"released {engine_id}")
        self._move(engine_id, "OFFLOADED")

    def resumed(self, engine_id: str) -> None:
        self.told.append(f"resumed {engine_id}")
        self._move(engine_id, "STALE")

    def plan(self, request: Request) -> FleetPlan | Refused:
        self.requests.append(request)
        targets = self._targets(request)
        generations = {name: self.slots[name]["generation"] for name in targets if name in self.slots}
        diff: dict[str, list[str]] = {}
        steps = [f"{type(request).__name__} of engine {', '.join(targets)}"]
        match request:
            case SetToggles(changes=changes) | Ab(changes=changes):
                if "speculative" in changes and changes.get("deepep") == "auto":
                    return Refused(
                        code="refused-by-rules", why="deepep=auto does not go with speculative", do="one of them"
                    )
                same = [name for name in targets if changes.items() <= self.slots[name]["toggles"].items()]
                targets = tuple(name for name in targets if name not in same) or targets
                diff = {name: [f"+ --{toggle} {value}" for toggle, value in changes.items()] for name in targets}
            case Synced(generation=generation):
                if generations.get(targets[0]) != generation:
                    return Refused(code="stale-generation", why="another generation is there")
            case _:
                pass
        steps = [
            *(line for name in diff for line in (f"engine {name}:", *(f"  {text}" for text in diff[name]))),
            *steps,
        ]
        return FleetPlan(request=request, steps=steps, diff=diff, targets=targets, generations=generations)

    async def carry_out(self, plan: FleetPlan, stage: Stage) -> str:
        return await self._do(plan.request, plan.targets, stage)

    async def resume(self, request: Request, before: Mapping[str, int], stage: Stage) -> str:
        left = tuple(name for name in self._targets(request) if self.slots[name]["generation"] == before.get(name))
        stage(f"left to do: engine {', '.join(left) or 'none'}")
        return await self._do(request, left, stage)

    async def stop_all(self, stage: Stage) -> str:
        for name in self.ids():
            stage(f"engine {name}: stopping")
            self._move(name, "STOPPED")
        return f"{len(self.slots)} engines are stopped"

    # ---------------------------------------------------------------- what it does

    def _targets(self, request: Request) -> tuple[str, ...]:
        match request:
            case StartEngines(slots=slots):
                return tuple(slot.id for slot in slots)
            case Synced(target=target) | Http(target=target):
                return (target,)
            case AbEnd():
                return tuple(self.ids())
            case _:
                return request.targets

    async def _do(self, request: Request, targets: tuple[str, ...], stage: Stage) -> str:
        match request:
            case StartEngines(slots=slots):
                for slot in slots:
                    self.declare(slot)
            case Synced(version=version):
                self.slots[request.target]["weights"] = version
                self._move(request.target, "HEALTHY")
                return f"engine {request.target} holds weight version {version}"
            case Http(action=action):
                return f"{action} asked of engine {request.target}"
            case _:
                pass
        for name in targets:
            match request:
                case Stop():
                    await self._step(name, "STOPPED", stage)
                case Start() | StartEngines() | Restart() | Revert() | SetToggles() | Ab() | AbEnd():
                    await self._restart(name, request, stage)
                case _:
                    raise RltopError(f"{type(request).__name__} is not known here")
        return f"engine {', '.join(targets)} done"

    async def _restart(self, name: str, request: Request, stage: Stage) -> None:
        slot = self.slots[name]
        if slot["state"] != "STOPPED":
            await self._step(name, "DRAINING", stage)
        slot["generation"] += 1
        if isinstance(request, SetToggles | Ab):
            slot["toggles"] = {**slot["toggles"], **request.changes}
        if getattr(request, "reason", "") == "it can not start":
            raise RltopError(f"engine {name} did not start", why="its port is taken", exit_code=1)
        for state in ("LAUNCHING", "STALE", "HEALTHY"):
            await self._step(name, state, stage)

    async def _step(self, name: str, state: str, stage: Stage) -> None:
        stage(f"engine {name}: {state}")
        self._move(name, state)
        await asyncio.sleep(self.pace)
        await self.gate.wait()
        while (self.engines.run_dir / "hold").exists():  # noqa: ASYNC110 - a test in another process holds it
            await asyncio.sleep(0.02)

    def declare(self, slot: EngineSlot, state: str = "STOPPED") -> None:
        """Have a slot, without doing anything."""
        self.slots.setdefault(
            slot.id,
            {
                "generation": 0 if state == "STOPPED" else 1,
                "argv": list(slot.args),
                "toggles": {"cuda_graph": "on"},
                "state": state,
                "weights": "default",
                "kind": slot.kind,
                "model_path": slot.model_path,
            },
        )
        self._publish(slot.id)

    def _move(self, name: str, state: str) -> None:
        before = self.slots[name]["state"]
        self.slots[name]["state"] = state
        self._publish(name)
        self.engines.event("info", f"engine {name}: {before} -> {state}", name, before, state)

    def _publish(self, name: str) -> None:
        slot = self.slots[name]
        file = self.engines.run_dir / "engines" / name / "slot.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(slot))
        log = file.parent / str(slot["generation"]) / "stdout.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as written:
            written.write(f"{slot['state']}\n")
        cell = {"url": "", "kind": slot["kind"], "pid": 0, "host": "", "version": "0.5.23", "log": str(log)}
        cell |= {"state": slot["state"], "generation": slot["generation"], "model_path": slot["model_path"]}
        cell |= {"weight_version": slot["weights"], "toggles": slot["toggles"], "wanted": slot["toggles"]}
        # Whatever this value is asked of has no effect.
        cell |= {"ignored": [toggle for toggle, value in slot["toggles"].items() if value == "DFLASH"]}
        cell |= {
            "since": self.engines._core.now(),
            "cause": "",
            "signals": {"process": {"ok": True, "text": "", "t": self.engines._core.now()}},
        }
        self.engines.publish(name, cell)


def make_fake(pace: float = 0.0, made: Callable[[FakeFleet], None] = lambda fleet: None) -> Any:
    """A maker for `Engines`. made: gets the fleet."""

    def make(engines: Engines, launchers: MutableMapping[str, Any]) -> FakeFleet:
        fleet = FakeFleet(engines, pace=pace)
        made(fleet)
        return fleet

    return make


if __name__ == "__main__":
    from rltop.daemon import __main__ as daemon

    sys.exit(daemon.main(sys.argv[1:], fleet=make_fake(float(os.environ.get("RLTOP_FAKE_PACE", "0.02")))))
