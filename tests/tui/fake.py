"""A client without a wire. It does what a test tells it, and time is what the test says."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rltop.errors import RltopError
from rltop.protocol.messages import (
    Accepted,
    DumpPageAnswer,
    DumpPageQuery,
    DumpsAnswer,
    EventsAnswer,
    LinesAnswer,
    Rejected,
    Tick,
)
from rltop.tui.model import Clocks

NOW = 1_760_000_000.0
"""Server time of every scene, 2025-10-09 08:53:20 UTC."""


START = 1000.0
"""Monotonic time at the start of every scene."""


@dataclass(slots=True)
class FakeSeries:
    step: array[float]
    lo: array[float]
    hi: array[float]
    last: array[float]
    nan: array[int]


def series(values: Sequence[float], first: int = 0) -> FakeSeries:
    """One bucket per value, as the daemon answers a short history."""
    finite = [value if math.isfinite(value) else math.nan for value in values]
    steps = array("d", range(first, first + len(values)))
    column = array("f", finite)
    return FakeSeries(steps, column, column, column, array("I", [not math.isfinite(v) for v in values]))


@dataclass(slots=True)
class FakeMirror:
    state: dict[str, Any] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=2000))
    gaps: list[tuple[int, int]] = field(default_factory=list)
    tick: Tick | None = None
    server_time: float = 0.0
    run: str = "night-shift"
    epoch: str = "e1"
    role: str = "view"
    dirty: set[str] = field(default_factory=set)

    def take_dirty(self) -> set[str]:
        dirty, self.dirty = self.dirty, set()
        return dirty


class FakeClient:
    """Does what a test tells it. `now` is the monotonic clock of everybody."""

    def __init__(self) -> None:
        self.mirror = FakeMirror()
        self.status: Literal["connecting", "live", "lost"] = "connecting"
        self.since = 0.0
        self.problem = ""
        self.now = START
        self.history: dict[str, FakeSeries] = {}
        self.first_event = 1
        self.old_events: list[dict[str, Any]] = []
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        """Commands that were meant: (name, target, args)."""
        self.orders: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        """All commands, dry runs too: (name, target, args, further fields)."""
        self.answer: Accepted | Rejected = Accepted(op="op1")
        self.plan: Accepted | Rejected = Accepted(op="", plan=["nothing was planned by the test"])
        """The answer to dry runs."""
        self.queries: list[tuple[tuple[str, ...], float | None, float | None]] = []
        self.logs: dict[str, LinesAnswer] = {}
        self.opened: list[tuple[str, int]] = []
        """What was asked for with `lines`."""
        self.dump_list = DumpsAnswer(why="no dump lies at /runs/night-shift/dumps")
        self.dump_answer: Callable[[DumpPageQuery], DumpPageAnswer] = lambda query: DumpPageAnswer(query.path)
        """How `dump-page?` is answered."""
        self.dump_queries: list[DumpPageQuery] = []
        self.too_old = False
        """The daemon does not know the queries about dumps."""
        self.busy = False
        """Queries get no answer."""
        self.closed = False
        self.body: Callable[[], Awaitable[object]] = lambda: asyncio.Event().wait()
        """What `run` does."""
        self.after: Callable[[], object] = lambda: None
        """What a scene does once its first picture is on the screen."""
        self._live = asyncio.Event()

    @property
    def clocks(self) -> Clocks:
        """Clocks that stand still until the test moves `now`; stamps in UTC."""
        return Clocks(lambda: self.now, lambda: NOW, stamp)

    @property
    def server_now(self) -> float:
        """The daemon's wall clock."""
        return NOW + self.now - START

    # ---- what a test does

    def put(self, key: str, value: Any) -> None:
        self.mirror.state[key] = value
        self.mirror.dirty.add(key)

    def metric(self, name: str, step: int, value: float, nan: int = 0) -> None:
        self.put(
            f"metric/{name}",
            {"step": step, "value": value, "t": NOW, "axis": "rollout", "rollout_id": step, "nan": nan},
        )

    def event(self, text: str, *, level: str = "info", kind: str = "log", **more: Any) -> None:
        seq = self.mirror.events[-1]["eseq"] + 1 if self.mirror.events else self.first_event
        self.mirror.events.append(
            {
                "eseq": seq,
                "t": NOW - 300 + seq,
                "kind": kind,
                "level": level,
                "text": text,
                "source": "trainer/0",
                **more,
            }
        )

    def connect(self, *, ages: dict[str, float] | None = None, viewers: int = 1) -> None:
        self.status, self.since, self.problem = "live", self.now, ""
        self.mirror.tick = Tick(time=NOW, lag_ms=1.0, ages=ages or {"trainer/0": 0.2}, viewers=viewers)
        self.mirror.server_time = NOW
        self._live.set()

    def lose(self, problem: str = "connection refused") -> None:
        self.status, self.problem = "lost", problem
        self._live.clear()

    # ---- what the dashboard calls

    async def run(self) -> None:
        await self.body()

    async def wait_live(self, timeout: float) -> None:  # noqa: ASYNC109 - the client's interface
        await asyncio.wait_for(self._live.wait(), timeout)

    async def series(
        self, keys: Sequence[str], lo: float | None = None, hi: float | None = None, buckets: int = 200
    ) -> dict[str, FakeSeries]:
        self.queries.append((tuple(keys), lo, hi))
        if self.busy:
            raise TimeoutError
        return {key: self.history[key] for key in keys if key in self.history}

    async def events(self, **query: Any) -> EventsAnswer:
        hi = query.get("hi")
        found = [event for event in self.old_events if hi is None or event["eseq"] <= hi]
        return EventsAnswer(found[-query.get("limit", 200) :])

    async def lines(self, source: str, line: int, **query: Any) -> LinesAnswer:
        self.opened.append((source, line))
        if self.busy:
            raise RltopError("no answer to 'lines?' in 10 s")
        return self.logs.get(source, LinesAnswer(source, why="it is neither a log that this run's daemon follows"))

    async def dumps(self) -> DumpsAnswer:
        self._refuse()
        return self.dump_list

    async def dump_page(self, query: DumpPageQuery) -> DumpPageAnswer:
        self._refuse()
        self.dump_queries.append(query)
        return self.dump_answer(query)

    def _refuse(self) -> None:
        if self.busy:
            raise RltopError("no answer to 'dumps?' in 10 s", exit_code=1)
        if self.too_old:
            raise RltopError("the daemon refused: unknown message type 'dumps?'", why="unsupported", exit_code=1)

    async def command(
        self, name: str, target: str = "", args: dict[str, Any] | None = None, **kw: Any
    ) -> Accepted | Rejected:
        self.orders.append((name, target, args or {}, kw))
        if self.busy:
            raise RltopError("no answer to 'cmd' in 10 s")
        if kw.get("dry_run"):
            return self.plan
        self.sent.append((name, target, args or {}))
        return self.answer

    async def close(self) -> None:
        self.closed = True


def stamp(when: float) -> str:
    """`HH:MM:SS` in UTC."""
    seconds = int(when) % 86400
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
