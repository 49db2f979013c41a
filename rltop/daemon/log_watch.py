"""Follows the logs of the run, so that the rules over log lines see a live run too.

The trainer's output (`trainer.log`, from where this attempt began) and the log that each engine names, if it lies on
this host. Reading and recognising happens in a thread, a bounded piece a second; a log that grows faster is read late.
Only what was not streamed is taken from a log: its events, and metrics where nobody sends any.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rltop.checks.found import LogEvent, LogSource
from rltop.checks.observe import MetricRow
from rltop.daemon.state import StateTable
from rltop.evidence.collect import in_order
from rltop.evidence.logs import LogScan
from rltop.evidence.metric_names import Names
from rltop.evidence.sink import Sink
from rltop.evidence.tail import Position, Tail

EVERY_S = 1.0
BYTES = 4 << 20
"""Of one log and one turn."""
QUIET_POLLS = 3
"""Then a traceback at the end of a log is taken to be over: who hangs behind it writes no next line."""
MOST_LOGS = 256
MOST_EVENTS = 8_000
KEPT_FIRST = 16
KEPT_NEWEST = 48
"""Of the logs that were followed and are not wanted any more."""


@dataclass(frozen=True, slots=True)
class Logs:
    """What all logs have said so far, in the order of time."""

    events: tuple[LogEvent, ...] = ()
    sources: tuple[LogSource, ...] = ()
    rows: tuple[MetricRow, ...] = ()
    facts: Sink | None = None
    """Of a run of which nothing but its logs tells: everything that they say."""


@dataclass(slots=True)
class _Followed:
    tail: Tail
    scan: LogScan
    restarts: int = 0
    lines: int = 0
    """Number of the newest line that was read."""
    before: int = 0
    """Lines of the files that were there before this one was rotated in, or cut: what they said stays."""
    quiet: int = 0
    """Polls in a row without a new line."""


class LogWatch:
    """Follows any number of logs. `paths` says which: name -> (path, byte from which on it is this run's).

    names: what metrics of other trainers are here; default the table that comes with rltop.
    """

    def __init__(self, paths: Callable[[], Mapping[str, tuple[Path, int]]], *, names: Names | None = None) -> None:
        self._paths = paths
        self._names = names
        self._followed: dict[str, _Followed] = {}

    async def run(self, changed: Callable[[Logs], None]) -> None:
        """Follow until cancelled; `changed` is told, in this loop, whenever there were new lines."""
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                wanted = self._paths()
                if (found := await asyncio.to_thread(self.poll, wanted)) is not None:
                    changed(found)
        finally:
            self.close()

    def close(self) -> None:
        """Close the files."""
        for followed in self._followed.values():
            followed.tail.close()

    def before(self) -> dict[str, int]:
        """Log -> lines of the files that were there before the one that is there: numbers of lines go on."""
        return {name: followed.before for name, followed in list(self._followed.items()) if followed.before}

    def poll(self, wanted: Mapping[str, tuple[Path, int]]) -> Logs | None:
        """Read what is new; None when nothing is."""
        news = self._retire(wanted)
        for name, (path, start) in list(wanted.items())[:MOST_LOGS]:
            followed = self._followed.get(name)
            if followed is None:
                followed = self._followed[name] = _Followed(Tail(path, position(path, start)), self._scan(name))
            news = self._read(name, followed) or news
        return self._all() if news else None

    def _retire(self, wanted: Mapping[str, tuple[Path, int]]) -> bool:
        """Forget the oldest of the logs that nobody writes any more: an engine that crashes again and again leaves one
        for each of its processes. The first ones stay: there stands the first fault."""
        over = [name for name in self._followed if name not in wanted]
        gone = over[KEPT_FIRST : len(over) - KEPT_NEWEST] if len(over) > KEPT_FIRST + KEPT_NEWEST else []
        for name in gone:
            self._followed.pop(name).tail.close()
        return bool(gone)

    def _read(self, name: str, followed: _Followed) -> bool:
        news = False
        for start, pieces in followed.tail.poll(BYTES):
            if followed.tail.restarts != followed.restarts:
                followed.restarts = followed.tail.restarts
                followed.before = followed.lines
            start += followed.before
            followed.lines = start + len(pieces) - 1
            followed.scan.feed(start, pieces)
            news = True
        followed.quiet = 0 if news else followed.quiet + 1
        return followed.scan.settle() if followed.quiet == QUIET_POLLS else news

    def _scan(self, name: str) -> LogScan:
        return LogScan(name, live=True, names=self._names)

    def _all(self) -> Logs:
        events: list[LogEvent] = []
        sources: list[LogSource] = []
        rows: list[MetricRow] = []
        for followed in self._followed.values():
            found, source, metrics = followed.scan.so_far()
            events += found[-MOST_EVENTS:]
            sources.append(source)
            rows += metrics
        return Logs(tuple(in_order(events)), tuple(sources), tuple(rows))


def log_paths(table: StateTable, run_dir: Path) -> dict[str, tuple[Path, int]]:
    """Logs of this attempt that lie on this host: name -> (path, byte from which on it is this attempt's). Names are
    relative to the run directory where they lie in it."""
    found: dict[str, tuple[Path, int]] = {}
    trainer = table.get("trainer")
    if trainer and trainer.get("log"):
        found["trainer.log"] = (Path(trainer["log"]), int(trainer.get("log_from") or 0))
    here = socket.gethostname()
    for key in table.keys("engine/"):
        engine = table.get(key) or {}
        # What an engine on trial dies of is what the trial is for, and no fault of the run.
        if engine.get("log") and engine.get("host") in ("", here) and not engine.get("reserved"):
            path = Path(engine["log"])
            inside = path.is_relative_to(run_dir)
            found[str(path.relative_to(run_dir) if inside else path)] = (path, 0)
    return found


def position(path: Path, start: int) -> Position | None:
    """A position at byte `start` of a file that is there; None for its beginning, or a file that is not there yet.

    Line numbers count from the start of the file, so that they are those of an editor.
    """
    if start <= 0:
        return None
    try:
        with path.open("rb") as file:
            info = path.stat()
            if info.st_size < start:
                return None
            line, left = 1, start
            while left > 0 and (data := file.read(min(left, 1 << 20))):
                line += data.count(b"\n")
                left -= len(data)
    except OSError:
        return None
    return Position(info.st_dev, info.st_ino, start, line, b"")
