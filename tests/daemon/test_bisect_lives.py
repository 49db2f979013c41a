"""Bisections that meet everything: on a virtual clock, over engines without processes (`bisect_lab.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rltop.bisect.story_of import story_of
from rltop.daemon import bisect_again
from rltop.daemon.bisect_crashes import Refused
from rltop.daemon.bisect_model import Model, counts
from rltop.daemon.bisect_record import Record
from rltop.daemon.bisect_trial import MOST_LOST
from rltop.engines.fleet import Fleet, Required, SetToggles, Start, Stop
from rltop.errors import RltopError
from rltop.evidence.priors import load
from rltop.train.cpu_engine.injection import signature
from tests.daemon.bisect_lab import ARGS, IMA, OOM, POLICY, Lab
from tests.engines.fleet_world import Behaviour, FakeProcess, run_fleet

ENDED = ("found", "none", "not-separable", "budget", "stopped", "failed")


def play(
    lab: Lab,
    engines: int = 1,
    *,
    meanwhile: Callable[[Fleet, Any], Any] | None = None,
    **args: Any,
) -> Record:
    """A whole life; the record."""
    found: list[Record] = []

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, engines)
            record = lab.record(fleet, **args)
            runner = lab.runner(fleet, record)
            task = asyncio.create_task(runner.run())
            other = asyncio.create_task(meanwhile(fleet, runner)) if meanwhile is not None else None
            await task
            if other is not None:
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)
            found.append(record)
            assert record.ended is not None
            assert record.state in ENDED
            assert record.verdict is not None
            assert {row.outcome for row in record.trials} <= {"crashed", "quiet", "lost", "aborted"}
            assert runner.cell()["state"] == record.state
            (kept,), problems = lab.records.read_all()
            assert not problems
            assert (kept.state, len(kept.trials), kept.restored) == (record.state, len(record.trials), record.restored)

    run_fleet(main)
    return found[0]


def back(lab: Lab, record: Record) -> None:
    """Every engine is on its own flags, and serves."""
    assert record.restored == dict.fromkeys(record.engines, "original")
    for name in record.engines:
        assert lab.args(name) == ARGS
        assert lab.world.cells[name]["reserved"] == ""


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 5))])
@pytest.mark.parametrize(
    "bug",
    [
        ("radix_cache",),
        ("speculative", "overlap_schedule"),
        ("speculative", "overlap_schedule", "radix_cache"),
        (),
    ],
    ids="x".join,
)
def test_the_culprit_is_named(tmp_path: Path, bug: tuple[str, ...], seed: int) -> None:
    lab = Lab(tmp_path, bug, seed=seed)
    record = play(lab, engines=2)
    assert record.verdict is not None
    assert record.state == ("found" if bug else "none"), lab.events
    assert set(record.verdict.culprit or ()) == set(bug)
    back(lab, record)


def test_no_arm_crashes(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)
    record = play(lab, budget_min=90)
    assert record.state == "budget"
    assert record.verdict is not None
    assert "it did not crash again" in record.verdict.text
    assert "this traffic with these weights does not bring the crash back" in record.verdict.text
    assert not [row for row in record.trials if row.outcome == "crashed"]
    assert 90 <= record.minutes < 150
    back(lab, record)


def test_outcomes_that_contradict_each_other_give_no_wrong_name(tmp_path: Path) -> None:
    """Two bugs at once: with either toggle off the other one strikes."""
    lab = Lab(tmp_path, ())
    bugs = ("radix_cache", "overlap_schedule")

    def either(process: FakeProcess) -> bool:
        off = {name for name in bugs if f"--disable-{name.replace('_', '-')}" in process.spec.args}
        return len(off) < 2

    lab.may_strike = either  # type: ignore[method-assign]
    record = play(lab, budget_min=400)
    assert record.state in ("not-separable", "budget"), record.verdict
    assert record.verdict is not None
    assert record.verdict.culprit is None
    back(lab, record)


def test_a_crash_of_another_kind_is_noted_and_not_counted(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), seed=3)
    strays = iter([True, False, True])
    lab.last_words = lambda process: OOM if next(strays, False) else IMA
    record = play(lab)
    assert record.state == "found"
    assert record.verdict is not None
    assert record.verdict.culprit == ("radix_cache",)
    stray = [row for row in record.trials if row.fingerprint.startswith("oom/")]
    assert len(stray) == 2
    assert not any(row.counts for row in stray)
    assert all("another crash than the hunted one" in row.note for row in stray)
    back(lab, record)


def test_a_kernel_that_a_trial_names_moves_what_is_believed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("speculative",), seed=5)
    kernel = "build_tree_efficient_kernel"
    dump = signature("coredump", clock="00:00:00.1", kernel=kernel, core="/tmp/core").splitlines()
    lab.last_words = lambda process: (*dump, *IMA)
    record = play(lab)
    assert record.kernel == kernel
    assert record.factors["speculative"] > 10
    assert [one for one in record.facts if "build_tree" in one["text"]]
    assert [text for text in lab.told("info") if "its core dump names the kernel" in text]
    assert record.verdict is not None
    assert record.verdict.culprit == ("speculative",)
    back(lab, record)


def test_a_crash_before_the_first_request_is_a_crash_at_start(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)
    launcher = lab.world.launcher
    start = launcher.start

    async def dies(spec: Any) -> Any:
        trial = spec.generation > 1 and "--disable-radix-cache" not in spec.args and "--random-seed" not in spec.args
        own = spec.args == ARGS
        launcher.behaviour = Behaviour(dies_loading="" if own or not trial else "\n".join(IMA))
        return await start(spec)

    launcher.start = dies  # type: ignore[method-assign]
    record = play(lab)
    assert record.verdict is not None
    assert (record.state, record.verdict.culprit) == ("found", ("radix_cache",)), lab.events
    crashed = [row for row in record.trials if row.outcome == "crashed"]
    assert all("before its first request" in row.note and row.minutes == 0.0 for row in crashed)
    back(lab, record)


def test_an_engine_that_never_starts_takes_no_part_any_more(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",))
    launcher = lab.world.launcher
    start = launcher.start

    async def fails(spec: Any) -> Any:
        if spec.engine_id == "1" and spec.args != ARGS:
            raise RltopError("no such interpreter")
        return await start(spec)

    launcher.start = fails  # type: ignore[method-assign]
    record = play(lab, engines=2)
    assert record.state == "found"
    assert set(record.dropped) == {"1"}
    lost = [row for row in record.trials if row.outcome == "lost"]
    assert len(lost) == 3
    assert {row.engine for row in lost} == {"1"}
    assert not any(row.counts for row in lost)
    back(lab, record)


def test_none_of_the_engines_starts(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",))
    launcher = lab.world.launcher
    start = launcher.start

    async def fails(spec: Any) -> Any:
        if spec.args != ARGS:
            raise RltopError("no such interpreter.")
        return await start(spec)

    launcher.start = fails  # type: ignore[method-assign]
    record = play(lab, 2)
    assert record.state == "failed"
    assert "no engine is left to try on: engine " in record.error
    assert "no such interpreter" in record.error
    assert ".;" not in record.error + "".join(row.note for row in record.trials)
    assert record.error.endswith("once they start again, rltop bisect start begins anew")
    back(lab, record)


def test_a_hang_is_no_evidence(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), mean_s=12.0, seed=1)
    hung: list[FakeProcess] = []

    def hangs(process: FakeProcess) -> bool:
        if not hung:
            hung.append(process)
            process.running, process.flowing = 1, False
            return False
        return True

    lab.before_crash = hangs
    record = play(lab, time_scale=1.0)
    assert record.state == "found"
    (row,) = [row for row in record.trials if row.outcome == "lost"]
    assert "it hung after" in row.note
    assert not row.counts
    back(lab, record)


def _deaf(lab: Lab, flag: str) -> None:
    """Its engines take this flag and do not do what it says."""
    launcher = lab.world.launcher
    start = launcher.start

    async def ignores(spec: Any) -> Any:
        return await start(replace(spec, args=tuple(word for word in spec.args if word != flag)))

    launcher.start = ignores  # type: ignore[method-assign]


def test_a_toggle_whose_flag_has_no_effect_is_not_asked_for_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), seed=1)
    _deaf(lab, "--disable-overlap-schedule")
    record = play(lab)
    assert record.verdict is not None
    assert (record.state, record.verdict.culprit) == ("found", ("radix_cache",)), lab.events
    asked = [row for row in record.trials if "overlap_schedule" not in row.asked_on]
    assert len(asked) == 1
    assert "overlap_schedule" in (asked[0].on or ()), "it counts as what is in effect"
    assert "overlap_schedule stayed on" in asked[0].note
    assert set(record.stuck) == {"overlap_schedule"}
    back(lab, record)


def test_a_culprit_that_cannot_be_turned_off_is_not_blamed_on_another(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("overlap_schedule",), seed=2)
    _deaf(lab, "--disable-overlap-schedule")
    record = play(lab)
    assert record.verdict is not None
    assert record.state == "none", lab.events
    assert "overlap_schedule, which can not be turned off" in record.verdict.words
    back(lab, record)


def test_the_operator_ends_it_in_the_middle_of_a_trial(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def abort(fleet: Fleet, runner: Any) -> None:
        await lab.world.until(lambda: any(row.ready for row in runner.record.trials))
        await asyncio.sleep(3)
        runner.stop("stopped by ana")

    record = play(lab, engines=2, meanwhile=abort)
    assert (record.state, record.verdict and record.verdict.text) == ("stopped", "stopped by ana")
    assert {row.outcome for row in record.trials} == {"aborted"}
    assert all(row.minutes > 1 for row in record.trials if row.ready), "its quiet time is known"
    back(lab, record)


def test_nothing_counts_while_it_is_paused(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def pauses(fleet: Fleet, runner: Any) -> None:
        await lab.world.until(lambda: any(row.ready for row in runner.record.trials))
        await asyncio.sleep(2)
        runner.pause("ana")
        await asyncio.sleep(1)
        before = [row.minutes for row in runner.record.trials], runner.record.minutes
        await asyncio.sleep(500)
        assert ([row.minutes for row in runner.record.trials], runner.record.minutes) == before
        assert lab.world.state("0") == "RESERVED"
        runner.go_on("ana")
        await asyncio.sleep(5)
        assert sum(row.minutes for row in runner.record.trials) > sum(before[0])
        runner.stop("enough")

    record = play(lab, meanwhile=pauses)
    assert record.state == "stopped"
    back(lab, record)


def test_its_node_is_lost(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def loses(fleet: Fleet, runner: Any) -> None:
        await lab.world.until(lambda: any(row.ready for row in runner.record.trials))
        lab.world.launcher.lost = True

    record = play(lab, meanwhile=loses)
    assert record.state == "failed"
    assert "no engine is left" in record.error
    assert record.restored["0"] != "original"
    assert [text for text in lab.told("error") if "not every engine is back as it was" in text]


def test_the_engines_are_stopped_under_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 2)
            record = lab.record(fleet)
            runner = lab.runner(fleet, record)
            task = asyncio.create_task(runner.run())
            await lab.world.until(lambda: any(row.ready for row in record.trials))
            await fleet.stop_all(lambda stage: None)
            await asyncio.gather(task, return_exceptions=True)
            assert (record.state, record.restored) == ("stopped", {"0": "original", "1": "original"})
            assert record.ended is not None
            assert fleet.trials.on_trial() == {}
            assert not lab.world.launcher.alive()

    run_fleet(main)


def test_a_full_disk_ends_nothing_and_is_said_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), seed=3)
    full = False
    write = lab.records.write

    def writes(record: Record) -> None:
        if full:
            raise RltopError("the bisection's record cannot be written", why="No space left on device", exit_code=1)
        write(record)

    lab.records.write = writes  # type: ignore[method-assign]

    async def fills(fleet: Fleet, runner: Any) -> None:
        nonlocal full
        await lab.world.until(lambda: any(row.ready for row in runner.record.trials))
        full = True
        trials = len(runner.record.trials)
        await lab.world.until(lambda: len(runner.record.trials) > trials + 2)
        assert "No space left on device" in runner.cell()["unwritten"]
        await lab.world.until(lambda: runner.record.ended is not None)
        await asyncio.sleep(60)
        full = False

    record = play(lab, meanwhile=fills)
    assert record.verdict is not None
    assert (record.state, record.verdict.culprit) == ("found", ("radix_cache",))
    assert [text for text in lab.told("error") if "No space left on device" in text] == lab.told("error")
    assert len(lab.told("error")) == 1
    assert len([text for text in lab.told("info") if "is written down again" in text]) == 1
    back(lab, record)


def test_a_trial_waits_until_its_engine_can_be_written_down(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), seed=3)
    refusals = 0

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 1)
            record = lab.record(fleet)
            put_on = fleet.trials.put_on

            def puts_on(*args: Any) -> int:
                nonlocal refusals
                if len(record.trials) == 2 and refusals < 7:
                    refusals += 1
                    raise RltopError("it cannot be written", why="No space left on device", exit_code=1)
                return put_on(*args)

            fleet.trials.put_on = puts_on  # type: ignore[method-assign, assignment]
            await lab.runner(fleet, record).run()
            assert (record.state, refusals) == ("found", 7)
            (told,) = lab.told("error")
            assert "trial 2 waits until it can be written down: it cannot be written: No space left" in told

    run_fleet(main)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 8))])
def test_it_goes_on_under_the_next_daemon(tmp_path: Path, seed: int) -> None:
    """kill -9 of the daemon, again and again, at any moment; what its file says is all that is left."""
    lab = Lab(tmp_path, ("speculative", "radix_cache"), seed=seed)
    lives = 0

    async def main() -> None:
        nonlocal lives
        async with lab.fleet() as fleet:
            await lab.start(fleet, 2)
            lab.record(fleet)
        while True:
            lives += 1
            async with lab.fleet() as fleet:
                (record,), _ = lab.records.read_all()
                runner = lab.runner(fleet, record)
                task = asyncio.create_task(runner.run())
                done, _ = await asyncio.wait([task], timeout=lab.rng.uniform(0.1, 5.0) if lives < 20 else 3000.0)
                kept = (tmp_path / "bisect" / "1" / "record.json").read_bytes()
                if done:
                    task.result()
                    break
                runner.leave()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                (tmp_path / "bisect" / "1" / "record.json").write_bytes(kept)  # nobody had time for a last word
        assert record.verdict is not None
        assert (record.state, set(record.verdict.culprit or ())) == ("found", {"speculative", "radix_cache"})
        assert fleet.trials.on_trial() == {}
        back(lab, record)

    run_fleet(main)
    assert lives > 3


def test_a_stopped_guinea_pig_is_not_started_by_the_next_daemon(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 1)
            record = lab.record(fleet)
            runner = lab.runner(fleet, record)
            task = asyncio.create_task(runner.run())
            await lab.world.until(lambda: any(row.ready for row in record.trials))
            runner.leave()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with lab.fleet() as fleet:
            await lab.world.do(fleet, Stop(targets=("0",)))
        async with lab.fleet() as fleet:
            (record,), _ = lab.records.read_all()
            await lab.runner(fleet, record).run()
            assert record.state == "failed"
            assert "somebody stopped it" in record.error
            assert record.restored == {"0": "original"}
            assert not lab.world.launcher.alive()

    run_fleet(main)


# ---------------------------------------------------------------------- the engines that serve on


def test_a_crash_of_an_engine_that_serves_is_evidence(tmp_path: Path) -> None:
    """And that nobody serves is said, and shown, until somebody does again."""
    lab = Lab(tmp_path, None)
    unserved: list[str | None] = []

    async def crashes(fleet: Fleet, runner: Any) -> None:
        await lab.world.until(lambda: any(row.ready for row in runner.record.trials))
        lab.world.launcher.at("1").running = 3
        await asyncio.sleep(30)
        lab.strike(lab.world.launcher.at("1"))
        await lab.world.until(lambda: runner.record.unserved)
        unserved.append(runner.cell()["unserved"])
        await lab.world.until(lambda: runner.record.outside and not runner.record.unserved)
        unserved.append(runner.cell()["unserved"])
        runner.stop("enough")

    record = play(lab, engines=2, meanwhile=crashes, mode="in-fleet")
    assert record.engines == ("0",)
    (one,) = record.outside
    assert (one.engine, one.generation, one.fingerprint.split("/")[0]) == ("1", 1, "ima")
    assert one.minutes == pytest.approx(0.5, abs=0.05), "with requests, not since it was ready"
    model = Model(record, load())
    assert [trial.arm for trial in model.evidence() if trial.crashed and trial.engine == "1"] == [model.space.all_on]
    assert unserved == ["no engine serves the run: engine 1 is BACKOFF, engine 0 is on trial", None]
    told = lab.told("warn")
    assert sum("counts as a crash with everything on" in text for text in told) == 1
    assert sum("no engine serves the run" in text for text in told) == 1
    assert [text for text in lab.told("info") if "an engine serves the run again" in text]
    back(lab, record)


def test_a_crash_with_other_arguments_is_no_evidence(tmp_path: Path) -> None:
    """A workaround on the engines that serve on: what they then crash of is not the bug with everything on."""
    lab = Lab(tmp_path, None)

    async def crashes(fleet: Fleet, runner: Any) -> None:
        await lab.world.do(fleet, SetToggles(targets=("1",), changes={"radix_cache": "off"}))
        await lab.world.until_state("1", "HEALTHY")
        lab.strike(lab.world.launcher.at("1"))
        await lab.world.until(lambda: lab.see_crashes("1"))
        await asyncio.sleep(30)
        runner.stop("enough")

    record = play(lab, engines=2, meanwhile=crashes, mode="in-fleet")
    assert record.outside == []
    back(lab, record)


# ---------------------------------------------------------------------- trials that tell nothing


def test_weights_that_do_not_load_end_it_after_a_few_tries_with_the_reason(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",))

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 1)
            record = lab.record(fleet)
            record.weights = Required(version="7", source="disk", path="/w/7")
            lab.world.launcher.behaviour = Behaviour(refuses_updates=True)
            await lab.runner(fleet, record).run()
            assert record.state == "failed"
            assert "cannot load weight version '7' from /w/7" in record.error
            assert [row.outcome for row in record.trials] == ["lost"] * MOST_LOST
            assert all("no such path" in row.note and not row.counts and row.log for row in record.trials)
            assert record.barred == [], "no arm starts: none of them is at fault"
            assert max(row.ended - row.started for row in record.trials if row.ended) < POLICY.start_s + 40
            back(lab, record)

    run_fleet(main)


def test_an_arm_that_never_starts_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("speculative",), seed=4)
    launcher = lab.world.launcher
    start = launcher.start
    bad: list[tuple[str, ...]] = []

    async def fails(spec: Any) -> Any:
        if spec.args != ARGS:
            bad.append(spec.args)
            if spec.args == bad[0]:
                raise RltopError("the pool does not fit")
        return await start(spec)

    launcher.start = fails  # type: ignore[method-assign]
    record = play(lab, budget_min=2000)
    assert record.verdict is not None
    assert (record.state, record.verdict.culprit) == ("found", ("speculative",)), lab.events
    lost = [row for row in record.trials if row.outcome == "lost"]
    assert [row.n for row in lost] == [1, 2]
    assert all("the pool does not fit" in row.note for row in lost)
    assert record.barred == [lost[0].asked_on]
    assert not record.dropped
    assert [note for note in record.notes if "was lost twice, another one runs: it is left out" in note]
    back(lab, record)


def test_an_engine_that_refuses_every_request_is_not_quiet(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)
    lab.refuses = True
    record = play(lab)
    assert record.state == "failed"
    assert {row.outcome for row in record.trials} == {"lost"}
    assert all("it refused every request" in row.note for row in record.trials)
    back(lab, record)


# ---------------------------------------------------------------------- the run goes down, and comes back


def test_a_run_that_goes_down_cuts_it_off_and_it_goes_on_when_asked(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), mean_s=3.0, seed=2)

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 2)
            record = lab.record(fleet)
            task = asyncio.create_task(lab.runner(fleet, record).run())
            await lab.world.until(lambda: sum(row.outcome == "crashed" for row in record.trials) >= 2)
            await fleet.stop_all(lambda stage: None)
            await asyncio.gather(task, return_exceptions=True)
            assert (record.state, record.cut_off) == ("stopped", True)
            assert record.verdict is not None
            assert "the run went down" in record.verdict.text
            assert "rltop bisect resume" in record.verdict.text
            before = len(record.trials)
            with pytest.raises(Refused, match=r"none of its engines can go on: engine 0: it is stopped"):
                bisect_again.plan("", lab.records.read_all()[0], fleet.trials)
        async with lab.fleet() as fleet:
            await lab.start(fleet, 2)
            with pytest.raises(Refused, match="bisection '7' was cut off"):
                bisect_again.plan("7", lab.records.read_all()[0], fleet.trials)
            record, steps = bisect_again.plan("1", lab.records.read_all()[0], fleet.trials)
            assert "go on with bisection 1" in steps[0]
            told = story_of({"trials": [], "counts": counts(record.trials)})
            assert told is not None
            assert f": {told.counts()}; their crashes" in steps[0], "as status says it"
            assert " aborted" in steps[0]
            bisect_again.reopen(record)
            await lab.runner(fleet, record).run()
            assert record.verdict is not None
            assert (record.state, record.verdict.culprit, record.cut_off) == ("found", ("radix_cache",), False)
            assert len(record.trials) > before
            back(lab, record)

    run_fleet(main)


def test_engines_with_other_arguments_do_not_go_on_with_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 1)
            record = lab.record(fleet)
            task = asyncio.create_task(lab.runner(fleet, record).run())
            await lab.world.until(lambda: any(row.ready for row in record.trials))
            await fleet.stop_all(lambda stage: None)
            await asyncio.gather(task, return_exceptions=True)
            await lab.world.do(fleet, SetToggles(targets=("0",), changes={"radix_cache": "off"}))
            await lab.world.do(fleet, Start(targets=("0",)))
            await lab.world.until_state("0", "HEALTHY")
            with pytest.raises(Refused, match=r"its arguments are others now \(\+ --disable-radix-cache\)"):
                bisect_again.plan("", lab.records.read_all()[0], fleet.trials)

    run_fleet(main)


def test_its_stage_changes_only_when_a_trial_ends(tmp_path: Path) -> None:
    """It becomes an event of the run's log."""
    lab = Lab(tmp_path, ("radix_cache",), mean_s=8.0)
    seen: list[str] = []

    async def looks(fleet: Fleet, runner: Any) -> None:
        while True:
            if not seen or seen[-1] != runner.stage():
                seen.append(runner.stage())
            await asyncio.sleep(0.1)

    record = play(lab, meanwhile=looks, time_scale=1.0)
    assert len(seen) <= len(record.trials) + 4
    assert "running: 1 trial ended, 1 of them crashed" in seen or "running: 1 trial ended, 0 of them crashed" in seen
    events = [text for _, text in lab.events]
    assert len(events) == len(set(events)) <= 3 * len(record.trials) + 8, "begun, ready, ended"


def test_a_trial_whose_engine_is_killed_was_not_a_start_that_failed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, None)

    async def kills(fleet: Fleet, runner: Any) -> None:
        await lab.world.until(lambda: any(row.minutes > 0.1 for row in runner.record.trials))
        lab.world.launcher.at("0").end(-9)
        await lab.world.until(lambda: len(runner.record.trials) > 1)
        runner.stop("enough")

    record = play(lab, meanwhile=kills)
    first = record.trials[0]
    assert (first.outcome, first.counts) == ("lost", False)
    assert "it was ended after " in first.note
    assert "did not start" not in first.note


def test_another_bisection_of_the_same_crash_tells_of_the_first(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ("radix_cache",), seed=3)

    async def main() -> None:
        async with lab.fleet() as fleet:
            await lab.start(fleet, 2)
            with pytest.raises(Refused, match="exclusive is all engines, and engine 1 would serve on"):
                lab.record(fleet, engines=["0"])
            first = lab.record(fleet)
            assert not [note for note in first.notes if "of this run" in note]
            await lab.runner(fleet, first).run()
            again = lab.record(fleet, budget_min=0.1)
            (note,) = [one for one in again.notes if "of this run" in one]
            assert "bisection 1 of this run hunted ima/decode/000000 and found radix_cache (9" in note
            assert "this one begins anew" in note

    run_fleet(main)
