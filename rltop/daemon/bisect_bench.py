"""What the workers of one bisection share: its record, its engines, its traffic, and which trial is under traffic now.

Exposure is counted here: a trial's minutes go on only between `begin` and `rest`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rltop.bisect.trials import Running
from rltop.daemon.bisect_model import Model
from rltop.daemon.bisect_record import Record, Records, TrialRow
from rltop.engines.traffic import Cycle, Replay
from rltop.engines.trials import Trials
from rltop.errors import RltopError

Tell = Callable[..., None]
"""Level, text, further fields of a journal event."""


class Traffic(Protocol):
    """What is replayed (`rltop.engines.traffic.Traffic`)."""

    def replay(self, seed: int, cycle: Cycle | None = None) -> Replay: ...


@dataclass(slots=True)
class _Live:
    """A trial under traffic."""

    row: TrialRow
    base: float
    """Minutes before this stretch."""
    since: float
    replay: Replay
    requests: int
    """Answered before this replay."""
    failed: int
    tokens: int


@dataclass(kw_only=True, slots=True)
class Bench:
    """What the workers of one bisection share."""

    record: Record
    model: Model
    trials: Trials
    records: Records
    traffic: Traffic
    tell: Tell
    clock: Callable[[], float]
    wall: Callable[[], float]
    beat_s: float
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Not paused."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Something is another than before."""
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it was asked whether there is a verdict: nothing is begun that a trial's end made needless."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One choice at a time: each takes into account what the others do."""
    live: dict[str, _Live] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    """Engine -> trials in a row without evidence."""
    aside: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    """Engine -> the arm that it could not start, and why, until it is known whose fault that is."""
    saved: float = 0.0
    unwritten: str = ""
    """Why the record is not on disk as it is here; "": it is."""

    @property
    def name(self) -> str:
        """What it is called where it stands in another's way."""
        return f"bisection {self.record.id}"

    @property
    def scale(self) -> float:
        """Exposure minutes per second."""
        return self.record.time_scale / 60

    def save(self) -> bool:
        """Write down what happened. False: that cannot be (a full disk); it goes on in memory, and is tried again.

        Said when it begins and when it is over, however often it is tried meanwhile.
        """
        self.saved = self.clock()
        try:
            self.records.write(self.record)
        except RltopError as error:
            if not self.unwritten:
                told = "goes on in memory: what happens until there is room is lost if this daemon dies"
                self.say("error", f"{sentence(error)}; it {told}")
            self.unwritten = sentence(error)
            return False
        if self.unwritten:
            self.unwritten = ""
            self.say("info", "its record is written down again, nothing is lost")
        return True

    def say(self, level: str, text: str, **more: Any) -> None:
        """A line in the journal."""
        self.tell(level, f"{self.name}: {text}", bisection=self.record.id, **more)

    def count(self, row: TrialRow) -> None:
        """Bring the exposure of a trial up to now."""
        live = self.live.get(row.engine)
        if live is not None and live.row is row:
            seen = self.trials.sight(row.engine, row.generation)
            # One that is writing its last words is under no traffic any more.
            until = self.clock() if seen.where == "ready" else min(self.clock(), max(seen.since, live.since))
            row.minutes = live.base + (until - live.since) * self.scale
            counts = live.replay.counts()
            row.requests, row.failed = live.requests + counts.done, live.failed + counts.failed
            row.tokens = live.tokens + counts.tokens

    def begin(self, row: TrialRow, replay: Replay) -> None:
        """From now on its engine is under traffic."""
        counts = row.requests, row.failed, row.tokens
        self.live[row.engine] = _Live(row, row.minutes, self.clock(), replay, *counts)

    def rest(self, row: TrialRow) -> None:
        """No traffic any more, for now: what follows is no exposure."""
        self.count(row)
        self.live.pop(row.engine, None)

    def running(self) -> list[Running]:
        """Trials under way, by now."""
        for live in self.live.values():
            self.count(live.row)
        return self.model.running()


async def first(work: Any, other: asyncio.Future[Any]) -> None:
    """Until one of them is done; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, other], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()


async def within(work: Any, limit_s: float) -> None:
    """Until it is done, at most so long; it is cancelled then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        task.cancel()


def sentence(error: RltopError) -> str:
    """Where, what and why."""
    head = f"{error.where}: {error.what}" if error.where else error.what
    return f"{head}: {error.why}" if error.why else head
