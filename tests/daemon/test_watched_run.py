"""A slime run that knows nothing of rltop, watched by its log: the timeline of docs/watch.md, on a virtual clock."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.daemon.ingest import Ingest
from rltop.daemon.live_checks import LiveChecks
from rltop.daemon.others import NAMED, Others
from rltop.daemon.verdicts import Verdicts
from rltop.daemon.watched_engines import NamedEngines
from rltop.daemon.watched_files import LogFiles
from rltop.daemon.watched_logs import QUIET_TURNS, LogReader
from rltop.daemon.watched_run import WatchedRun
from rltop.evidence.sink import Sink
from rltop.protocol.messages import Record, Source
from tests.daemon.fakes import FakeCore
from tests.daemon.slime_log import BEGIN, Plan, lines, text


class Watched:
    """A run that is watched by the log `train.log`, with the real checks and without a daemon."""

    def __init__(self, tmp_path: Path, name: str = "train.log") -> None:
        self.path = tmp_path / name
        self.core = FakeCore()
        self.core.set("run", {"name": "w-1", "attempt": 1, "state": "waiting"})
        self.ingest = Ingest(self.core, host="here", alive=lambda pid: True)
        self.checks = LiveChecks()
        self.verdicts = Verdicts(self.core, self.checks, aside=lambda work, done: done(work()))
        self.reader = LogReader(LogFiles([str(self.path)]), clock=lambda: 0.0, wall=lambda: self.core.time)
        self.run = WatchedRun(
            self.core,
            self.ingest,
            self.verdicts,
            self.reader,
            NamedEngines(self.core, Others(self.core, ())),
            run_dir=tmp_path,
            host="here",
            extra=Sink,
            sleep=_no_sleep,
            clock=lambda: 0.0,
        )
        self.run.begin()

    async def turn(self) -> None:
        await self.run.apply(self.reader.turn())

    def write(self, said: str) -> None:
        with self.path.open("a") as file:
            file.write(said)

    def status(self, check_id: str) -> str:
        return str((self.core.table.get(f"check/{check_id}") or {}).get("status"))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A watched run whose log is not there yet."""
    made = Watched(tmp_path)
    yield made
    made.reader.close()


async def _no_sleep(_: float) -> None:
    return


async def test_the_timeline_of_a_run_with_a_garble_and_an_engine_that_dies(watched: Watched) -> None:
    plan = Plan(rollouts=14)
    seen: list[tuple[str, str]] = []
    marks: dict[str, float] = {}
    waiting, due = "", 0.0
    for when, line in lines(plan):
        waiting += f"{line}\n"
        if when < due:
            continue
        due = when + 15.0
        watched.core.time = 1000.0 + when
        watched.write(waiting)
        waiting = ""
        await watched.turn()
        engine = watched.core.table.get("engine/2") or {}
        for name, state in (("rollout.text", watched.status("rollout.text")), ("engine 2", engine.get("state"))):
            if state and (not seen or (name, state) != next((one for one in reversed(seen) if one[0] == name), None)):
                seen.append((name, str(state)))
                marks[f"{name} {state}"] = when
    watched.write(waiting)
    await watched.turn()
    assert [one for one in seen if one[0] == "rollout.text"] == [
        ("rollout.text", "skip"),
        ("rollout.text", "pass"),
        ("rollout.text", "fail"),
    ]
    assert [state for name, state in seen if name == "engine 2"] == [NAMED, "CRASHED", NAMED]
    began = {rollout: 25 + 90 * rollout for rollout in range(plan.rollouts)}
    assert began[7] <= marks["rollout.text fail"] < began[8]
    assert began[11] <= marks["engine 2 CRASHED"] < began[12]
    engine = watched.core.table.get("engine/2")
    assert (engine["generation"], engine["url"]) == (2, "http://10.0.0.1:15600")
    [crash] = engine["crashes"]
    assert (crash["rollout"], crash["generation"]) == (10, 1)
    assert "its health monitor killed it (train.log:" in crash["cause"]
    verdict = watched.core.table.get("check/rollout.text")
    assert (verdict["rollout"], verdict["evidence"][0]["source"]) == (7, "train.log")
    assert watched.core.table.get("check/engine.died")["status"] == "warn"
    assert watched.core.table.get("metric/train/grad_norm")["step"] == 13
    assert watched.core.table.get("samples")["rollout_id"] == 13
    phase = watched.core.table.get("phase")
    assert (phase["name"], phase["rollout_id"], phase["median_s"]) == ("rollout", 14, 55.0)
    assert watched.core.series.query("rollout/raw_reward", None, None, 50) is not None
    assert watched.core.table.get("run")["args"]["rollout_batch_size"] in (16, "16")


async def test_a_death_and_its_recovery_that_are_read_at_once_are_both_told(watched: Watched) -> None:
    """Of a log that comes late nobody has seen the moment in between: it is in the events."""
    whole = text(Plan(rollouts=4, garbled_from=None, dies_in=1))
    cut = whole.index("\n", whole.index("'train/step': 0}")) + 1
    watched.write(whole[:cut])
    await watched.turn()
    assert watched.status("engine.died") == "pass"
    watched.write(whole[cut:])
    await watched.turn()
    crashed, again = (event for event in watched.core.events("engine") if event.get("from"))
    assert (crashed["level"], crashed["from"], crashed["to"]) == ("error", NAMED, "CRASHED")
    assert "its health monitor killed it (train.log:" in crashed["text"]
    assert (again["from"], again["to"]) == ("CRASHED", NAMED)
    [verdict] = [event for event in watched.core.events("verdict") if event["id"] == "engine.died" and event["from"]]
    assert (verdict["level"], verdict["from"], verdict["to"]) == ("warn", "pass", "warn")
    assert "engine 2 died at" in verdict["text"]
    assert "an engine was started again since" in verdict["text"]


async def test_values_of_old_lines_have_their_own_time_and_new_ones_that_of_their_coming(watched: Watched) -> None:
    whole = text(Plan(rollouts=3, garbled_from=None, dies_in=None))
    cut = whole.index("\n", whole.index("'train/step': 1}")) + 1
    watched.write(whole[:cut])
    watched.core.time = BEGIN + 5000
    os.utime(watched.path, (BEGIN + 200, BEGIN + 200))
    await watched.turn()
    watched.write(whole[cut:])
    await watched.turn()
    told = [row for row in watched.core.written.told("point time") if row[0] == "train/grad_norm"]
    assert [step for _, step, _ in told] == [0, 1, 2]
    assert told[1][2] - told[0][2] == 90.0, "the lines are a rollout apart"
    assert BEGIN <= told[0][2] <= BEGIN + 200
    assert told[2][2] == BEGIN + 5000


async def test_a_second_run_in_the_file_puts_away_the_verdicts_of_the_first(
    watched: Watched,
) -> None:
    first = text(Plan(rollouts=3, garbled_from=2, dies_in=None))
    watched.write(first + text(Plan(rollouts=2, garbled_from=None, dies_in=None, pid=7000)))
    await watched.turn()
    run, previous = watched.core.table.get("run"), watched.core.table.get("previous")
    assert (run["attempt"], run["state"]) == (2, "running")
    assert run["watched"].endswith(f"begins at train.log:{first.count(chr(10)) + 1}")
    assert "weights.sync-garble" in previous["root_causes"]
    assert watched.status("rollout.text") == "pass"
    assert [watched.core.table.get(f"engine/{at}")["generation"] for at in range(4)] == [1, 1, 1, 1]
    assert watched.core.table.get("metric/train/grad_norm")["step"] == 1


async def test_two_runs_of_rltop_s_trainer_in_one_file_are_two_attempts(watched: Watched) -> None:
    logs = Path(__file__).parents[1] / "data" / "logs" / "colocate"
    first, second = ((logs / f"{name}.trainer.log").read_text() for name in ("two_turns", "no_update"))
    watched.write(first)
    await watched.turn()
    assert watched.core.table.get("metric/rollout/raw_reward")["step"] == 2
    watched.write(second)
    await watched.turn()
    run = watched.core.table.get("run")
    assert (run["attempt"], run["state"]) == (2, "running")
    assert run["watched"].endswith(f"begins at train.log:{first.count(chr(10)) + 1}")
    assert watched.core.table.get("metric/rollout/raw_reward")["step"] == 1


async def test_of_a_log_that_is_no_text_no_check_says_that_all_is_well(watched: Watched) -> None:
    watched.path.write_bytes(bytes(range(256)) * 8)
    await watched.turn()
    found = {key: (watched.core.table.get(key) or {}).get("status") for key in watched.core.table.keys("check/")}
    assert set(found.values()) <= {"skip"}, found
    assert watched.core.table.get("log/train.log")["state"] == "unreadable"


async def test_the_next_daemon_of_the_run_reads_its_logs_again_and_tells_nothing_twice(tmp_path: Path) -> None:
    first, second = Watched(tmp_path), Watched(tmp_path)
    first.write(text(Plan(rollouts=3, garbled_from=None, dies_in=1)) + text(Plan(rollouts=1, dies_in=None, pid=7000)))
    await first.turn()
    for key in first.core.table.keys(""):
        second.core.set(key, first.core.table.get(key))
    second.run.begin()
    await second.turn()
    for key in ("engine/2", "log/train.log"):
        assert _without_times(second.core.table.get(key)) == _without_times(first.core.table.get(key)), key
    for key in ("run", "previous", "metric/train/grad_norm"):
        assert second.core.table.get(key) == first.core.table.get(key), f"{key}: with its times"
    assert second.core.series.keys() == [], "the curves are in the journal"
    assert {key: cell["status"] for key, cell in _checks(second)} == {key: c["status"] for key, c in _checks(first)}
    assert second.core.events("engine") == []
    assert second.core.events("log") == []
    for one in (first, second):
        one.reader.close()


async def test_the_next_daemon_knows_the_phases_again_and_counts_none_twice(tmp_path: Path) -> None:
    first, second = Watched(tmp_path), Watched(tmp_path)
    usual = text(Plan(rollouts=8, garbled_from=None, dies_in=None))
    at = usual.rindex("Timer actor_train end (elapsed: 24.0s)")
    first.write(usual[:at] + usual[at:].replace("24.0s", "124.0s", 1))
    await first.turn()
    first.ingest.tick()
    assert first.core.texts("phase") == ["actor_train took 124.0 s, usually 24.0 s"]
    for key in first.core.table.keys(""):
        second.core.set(key, first.core.table.get(key))
    second.ingest.restore()
    second.run.begin()
    await second.turn()
    second.ingest.tick()
    assert second.core.events("phase") == []
    assert second.core.table.get("source/log/0") == first.core.table.get("source/log/0")
    phases = [watched.core.table.get("phase") for watched in (first, second)]
    assert phases[0] == phases[1]
    assert (phases[1]["name"], phases[1]["open"], phases[1]["median_s"]) == ("rollout", ["rollout"], 55.0)
    for one in (first, second):
        one.reader.close()


def _checks(watched: Watched) -> list[tuple[str, dict[str, Any]]]:
    return [(key, watched.core.table.get(key)) for key in watched.core.table.keys("check/")]


async def test_the_next_daemon_counts_the_lines_of_a_log_on_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    first, second = Watched(tmp_path), Watched(tmp_path)
    whole = text(Plan(rollouts=2, garbled_from=None, dies_in=None))
    cut = whole.index("\n", len(whole) // 2) + 1
    first.write(whole[:cut])
    await first.turn()
    for key in first.core.table.keys(""):
        second.core.set(key, first.core.table.get(key))
    first.path.rename(tmp_path / "train.log.1")
    first.write("(T pid=4) a.py:1 - torch.OutOfMemoryError: CUDA out of memory.\n")
    second.run.begin()
    await second.turn()
    [event] = [event for event in second.core.events("log") if "OutOfMemory" in event["text"]]
    assert event["source"] == f"train.log:{whole[:cut].count(chr(10)) + 1}"
    assert second.core.table.get("run")["attempt"] == 1
    assert len(second.core.table.keys("engine/")) == 4
    for one in (first, second):
        one.reader.close()


def _by_cut(path: Path) -> None:
    path.write_text("")


def _by_rotation(path: Path) -> None:
    path.rename(path.with_suffix(".log.1"))


def _by_making_it_anew(path: Path) -> None:
    path.unlink()
    path.write_text("")


@pytest.mark.parametrize("replace", [_by_cut, _by_rotation, _by_making_it_anew])
async def test_a_log_that_is_replaced_makes_no_verdict_forget(
    watched: Watched, replace: Callable[[Path], None]
) -> None:
    """Not a gradient that was no number, not the faults, not the load, nor which rollout was the first."""
    whole = text(Plan(rollouts=4, garbled_from=None, dies_in=1))
    cut = whole.index("\n", len(whole) // 2) + 1
    first, rest = whole[:cut], whole[cut:]
    first = re.sub(r"'train/grad_norm': [\d.]+", "'train/grad_norm': float('nan')", first, count=1)
    watched.write(first)
    await watched.turn()
    before = {key: watched.core.table.get(key)["status"] for key in watched.core.table.keys("check/")}
    assert (before["check/train.nan"], before["check/ckpt.loaded"]) == ("fail", "pass")
    assert before["check/logprob.ref-equal"] == "pass"
    replace(watched.path)
    await watched.turn()
    watched.write(rest)
    await watched.turn()
    for name in ("train.nan", "ckpt.loaded", "logprob.ref-equal"):
        assert watched.status(name) == before[f"check/{name}"], name
    assert (before["check/engine.died"], watched.status("engine.died")) == ("fail", "warn"), "it is back since"
    assert watched.core.table.get("metric/train/grad_norm")["step"] == 3
    assert watched.core.table.get("run")["attempt"] == 1
    assert watched.core.table.get("log/train.log")["before"] == first.count("\n")
    assert [e["text"] for e in watched.core.events("log") if "what it said stays" in e["text"]]
    watched.write(text(Plan(rollouts=1, garbled_from=None, dies_in=None, pid=7000)))
    await watched.turn()
    assert (watched.core.table.get("run")["attempt"], watched.status("train.nan")) == (2, "pass")


def _without_times(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cell.items() if name not in ("since", "started", "last", "t")}


async def test_what_is_streamed_counts_and_a_log_adds_only_the_rest(watched: Watched) -> None:
    mine = {"values": {"train/loss": 7.0}, "step": 0, "axis": "train"}
    record = Record("w-1", Source("trainer", 0, "elsewhere", 1), 1, 0.0, 0.0, "metrics", mine)
    watched.ingest.take(record)
    watched.checks.feed(record)
    watched.write(text(Plan(rollouts=2, dies_in=1, garbled_from=None)))
    await watched.turn()
    assert watched.core.table.get("metric/train/loss")["value"] == 7.0
    assert watched.core.table.get("metric/rollout/raw_reward") is None
    assert watched.core.table.get("engine/2")["state"] == NAMED
    assert [row.values for row in watched.checks.observations().metrics] == [{"train/loss": 7.0}]


async def test_a_phase_that_was_open_before_we_looked_is_as_old_as_the_log_says(watched: Watched) -> None:
    shapes = (
        "(T pid=4) [2026-03-01 10:00:00] timer.py:24 - Timer train start\n",
        "(R pid=5) [2026-03-01 10:10:00] x.py:1 - Creating placement group with 8 GPUs...\n",
    )
    watched.write("".join(shapes))
    watched.core.time = watched.path.stat().st_mtime + 60
    await watched.turn()
    since = watched.core.table.get("phase")["since"]
    assert abs(watched.core.time - since - 660) < 1


async def test_an_event_names_its_line_and_floods_are_counted(watched: Watched) -> None:
    watched.write("health_monitor.py:153 - Health check failed for rollout engine 0. Killing actor.\n" * 300)
    await watched.turn()
    events = watched.core.events("log")
    assert events[0]["source"] == "train.log:1"
    assert any("200 more events of kind health" in event["text"] for event in events)


async def test_the_end_of_a_job_ends_the_run(watched: Watched) -> None:
    watched.write(text(Plan(rollouts=1)) + "Job 'raysubmit_x' failed\n")
    await watched.turn()
    run = watched.core.table.get("run")
    assert (run["state"], "raysubmit_x" in run["text"]) == ("failed", True)


LOGS = Path(__file__).parents[1] / "data" / "logs"


@pytest.mark.parametrize(
    ("log", "state", "failing"),
    [
        ("sglang_healthy.log", NAMED, set()),
        ("sglang_cpu_0_5_23.log", NAMED, set()),
        ("whole_ima_async_graphs.log", "CRASHED", {"engine.ima", "engine.died"}),
        ("whole_ima_blocking_no_graphs.log", "CRASHED", {"engine.ima", "engine.died"}),
        ("whole_fp32_fails_in_warm_up.log", "CRASHED", {"engine.died"}),
        ("whole_released_then_health.log", "CRASHED", {"engine.died", "engine.resume-order"}),
    ],
)
async def test_recorded_logs_of_servers(tmp_path: Path, log: str, state: str, failing: set[str]) -> None:
    """What real engines wrote, watched from the start: the cell of the engine says what the checks say."""
    watched = Watched(tmp_path, "server.log")
    watched.path.write_bytes((LOGS / log).read_bytes())
    for _ in range(QUIET_TURNS + 1):
        await watched.turn()
    engine = watched.core.table.get("engine/0")
    assert (engine["state"], engine["generation"]) == (state, 1)
    fired = {key for key in watched.core.table.keys("check/") if watched.core.table.get(key)["status"] == "fail"}
    assert fired == {f"check/{name}" for name in failing}
    if failing:
        assert "server.log:" in engine["cause"]
    watched.reader.close()
