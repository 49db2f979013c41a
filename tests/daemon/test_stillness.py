"""A live run that stands still is told, with a clock that the tests turn; healthy, paused and ended ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.checks.verdict import Report, Verdict
from rltop.daemon.live_checks import JUDGE_EVERY_S, LiveChecks
from rltop.daemon.log_watch import LogWatch
from rltop.daemon.stillness import MOST_STEP_S, Stillness
from tests.checks.build import Recorder

LINE = "(MegatronTrainRayActor pid=41) [2026-03-01 {at}] timer.py:31 - Timer {name} {edge}\n"


class Watched:
    """Checks of a live run, ticked once a second."""

    def __init__(self) -> None:
        self.checks, self.record = LiveChecks(), Recorder()
        self.now = 1_000_000.0
        self.reports: list[Report] = []
        self.checks.feed(self.record.run())

    def wait(self, seconds: float, *, going: bool = True, step: float = 1.0) -> None:
        """Let time pass, as the daemon does."""
        for _ in range(int(seconds / step)):
            self.now += step
            self.checks.tick(self.now, going=going)
            if (work := self.checks.pending()) is not None:
                self.reports.append(work())

    def phase(self, name: str, edge: str, **more: object) -> None:
        self.checks.feed(self.record("phase", name=name, edge=edge, **more))

    def rounds(self, count: int) -> None:
        for step in range(count):
            for name, took in (("rollout", 30.0), ("train", 10.0)):
                self.phase(name, "enter", rollout_id=step)
                self.wait(took)
                self.phase(name, "leave", rollout_id=step, elapsed_s=took)
            self.checks.feed(self.record.metrics("train", step, {"loss": 0.1}))

    @property
    def stall(self) -> Verdict:
        (found,) = (one for one in self.checks.report().verdicts if one.id == "cluster.stall")
        return found

    def alarms(self) -> list[str]:
        return [
            one.cause
            for report in self.reports
            for one in report.verdicts
            if one.id == "cluster.stall" and one.status in ("warn", "fail")
        ]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_phase_that_never_ends_is_told_while_nothing_else_comes(watched: Watched) -> None:
    watched.rounds(4)
    watched.phase("train", "enter", rollout_id=4)
    watched.wait(599)
    assert watched.alarms() == []
    watched.wait(JUDGE_EVERY_S + 1)
    assert watched.alarms(), "judged again although no record came"
    assert (watched.stall.status, watched.stall.value["side"], watched.stall.value["count"]) == ("fail", "trainer", 4)
    watched.phase("train", "leave", rollout_id=4)
    assert watched.stall.status == "pass", "it moves again"


def test_a_run_in_which_nothing_moves_is_judged_every_half_minute_and_not_more_often(watched: Watched) -> None:
    watched.wait(300)
    quiet = len(watched.reports)
    assert 8 <= quiet <= 12
    assert watched.stall.status == "skip", "no phase was ever seen"


def test_a_healthy_run_raises_no_alarm_however_long_it_is(watched: Watched) -> None:
    watched.rounds(60)
    assert watched.alarms() == []
    assert watched.stall.status == "pass"


def test_a_daemon_that_was_stopped_does_not_blame_the_run(watched: Watched) -> None:
    watched.rounds(4)
    watched.phase("train", "enter", rollout_id=4)
    watched.now += 7200.0  # SIGSTOP, or a suspended machine
    watched.wait(60)
    assert watched.alarms() == []
    assert watched.stall.status == "pass"
    watched.now -= 86_400.0  # and a clock that was set back
    watched.wait(60)
    assert watched.alarms() == []


@pytest.mark.parametrize("reason", ["done", "failed", "interrupted"])
def test_a_run_that_ended_stands_still_rightly(watched: Watched, reason: str) -> None:
    watched.rounds(4)
    watched.phase("train", "enter", rollout_id=4)
    watched.checks.feed(watched.record("bye", reason=reason, text=""))
    watched.wait(7200, going=False, step=10.0)
    assert watched.alarms() == []
    assert watched.stall.status == "pass"


def test_a_stall_stays_told_when_the_run_is_killed_for_it(watched: Watched) -> None:
    watched.rounds(4)
    watched.phase("train", "enter", rollout_id=4)
    watched.wait(700)
    watched.checks.feed(watched.record("bye", reason="failed", text="killed"))
    watched.wait(700, going=False)
    assert watched.stall.status == "fail"


def test_a_run_that_starts_again_has_no_phase_of_the_one_before(watched: Watched) -> None:
    watched.rounds(4)
    watched.phase("train", "enter", rollout_id=4)
    watched.checks.feed(watched.record.run())
    watched.wait(2000)
    assert watched.alarms() == []


def test_lines_of_a_log_are_movement_and_their_newest_timer_counts_at_once(tmp_path: Path, watched: Watched) -> None:
    path = tmp_path / "trainer.log"
    watch = LogWatch(dict)
    path.write_text("")

    def write(name: str, edge: str, at: str) -> None:
        with path.open("a") as file:
            file.write(LINE.format(at=at, name=name, edge=edge))
        if (logs := watch.poll({"trainer.log": (path, 0)})) is not None:
            watched.checks.see_logs(logs)

    for i in range(30):
        write("actor_train", "start", f"10:{i:02}:00")
        write("actor_train", "end (elapsed: 20.0s)", f"10:{i:02}:20")
        watched.wait(60)
    assert watched.stall.status == "pass"
    watched.wait(900)
    assert watched.alarms() == [], "no timer is open"
    write("actor_train", "start", "10:30:00")
    watched.wait(590)
    assert watched.alarms() == []
    watched.wait(60)
    assert (watched.stall.status, watched.stall.evidence[0].source, watched.stall.evidence[0].line) == (
        "fail",
        "trainer.log",
        61,
    )
    write("actor_train", "end (elapsed: 680.0s)", "10:41:20")
    assert watched.stall.status == "pass"
    watch.close()


def test_a_step_of_the_stopwatch_is_bounded() -> None:
    still = Stillness()
    for now in (0.0, 1.0, 2.0, 1000.0):
        still.tick(now, going=True)
    assert still.seconds == 2.0 + MOST_STEP_S
    still.tick(1001.0, going=False)
    still.tick(2000.0, going=False)
    still.tick(3000.0, going=True)
    assert still.seconds == 2.0 + MOST_STEP_S
    still.moved()
    assert still.seconds == 0.0
