"""The fleet over fake engines on a virtual clock: operations, weights, failures, and a daemon that is killed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rltop.daemon.engine_view import serves
from rltop.engines.cell import SEEN_S
from rltop.engines.fleet import (
    Ab,
    AbEnd,
    Config,
    EngineSlot,
    FleetPolicy,
    Http,
    Required,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
    Synced,
)
from rltop.engines.launcher import GpuUse
from rltop.engines.rolling import times
from rltop.engines.slots import differences, new_record
from rltop.engines.states import State
from rltop.errors import RltopError
from tests.engines.fleet_world import POLICY, World, planned, refused, run_fleet, slots

OFF = {"radix_cache": "off"}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# ---------------------------------------------------------------------- start, weights


def test_a_started_engine_passes_every_stage_and_shows_what_is_in_effect(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            cell = world.cells["0"]
        assert [after for _, _, after in world.states] == [
            *("LAUNCHING", "LOADING", "CAPTURING", "WARMING", "STALE", "HEALTHY")
        ]
        assert (cell["generation"], cell["weight_version"], cell["ignored"]) == (1, "default", [])
        assert cell["toggles"]["radix_cache"] == "on"
        assert cell["signals"].keys() == {"process", "probe", "progress", "trainer", "log"}

    run_fleet(main)


def test_an_engine_serves_only_after_the_trainer_pushed_and_its_own_word_says_so(world: World) -> None:
    async def main() -> None:
        world.required = Required(version="7", source="trainer")
        async with world.fleet() as fleet:
            await world.start(fleet, 1, healthy=False)
            await asyncio.sleep(POLICY.stale_s + 1)
            assert world.state("0") == "STALE"
            assert world.cells["0"]["cause"] == "awaits weight version '7' from the trainer; it holds 'default'"
            assert ("error", "engine 0: STALE since 30 s: " + world.cells["0"]["cause"]) in world.told
            # The trainer's word alone moves nothing.
            with pytest.raises(RltopError, match="does not serve yet"):
                await world.do(fleet, Synced(target="0", generation=1, version="7"))
            world.launcher.at("0").version = "7"
            await world.do(fleet, Synced(target="0", generation=1, version="7", digest="digest of 7"))
            assert world.state("0") == "HEALTHY"
            assert world.cells["0"]["weight_digest"] == "digest of 7"

    run_fleet(main)


def test_the_right_label_on_the_wrong_weights_is_not_let_through(world: World) -> None:
    async def main() -> None:
        world.required = Required(version="default", source="trainer", digest="another")
        async with world.fleet() as fleet:
            await world.start(fleet, 1, healthy=False)
            await world.until(lambda: "digest" in world.cells["0"]["cause"])
            assert world.state("0") == "STALE"

    run_fleet(main)


def test_published_weights_are_loaded_from_disk_where_no_trainer_lives(world: World) -> None:
    async def main() -> None:
        world.required = Required(version="3", source="disk", path="/weights/3")
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            assert world.launcher.at("0").version == "3"

    run_fleet(main)


def test_a_refused_load_is_said_and_tried_again(world: World) -> None:
    async def main() -> None:
        world.required = Required(version="3", source="disk", path="/weights/3")
        world.launcher.behaviour.refuses_updates = True
        async with world.fleet() as fleet:
            await world.start(fleet, 1, healthy=False)
            await world.until(lambda: "no such path" in world.cells["0"]["cause"])
            world.launcher.at("0").how.refuses_updates = False
            await world.until_state("0", "HEALTHY")

    run_fleet(main)


def test_an_engine_left_behind_by_an_update_leaves_the_rotation(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            world.updating = True
            world.required = Required(version="1", source="trainer")
            world.launcher.at("0").version = "1"
            await asyncio.sleep(30)
            assert (world.state("0"), world.state("1")) == ("HEALTHY", "HEALTHY"), "nothing is judged in an update"
            world.updating = False
            await world.until_state("1", "STALE")
            assert world.state("0") == "HEALTHY"

    run_fleet(main)


def test_an_ignored_flag_is_told(world: World) -> None:
    async def main() -> None:
        world.launcher.behaviour.deaf = True
        async with world.fleet() as fleet:
            await world.do(fleet, StartEngines(slots=slots(1)))
            await world.until_state("0", "HEALTHY")
            told = await world.do(fleet, SetToggles(changes=OFF))
            assert told.endswith(" s, but without effect: radix_cache=off (it runs with on)")
            assert "radix_cache" in world.cells["0"]["ignored"]
            assert any("radix_cache=off had no effect" in text for level, text in world.told if level == "warn")

    run_fleet(main)


# ---------------------------------------------------------------------- rolling changes


def test_a_rolling_change_keeps_enough_engines_serving(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 4)
            plan = planned(fleet, SetToggles(changes=OFF, keep=2))
            assert plan.diff["0"] == ["+ --disable-radix-cache"]
            how = "the first alone, then up to 2 at a time; at least 2 of 4 go on serving"
            assert plan.steps[-1] == f"restart engines 0, 1, 2, 3, {how}"
            narrow = planned(fleet, SetToggles(changes=OFF, keep=3)).steps[-1]
            assert narrow == "restart engines 0, 1, 2, 3 one after the other; at least 3 of 4 go on serving"
            least = 4
            work = asyncio.ensure_future(fleet.carry_out(plan, world.stages.append))
            while not work.done():
                serving = sum(cell["state"] in ("HEALTHY", "SUSPECT") for cell in world.cells.values())
                least = min(least, serving)
                await asyncio.sleep(0.02)
            await work
            assert least == 2, "as many at a time as may be"
            assert all(cell["generation"] == 2 for cell in world.cells.values())
            assert all(cell["toggles"]["radix_cache"] == "off" for cell in world.cells.values())
            assert all(cell["previous_generation"] == 1 for cell in world.cells.values())
        assert set(healthy_from(world)) == {"STALE"}

    run_fleet(main)


def healthy_from(world: World) -> list[str]:
    """States from which engines became HEALTHY."""
    return [before for _, before, after in world.states if after == "HEALTHY"]


def test_the_first_engine_goes_alone_and_a_change_that_does_not_start_is_taken_back(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 3)
            world.launcher.behaviour.dies_loading = "torch.OutOfMemoryError: CUDA out of memory."
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF, keep=0)))
            await world.until(lambda: world.cells["0"]["generation"] == 3)
            world.launcher.behaviour.dies_loading = ""
            with pytest.raises(RltopError, match="engine 0 did not come up as generation 2") as caught:
                await work
            assert "serves again" in caught.value.do
            assert world.cells["0"]["toggles"]["radix_cache"] == "on"
            assert [world.cells[name]["generation"] for name in "012"] == [3, 1, 1]
            assert world.cells["0"]["previous_generation"] is None, "what never ran is nothing to go back to"

    run_fleet(main)


def test_revert_goes_back_to_the_arguments_before(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            assert refused(fleet, Revert()).code == "bad-args"
            await world.do(fleet, SetToggles(changes=OFF))
            world.launcher.at("0").end(-9)
            await world.until(lambda: world.cells["0"]["generation"] == 3 and world.state("0") == "HEALTHY")
            plan = planned(fleet, Revert(targets=("0",)))
            assert plan.diff["0"] == ["- --disable-radix-cache"]
            await world.do(fleet, Revert())
            assert world.cells["0"]["toggles"]["radix_cache"] == "on"

    run_fleet(main)


def test_a_roll_that_could_never_keep_enough_serving_ends_at_once(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            for _ in range(3):
                await world.until_state("1", "HEALTHY")
                world.launcher.at("1").end(-9)
                await world.until(lambda: world.state("1") != "HEALTHY")
            await world.until_state("1", "QUARANTINED")
            began = world.launcher.now()
            with pytest.raises(RltopError, match="engine 0 was not restarted") as caught:
                await world.do(fleet, Restart(targets=("0",)))
            assert "1 QUARANTINED" in caught.value.why
            assert world.launcher.now() - began < 1
            # One that is stopped on purpose does not count: there is nothing to keep.
            await world.do(fleet, Stop(targets=("1",)))
            await world.do(fleet, Restart(targets=("0",)))

    run_fleet(main)


def test_requests_that_do_not_end_are_aborted_before_the_engine_is(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            old = world.launcher.at("0")
            old.running = 5
            await world.do(fleet, Restart())
            assert (old.aborted, old.exit_code) == (5, -15)
            assert any(stage.startswith("engine 0: drained 20.") for stage in world.stages)

    run_fleet(main)


def test_who_sends_requests_is_told_before_an_engine_drains(world: World) -> None:
    """And is not waited for when he does not answer."""
    heard: list[tuple[str, int]] = []

    async def main() -> None:
        async def leaving(url: str) -> None:
            heard.append((url, world.launcher.at("0").running))
            await asyncio.get_running_loop().create_future()

        world.leaving = leaving
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            old = world.launcher.at("0")
            old.running, url = 2, world.cells["0"]["url"]
            await world.do(fleet, Restart())
            assert heard == [(url, 2)]
            assert old.exit_code == -15

    run_fleet(main)


def test_an_engine_that_ignores_sigterm_is_killed(world: World) -> None:
    async def main() -> None:
        world.launcher.behaviour.ignores_term = True
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            old = world.launcher.at("0")
            await world.do(fleet, Restart())
            assert old.killed

    run_fleet(main)


def test_a_second_operation_on_a_busy_engine_is_refused_with_who_and_what(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            work = asyncio.ensure_future(world.do(fleet, Restart(targets=("0",), who="ann", reason="odd")))
            await world.until_state("0", "DRAINING")
            found = refused(fleet, SetToggles(targets=("0", "1"), changes=OFF))
            assert (found.code, found.why) == ("busy", "engine 0 is held by another operation: restart by ann: odd")
            assert planned(fleet, Restart(targets=("1",))).targets == ("1",), "a lock per engine, never a global one"
            await work

    run_fleet(main)


def test_a_plan_for_another_generation_is_not_carried_out(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            plan = planned(fleet, SetToggles(changes=OFF))
            await world.do(fleet, Restart())
            with pytest.raises(RltopError, match="changed since the plan"):
                await fleet.carry_out(plan, world.stages.append)

    run_fleet(main)


def test_a_change_waits_for_the_next_safe_point_and_says_so(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.between = False
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF, when="safe-point")))
            await asyncio.sleep(100)
            assert (world.state("0"), world.cells["0"]["generation"]) == ("HEALTHY", 1)
            assert "safe point" in world.cells["0"]["pending"]
            world.between = True
            await work
            assert world.cells["0"]["generation"] == 2

    run_fleet(main)


def test_nothing_is_restarted_in_a_weight_update(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            world.updating = True
            work = asyncio.ensure_future(world.do(fleet, Restart(targets=("0",))))
            world.launcher.at("1").end(-9)
            await asyncio.sleep(60)
            assert world.state("0") == "HEALTHY"
            assert world.cells["0"]["pending"] == "the end of the weight update"
            assert world.state("1") == "BACKOFF"
            world.updating = False
            await work
            await world.until_state("1", "HEALTHY")

    run_fleet(main)


# ---------------------------------------------------------------------- labels


def test_an_answer_from_before_a_push_says_nothing_of_what_was_pushed(world: World) -> None:
    """A scrape takes a second and a push is in the middle of each: the label is that of before, the requirement new."""

    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            engine = world.launcher.at("0")
            engine.slow_s = 0.6
            world.states.clear()
            for version in range(1, 40):
                await asyncio.sleep(0.75)
                # The next label arrives in the engine a moment before the trainer's word about it.
                engine.version = str(version)
                await asyncio.sleep(0.05)
                world.required = Required(version=str(version), source="trainer")
            assert world.states == []

    run_fleet(main)


def test_one_wrong_look_is_no_proof_and_two_are(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            engine = world.launcher.at("0")
            asked = engine.loads_asked
            await world.until(lambda: engine.loads_asked > asked)
            engine.version = "other"
            await world.until(lambda: engine.loads_asked > asked + 1)
            await asyncio.sleep(0.3)
            engine.version = "default"
            await asyncio.sleep(10)
            assert world.state("0") == "HEALTHY"
            engine.version = "other"
            begun = world.launcher.now()
            await world.until_state("0", "STALE")
            assert world.launcher.now() - begun < 2.5

    run_fleet(main)


def test_an_engine_that_refused_a_sync_is_stale_at_once(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            world.required = Required(version="1", source="trainer")
            world.launcher.at("0").version = "1"
            fleet.not_synced("1", "it did not take weight version '1': no")
            assert (world.state("0"), world.state("1")) == ("HEALTHY", "STALE")
            assert any("HEALTHY -> STALE: it did not take weight version '1': no" in text for _, text in world.told)
            await asyncio.sleep(5)
            assert world.state("1") == "STALE"
            assert "it holds 'default'" in world.cells["1"]["cause"]
            world.launcher.at("1").version = "1"
            await world.until_state("1", "HEALTHY")
            assert world.cells["1"]["cause"] == "", "no word about the weights of then"

    run_fleet(main)


# ---------------------------------------------------------------------- a weight update that hangs


def test_an_engine_that_a_weight_update_hangs_on_is_doubted_and_may_be_restarted(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            world.updating = True
            begun, old = world.launcher.now(), world.launcher.at("1")
            old.mute = True
            work = asyncio.ensure_future(world.do(fleet, Restart(targets=("1",))))
            await asyncio.sleep(4.5)
            assert world.state("1") == "HEALTHY", "an engine may be silent for a moment while it loads"
            assert world.cells["1"]["pending"] == "the end of the weight update"
            await world.until_state("1", "SUSPECT", 3)
            assert "no route answers" in next(text for _, text in world.told if "-> SUSPECT" in text)
            await world.until(lambda: not old.alive, 10)
            assert world.launcher.now() - begun < 12, "5 s of silence, 3 s that it has to answer, 0.5 s to end"
            await asyncio.sleep(30)
            assert (world.state("0"), world.state("1")) == ("HEALTHY", "STOPPED"), "nothing is started in an update"
            world.updating = False
            await work
            assert world.cells["1"]["generation"] == 2
            assert world.cells["0"]["generation"] == 1

    run_fleet(main)


def test_a_stale_engine_that_an_update_hangs_on_may_be_stopped_too(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            world.required = Required(version="1", source="trainer")
            await world.start(fleet, 1, healthy=False)
            await world.until_state("0", "STALE")
            world.updating = True
            world.launcher.at("0").mute = True
            begun = world.launcher.now()
            await world.do(fleet, Stop(targets=("0",)))
            assert 5.0 < world.launcher.now() - begun < 12.0

    run_fleet(main)


def test_an_engine_that_takes_its_weights_slowly_is_left_alone(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.updating = True
            world.launcher.at("0").mute = True
            await asyncio.sleep(4)
            world.launcher.at("0").mute = False
            await asyncio.sleep(20)
            assert world.state("0") == "HEALTHY"

    run_fleet(main)


def test_silence_in_a_drain_is_measured_by_the_clock(world: World) -> None:
    """Each question hangs instead of being refused: tries do not count, seconds do."""

    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            process = world.launcher.at("0")
            process.running, process.slow_s = 1, 1000.0
            begun = world.launcher.now()
            await world.do(fleet, Stop(targets=("0",)))
            drained = begun + float(world.stages[-1].split("drained ")[1].split(" s")[0])
            assert drained - begun == pytest.approx(3.0, abs=0.2)
            assert process.aborted == 0

    run_fleet(main)


# ---------------------------------------------------------------------- cancel


def test_cancelled_while_it_drains_the_old_generation_goes_on(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            old = world.launcher.at("0")
            old.running = 3
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF)))
            await world.until_state("0", "DRAINING")
            await asyncio.sleep(1)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await world.until_state("0", "HEALTHY")
            assert old.alive
            assert [world.cells[name]["generation"] for name in "01"] == [1, 1]
            assert fleet.launch("0")[0] == ()
            assert ("0", "DRAINING", "STALE") in world.states

    run_fleet(main)


def test_cancelled_after_the_old_one_was_ended_the_new_one_comes(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF)))
            await world.until_state("0", "STOPPING")
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await world.until_state("0", "HEALTHY")
            assert [world.cells[name]["generation"] for name in "01"] == [2, 1]
            assert fleet.launch("0")[0] == ("--disable-radix-cache",)
            assert fleet.launch("1")[0] == ()

    run_fleet(main)


# ---------------------------------------------------------------------- failures


def test_a_dead_engine_is_known_within_a_second_and_comes_back(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            process = world.launcher.at("0")
            process.say("Scheduler hit an exception: Traceback (most recent call last):")
            process.say("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
            process.end(-9)
            began = world.launcher.now()
            await world.until_state("0", "CRASHED", limit_s=1.0)
            cell = world.cells["0"]
            assert cell["fingerprint"].startswith("ima/")
            await world.until_state("0", "BACKOFF")
            assert world.cells["0"]["backoff_until"] == pytest.approx(began + 1.8e9 + 10, abs=1)
            await world.until_state("0", "HEALTHY")
            assert (world.cells["0"]["generation"], world.cells["0"]["restarts"]) == (2, 1)
        story = json.loads((world.folder / "engines/0/1/crash.json").read_text())
        assert story["signal"] == 9
        assert story["crash"]["kind"] == "ima"
        assert "illegal memory access" in (world.folder / "engines/0/1/crash.log").read_text()

    run_fleet(main)


def test_a_fatal_line_takes_the_engine_out_before_its_process_ends(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            process = world.launcher.at("0")
            process.say(
                "Scheduler hit an exception: Traceback (most recent call last):",
                "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
                "SIGQUIT received. signum=<Signals.SIGQUIT: 3>, frame=<frame>. It usually means one child failed.",
            )
            await world.until_state("0", "CRASHED", limit_s=2.0)
            assert process.alive
            await asyncio.sleep(20)
            assert process.alive, "it may be writing a dump"
            assert world.state("0") == "CRASHED"
            process.end(-9)
            await world.until_state("0", "BACKOFF", limit_s=1.0)

    run_fleet(main)


def test_work_without_progress_is_told_and_not_killed_although_every_route_answers(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            process = world.launcher.at("0")
            process.running = 2
            await asyncio.sleep(30)
            assert world.state("0") == "HEALTHY"
            process.flowing = False
            await world.until_state("0", "SUSPECT", limit_s=30)
            await world.until(lambda: any("hung" in text for level, text in world.told if level == "error"))
            await asyncio.sleep(300)
            assert process.alive
            cell = world.cells["0"]
            assert (cell["hung"], cell["running"], cell["tokens_per_s"]) == (True, 2, 0.0)
            assert "rltop engine restart --engine 0" in cell["cause"]
            assert not serves(cell), "it is asked and does not answer"
            told = next(text for level, text in world.told if level == "error")
            assert "SUSPECT since 12 s: hung" in told, "in doubt since 3 s without a token, hung after 15 s"
            process.flowing = True
            await world.until_state("0", "HEALTHY", limit_s=30)
            assert serves(world.cells["0"])

    run_fleet(main)


def test_an_engine_that_does_not_serve_has_no_numbers_and_nothing_good_to_say(world: World) -> None:
    numbers = ("running", "queued", "tokens_per_s", "token_usage", "cuda_graph", "spec_accept_length", "error")

    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            for name in ("0", "1"):
                world.launcher.at(name).running = 3
                fleet.trainer_saw(name, 1, True, "")
            await world.until(lambda: all(cell["running"] == 3 for cell in world.cells.values()))
            assert world.cells["0"]["signals"]["trainer"]["ok"] is True
            await world.do(fleet, Stop(targets=("1",)))
            world.launcher.at("0").end(-9)
            await world.until_state("0", "BACKOFF")
            for name, process_is in (("0", False), ("1", None)):
                cell = world.cells[name]
                assert [cell[key] or None for key in numbers] == [None] * len(numbers), cell["state"]
                said = {key: one["ok"] for key, one in cell["signals"].items()}
                assert said.pop("process") is process_is
                assert set(said.values()) <= {None, False}, cell["state"]

    run_fleet(main)


def test_a_pause_is_shown_with_who_and_since_until_it_ends(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            process = world.launcher.at("0")
            process.running = 2
            await asyncio.sleep(5)
            process.flowing = False
            asked = world.launcher.now() + 1.8e9
            await world.do(fleet, Http(target="0", action="pause", who="ana"))
            await world.until(lambda: world.cells["0"]["paused"])
            assert world.cells["0"]["paused"]["by"] == "ana"
            assert abs(world.cells["0"]["paused"]["since"] - asked) < 1
            await asyncio.sleep(60)
            cell = world.cells["0"]
            assert (cell["state"], cell["tokens_per_s"], serves(cell)) == ("HEALTHY", 0.0, False)
            assert cell["signals"]["progress"] | {"t": 0} == {"ok": None, "text": "paused by ana", "t": 0}
        async with world.fleet() as fleet:
            await world.until_state("0", "HEALTHY")
            await asyncio.sleep(20)
            assert world.cells["0"]["paused"]["by"] == "ana", "the next daemon knows of it"
            await world.do(fleet, Http(target="0", action="continue", who="bo"))
            await world.until(lambda: not world.cells["0"]["paused"], 2.0)
            await world.do(fleet, Http(target="0", action="pause", who="ana"))
            await asyncio.sleep(10)
            assert world.cells["0"]["paused"]
            process.flowing = True  # a weight update let it go on
            await world.until(lambda: not world.cells["0"]["paused"], 10.0)
            await world.do(fleet, Http(target="0", action="pause", who="ana"))
            await world.do(fleet, Restart(targets=("0",)))
            assert not world.cells["0"]["paused"], "of the process before"

    run_fleet(main)


def test_what_the_trainers_requests_met_counts_for_a_generation_while_it_is_in_the_rotation(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            fleet.trainer_saw("0", 1, False, "gone: its process is gone")
            await asyncio.sleep(5)
            assert world.state("0") == "HEALTHY", "we see that it lives"
            fleet.trainer_saw("0", 1, False, "refused: no connection")
            await world.until_state("0", "SUSPECT", 5.0)
        world.launcher.at("0").mute = True
        async with world.fleet() as fleet:
            # The trainer lost sight of it with the daemon, and says so to the next one.
            await world.until(lambda: world.state("0") == "WARMING")
            fleet.trainer_saw("0", 1, False, "refused: no connection")
            world.launcher.at("0").mute = False
            await world.until_state("0", "HEALTHY")
            await asyncio.sleep(10)
            assert world.state("0") == "HEALTHY"
            assert world.cells["0"]["signals"]["trainer"]["ok"] is None

    run_fleet(main)


def test_three_crashes_of_one_kind_end_in_quarantine_until_a_person_starts_it(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            for _ in (1, 2, 3):
                await world.until_state("0", "HEALTHY")
                world.launcher.at("0").end(-9)
                await world.until(lambda: world.state("0") != "HEALTHY")
            await world.until_state("0", "QUARANTINED")
        async with world.fleet() as fleet:
            await asyncio.sleep(400)
            assert world.state("0") == "QUARANTINED", "also the next daemon leaves it alone"
            await world.do(fleet, Start(targets=("0",)))
            assert world.state("0") == "HEALTHY"

    run_fleet(main)


def test_an_orphan_that_holds_memory_is_named_and_waited_for(world: World) -> None:
    async def main() -> None:
        world.launcher.stranger = GpuUse(index=0, pid=77, mib=1200, name="python", ours=False)
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            old = world.launcher.at("0")
            old.how.orphan = True
            work = asyncio.ensure_future(world.do(fleet, Restart()))
            await world.until_state("0", "RECLAIMING")
            await asyncio.sleep(POLICY.reclaim_s + 1)
            assert f"pid {old.pid + 5000} (orphan) holds 800 MiB of GPU 0" in world.cells["0"]["cause"]
            assert any(level == "error" and "800 MiB" in text for level, text in world.told)
            assert len(world.launcher.alive()) == 0, "no second process beside an orphan"
            world.launcher.release_orphans()
            await work
            assert any("pid 77 (python) holds 1200 MiB of GPU 0 and is not ours" in text for _, text in world.told)

    run_fleet(main)


def test_a_launch_that_fails_waits_and_is_tried_again(world: World) -> None:
    async def main() -> None:
        world.launcher.fail_start = "port 30000 is in use"
        async with world.fleet() as fleet:
            with pytest.raises(RltopError, match="did not start") as caught:
                await world.start(fleet, 1)
            assert "port 30000 is in use" in caught.value.why
            world.launcher.fail_start = ""
            await world.until_state("0", "HEALTHY")

    run_fleet(main)


def test_a_launch_that_never_ends_is_abandoned(world: World) -> None:
    async def main() -> None:
        world.launcher.start_delay = 1e6
        async with world.fleet() as fleet:
            with pytest.raises(RltopError, match="did not start"):
                await world.start(fleet, 1)
            world.launcher.start_delay = 0.1
            await world.until_state("0", "HEALTHY")
            assert len(world.launcher.alive()) == 1

    run_fleet(main)


def test_an_engine_that_never_gets_ready_ends_the_operation(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.launcher.behaviour.never_ready = True
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF)))
            await world.until(lambda: world.cells["0"]["fingerprint"] == "start-timeout:CAPTURING")
            world.launcher.behaviour.never_ready = False
            with pytest.raises(RltopError, match="did not come up"):
                await work
            assert world.state("0") == "HEALTHY"

    run_fleet(main)


def test_a_lost_node_is_given_up_after_a_while(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.launcher.lost = True
            await world.until_state("0", "LOST")
            await asyncio.sleep(30)
            world.launcher.lost = False
            await world.until_state("0", "HEALTHY")
            assert healthy_from(world) == ["STALE", "STALE"], "it was out of sight"
            world.launcher.lost = True
            await world.until_state("0", "LOST")
            await world.until(lambda: world.state("0") != "LOST", limit_s=POLICY.lost_s + 2)

    run_fleet(main)


def test_failures_that_the_trainer_sees_put_an_engine_in_doubt(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            fleet.trainer_saw("0", 99, False, "of another generation")
            await asyncio.sleep(5)
            assert world.state("0") == "HEALTHY"
            fleet.trainer_saw("0", 1, False, "ReadTimeout")
            await world.until_state("0", "SUSPECT")
            assert "ReadTimeout" in world.cells["0"]["cause"]
            fleet.trainer_saw("0", 1, True, "")
            await world.until_state("0", "HEALTHY")

    run_fleet(main)


def test_a_released_engine_is_not_asked_anything(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            fleet.released("0")
            await asyncio.sleep(1)
            asked = world.launcher.at("0").loads_asked
            await asyncio.sleep(100)
            assert (world.state("0"), world.launcher.at("0").loads_asked) == ("OFFLOADED", asked)
            fleet.resumed("0")
            assert world.states[-1] == ("0", "OFFLOADED", "STALE")
            await world.until_state("0", "HEALTHY")

    run_fleet(main)


def test_an_engine_whose_memory_the_trainer_has_is_not_restarted_until_it_has_it_back(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            fleet.released("0")
            work = asyncio.ensure_future(world.do(fleet, Restart()))
            await asyncio.sleep(50)
            assert (world.state("0"), world.cells["0"]["generation"]) == ("OFFLOADED", 1)
            assert world.cells["0"]["pending"] == "its memory, which the trainer has"
            fleet.resumed("0")
            await work
            assert world.cells["0"]["generation"] == 2

    run_fleet(main)


def test_after_a_release_the_label_alone_does_not_count(world: World) -> None:
    """The label outlives a release, the tensors do not: such an engine answers token 0 for ever."""

    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            fleet.released("0")
            fleet.resumed("0")
            await world.until_state("0", "HEALTHY")
            assert world.launcher.at("0").loaded == ["/m"], "the checkpoint was loaded again"
            world.required = Required(version="default", source="trainer")
            fleet.released("0")
        async with world.fleet() as fleet:
            await world.until_state("0", "OFFLOADED")
            fleet.resumed("0")
            await asyncio.sleep(50)
            assert world.state("0") == "STALE"
            assert "its memory was released" in world.cells["0"]["cause"]
            await world.do(fleet, Synced(target="0", generation=1, version="default"))
            assert world.state("0") == "HEALTHY"

    run_fleet(main)


def test_an_engine_that_cannot_die_of_its_error_is_ended(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            process = world.launcher.at("0")
            process.say("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
            await world.until_state("0", "CRASHED", limit_s=2.0)
            await asyncio.sleep(POLICY.dying_s)
            await world.until(lambda: not process.alive, limit_s=5)
            assert process.killed

    run_fleet(main)


def test_sglang_engines_dump_core_unless_somebody_has_said_anything_about_it(tmp_path: Path) -> None:
    """Dumps name the kernel of an illegal access, inside graphs too, and are small with these flags."""

    def env(**fields: object) -> dict[str, str]:
        slot = EngineSlot(id="0", kind="sglang", model_path="/m", **fields)  # type: ignore[arg-type]
        return dict(new_record(slot, "local").spec("run", tmp_path, 3).env)

    asked = env()
    assert asked["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"
    assert "skip_global_memory" in asked["CUDA_COREDUMP_GENERATION_FLAGS"]
    assert asked["CUDA_COREDUMP_FILE"] == f"{tmp_path}/engines/0/3/coredump/cuda_coredump_%h.%p.%t"
    assert env(env={"CUDA_COREDUMP_FILE": "/my/dump"})["CUDA_COREDUMP_FILE"] == "/my/dump"
    assert env(env={"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}) == {"CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "0"}
    assert env(unset=("CUDA_ENABLE_COREDUMP_ON_EXCEPTION",)) == {}
    assert dict(new_record(slots(1)[0], "local").spec("run", tmp_path, 1).env) == {}, "the CPU engine has no GPU"


def test_what_changes_is_told_option_by_option_without_secrets() -> None:
    old = Config(args=("--tp", "2", "--api-key", "sk-abc", "--disable-radix-cache"), env={"A": "1", "HF_TOKEN": "hf_x"})
    new = Config(args=("--tp", "4", "--api-key", "other"), env={"HF_TOKEN": "hf_y"}, unset=("CUDA_LAUNCH_BLOCKING",))
    lines = differences(old, new)
    assert lines[:1] + lines[2:4] == ["- --tp 2", "- --disable-radix-cache", "+ --tp 4"]
    assert lines[-4:] == [
        *("- A=1", "- HF_TOKEN=***", "+ HF_TOKEN=***", "- CUDA_LAUNCH_BLOCKING (not inherited any more)"),
    ]
    assert "sk-abc" not in str(lines)
    assert differences(old, old) == []


def test_a_cell_that_says_the_same_is_shown_once(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            await asyncio.sleep(30)
            shown, before = world.shown, world.cells["0"]
            await asyncio.sleep(30)
            # Only when it was last seen moves on, in steps: an idle engine is asked like every other.
            now = world.cells["0"]
            assert world.shown - shown == 30 / SEEN_S
            assert {**now, "seen": None} == {**before, "seen": None}
            assert 29 <= now["seen"] - before["seen"] <= 31

    run_fleet(main)


def test_what_cannot_be_written_down_is_not_begun(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            folder = world.folder / "engines/0"
            monkeypatch.setattr("os.replace", _no_space)
            with pytest.raises(RltopError, match="cannot write down"):
                await world.do(fleet, SetToggles(changes=OFF))
            monkeypatch.undo()
            await asyncio.sleep(10)
            assert (world.state("0"), world.cells["0"]["generation"]) == ("HEALTHY", 1)
            assert not list(folder.glob(".slot*")), "no debris"

    run_fleet(main)


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------------- the next daemon


@pytest.mark.parametrize("state", ["DRAINING", "STOPPING", "RECLAIMING", "LAUNCHING", "LOADING", "WARMING", "STALE"])
def test_a_daemon_killed_in_any_stage_of_a_change_leaves_it_to_the_next_one(world: World, state: str) -> None:
    async def main() -> None:
        world.launcher.behaviour.orphan = state == "RECLAIMING"
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.launcher.at("0").running = 1
            world.launcher.behaviour.orphan = False
            world.required = Required(version="default", source="base")
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF)))
            if state == "STALE":
                world.required = Required(version="9", source="trainer")
            await world.until_state("0", state)
        work.cancel()
        world.launcher.release_orphans()
        world.required = Required(version="default", source="base")
        async with world.fleet() as fleet:
            await world.until(lambda: world.state("0") == "HEALTHY" and fleet.state("0") is State.HEALTHY)
            await world.until(lambda: world.cells["0"]["toggles"].get("radix_cache") == "off")
            assert world.launcher.at("0").spec.args == ("--disable-radix-cache",)
            assert len(world.launcher.alive()) == 1
        assert set(healthy_from(world)) == {"STALE"}

    run_fleet(main)


def test_an_engine_that_died_while_no_daemon_was_there_is_a_crash(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
        process = world.launcher.at("0")
        process.say("torch.OutOfMemoryError: CUDA out of memory.")
        process.end(-9)
        async with world.fleet() as fleet:
            await world.until_state("0", "BACKOFF")
            assert world.cells["0"]["fingerprint"]
            await world.until_state("0", "HEALTHY")

    run_fleet(main)


def test_a_running_engine_is_adopted_with_its_process_and_declared_again_without_a_restart(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            pid = world.cells["0"]["pid"]
        async with world.fleet() as fleet:
            await world.do(fleet, StartEngines(slots=slots(2)))
            await world.until(lambda: fleet.state("0") is State.HEALTHY)
            assert (world.cells["0"]["pid"], world.cells["0"]["generation"]) == (pid, 1)

    run_fleet(main)


def test_an_operation_begun_by_an_earlier_daemon_is_finished(world: World) -> None:
    async def main() -> None:
        request = SetToggles(changes=OFF)
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            work = asyncio.ensure_future(world.do(fleet, request))
            await world.until_state("0", "STOPPING")
        work.cancel()
        async with world.fleet() as fleet:
            await fleet.resume(request, {"0": 1, "1": 1}, world.stages.append)
            assert [world.cells[name]["generation"] for name in "01"] == [2, 2]
            assert {fleet.launch(name)[0] for name in "01"} == {("--disable-radix-cache",)}
            assert {world.cells[name]["stage"] for name in "01"} == {""}

    run_fleet(main)


def test_after_an_adoption_the_next_engine_waits_until_the_others_serve_again(world: World) -> None:
    async def main() -> None:
        request = SetToggles(changes=OFF)
        async with world.fleet() as fleet:
            await world.start(fleet, 3)
            work = asyncio.ensure_future(world.do(fleet, request))
            await world.until_state("0", "STOPPING")
        work.cancel()
        async with world.fleet() as fleet:
            work = asyncio.ensure_future(fleet.resume(request, {"0": 1, "1": 1, "2": 1}, world.stages.append))
            await world.until(lambda: any(fleet.state(name) is State.HEALTHY for name in "012"))
            while not work.done():
                assert any(fleet.state(name) in (State.HEALTHY, State.SUSPECT) for name in "012")
                await asyncio.sleep(0.02)
            await work

    run_fleet(main)


def test_a_slot_file_that_cannot_be_read_is_named_and_set_aside(world: World) -> None:
    async def main() -> None:
        file = world.folder / "engines/3/slot.json"
        file.parent.mkdir(parents=True)
        file.write_text("{")
        async with world.fleet() as fleet:
            assert fleet.ids() == []
            assert any(level == "error" and "slot.json: cannot be read" in text for level, text in world.told)
        assert file.with_name("slot.damaged-1.json").read_text() == "{"
        assert not file.exists(), "nothing was ever started there: nothing to make it from"

    run_fleet(main)


def spoil(file: Path, how: str) -> None:
    """What a machine that went down, a person or another program makes of a slot file."""
    told = json.loads(file.read_text())
    match how:
        case "lost":
            file.unlink()
        case "empty":
            file.write_text("")
        case "half":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "elsewhere":
            told["declared"]["id"] = "../../../w/evil"
            file.write_text(json.dumps(told))
        case "negative":
            file.write_text(json.dumps(told | {"generation": -1}))
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize("how", ["lost", "empty", "half", "elsewhere", "negative"])
def test_an_engine_whose_slot_file_is_damaged_is_adopted_as_it_runs(world: World, how: str) -> None:
    """Nothing of it is stopped, its arguments are known, and its generations go on."""

    async def main() -> None:
        file = world.folder / "engines/1/slot.json"
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            await world.do(fleet, SetToggles(targets=("1",), changes=OFF))
            pid = world.launcher.at("1").pid
        spoil(file, how)
        with (file.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as its keeper does while it lives
            async with world.fleet() as fleet:
                await world.until(lambda: "1" in fleet.ids() and fleet.state("1") is State.HEALTHY)
                cell = world.cells["1"]
                assert (cell["pid"], cell["generation"], cell["toggles"]["radix_cache"]) == (pid, 2, "off")
                assert fleet.launch("1")[0] == ("--disable-radix-cache",)
                assert any(level == "error" and "made again from generation 2" in text for level, text in world.told)
                assert not [one for one in world.launcher.processes.values() if "evil" in one.spec.directory]
                await world.do(fleet, Restart(targets=("1",)))
                assert world.cells["1"]["generation"] == 3
                await fleet.stop_all(world.stages.append)
                assert world.launcher.alive() == []
        assert json.loads(file.read_text())["declared"]["id"] == "1"
        assert file.with_name("slot.damaged-1.json").exists() is (how != "lost")

    run_fleet(main)


def test_what_had_ended_under_a_damaged_slot_file_stays_ended_and_its_numbers_go_on(world: World) -> None:
    async def main() -> None:
        file = world.folder / "engines/0/slot.json"
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            await fleet.stop_all(world.stages.append)
        (file.parent / "1").mkdir()
        (file.parent / "1/record.json").write_text('{"marker": "run/0/1", "pid": 100, "code": 0}')
        file.write_text("{")
        async with world.fleet() as fleet:
            await asyncio.sleep(100)
            assert world.launcher.alive() == []
            assert world.state("0") == "STOPPED"
            await world.start(fleet, 1)
            assert world.cells["0"]["generation"] == 2
            await fleet.stop_all(world.stages.append)
        for path in file.parent.glob("slot*"):
            path.unlink()  # also when nothing but the folders is left
        (file.parent / "2").mkdir()
        async with world.fleet() as fleet:
            assert fleet.ids() == []
            await world.start(fleet, 1)
            assert world.cells["0"]["generation"] == 3

    run_fleet(main)


def test_slots_of_a_newer_rltop_are_refused_and_nothing_is_touched(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
        newer, damaged = (world.folder / "engines" / name / "slot.json" for name in "10")
        newer.write_text('{"schema": 2, "state": "SLEEPING"}')
        damaged.write_text("{")
        with pytest.raises(RltopError, match="written by a newer rltop") as caught:
            async with world.fleet():
                pass
        assert (caught.value.exit_code, caught.value.where) == (2, str(newer))
        assert caught.value.why == "its schema version is 2, this build reads up to 1"
        assert (newer.read_text(), damaged.read_text()) == ('{"schema": 2, "state": "SLEEPING"}', "{")
        assert len(world.launcher.alive()) == 2

    run_fleet(main)


def test_a_disk_that_takes_nothing_withholds_no_stop_and_hears_of_it_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 3)
            full = OSError(errno.ENOSPC, "No space left on device")
            with monkeypatch.context() as patch:
                patch.setattr("rltop.engines.slots._replace", Mock(side_effect=full))
                with pytest.raises(RltopError, match="cannot write down what the engine should be"):
                    await world.do(fleet, Restart(targets=("0",)))  # what is to run again must be written first
                assert world.cells["0"]["generation"] == 1
                await world.do(fleet, Stop(targets=("1",)))
                assert [world.state(name) for name in "012"] == ["HEALTHY", "STOPPED", "HEALTHY"]
                await fleet.stop_all(world.stages.append)
                assert world.launcher.alive() == []
                said = [text for level, text in world.told if level == "error" and "though that cannot be" in text]
                assert len(said) == 3
                assert "slot.json: No space left on device" in said[0]
            await asyncio.sleep(2)  # there is room again
        for name in "012":
            record = json.loads((world.folder / "engines" / name / "slot.json").read_text())
            assert (record["state"], record["goal"]["run"]) == ("STOPPED", False)

    run_fleet(main)


# ---------------------------------------------------------------------- stop, A/B, bad input


def test_stop_all_ends_everything_at_once_also_in_an_update_and_beside_an_operation(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 3)
            world.launcher.at("0").running = 9
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF)))
            await world.until_state("0", "DRAINING")
            world.updating = True
            await asyncio.gather(*(fleet.stop_all(world.stages.append) for _ in range(2)))
            await asyncio.gather(work, return_exceptions=True)
            assert world.launcher.alive() == []
            assert {cell["state"] for cell in world.cells.values()} == {"STOPPED"}
        async with world.fleet():
            await asyncio.sleep(100)
            assert world.launcher.alive() == [], "stopped is stopped"

    run_fleet(main)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"port": -1}, "engine 0: there is no port -1"),
        ({"port": 99_999_999}, "engine 0: there is no port 99999999"),
        ({"args": ("--port", "1")}, "engine 0: --port in its args is not its owner's to give"),
        ({"args": ("--host=::",)}, "engine 0: --host=:: in its args is not its owner's to give"),
        ({"args": ("--tp-size", "1\0")}, "engine 0: an argument: a NUL character in '1\\x00'"),
        ({"env": {"A": "x" * 131_072}}, f"engine 0: A: '{'x' * 40}'… has 131072 bytes"),
        ({"env": {"A=B": "1"}}, "engine 0: 'A=B' cannot be the name of a variable"),
        ({"env": {f"A{at}": "x" * 131_000 for at in range(9)}}, "of arguments and environment; at most 1048576"),
        ({"model_path": "/m\0"}, "engine 0: model_path: a NUL character"),
        ({"id": "../evil"}, "'../evil' cannot be an engine's id"),
    ],
)
def test_what_no_process_can_be_given_is_refused_in_the_plan(world: World, fields: dict[str, Any], why: str) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            slot = replace(slots(1)[0], **fields)
            found = refused(fleet, StartEngines(slots=(slot,)))
            assert why in found.why
            assert found.code == "bad-args"
            assert not (world.folder / "engines").exists()

    run_fleet(main)


@pytest.mark.parametrize("value", ["EAGLE:/m\0", "EAGLE:/" + "m" * 300_000])
def test_a_toggle_that_no_process_can_be_given_is_refused_while_the_good_engine_serves(
    world: World, value: str
) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            found = refused(fleet, SetToggles(changes={"speculative": value}))
            assert "NUL character" in found.why or "has 300" in found.why
            await asyncio.sleep(10)
            assert (world.state("0"), world.cells["0"]["generation"]) == ("HEALTHY", 1)

    run_fleet(main)


def test_a_stopped_engine_stays_stopped_until_it_is_started(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            await world.do(fleet, Stop(targets=("1",)))
            await asyncio.sleep(400)
            assert world.state("1") == "STOPPED"
            assert refused(fleet, Stop(targets=("1",))).code == "bad-args"
            assert refused(fleet, Start(targets=("0",))).code == "bad-args"
            await world.do(fleet, Start(targets=("1",)))
            assert world.state("1") == "HEALTHY"

    run_fleet(main)


def test_a_change_of_a_stopped_engine_waits_for_its_start(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            await world.do(fleet, Stop(targets=("1",)))
            plan = planned(fleet, SetToggles(changes=OFF))
            assert plan.targets == ("0", "1")
            assert "engine 1: it is stopped and stays so; when it is started it gets" in plan.steps
            assert plan.steps[-1] == "restart engine 0; no other engine serves meanwhile"
            told = await fleet.carry_out(plan, world.stages.append)
            assert told.endswith("engine 1: stays stopped, with other arguments for its next start")
            await asyncio.sleep(100)
            assert [(world.state(name), world.cells[name]["generation"]) for name in "01"] == [
                ("HEALTHY", 2),
                ("STOPPED", 1),
            ]
            assert world.cells["1"]["wanted"]["radix_cache"] == "off"
            alone = planned(fleet, Revert(targets=("1",), when="safe-point"))
            assert alone.diff["1"] == ["- --disable-radix-cache"]
            assert alone.steps[-1] == "no engine is started or stopped"
            await fleet.carry_out(alone, world.stages.append)
            assert (world.state("1"), fleet.launch("1")[0]) == ("STOPPED", ())
            await world.do(fleet, SetToggles(targets=("1",), changes=OFF))
            await world.do(fleet, Start(targets=("1",)))
            assert world.cells["1"]["toggles"]["radix_cache"] == "off"
            # A restart is asked for by name: it starts, and says so.
            await world.do(fleet, Stop(targets=("0",)))
            again = planned(fleet, Restart(targets=("0",), when="safe-point"))
            assert again.steps == [
                "engine 0: generation 2 -> 3 (it is stopped: it is started)",
                "start engine 0 at the next safe point; the others are not touched",
            ]

    run_fleet(main)


def test_a_plan_after_which_nobody_serves_says_so(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            last = "warning: no engine serves afterwards, until one is started; rollouts wait"
            assert planned(fleet, Stop(targets=("0", "1"))).steps[-1] == last
            assert planned(fleet, Stop(targets=("0",))).warnings == []
            at_once = planned(fleet, Restart(mode="at-once"))
            assert at_once.steps[-2:] == [
                "warning: no engine serves until the first is back; rollouts wait",
                "restart engines 0, 1 at once",
            ]
            assert planned(fleet, Restart(mode="at-once", targets=("0",))).warnings == []
            assert planned(fleet, Restart()).warnings == []
            assert planned(fleet, Restart(keep=0)).warnings == [at_once.warnings[0]]
            await world.do(fleet, Stop(targets=("1",)))
            assert planned(fleet, Stop(targets=("0",))).warnings == [f"{last} (engine 1 is STOPPED)"]
            assert planned(fleet, Restart(targets=("0",))).steps[-1].endswith("no other engine serves meanwhile")

    run_fleet(main)


def test_a_comparison_of_engines_that_differ_already_says_in_what(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 3)
            assert planned(fleet, Ab(changes=OFF)).warnings == []
            await world.do(fleet, SetToggles(targets=("2",), changes={"overlap_schedule": "off"}))
            plan = planned(fleet, Ab(changes=OFF))
            assert plan.warnings == [
                "warning: the engines differ already, and that is compared too: overlap_schedule on (0 1), off (2)"
            ]
            assert plan.warnings[0] in plan.steps
            await fleet.carry_out(plan, world.stages.append)
            shown = fleet.ab()
            assert shown is not None
            assert shown["verdict"].endswith("; the engines differed before: overlap_schedule on (0 1), off (2)")
        async with world.fleet() as fleet:
            shown = fleet.ab()
            assert shown is not None
            assert "differed before" in shown["verdict"], "also under the next daemon"

    run_fleet(main)


def test_a_cancelled_roll_says_which_engines_have_what(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 3)
            await world.do(fleet, Stop(targets=("2",)))
            work = asyncio.ensure_future(world.do(fleet, SetToggles(changes=OFF)))
            await world.until(lambda: world.cells["0"]["generation"] == 2 and world.state("0") == "HEALTHY")
            world.launcher.at("1").running = 3
            await world.until_state("1", "DRAINING")
            work.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await work
            assert str(caught.value) == (
                "engine 0 is generation 2, with the change; engine 1 stays generation 1, with its old arguments; "
                "engine 2 is stopped, with the change"
            )
            await world.until_state("1", "HEALTHY")
            work = asyncio.ensure_future(world.do(fleet, Restart(targets=("1",))))
            world.launcher.at("1").running = 0
            await world.until_state("1", "STOPPING")
            work.cancel()
            with pytest.raises(asyncio.CancelledError, match="engine 1 goes on to generation 2"):
                await work

    run_fleet(main)


def test_half_of_the_engines_get_the_change_and_are_put_back(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 4)
            assert refused(fleet, AbEnd()).code == "bad-args"
            assert refused(fleet, Ab(changes=OFF, targets=("0",))).code == "bad-args"
            await world.do(fleet, Ab(changes=OFF))
            assert [world.cells[name]["arm"] for name in "0123"] == ["A", "B", "A", "B"]
            assert refused(fleet, Ab(changes=OFF)).code == "bad-args"
            for name in "0123":
                world.launcher.at(name).running = 4
            await asyncio.sleep(200)
            shown = fleet.ab()
            assert shown is not None
            assert shown["changes"] == OFF
            assert {row["name"] for row in shown["rows"]} >= {"tokens_per_s", "crashes_per_hour"}
        async with world.fleet() as fleet:
            assert fleet.ab() is not None, "the comparison goes on under the next daemon"
            await world.until(lambda: all(fleet.state(name) is State.HEALTHY for name in "0123"))
            for name in "0123":
                world.launcher.at(name).running = 0
            await world.do(fleet, AbEnd())
            assert fleet.ab() is None
            assert [world.cells[name]["arm"] for name in "0123"] == [""] * 4
            assert {fleet.launch(name)[0] for name in "0123"} == {()}

    run_fleet(main)


def test_bad_requests_are_refused_with_what_to_do(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            assert refused(fleet, Restart()).why == "this run has no engines of its own"
            await world.start(fleet, 2)
            assert refused(fleet, Restart(targets=("7",))).do == "there are: 0, 1"
            assert refused(fleet, SetToggles(changes={"radix_cash": "off"})).code == "refused-by-rules"
            assert "set already" in refused(fleet, SetToggles(changes={"radix_cache": "on"})).why
            assert "cannot be" in refused(fleet, SetToggles(changes=OFF, keep=2)).why
            draft = refused(fleet, SetToggles(changes={"speculative": "EAGLE:/nonexistent"}))
            assert draft.why == "engine 0: speculative: there is no draft model at /nonexistent"
            there = planned(fleet, SetToggles(targets=("0",), changes={"speculative": f"EAGLE:{world.folder}"}))
            assert any(f"--speculative-draft-model-path {world.folder}" in line for line in there.steps)
            assert refused(fleet, Synced(target="0", generation=9, version="1")).code == "stale-generation"
            bad = slots(1)[0]
            keyed = EngineSlot(id="y", model_path="/m", args=("--api-key=k",))
            assert "401" in refused(fleet, StartEngines(slots=(keyed,))).why
            for declared in ({"id": "../up"}, {"id": "x", "model_path": ""}, {"id": "x", "args": ("--no-such-flag",)}):
                slot = type(bad)(**{"id": "y", "model_path": "/m", **declared})  # type: ignore[arg-type]
                assert refused(fleet, StartEngines(slots=(slot,))).code in ("bad-args", "refused-by-rules")

    run_fleet(main)


def test_stage_times_are_told_in_the_order_of_a_restart() -> None:
    marks = [
        (State.DRAINING, 10.0),
        (State.STOPPING, 10.4),
        (State.RECLAIMING, 10.6),
        (State.STOPPED, 10.6),
        (State.LAUNCHING, 10.7),
        (State.LOADING, 10.8),
        (State.WARMING, 13.0),
        (State.STALE, 13.6),
        (State.HEALTHY, 13.8),
    ]
    assert times(marks) == "drained 0.4 s, stopped 0.2 s, reclaimed 0.0 s, ready 2.9 s, healthy 3.1 s"
    assert times(marks[:3]) == "drained 0.4 s, stopped 0.2 s"


def test_a_policy_that_never_restarts_leaves_a_crash_to_people(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, policy=FleetPolicy(restart="never"))
        async with world.fleet() as fleet:
            await world.start(fleet, 1)
            world.launcher.at("0").end(-9)
            await world.until_state("0", "CRASHED")
            await asyncio.sleep(400)
            assert world.state("0") == "CRASHED"
        async with world.fleet() as fleet:
            await asyncio.sleep(400)
            assert world.state("0") == "CRASHED"
            await world.do(fleet, Restart())
            assert world.state("0") == "HEALTHY"

    run_fleet(main)


def test_nothing_starts_while_a_colocated_trainer_has_the_memory(world: World) -> None:
    async def main() -> None:
        async with world.fleet() as fleet:
            await world.start(fleet, 2)
            fleet.released("0")
            world.lent = True
            await asyncio.sleep(1)
            assert world.state("0") == "OFFLOADED"
            world.launcher.at("1").end(-9)
            await asyncio.sleep(POLICY.backoff_s + 10)
            assert world.state("1") == "BACKOFF"
            assert world.cells["1"]["pending"] == "the device's memory, which the trainer has"
            assert world.state("0") == "OFFLOADED", "nobody looked after it, and nobody ended it"
            world.lent = False
            await asyncio.sleep(10)
            assert world.state("1") == "HEALTHY"
            assert world.cells["1"]["generation"] == 2

    run_fleet(main)
