"""State, events, series and journal behind one door, so that whatever is shown is also written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rltop.daemon.events import Event, EventRing
from rltop.daemon.series import SeriesStore
from rltop.daemon.state import StateTable


class Sink(Protocol):
    """What the daemon tells its journal; `rltop.daemon.journal.Journal` writes it to disk."""

    def event(self, event: Event) -> None:
        """An event was added to the ring."""

    def state(self, t: float, key: str, value: Any) -> None:
        """A state key has a new value; None: it is gone."""

    def verdict(self, t: float, verdict: dict[str, Any], was: str | None) -> None:
        """A verdict changed its status."""

    def operation(self, row: dict[str, Any]) -> None:
        """An operation began or changed."""

    def point(self, key: str, step: float, value: float, t: float | None = None) -> None:
        """A series got a point. t: wall clock when it came; None: not known."""

    def cut(self, key: str, step: float) -> None:
        """A series starts again from an earlier step."""

    def record(self, t: float, kind: str, source: str, payload: Any) -> None:
        """A record that is kept whole."""

    def client(self, t: float, what: str, role: str, who: str, client: str) -> None:
        """A client came or went."""


class Core:
    """The daemon's memory. Everything that changes it goes through here.

    now: wall clock, seconds. changed: called after every change that a viewer should see.
    """

    def __init__(self, sink: Sink, *, now: Callable[[], float], changed: Callable[[], None] = lambda: None) -> None:
        self.table = StateTable()
        self.ring = EventRing()
        self.series = SeriesStore()
        self.sink = sink
        self.now = now
        self.changed = changed

    def set(self, key: str, value: Any) -> bool:
        """Set a state key (None removes it); returns whether that changed anything."""
        changed = self.table.remove(key) if value is None else self.table.set(key, value)
        if changed:
            self.sink.state(self.now(), key, value)
            self.changed()
        return changed

    def update(self, key: str, **fields: Any) -> bool:
        """Change some fields of a map-valued key."""
        return self.set(key, {**(self.table.get(key) or {}), **fields})

    def event(self, kind: str, level: str, text: str, source: str = "", **more: Any) -> Event:
        """Append an event."""
        event = self.ring.add(self.now(), kind, level, text, source, **more)
        self.sink.event(event)
        self.changed()
        return event

    def point(self, key: str, step: float, value: float, t: float | None = None) -> bool:
        """Append a point to a series; False when there are too many series already. t: wall clock when it came; None:
        not known."""
        if self.series.full(key):
            return False
        if self.series.append(key, step, value):
            self.sink.cut(key, step)
        self.sink.point(key, step, value, t)
        return True


MAX_STRING = 8000
MAX_ITEMS = 1024
MAX_KEYS = 2000
MAX_DEPTH = 6


def trim(value: Any, depth: int = MAX_DEPTH) -> Any:
    """`value` small enough for a snapshot: long strings and lists are cut (and say so), deep nests become text.

    Tuples become lists; anything but plain data becomes its `str`.
    """
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            if len(value) <= MAX_STRING:
                return value
            return value[:MAX_STRING] + f" … ({len(value) - MAX_STRING} more characters)"
        case dict() if depth > 0:
            kept = list(value.items())[:MAX_KEYS]
            return {str(key): trim(item, depth - 1) for key, item in kept}
        case list() | tuple() if depth > 0:
            return [trim(item, depth - 1) for item in value[:MAX_ITEMS]]
        case _:
            return trim(str(value), 0)
