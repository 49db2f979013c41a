"""Random lives of a fleet over fake engines on the virtual clock: operations, cancellations, faults, daemons that die.

As `test_fleet_processes.py`, without processes: hundreds of lives with faults that real processes seldom have.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from rltop.engines.fleet import (
    Ab,
    AbEnd,
    Fleet,
    FleetPolicy,
    Refused,
    Request,
    Required,
    Restart,
    Revert,
    SetToggles,
    Start,
    Stop,
)
from rltop.engines.states import State
from rltop.errors import RltopError
from tests.engines.fleet_world import Behaviour, World, run_fleet

POLICY = FleetPolicy(
    drain_s=5,
    abort_s=1,
    term_s=4,
    kill_s=2,
    reclaim_s=5,
    start_s=20,
    stale_s=10,
    launch_s=5,
    lost_s=5,
    backoff_s=1,
    backoff_max_s=4,
    dying_s=5,
)
NAMES = ("0", "1", "2")


class Life:
    """One of them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.world = World(folder, policy=POLICY)
        self.work: list[asyncio.Task[str]] = []
        self.trail: list[str] = []

    async def run(self) -> None:
        """Wild days under several daemons, then a calm one."""
        async with self.world.fleet() as fleet:
            await self.world.start(fleet, len(NAMES))
            await self.wild(fleet)
        for _ in range(self.rng.randrange(3)):
            await self.drop()
            async with self.world.fleet() as fleet:
                await self.wild(fleet)
        await self.drop()
        async with self.world.fleet() as fleet:
            await self.wild(fleet)
            await self.calm(fleet)

    async def drop(self) -> None:
        """The daemon is killed: nobody is left to ask how its operations ended."""
        self.trail.append("the daemon is killed")
        for work in self.work:
            work.cancel()
        await asyncio.gather(*self.work, return_exceptions=True)
        self.work.clear()

    async def wild(self, fleet: Fleet) -> None:
        for _ in range(self.rng.randrange(3, 10)):
            self.fault()
            self.operate(fleet)
            await asyncio.sleep(self.rng.choice([0.0, 0.1, 0.5, 2.0, 10.0]))
            self.check()

    def operate(self, fleet: Fleet) -> None:
        rng = self.rng
        if rng.random() < 0.2 and self.work:
            self.trail.append("cancel")
            rng.choice(self.work).cancel()
            return
        targets = tuple(rng.sample(NAMES, rng.randrange(1, 4)))
        mode = rng.choice(["rolling", "at-once"])
        changes = {"radix_cache": rng.choice(["on", "off"])}
        requests: list[Request] = [
            SetToggles(targets=targets, changes=changes, mode=mode),  # type: ignore[arg-type]
            Restart(targets=targets, mode=mode),  # type: ignore[arg-type]
            Revert(targets=targets[:1]),
            Stop(targets=targets[:1]),
            Start(targets=targets),
            Ab(changes=changes, targets=targets),
            AbEnd(),
        ]
        request = rng.choice(requests)
        plan = fleet.plan(request)
        self.trail.append(f"{request} {'refused' if isinstance(plan, Refused) else ''}")
        if not isinstance(plan, Refused):
            self.work.append(asyncio.ensure_future(fleet.carry_out(plan, self.trail.append)))

    def fault(self) -> None:
        rng, launcher = self.rng, self.world.launcher
        alive = launcher.alive()
        victim = rng.choice(alive) if alive else None
        match rng.randrange(12):
            case 0 if victim:
                victim.how.orphan = rng.random() < 0.3
                victim.end(-9)
            case 1 if victim:
                victim.running = rng.choice([0, 3])
            case 2 if victim:
                victim.mute = not victim.mute
            case 3 if victim:
                victim.flowing = not victim.flowing
            case 4:
                launcher.behaviour = Behaviour(
                    dies_loading=rng.choice(["", "", "torch.OutOfMemoryError: CUDA out of memory."]),
                    never_ready=rng.random() < 0.2,
                    ignores_term=rng.random() < 0.2,
                    orphan=rng.random() < 0.2,
                )
            case 5:
                launcher.fail_start = rng.choice(["", "port in use"])
            case 6:
                launcher.start_delay = rng.choice([0.05, 0.05, 30.0])
            case 7:
                launcher.lost = not launcher.lost
            case 8:
                self.world.updating = not self.world.updating
            case 9:
                self.world.between = not self.world.between
            case 10 if victim:
                victim.say("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
            case 11:
                launcher.release_orphans()
            case _:
                return
        self.trail.append("a fault")

    def settled(self, fleet: Fleet, name: str) -> bool:
        """It is where its file says it should be, or waits for a person."""
        record = json.loads((self.world.folder / "engines" / name / "slot.json").read_text())
        wanted = State.HEALTHY if record["goal"]["run"] else State.STOPPED
        return fleet.state(name) in (wanted, State.QUARANTINED) and not self.world.cells[name]["pending"]

    def check(self) -> None:
        """What holds at every moment."""
        for lock, count in Counter(one.spec.lock for one in self.world.launcher.alive()).items():
            assert count <= 1, f"{count} processes of {lock}"
        for engine_id, before, after in self.world.states:
            assert after != "HEALTHY" or before in ("STALE", "SUSPECT"), f"engine {engine_id}: {before} -> HEALTHY"

    async def calm(self, fleet: Fleet) -> None:
        """Nothing goes wrong any more: every operation ends, every slot comes to its goal, and all can be stopped."""
        world, launcher = self.world, self.world.launcher
        self.trail.append("calm")
        launcher.behaviour, launcher.fail_start, launcher.start_delay = Behaviour(), "", 0.05
        launcher.lost, world.updating, world.between = False, False, True
        world.required = Required(version="default", source="base")
        launcher.release_orphans()
        for process in launcher.processes.values():
            process.running, process.mute, process.flowing = 0, False, True
            process.how.never_ready = process.how.ignores_term = process.how.orphan = False
        await world.until(lambda: all(work.done() for work in self.work), limit_s=500)
        for work in self.work:
            if not work.cancelled() and work.exception() is not None:
                assert isinstance(work.exception(), RltopError), work.exception()
        await world.until(lambda: all(self.settled(fleet, name) for name in NAMES), limit_s=500)
        self.check()
        assert {cell["stage"] + cell["pending"] for cell in world.cells.values()} == {""}
        await fleet.stop_all(self.trail.append)
        # What was given up with its node is ended once the node is back.
        await world.until(lambda: launcher.alive() == [], limit_s=30)


def live(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        life = Life(seed, tmp_path / str(seed))
        try:
            run_fleet(life.run)
        except BaseException:
            print(f"seed {seed}", *life.trail[-40:], *[text for _, text in life.world.told[-30:]], sep="\n")
            raise


def test_random_lives_of_a_fleet_come_to_their_goals(tmp_path: Path) -> None:
    live(range(6), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_five_hundred_random_lives_of_a_fleet_come_to_their_goals(tmp_path: Path) -> None:
    live(range(1000, 1500), tmp_path)
