"""Reads the logs of a run that knows nothing of rltop: what is new in them, in order, and all that they said so far.

Everything here runs in a thread and is bounded: a turn reads for a limited time, what was on disk at the start is
caught up with, and a log that grows faster than it can be read loses lines. Those are counted, and the numbers of the
others stay right. What was found is kept as `rltop.evidence.logs` keeps it, the first and the newest of each kind.

A log that is rotated, cut or written anew is still the same log: what it said stays, and the numbers of its lines go on
(`before`), as in `cat train.log.1 train.log`. Only `watched_restarts` says that another attempt begins.

Failure policy: a file that is missing, cannot be read or is no text is one without lines, and its cell says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.checks.found import LogEvent, Problem
from rltop.checks.observe import MetricRow, Where
from rltop.daemon.log_watch import position
from rltop.daemon.watched_files import LogFiles
from rltop.daemon.watched_restarts import Begin, Restarts
from rltop.evidence.collect import in_order
from rltop.evidence.logs import Fact, LogScan
from rltop.evidence.logtext import Printed
from rltop.evidence.metric_names import Names
from rltop.evidence.pieces import is_binary
from rltop.evidence.sink import Sink
from rltop.evidence.tail import READ, Position, Tail

TURN_S = 0.6
"""Of reading and recognising, in one turn; the rest of a second is the daemon's."""
PIECE = 256 * 1024
"""Bytes that are read at a time: long enough to be quick, short enough that the daemon's loop gets its turns."""
MOST_BEHIND = 64 << 20
"""Bytes that a growing log may be ahead of its reader before lines are left out."""
KEPT_BEHIND = 4 << 20
"""So much of its end is read then."""
HURRY = 1 << 20
"""Bytes still to be read from which on batch and access lines are only sampled."""
MOST_NEWS = 20_000
"""Facts of one turn that are told; the rest only counts for the checks."""
QUIET_TURNS = 3
"""Then a traceback at the end of a log is over: who hangs behind it writes no next line."""
_WORKER = re.compile(r"^(?:worker|python-core-worker)-[0-9a-f]+-(?:[0-9a-f]+-)?(?P<pid>\d+)\.(?:err|out)$")


@dataclass(frozen=True, slots=True)
class News:
    """Something that a log said, and who. `caught_up`: the line is new, not one of before the daemon looked."""

    fact: Fact
    actor: str = ""
    pid: int | None = None
    caught_up: bool = True


@dataclass(frozen=True, slots=True)
class Restarted:
    """A new attempt begins here. `before`: everything that was said of the one that is over."""

    begin: Begin
    before: Sink


@dataclass(slots=True)
class Turn:
    """What one turn of reading gave."""

    news: list[News | Restarted] = field(default_factory=list)
    more: int = 0
    """Facts that were too many to tell."""
    facts: Sink | None = None
    """Everything of this attempt; None where nothing is new."""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Log -> how it is: `log/<name>`."""
    left_out: int = 0
    """Files that are not followed, because there are too many."""
    busy: bool = False
    """There is more to read at once."""


@dataclass(slots=True)
class _Log:
    path: Path
    tail: Tail
    scan: LogScan
    history: int
    """Bytes of the file that were there when it was opened: they are caught up with, and never left out."""
    restarts: int = 0
    quiet: int = 0
    lines: int = 0
    """Number of the newest line that was read."""
    before: int = 0
    """Lines of the files that were there before this one: line 1 of the file has the next number."""
    dropped: int = 0
    seen: bool = False
    last: float | None = None
    """When it last grew, as far as we know: at the start its time of change."""
    problem: str = ""
    pid: int | None = None
    """Of the worker whose output it is, by its name."""
    checked: bool = False


class LogReader:
    """Follows the files. clock: seconds that only go forward; wall: seconds since the epoch."""

    def __init__(
        self,
        files: LogFiles,
        *,
        from_end: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        most_behind: int = MOST_BEHIND,
        names: Names | None = None,
    ) -> None:
        """most_behind: bytes that a growing log may be ahead. names: what metrics of other trainers are here."""
        self._files = files
        self._from_end = from_end
        self._clock = clock
        self._wall = wall
        self._most_behind = most_behind
        self._metric_names = names
        self._logs: dict[str, _Log] = {}
        self._restarts = Restarts()
        self._before: dict[str, int] = {}
        self._cut: Begin | None = None
        self._turn = Turn()
        self._pids: frozenset[int] = frozenset()
        self._first = True

    def count_on(self, before: Mapping[str, int]) -> None:
        """Before the first turn: log -> lines that it had before it was replaced or cut."""
        self._before = dict(before)

    def close(self) -> None:
        """Close the files."""
        for log in self._logs.values():
            log.tail.close()

    def turn(self) -> Turn:
        """Read what is new, for a limited time."""
        turn = self._turn = Turn()
        until = self._clock() + TURN_S
        self._find()
        waiting, news = list(self._logs), False
        while waiting:
            goes_on = []
            for name in waiting:
                read = self._piece(name, self._logs[name])
                news = news or read
                if read:
                    goes_on.append(name)
            waiting = goes_on
            if self._clock() > until:
                turn.busy = bool(waiting)
                break
        for name, log in self._logs.items():
            news = self._settle(log) or news
            turn.cells[name] = self._cell(log)
        for text in self._files.without_files:
            turn.cells[text] = _cell(text, "missing")
        turn.left_out = self._files.left_out
        if news:
            turn.facts = self._facts(self._logs, self._cut)
        self._first = False
        return turn

    # ---------------------------------------------------------------- files

    def _find(self) -> None:
        for name, path in self._files.find().items():
            if name not in self._logs:
                self._logs[name] = self._open(name, path)
        self._pids = frozenset(log.pid for log in self._logs.values() if log.pid is not None)

    def _open(self, name: str, path: Path) -> _Log:
        start: Position | None = None
        try:
            info = path.stat()
            size, changed = info.st_size, info.st_mtime
        except OSError:
            size, changed = 0, None
        if self._from_end and self._first and size:
            start = position(path, size)
        worker = _WORKER.match(path.name)
        log = _Log(path, Tail(path, start), self._scan(name), size, last=changed)
        log.pid = int(worker["pid"]) if worker else None
        log.before = log.lines = self._before.get(name, 0)
        return log

    def _scan(self, name: str) -> LogScan:
        def told(fact: Fact, actor: str, pid: int | None) -> None:
            self._told(name, fact, actor, pid)

        return LogScan(name, live=True, facts=told, names=self._metric_names)

    def _piece(self, name: str, log: _Log) -> bool:
        """Read a piece of one log; False where nothing is left of it."""
        behind = log.tail.behind()
        if behind > self._most_behind and log.tail.read_bytes >= log.history:
            log.dropped += log.tail.skip(behind - KEPT_BEHIND)
        read = False
        for start, pieces in log.tail.poll(PIECE):
            if log.tail.restarts != log.restarts:
                log.restarts = log.tail.restarts
                log.before, log.history, log.checked = log.lines, 0, False
            if not log.checked:
                log.checked = True
                log.problem = "it is no text" if is_binary(log.tail.head) else ""
            read = True
            start += log.before
            log.lines = start + len(pieces) - 1
            log.scan.hurry = behind > HURRY
            if not log.problem:
                log.scan.feed(start, pieces)
        if read:
            if log.last is None or log.tail.read_bytes > log.history:
                log.last = self._wall()
            log.quiet = 0
        log.seen = log.seen or read or log.tail.read_bytes > 0
        return read

    def _settle(self, log: _Log) -> bool:
        log.quiet += 1
        return log.scan.settle() if log.quiet == QUIET_TURNS else False

    def _cell(self, log: _Log) -> dict[str, Any]:
        try:
            size, problem = log.path.stat().st_size, log.problem
            state = "unreadable" if problem else "followed"
        except OSError as error:
            size = 0
            state = "gone" if log.seen else "missing"
            problem = "" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        if state == "followed" and not log.seen and size:
            state, problem = "unreadable", "it cannot be opened"
        more = {"behind": log.tail.behind(), "dropped": log.dropped, "restarts": log.restarts, "last": log.last}
        counts = {"lines": log.lines, "before": log.before, "bytes": size}
        return _cell(str(log.path), state) | {"problem": problem} | counts | more

    # ---------------------------------------------------------------- facts

    def _told(self, name: str, fact: Fact, actor: str, pid: int | None) -> None:
        log = self._logs[name]
        if self._twice(name, pid):
            return
        pid = log.pid if pid is None else pid
        if isinstance(fact, LogEvent):
            self._restarts.event(fact)
        elif isinstance(fact, MetricRow) and (begin := self._restarts.row(fact, actor, pid)) is not None:
            self._begin(begin)
        if len(self._turn.news) >= MOST_NEWS:
            self._turn.more += 1
            return
        self._turn.news.append(News(fact, actor, pid, caught_up=log.tail.read_bytes > log.history))

    def _twice(self, name: str, pid: int | None) -> bool:
        """Ray's driver log repeats what a worker wrote whose own output is followed too."""
        return pid is not None and pid in self._pids and self._logs[name].pid is None

    def _begin(self, begin: Begin) -> None:
        """A new attempt: it goes where its first line is, if that is of this turn."""
        before = self._facts(self._logs, self._cut, until=begin)
        self._cut = begin
        at = len(self._turn.news)
        for index, one in enumerate(self._turn.news):
            if isinstance(one, News) and _since(_where(one.fact), _time(one.fact), begin):
                at = index
                break
        self._turn.news.insert(at, Restarted(begin, before))

    def _facts(self, logs: Mapping[str, _Log], cut: Begin | None, until: Begin | None = None) -> Sink:
        whole = Sink()
        for name, log in logs.items():
            one = Sink()
            log.scan.give(one)
            # Nothing was read of it: that it tells of no fault is no evidence that there was none.
            one.logs = [source for source in one.logs if source.lines]
            if log.problem:
                one.problems.append(Problem(Where(name), "log", log.problem, whole=not one.logs))
            pids = self._pids if log.pid is None else frozenset()
            _add(whole, one, lambda where, time, pid: _in(where, time, cut, until), pids)
            if one.logs:
                whole.files.append(name)
        whole.events = in_order(whole.events)
        return whole


def _cell(path: str, state: str) -> dict[str, Any]:
    """`log/<name>` of a log of which nothing was read."""
    counts = dict.fromkeys(("lines", "before", "bytes", "behind", "dropped", "restarts"), 0)
    return {"path": path, "state": state, "problem": "", **counts, "last": None}


def _in(where: Where | None, time: float | None, cut: Begin | None, until: Begin | None) -> bool:
    if cut is not None and not _since(where, time, cut):
        return False
    return until is None or not _since(where, time, until)


def _since(where: Where | None, time: float | None, begin: Begin) -> bool:
    """The fact is of the attempt that begins there. In another log only its time can say it."""
    if where is not None and where.source == begin.source:
        return (where.line or 0) >= begin.line
    return time is None or begin.time is None or time >= begin.time


def _where(fact: Fact) -> Where | None:
    return fact.where


def _time(fact: Fact) -> float | None:
    return fact.time if isinstance(fact, LogEvent | MetricRow) else None


def _add(
    whole: Sink,
    one: Sink,
    wanted: Callable[[Where | None, float | None, int | None], bool],
    twice: frozenset[int],
) -> None:
    """Put into `whole` what of one log is wanted."""
    whole.events += [e for e in one.events if e.pid not in twice and wanted(e.where, e.time, e.pid)]
    whole.metrics += [r for r in one.metrics if not _of(r.where, twice) and wanted(r.where, r.time, None)]
    whole.phases += [p for p in one.phases if not _of(p.where, twice) and wanted(p.where, p.time, None)]
    whole.lines += [t for t in one.lines if not _of(t.where, twice) and wanted(t.where, t.time, None)]
    whole.samples += [s for s in one.samples if not _of(s.where, twice) and wanted(s.where, None, None)]
    whole.args += [a for a in one.args if wanted(a.where, None, None)]
    whole.logs += one.logs
    whole.problems += one.problems


_PID = re.compile(r"^\S{0,10}\([^()\n]{0,120}?\bpid=(?P<pid>\d{1,10})[,)]")


def _of(where: Where | None, pids: frozenset[int]) -> bool:
    """The line that it comes from is one of these processes, by its prefix."""
    if not pids or where is None:
        return False
    found = _PID.match(where.text)
    return found is not None and int(found["pid"]) in pids


def args_of(facts: Sink) -> Mapping[str, object]:
    """Arguments that the logs printed; the last one of a flag wins."""
    found: dict[str, object] = {}
    for one in facts.args:
        found |= {name: value for name, value in one.flags.items() if value is not None}
    return found


def samples_of(news: Iterable[Printed]) -> list[dict[str, Any]]:
    """Printed samples as a record of samples has them."""
    return [{**one.fields(), "index": index} for index, one in enumerate(news)]


__all__ = ["READ", "LogReader", "News", "Restarted", "Turn", "args_of", "samples_of"]
