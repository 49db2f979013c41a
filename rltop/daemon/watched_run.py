"""What the logs of a run say, as the daemon's state: metrics and curves, phases, samples, engines, events, attempts.

Metrics, phases and samples become the records that a reporter would have sent, so that they are kept, counted and shown
alike; the checks get the facts themselves, with file and line. Where a trainer streams, its own metrics, phases and
samples count and those of the logs are left out: nothing is told twice.

The news of a turn is applied in slices: an old log may hold a hundred thousand facts, and the daemon's loop has others
to serve.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from math import nan
from pathlib import Path
from typing import Any

import msgspec

from rltop.checks.found import LogEvent
from rltop.checks.observe import MetricRow, Where
from rltop.daemon import attempts
from rltop.daemon.core import Core, trim
from rltop.daemon.ingest import Ingest
from rltop.daemon.log_watch import Logs
from rltop.daemon.past import End
from rltop.daemon.verdicts import Verdicts
from rltop.daemon.watched_engines import NamedEngines, at
from rltop.daemon.watched_logs import LogReader, News, Restarted, Turn, args_of, samples_of
from rltop.evidence.logtext import Printed
from rltop.evidence.sink import Sink
from rltop.protocol.messages import PhasePayload, Record, Source
from rltop.runs.masks import is_secret

WATCHED = "from its logs; nothing is started or stopped"
EVERY_S = 1.0
SOON_S = 0.05
"""Until the next turn while there is more to read."""
SLICE_S = 0.008
"""The loop is held up for so long at a time."""
MOST_TOLD = 100
"""Events of one kind and one turn; the others are counted in one line."""
ROLE = "log"
PHASES = {"train_wait": "rollout", "save_model": "save"}
"""slime's timers that have another name here: what its trainer waits for is the rollout."""
_LEVELS: Mapping[str, str] = {
    "traceback": "error",
    "nan_abort": "error",
    "ima": "error",
    "oom": "error",
    "oom_killer": "error",
    "xid": "error",
    "fatal": "error",
    "collective": "error",
    "memory_held": "error",
    "no_weights": "error",
    "weights_check": "error",
    "death": "error",
    "health": "warn",
    "recovered": "info",
    "update_refused": "warn",
    "flush_failed": "warn",
    "port_in_use": "warn",
    "entry_missing": "warn",
    "pickle_refused": "warn",
    "over_length": "warn",
    "placement_wait": "warn",
    "ended": "warn",
    "injected": "warn",
    "sigterm": "info",
    "ckpt_loaded": "info",
    "ckpt_saved": "info",
    "placement_create": "info",
    "kernel": "info",
}
"""Log events that are events of the run, and how loud."""
_JOB = {"succeeded": "done", "failed": "failed", "stopped": "interrupted"}
_MOVING = frozenset({"timer", "prefill", "decode", "engine_stage", "placement_create", "startup", "iteration"})


class WatchedRun:
    """Applies what the reader found. streamed: whether a trainer sends metrics itself."""

    def __init__(
        self,
        core: Core,
        ingest: Ingest,
        verdicts: Verdicts,
        reader: LogReader,
        engines: NamedEngines,
        *,
        run_dir: Path,
        host: str,
        extra: Callable[[], Sink],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """extra: what is known beside the logs (arguments, the cluster), for the checks."""
        self._core = core
        self._ingest = ingest
        self._verdicts = verdicts
        self._reader = reader
        self._engines = engines
        self._run_dir = run_dir
        self._host = host
        self._extra = extra
        self._sleep = sleep
        self._clock = clock
        self._seq = 0
        self._rollout: int | None = None
        """Newest rollout whose samples are made."""
        self._told: Counter[str] = Counter()
        self._facts: Sink | None = None
        self._waiting: list[Printed] = []
        self._left_out = 0
        self._newest: tuple[str, int | None] = ("", None)
        """Line of the newest event: what it says twice is told once."""
        self._shifts: dict[str, float] = {}
        """Log -> what its clock must be given to be ours, for lines of before we looked."""
        self._restored: dict[str, int] = {}
        """Log -> newest line of which an earlier daemon of the run has told."""
        self._rereads = False
        """What an earlier daemon has told is being read again: until that is done the checks would see half of it."""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            self.begin()
            while True:
                turn = await asyncio.to_thread(self._reader.turn)
                await self.apply(turn)
                await self._sleep(SOON_S if turn.busy else EVERY_S)
        finally:
            self._reader.close()

    def begin(self) -> None:
        """Before the first turn. Where an earlier daemon of the run was here, the logs are read anew from their start:
        the checks see again what they say, and engines are known again, but metrics, attempts and events that the
        journal has already are not told twice."""
        table, before = self._core.table, {}
        for key in table.keys("log/"):
            cell, name = table.get(key), key.removeprefix("log/")
            self._restored[name] = int(cell.get("lines") or 0)
            same = _size(cell.get("path")) >= int(cell.get("bytes") or 0)  # else it was replaced meanwhile
            before[name] = int(cell.get("before") or 0) if same else self._restored[name]
        run = table.get("run") or {}
        if self._restored:
            self._reader.count_on(before)
            if not any(before.values()):  # else the file that named an engine may be gone
                self._engines.forget()
            self._core.update("run", ended=None, state="waiting", text="")
        self._rereads = bool(self._restored)
        if not str(run.get("watched") or "").startswith(WATCHED):
            self._core.update("run", watched=WATCHED)

    def ages(self) -> dict[str, float]:
        """Log -> seconds since it last grew, as far as we saw it."""
        now, found = self._core.now(), {}
        for key in self._core.table.keys("log/"):
            last = self._core.table.get(key).get("last")
            if isinstance(last, int | float):
                found[key] = max(0.0, now - last)
        return found

    def before(self) -> dict[str, int]:
        """Log -> lines that it had before it was replaced or cut."""
        table = self._core.table
        return {key.removeprefix("log/"): int(table.get(key).get("before") or 0) for key in table.keys("log/")}

    # ---------------------------------------------------------------- a turn

    async def apply(self, turn: Turn) -> None:
        """Take what one turn of reading gave."""
        self._told.clear()
        self._shifts = _shifts(turn)
        until = self._clock() + SLICE_S
        for item in turn.news:
            if isinstance(item, Restarted):
                await self._attempt(item)
            else:
                self._news(item)
            if self._clock() > until:
                await self._sleep(0)
                until = self._clock() + SLICE_S
        self._show_samples()
        self._count_untold(turn)
        for name, cell in turn.cells.items():
            self._cell(name, cell)
        for key in self._core.table.keys("log/"):
            if key.removeprefix("log/") not in turn.cells:  # a pattern that has files now
                self._core.set(key, None)
        if turn.left_out != self._left_out:
            self._left_out = turn.left_out
            text = f"{turn.left_out} more files are not followed: {len(turn.cells)} are, and that is the limit"
            self._core.event("loss", "warn", text, "log", count=turn.left_out)
        if turn.facts is not None:
            self._facts = turn.facts
            self._take_args(turn.facts)
        if turn.facts is not None or (self._rereads and not turn.busy):
            self._rereads = self._rereads and turn.busy
            self.judge()

    def judge(self) -> None:
        """Have the checks see everything that is known by now."""
        if self._facts is not None and not self._rereads:
            self._verdicts.see_logs(_with(self._facts, self._extra()))
            self._verdicts.refresh()

    def _news(self, news: News) -> None:
        match news.fact:
            case MetricRow():
                self._row(news.fact, caught_up=news.caught_up)
            case Printed() if not self._known(news.fact.where):
                self._waiting = [*self._waiting[-7:], news.fact]
            case LogEvent():
                self._event(news.fact, caught_up=news.caught_up)

    def _row(self, row: MetricRow, *, caught_up: bool) -> None:
        self._moves()
        if row.axis == "rollout" and "perf/rollout_time" in row.values:
            self._rollout = row.step if row.rollout_id is None else row.rollout_id
        if self._streamed() or self._known(row.where):
            return
        more = {"rollout_id": row.rollout_id, "step_in_rollout": row.step_in_rollout}
        when = None if caught_up else nan  # an old line is of its own time, if it has one that is ours
        if not caught_up and row.time is not None and row.where is not None and row.where.source in self._shifts:
            when = row.time + self._shifts[row.where.source]
        self._record("metrics", {"values": dict(row.values), "step": row.step, "axis": row.axis, **more}, when=when)

    def _event(self, event: LogEvent, *, caught_up: bool) -> None:
        if event.kind in _MOVING:
            self._moves()
        if event.kind == "timer":
            shift = None if caught_up else self._shifts.get(event.where.source)
            self._timer(event, None if shift is None or event.time is None else event.time + shift)
            return
        told = self._engines.see(event, rollout=self._rollout, tell=not self._known(event.where))
        state = _JOB.get(str(event.data.get("state"))) if event.kind == "job_end" else None
        if state is not None and "job" in event.text.lower():
            self._ingest.end(state, f"{event.text[:200]} ({at(event)})", at(event))
        level = _LEVELS.get(event.kind)
        where = (event.where.source, event.where.line)
        if level is None or told or self._known(event.where) or where == self._newest:
            return
        self._newest = where
        self._told[event.kind] += 1
        if self._told[event.kind] <= MOST_TOLD:
            who = f"{event.actor}: " if event.actor else ""
            text = f"{who}{event.text}" if event.kind != "traceback" else f"{who}traceback: {event.text}"
            self._core.event("log", level, text[:2000], at(event))

    def _known(self, where: Where | None) -> bool:
        """An earlier daemon of the run has told of this line."""
        return where is not None and (where.line or 0) <= self._restored.get(where.source, 0)

    def _timer(self, event: LogEvent, when: float | None) -> None:
        if self._streamed():
            return
        name, edge = str(event.data.get("name")), event.data.get("edge")
        name = PHASES.get(name, name)
        rollout = self._rollout
        if name == "rollout":
            rollout = self._first_rollout() if rollout is None else rollout + 1
        elapsed = event.data.get("elapsed_s")
        seconds = float(elapsed) if isinstance(elapsed, int | float) else None
        payload = PhasePayload(name, "enter" if edge == "start" else "leave", rollout, seconds)
        if self._known(event.where):
            self._ingest.recall_phase(f"{ROLE}/0", payload, mono=event.time or 0.0, when=when)
        else:
            self._record("phase", msgspec.to_builtins(payload), mono=event.time or 0.0, when=when)

    def _first_rollout(self) -> int | None:
        start = ((self._core.table.get("run") or {}).get("args") or {}).get("start_rollout_id")
        return int(start) if isinstance(start, int | str) and str(start).isdigit() else None

    def _show_samples(self) -> None:
        newest = [one for one in self._waiting if one.rollout_id is not None]
        if not newest or self._streamed():
            self._waiting = []
            return
        rollout = newest[-1].rollout_id
        mine = [one for one in newest if one.rollout_id == rollout]
        self._waiting = []
        self._record("samples", {"rollout_id": rollout, "samples": samples_of(mine), "total": len(mine)})

    # ---------------------------------------------------------------- attempts

    async def _attempt(self, restarted: Restarted) -> None:
        """The attempt before is judged to its end and put away. One that an earlier daemon has begun is begun: only the
        engines of the one before are forgotten."""
        begin = restarted.begin
        place = f"{begin.source}:{begin.line}"
        run = self._core.table.get("run") or {}
        if self._known(Where(begin.source, begin.line)) or str(run.get("watched")).endswith(f" {place}"):
            keep = self._engines.of_attempt(begin.source, begin.line)
            for key in (key for key in self._core.table.keys("engine/") if key not in keep):
                self._core.set(key, None)
            self._ingest.over(f"{ROLE}/0")
            self._rollout, self._facts = None, None
            return
        self._show_samples()
        self._verdicts.see_logs(_with(restarted.before, self._extra()))
        self._verdicts.refresh()
        await self._verdicts.judged()
        run = self._core.table.get("run") or {}
        over = run.get("state") in ("done", "failed", "interrupted")
        told = str(run.get("text") or "") if over else f"its log goes on with another start at {place}"
        end = End(str(run["state"]) if over else "ended", told, run.get("ended") or self._core.now())
        keep = self._engines.of_attempt(begin.source, begin.line)
        self._ingest.over(f"{ROLE}/0")
        attempts.begin(self._core, self._run_dir, end=end, keep=keep)
        self._verdicts.begin()
        self._rollout, self._facts = None, None
        more = {"watched": f"{WATCHED}; this attempt begins at {place}", "framework": run.get("framework") or ""}
        self._core.update("run", state="running", text="", ended=None, args={}, **more)

    # ---------------------------------------------------------------- small things

    def _moves(self) -> None:
        run = self._core.table.get("run") or {}
        if run.get("state") == "waiting":
            self._core.update("run", state="running")
            self._core.event("run", "info", "the log shows a run that is going on", "log", state="running")

    def _streamed(self) -> bool:
        return self._ingest.streams(besides=ROLE)

    def _record(self, kind: str, payload: dict[str, Any], *, mono: float = 0.0, when: float | None = None) -> None:
        self._seq += 1
        source = Source(ROLE, 0, self._host, 0)
        record = Record(self._core.table.get("run")["name"], source, self._seq, mono, 0.0, kind, payload)
        self._ingest.take(record, when=when)

    def _cell(self, name: str, cell: Mapping[str, Any]) -> None:
        before = self._core.table.get(f"log/{name}") or {}
        self._core.set(f"log/{name}", dict(cell))
        if before.get("state") != cell["state"] and (cell["state"] != "followed" or before):
            words = {"missing": "is not there yet", "gone": "is gone", "followed": "is there"}.get(cell["state"], "")
            level = "warn" if cell["state"] in ("gone", "unreadable") else "info"
            text = f"log {name} {words or 'cannot be read: ' + str(cell['problem'])} ({cell['path']})"
            self._core.event("log", level, text, "log")
        lost = cell["dropped"] - int(before.get("dropped") or 0)
        if lost > 0:
            text = f"{lost} lines of {name} were left out: it grows faster than it can be read"
            self._core.event("loss", "warn", text, name, count=lost)
        if before and cell["restarts"] > int(before.get("restarts") or 0):
            text = f"log {name} was replaced or cut; what it said stays, its line 1 is counted as {cell['before'] + 1}"
            self._core.event("log", "info", text, "log")

    def _count_untold(self, turn: Turn) -> None:
        for kind, count in self._told.items():
            if count > MOST_TOLD:
                text = f"{count - MOST_TOLD} more events of kind {kind} in this second are not shown"
                self._core.event("log", "warn", text, "log")
        if turn.more:
            text = f"{turn.more} findings of one second are only counted by the checks: too many to show"
            self._core.event("loss", "warn", text, "log", count=turn.more)

    def _take_args(self, facts: Sink) -> None:
        found = {**args_of(self._extra()), **args_of(facts)}
        if not found:
            return
        args = {name: "***" if is_secret(name, str(value)) else trim(value) for name, value in found.items()}
        framework = next((one.framework for one in (*facts.args, *self._extra().args) if one.framework), "")
        run = self._core.table.get("run") or {}
        number = found.get("num_rollout")
        more = {"num_rollout": int(str(number))} if str(number).isdigit() else {}
        self._core.update("run", args=args, framework=run.get("framework") or framework, **more)


def _size(path: object) -> int:
    try:
        return Path(str(path)).stat().st_size
    except OSError:
        return 0


def _shifts(turn: Turn) -> dict[str, float]:
    """Of each log the time of its last change less the time of its newest line: its clock may be of another zone."""
    found = {}
    for source in turn.facts.logs if turn.facts is not None else ():
        last = (turn.cells.get(source.source) or {}).get("last")
        if source.last_time is not None and isinstance(last, int | float):
            found[source.source] = last - source.last_time
    return found


def _with(facts: Sink, extra: Sink) -> Logs:
    """What the checks see: the logs, and what is known beside them."""
    whole = Sink(
        metrics=facts.metrics,
        samples=facts.samples,
        phases=facts.phases,
        lines=facts.lines,
        events=facts.events,
        logs=facts.logs,
        args=[*extra.args, *facts.args],
        scripts=extra.scripts,
        documents=extra.documents,
        ray=extra.ray,
        problems=[*facts.problems, *extra.problems],
        files=[*facts.files, *extra.files],
    )
    return Logs(tuple(facts.events), tuple(facts.logs), tuple(facts.metrics), whole)
