"""A core whose journal is a list and whose clock is turned by the test."""

from __future__ import annotations

from typing import Any

from rltop.daemon.core import Core
from rltop.protocol.messages import Record, Source


class Written:
    """A sink that remembers what it was told: `rows` of (what, arguments)."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, tuple[Any, ...]]] = []

    def told(self, what: str) -> list[tuple[Any, ...]]:
        """Arguments of every call of one kind."""
        return [arguments for kind, arguments in self.rows if kind == what]

    def event(self, event: dict[str, Any]) -> None:
        self.rows.append(("event", (event,)))

    def state(self, t: float, key: str, value: Any) -> None:
        self.rows.append(("state", (t, key, value)))

    def verdict(self, t: float, verdict: dict[str, Any], was: str | None) -> None:
        self.rows.append(("verdict", (t, verdict, was)))

    def operation(self, row: dict[str, Any]) -> None:
        self.rows.append(("operation", (row,)))

    def point(self, key: str, step: float, value: float, t: float | None = None) -> None:
        self.rows.append(("point", (key, step, value)))
        self.rows.append(("point time", (key, step, t)))

    def cut(self, key: str, step: float) -> None:
        self.rows.append(("cut", (key, step)))

    def record(self, t: float, kind: str, source: str, payload: Any) -> None:
        self.rows.append(("record", (t, kind, source, payload)))

    def client(self, t: float, what: str, role: str, who: str, client: str) -> None:
        self.rows.append(("client", (t, what, role, who, client)))


class FakeCore(Core):
    """A core over `Written`; `time` is what the clock says."""

    def __init__(self) -> None:
        self.written = Written()
        self.time = 1000.0
        super().__init__(self.written, now=lambda: self.time)

    def texts(self, kind: str = "") -> list[str]:
        """Texts of the events of a kind (all by default), oldest first."""
        return [e["text"] for e in self.ring.newest(len(self.ring)) if not kind or e["kind"] == kind]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind, oldest first."""
        return [e for e in self.ring.newest(len(self.ring)) if e["kind"] == kind]


class Trainer:
    """Makes records of one process, numbered as a producer does."""

    def __init__(self, *, role: str = "trainer", rank: int = 0, host: str = "here", pid: int = 7) -> None:
        self.source = Source(role, rank, host, pid)
        self.seq = 0
        self.mono = 0.0

    def record(self, kind: str, payload: dict[str, Any], *, skip: int = 0, dropped: int = 0) -> Record:
        """The next record; `skip` of them were lost before it."""
        self.seq += 1 + skip
        return Record("r", self.source, self.seq, self.mono, 0.0, kind, payload, dropped)

    def metrics(self, step: int, values: dict[str, Any], **more: Any) -> Record:
        """A metrics record."""
        return self.record("metrics", {"values": values, "step": step, **more})
