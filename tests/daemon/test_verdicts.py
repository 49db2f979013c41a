"""Live checks on the wire: verdict keys, events on change, and checks that fail themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rltop.checks.verdict import Report, Status, Verdict
from rltop.daemon.log_watch import Logs
from rltop.daemon.verdicts import Verdicts
from rltop.protocol.messages import Record
from tests.daemon.fakes import FakeCore, Trainer


class FakeChecks:
    """Says what the test wants it to say."""

    def __init__(self) -> None:
        self.fed: list[Record] = []
        self.reports = 0
        self.news = False
        self.ticks: list[tuple[float, bool]] = []
        self.next = report(("train.nan", "skip"))
        self.error: Exception | None = None

    def feed(self, record: Record) -> None:
        if self.error is not None:
            raise self.error
        self.fed.append(record)
        self.news = True

    def begin(self) -> None:
        self.fed = []

    def see_logs(self, logs: Logs) -> None:
        self.news = True

    def see_engines(self, cells: Iterable[Mapping[str, Any]]) -> None:
        self.cells = list(cells)

    def tick(self, now: float, *, going: bool) -> None:
        if self.error is not None:
            raise self.error
        self.ticks.append((now, going))
        self.news = self.news or len(self.ticks) % 30 == 0

    def pending(self) -> Callable[[], Report] | None:
        if not self.news:
            return None
        self.news = False
        return self._evaluate

    def _evaluate(self) -> Report:
        self.reports += 1
        if self.error is not None:
            raise self.error
        return self.next


def at_once(work: Callable[[], Report], done: Callable[[Report | Exception], None]) -> None:
    """Stands for a thread that is always quick."""
    try:
        result: Report | Exception = work()
    except Exception as error:
        result = error
    done(result)


def report(*found: tuple[str, Status], causes: tuple[str, ...] = ()) -> Report:
    verdicts = tuple(Verdict(name, status, rollout=3, cause=f"{name} is {status}") for name, status in found)
    summary = {status: sum(v.status == status for v in verdicts) for status in ("pass", "info", "warn", "fail", "skip")}
    return Report(verdicts, causes, summary)


class Desk:
    def __init__(self, core: FakeCore | None = None) -> None:
        self.core = core or FakeCore()
        self.checks = FakeChecks()
        self.verdicts = Verdicts(self.core, self.checks, at_once)
        self.trainer = Trainer()

    def say(self, *found: tuple[str, Status], causes: tuple[str, ...] = ()) -> None:
        self.checks.next = report(*found, causes=causes)
        self.verdicts.feed(self.trainer.metrics(1, {"x": 1.0}))
        self.verdicts.refresh()

    def tell(self, verdict: Verdict, causes: tuple[str, ...] = ()) -> None:
        summary = {**dict.fromkeys(("pass", "info", "warn", "fail", "skip"), 0), verdict.status: 1}
        self.checks.next = Report((verdict,), causes, summary)
        self.verdicts.feed(self.trainer.metrics(1, {"x": 1.0}))
        self.verdicts.refresh()

    def key(self, name: str) -> Any:
        return self.core.table.get(f"check/{name}")


def test_a_change_of_status_is_an_event_and_keeps_its_time() -> None:
    desk = Desk()
    desk.say(("train.nan", "skip"))
    assert desk.core.events("verdict") == [], "nothing measured yet is no news"
    desk.core.time = 1010.0
    desk.say(("train.nan", "pass"))
    desk.core.time = 1020.0
    desk.say(("train.nan", "pass"))
    assert (desk.key("train.nan")["status"], desk.key("train.nan")["since"]) == ("pass", 1010.0)
    desk.say(("train.nan", "fail"), causes=("train.nan",))
    first, second = desk.core.events("verdict")
    assert (first["from"], first["to"], second["from"], second["to"]) == ("skip", "pass", "pass", "fail")
    assert (second["level"], second["id"], second["rollout"]) == ("error", "train.nan", 3)
    assert "train.nan is fail" in second["text"]
    assert desk.core.table.get("checks") == {
        "root_causes": ["train.nan"],
        "summary": {"pass": 0, "info": 0, "warn": 0, "fail": 1, "skip": 0},
        "muted": [],
    }
    assert [was for _, _, was in desk.core.written.told("verdict")] == ["skip", "pass"]


def test_the_worst_of_several_subjects_is_shown() -> None:
    desk = Desk()
    desk.say(("engine.x", "pass"), ("engine.x", "fail"), ("engine.x", "skip"))
    assert (desk.key("engine.x")["status"], desk.key("engine.x")["subjects"]) == ("fail", 3)


def test_nothing_is_evaluated_when_nothing_was_fed() -> None:
    desk = Desk()
    desk.verdicts.refresh()
    desk.say(("a.b", "pass"))
    desk.verdicts.refresh()
    assert desk.checks.reports == 1


def test_the_checks_know_the_time_and_whether_the_run_goes_on() -> None:
    desk = Desk()
    desk.verdicts.tick()
    for state in ("running", "lost", "running", "done"):
        desk.core.time += 1.0
        desk.core.set("run", {"state": state})
        desk.verdicts.tick()
    assert desk.checks.ticks == [(1000.0, True), (1001.0, True), (1002.0, False), (1003.0, True), (1004.0, False)]
    assert desk.checks.reports == 0
    for _ in range(25):
        desk.verdicts.tick()
    assert desk.checks.reports == 1, "time alone gives a reason to judge again"
    desk.checks.error = ZeroDivisionError("by zero")
    desk.verdicts.tick()
    assert any("could not take the time" in text for text in desk.core.texts("log"))


def test_checks_that_fail_are_shown_once_counted_and_leave_the_last_verdicts() -> None:
    desk = Desk()
    desk.say(("a.b", "pass"))
    desk.checks.error = ZeroDivisionError("by zero")
    for _ in range(5):
        desk.verdicts.feed(desk.trainer.metrics(1, {"x": 1.0}))
        desk.checks.news = True
        desk.verdicts.refresh()
    assert desk.verdicts.errors == 10
    errors = [text for text in desk.core.texts("log") if "by zero" in text]
    assert len(errors) == 2
    assert desk.key("a.b")["status"] == "pass"


async def test_the_loop_goes_on_while_the_checks_are_evaluated_and_what_came_meanwhile_is_not_forgotten() -> None:
    core, checks = FakeCore(), FakeChecks()
    verdicts = Verdicts(core, checks)
    started, held, seen = threading.Event(), threading.Event(), asyncio.Event()
    threads: list[threading.Thread] = []

    def slow() -> Report:
        threads.append(threading.current_thread())
        started.set()
        held.wait(20)
        return report(("a.b", "pass"))

    def look() -> None:
        if (core.table.get("check/a.b") or {}).get("status") == "fail":
            seen.set()

    works = [slow, lambda: report(("a.b", "fail"))]
    checks.pending = lambda: works.pop(0) if works else None  # type: ignore[method-assign]
    core.changed = look
    verdicts.refresh()
    assert await asyncio.to_thread(started.wait, 20)
    for _ in range(3):  # the loop is free
        verdicts.refresh()
    assert len(works) == 1, "one at a time"
    assert core.table.keys("check/") == []
    held.set()
    async with asyncio.timeout(20):
        await seen.wait()
    assert threads[0] is not threading.current_thread()
    assert [event["to"] for event in core.events("verdict")] == ["pass", "fail"]


def test_a_build_without_checks_publishes_nothing() -> None:
    core = FakeCore()
    verdicts = Verdicts(core, None)
    verdicts.feed(Trainer().metrics(1, {"x": 1.0}))
    verdicts.refresh()
    assert core.table.keys("check") == []


def test_old_faults_stand_after_a_restart_until_the_run_starts_anew() -> None:
    old = Desk()
    old.say(("bad", "fail"), ("good", "pass"), ("worse", "warn"), causes=("bad", "worse"))
    new = Desk(old.core)
    kept = [new.trainer.record("run", {"framework": "x"})]
    new.verdicts.restore(kept)
    assert new.checks.fed == kept, "what the journal kept is shown to the checks"
    new.say(("bad", "pass"), ("good", "pass"), ("worse", "fail"), causes=("worse",))
    assert (new.key("bad")["status"], new.key("bad")["restored"]) == ("fail", True)
    assert "restored" not in new.key("good")
    assert (new.key("worse")["status"], "restored" in new.key("worse")) == ("fail", False)
    checks = new.core.table.get("checks")
    assert checks["root_causes"] == ["worse", "bad"]
    assert (checks["summary"]["fail"], checks["summary"]["pass"]) == (2, 1)
    new.verdicts.feed(new.trainer.record("run", {"framework": "x"}))
    new.say(("bad", "pass"), ("good", "pass"), ("worse", "pass"))
    assert (new.key("bad")["status"], "restored" in new.key("bad")) == ("pass", False)


def restarted(status: Status, *, step: int | None = None, cause: str = "old") -> Desk:
    """A desk after a restart of its daemon, before which one check had this verdict."""
    old = Desk()
    old.tell(Verdict("a", status, step=step, cause=cause))
    new = Desk(old.core)
    new.verdicts.restore([])
    return new


def test_what_passed_before_a_restart_stays_when_its_evidence_does_not_come_again() -> None:
    desk = restarted("pass", step=0)
    desk.tell(Verdict("a", "pass", step=51))  # from the log, which still holds rollout 0
    desk.tell(Verdict("a", "skip", cause="the evidence begins with rollout 51"))
    assert (desk.key("a")["status"], desk.key("a")["step"], desk.key("a")["restored"]) == ("pass", 0, True)
    assert desk.core.table.get("checks")["summary"] == {"pass": 1, "info": 0, "warn": 0, "fail": 0, "skip": 0}
    assert [event["to"] for event in desk.core.events("verdict")] == ["pass"], "nothing changed"
    desk.tell(Verdict("a", "skip", step=60, cause="grad_norm is NaN since step 60"))
    assert desk.key("a")["status"] == "skip", "a skip about what came since is news"
    desk.tell(Verdict("a", "fail", step=61))
    assert (desk.key("a")["status"], "restored" in desk.key("a")) == ("fail", False)


def test_of_two_equal_faults_the_first_step_stands_after_a_restart() -> None:
    desk = restarted("fail", step=5)
    desk.tell(Verdict("a", "fail", step=286), causes=("a",))
    assert (desk.key("a")["step"], desk.key("a")["restored"]) == (5, True)
    desk.tell(Verdict("a", "pass"))
    assert desk.key("a")["step"] == 5
    assert desk.core.table.get("checks")["root_causes"] == ["a"]
    desk.tell(Verdict("a", "fail", step=3), causes=("a",))
    assert (desk.key("a")["step"], "restored" in desk.key("a")) == (3, False)


def test_a_fault_without_a_step_gives_way_to_the_same_fault_seen_anew() -> None:
    desk = restarted("warn", cause="3 engines wait")
    desk.tell(Verdict("a", "warn", cause="4 engines wait"))
    assert (desk.key("a")["cause"], "restored" in desk.key("a")) == ("4 engines wait", False)


def test_a_muted_check_stays_visible_and_calls_for_nobody() -> None:
    changes: list[tuple[Any, str | None]] = []
    core, checks = FakeCore(), FakeChecks()
    verdicts = Verdicts(core, checks, at_once, changed=lambda value, was: changes.append((dict(value), was)))
    checks.next = report(("train.nan", "fail"))
    verdicts.feed(Trainer().record("metrics", {}))
    verdicts.refresh()
    assert changes[0][0]["status"] == "fail"
    verdicts.mute("train.nan", reason="known", who="ana", since=5.0)
    shown = core.table.get("check/train.nan")
    assert (shown["status"], shown["muted"]) == ("fail", {"reason": "known", "who": "ana", "since": 5.0})
    checks.next = report(("train.nan", "warn"))
    verdicts.feed(Trainer().record("metrics", {}))
    verdicts.refresh()
    assert changes[-1][0]["muted"]["reason"] == "known"
    assert core.table.get("checks")["muted"] == ["train.nan"]
    assert verdicts.unmute("train.nan")
    assert core.table.get("checks")["muted"] == []
    assert "muted" not in core.table.get("check/train.nan")
    assert not verdicts.unmute("train.nan")
