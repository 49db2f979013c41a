"""Engines on trial: out of the rotation, with weights and arguments of their own, and back to what they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rltop.engines.chores import Verified
from rltop.engines.fleet import Config, Fleet, Required, Restart
from rltop.engines.log import EngineLog
from rltop.engines.requests import Http
from rltop.engines.slots import OnTrial
from rltop.engines.trials import effective_toggles
from rltop.engines.verify import Effective
from rltop.errors import RltopError
from tests.engines.fleet_world import Behaviour, World, refused, run_fleet

IMA = (
    "Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/s/sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process',
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
)
WEIGHTS = Required(version="7", source="disk", path="/w/7")
OFF = Config(args=("--disable-radix-cache",))

LOGS = Path(__file__).parents[1] / "data" / "logs"


def trial(fleet: Fleet, name: str = "0") -> OnTrial:
    return OnTrial(name="bisection 1", weights=WEIGHTS, base=fleet.trials.subject(name).config)


async def ready(fleet: Fleet, generation: int) -> str:
    return await fleet.trials.until("0", generation, lambda seen: seen.where if seen.where != "coming" else None)


def test_it_leaves_the_rotation_and_holds_the_weights_of_the_trial(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        world.required = Required(version="9", source="trainer")
        async with world.fleet() as fleet:
            await world.start(fleet, 2, healthy=False)
            for number in ("0", "1"):
                world.launcher.at(number).version = "9"
                await world.until_state(number, "HEALTHY")
            with fleet.trials.held(["0"], "bisection 1"):
                generation = fleet.trials.put_on("0", trial(fleet), OFF, "try it")
                assert await ready(fleet, generation) == "ready"
                assert world.state("0") == "RESERVED"
                assert world.cells["0"]["reserved"] == "bisection 1"
                assert world.launcher.at("0").version == "7", "the crash's, not the newest"
                assert world.cells["0"]["weight_version"] == "7"
                seen = fleet.trials.sight("0", generation)
                assert (seen.toggles["radix_cache"], seen.toggles["overlap_schedule"]) == ("off", "on")
                assert "held by another operation: bisection 1" in refused(fleet, Restart(targets=("0",))).why
                world.updating = True  # the trainer's update has no part in it, nor it in the update
                generation = fleet.trials.put_on("0", trial(fleet), Config(), "another arm")
                assert await ready(fleet, generation) == "ready"
                world.updating = False
                back = asyncio.create_task(fleet.trials.give_back("0", "back to its arguments"))
                await world.until_state("0", "STALE")
                assert await back == ""
            world.launcher.at("0").version = "9"
            await world.until_state("0", "HEALTHY")
            assert world.cells["0"]["reserved"] == ""
            assert fleet.trials.on_trial() == {}
            assert not [row for row in world.states if row[0] == "1" and "HEALTHY" in row[1]], "the other one served on"

    run_fleet(main)


def test_its_crash_is_seen_and_nobody_restarts_it(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            generation = fleet.trials.put_on("0", trial(fleet), Config(), "try it")
            assert await ready(fleet, generation) == "ready"
            no = refused(fleet, Http(target="0", action="pause"))
            assert (no.code, "on trial for bisection 1" in no.why) == ("busy", True)
            process = world.launcher.at("0")
            process.say(*IMA)
            process.end(-9)
            crashed = await fleet.trials.until("0", generation, lambda one: one if one.where == "crashed" else None)
            assert (crashed.kind, crashed.started) == ("ima", True)
            await asyncio.sleep(200)  # virtual
            assert fleet.trials.sight("0", generation).where == "crashed"
            assert world.state("0") == "RESERVED"
            assert not [text for level, text in world.told if level == "error"], "it is what the trial is for"
            generation = fleet.trials.put_on("0", trial(fleet), OFF, "the next arm")
            assert await ready(fleet, generation) == "ready"

    run_fleet(main)


def test_a_start_that_crashes_and_one_that_never_is(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.launcher.behaviour = Behaviour(dies_loading="\n".join(IMA))
            generation = fleet.trials.put_on("0", trial(fleet), Config(), "try it")
            assert await ready(fleet, generation) == "crashed"
            assert not fleet.trials.sight("0", generation).started
            world.launcher.fail_start = "no room"
            generation = fleet.trials.put_on("0", trial(fleet), Config(), "try it")
            assert await ready(fleet, generation) == "lost"

    run_fleet(main)


def test_the_next_daemon_finds_it_on_trial_and_can_give_it_back(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            generation = fleet.trials.put_on("0", trial(fleet), OFF, "try it")
            assert await ready(fleet, generation) == "ready"
        async with world.fleet() as fleet:
            assert set(fleet.trials.on_trial()) == {"0"}
            assert await ready(fleet, generation) == "ready"
            assert world.state("0") == "RESERVED"
            assert await fleet.trials.give_back("0", "nobody tries any more") == ""
            await world.until_state("0", "HEALTHY")
            assert world.launcher.at("0").spec.args == ()

    run_fleet(main)


def test_what_does_not_come_back_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            generation = fleet.trials.put_on("0", trial(fleet), OFF, "try it")
            assert await ready(fleet, generation) == "ready"
            world.launcher.behaviour = Behaviour(dies_loading="\n".join(IMA))
            assert "ima" in await fleet.trials.give_back("0", "back")

    run_fleet(main)


def test_two_cannot_hold_one_engine(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path)
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            with fleet.trials.held(["0"], "bisection 1"):
                with pytest.raises(RltopError, match="held by another"), fleet.trials.held(["0"], "bisection 2"):
                    pass
                assert fleet.trials.subject("0").busy == "bisection 1"

    run_fleet(main)


def test_graphs_that_no_step_replays_are_not_on() -> None:
    """SGLang 0.5.14 on an H200 with --disable-cuda-graph-padding: it captures 23 sizes and replays none of them."""
    log = EngineLog()
    log.feed((LOGS / "sglang_padding_flag_replays_nothing.log").read_bytes(), 1.0)
    assert (log.replayed, log.eager) == (0, 4)
    both = {name: Effective("on", True, "/server_info") for name in ("cuda_graph", "prefill_graph")}
    found = Verified(version="0.5.14", info={}, toggles=both, wanted={})
    assert effective_toggles(found, log) == {"cuda_graph": "off", "prefill_graph": "on", "cuda_graph_padding": "off"}
    assert effective_toggles(found, EngineLog())["cuda_graph"] == "on", "no step was seen yet"
