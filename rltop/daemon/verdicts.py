"""Live checks -> `check/<id>` and `checks` keys, and an event whenever a verdict changes its status.

The checks look at what a run sends and can meet anything: an exception inside them is counted and shown once per text;
the daemon goes on and the last verdicts stay, marked by that event. They are evaluated in a thread, one evaluation at a
time: the daemon's loop only hands over what they need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import msgspec

from rltop.checks.verdict import FIRING, Report, Verdict
from rltop.daemon.core import Core, trim
from rltop.daemon.log_watch import Logs
from rltop.protocol.messages import Record

_RANK = {"fail": 0, "warn": 1, "info": 2, "pass": 3, "skip": 4}
_OVER = ("done", "failed", "interrupted", "lost")
"""States of a run that has ended."""
_LEVEL = {"fail": "error", "warn": "warn", "info": "info", "pass": "info", "skip": "debug"}


def _stands(old: Mapping[str, Any], new: Verdict) -> bool:
    """Whether a verdict of before the restart holds against one on what came since."""
    before, now = _RANK[old["status"]], _RANK[new.status]
    if old["status"] not in FIRING:
        # A skip that names a step is about what came since; any other has nothing to judge by.
        return new.step is None and new.rollout is None if new.status == "skip" else before < now
    return before < now or (before == now and _earlier(old, new))


def _earlier(old: Mapping[str, Any], new: Verdict) -> bool:
    """Of two equally bad verdicts the old one names the earlier step, or a step where the new one names none."""
    if old["step"] is not None and new.step is not None:
        return bool(old["step"] < new.step)
    if old["rollout"] is not None and new.rollout is not None:
        return bool(old["rollout"] < new.rollout)
    return (old["step"], old["rollout"]) != (None, None)


class Checks(Protocol):
    """The live form of the catalogue (`rltop.daemon.live_checks.LiveChecks`)."""

    def feed(self, record: Record) -> None:
        """See a record."""

    def see_logs(self, logs: Logs) -> None:
        """See what the run's logs say by now."""

    def see_engines(self, cells: Iterable[Mapping[str, Any]]) -> None:
        """See the cells `engine/<id>` as they are now."""

    def tick(self, now: float, *, going: bool) -> None:
        """Know what time it is (wall clock, seconds), and whether the run goes on."""

    def begin(self) -> None:
        """Forget the run: another attempt begins."""

    def pending(self) -> Callable[[], Report] | None:
        """What gives all verdicts on what was seen so far, in whatever thread; None when there is nothing new."""


Aside = Callable[[Callable[[], Report], Callable[[Report | Exception], None]], None]
"""Does some work without holding up the caller, then calls the second argument, in the caller's thread."""


class Threads:
    """Work in threads of the running loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, work: Callable[[], Report], done: Callable[[Report | Exception], None]) -> None:
        """Start it."""

        async def both() -> None:
            result: Report | Exception
            try:
                result = await asyncio.to_thread(work)
            except Exception as error:
                result = error
            done(result)

        task = asyncio.get_running_loop().create_task(both())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Verdicts:
    """Feeds the checks and publishes what they say. `checks` None: this build has none; nothing is published."""

    def __init__(
        self,
        core: Core,
        checks: Checks | None,
        aside: Aside | None = None,
        *,
        changed: Callable[[Mapping[str, Any], str | None], None] | None = None,
    ) -> None:
        """`changed` is told every verdict whose status changed, and what it was before."""
        self._core = core
        self._changed = changed
        self._mutes: dict[str, dict[str, Any]] = {}
        self._checks = checks
        self._aside: Aside = aside or Threads()
        self._busy = self._again = False
        self._settled = asyncio.Event()
        self._errors: dict[str, int] = {}
        self._restored: dict[str, dict[str, Any]] = {}

    def restore(self, kept: Sequence[Record]) -> None:
        """Take over the verdicts of an earlier daemon, and show the checks the records that were kept, oldest first.

        The checks have not seen what led to those verdicts, and neither a fault nor a passed step 1 is gone because its
        evidence was forgotten: until the next start of the run the worse of the old and the new verdict stands, the old
        one marked `restored`. Of two that are equally bad the one with the earlier step stands: it is the first fault.
        """
        for key in self._core.table.keys("check/"):
            if (verdict := self._core.table.get(key))["status"] != "skip":
                self._restored[verdict["id"]] = {**verdict, "restored": True}
        for record in kept:
            self._feed(record)

    @property
    def errors(self) -> int:
        """Exceptions inside the checks so far."""
        return sum(self._errors.values())

    def feed(self, record: Record) -> None:
        """Show a record to the checks."""
        if record.kind == "run":
            self._restored.clear()  # a new run: old verdicts are about another one
        self._feed(record)

    def _feed(self, record: Record) -> None:
        if self._checks is None:
            return
        try:
            self._checks.feed(record)
        except Exception as error:
            self._failed(f"the checks could not read a record of kind {record.kind!r}", error)

    def see_logs(self, logs: Logs) -> None:
        """Show the checks what the run's logs say by now."""
        if self._checks is None:
            return
        try:
            self._checks.see_logs(logs)
        except Exception as error:
            self._failed("the checks could not take the logs", error)

    def begin(self) -> None:
        """Another attempt of the run begins: what the checks know is about the one before."""
        self._restored.clear()
        if self._checks is not None:
            self._checks.begin()

    async def judged(self) -> None:
        """Wait until everything that was fed has been judged and published."""
        while self._busy:
            self._settled.clear()
            await self._settled.wait()

    def tick(self) -> None:
        """Once a second: let the checks know the time, and have them judge what is new, or that nothing is."""
        if self._checks is not None:
            going = (self._core.table.get("run") or {}).get("state") not in _OVER
            try:
                table = self._core.table
                self._checks.see_engines([table.get(key) or {} for key in table.keys("engine/")])
                self._checks.tick(self._core.now(), going=going)
            except Exception as error:
                self._failed("the checks could not take the time", error)
        self.refresh()

    def refresh(self) -> None:
        """Have what was fed since the last call evaluated, and published when that is done."""
        if self._checks is None:
            return
        if self._busy:
            self._again = True
            return
        try:
            work = self._checks.pending()
        except Exception as error:
            self._failed("the checks failed", error)
            return
        if work is not None:
            self._busy = True
            self._aside(work, self._done)

    def mute(self, check_id: str, *, reason: str, who: str, since: float) -> None:
        """Say that a check's verdict is known and accepted: it stays visible, and no longer calls for anybody."""
        self._mutes[check_id] = {"reason": reason, "who": who, "since": since}
        self._mark(check_id)

    def unmute(self, check_id: str) -> bool:
        """Take that back; False where it was not muted."""
        known = self._mutes.pop(check_id, None) is not None
        self._mark(check_id)
        return known

    def _mark(self, check_id: str) -> None:
        if (value := self._core.table.get(f"check/{check_id}")) is not None:
            kept = {key: item for key, item in value.items() if key != "muted"}
            self._core.set(f"check/{check_id}", self._with_mute(kept))
        if (checks := self._core.table.get("checks")) is not None:
            self._core.set("checks", {**checks, "muted": self._muted()})

    def _with_mute(self, value: dict[str, Any]) -> dict[str, Any]:
        mute = self._mutes.get(value["id"])
        return value if mute is None else {**value, "muted": mute}

    def _done(self, result: Report | Exception) -> None:
        self._busy = False
        if isinstance(result, Exception):
            self._failed("the checks failed", result)
        else:
            self._show(result)
        if self._again:
            self._again = False
            self.refresh()
        if not self._busy:
            self._settled.set()

    def _show(self, report: Report) -> None:
        by_id: dict[str, list[Verdict]] = {}
        standing: set[str] = set()
        """Ids whose restored verdict is the one shown."""
        for verdict in report.verdicts:
            by_id.setdefault(verdict.id, []).append(verdict)
        for check_id, found in by_id.items():
            worst = min(found, key=lambda verdict: _RANK[verdict.status])
            old = self._restored.get(check_id)
            if old is None or not _stands(old, worst):
                if _RANK[worst.status] < _RANK["pass"]:
                    self._restored.pop(check_id, None)  # worse, or as bad and earlier: it is known anew
                self._publish(worst, len(found))
            else:
                standing.add(check_id)
                self._core.set(f"check/{check_id}", self._with_mute(old))
        self._publish_summary(report, by_id, standing)

    def _publish_summary(self, report: Report, by_id: Mapping[str, Sequence[Verdict]], standing: Set[str]) -> None:
        summary: dict[str, int] = {str(status): count for status, count in report.summary.items()}
        root_causes = list(report.root_causes)
        for check_id in sorted(standing):
            old = self._restored[check_id]
            for verdict in by_id.get(check_id, ()):
                summary[verdict.status] -= 1
            summary[old["status"]] = summary.get(old["status"], 0) + 1
            if old["status"] in ("fail", "warn") and not old["consequence_of"] and check_id not in root_causes:
                root_causes.append(check_id)
        self._core.set("checks", {"root_causes": root_causes, "summary": summary, "muted": self._muted()})

    def _muted(self) -> list[str]:
        """Muted checks that would call for somebody."""
        told = {check_id: self._core.table.get(f"check/{check_id}") or {} for check_id in sorted(self._mutes)}
        return [check_id for check_id, value in told.items() if value.get("status") in ("fail", "warn")]

    def _publish(self, worst: Verdict, subjects: int) -> None:
        check_id, key = worst.id, f"check/{worst.id}"
        before: dict[str, Any] | None = self._core.table.get(key)
        now = self._core.now()
        was = None if before is None else before["status"]
        since = now if before is None or was != worst.status else before["since"]
        value = self._with_mute(
            {**trim(msgspec.to_builtins(worst, enc_hook=str)), "subjects": subjects, "since": since}
        )
        self._core.set(key, value)
        if was == worst.status or (was is None and worst.status == "skip"):
            return  # at the start everything is "not measured yet": no news
        self._core.sink.verdict(now, value, was)
        words = f"{check_id}: {worst.status}" if was is None else f"{check_id}: {was} -> {worst.status}"
        text = f"{words}. {worst.cause}" if worst.cause else words
        muted = check_id in self._mutes
        self._core.event(
            "verdict",
            "info" if muted else _LEVEL[worst.status],
            text,
            "checks",
            id=check_id,
            **{"from": was, "to": worst.status},
            rollout=worst.rollout,
            step=worst.step,
        )
        if self._changed is not None:
            self._changed(value, was)

    def _failed(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        self._errors[text] = self._errors.get(text, 0) + 1
        if self._errors[text] == 1 and len(self._errors) <= 20:
            self._core.event("log", "error", text, "checks")
