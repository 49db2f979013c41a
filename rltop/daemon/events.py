"""The event log in memory: a ring with a sequence of its own. Never conflated; what fell off is named, not hidden."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

RING_SIZE = 5000
MAX_TEXT = 4000
"""Characters kept of one event's text."""

Event = dict[str, Any]
"""`{eseq, t, kind, level, text, source}` and more keys by kind, as in docs/protocol.md section 5."""


class EventRing:
    """The newest `size` events. `head` is the sequence of the newest event, 0 before the first."""

    __slots__ = ("_ring", "head")

    def __init__(self, size: int = RING_SIZE) -> None:
        self._ring: deque[Event] = deque(maxlen=size)
        self.head = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def first(self) -> int:
        """Sequence of the oldest event in the ring; head + 1 when it is empty."""
        return int(self._ring[0]["eseq"]) if self._ring else self.head + 1

    def add(self, t: float, kind: str, level: str, text: str, source: str = "", **more: Any) -> Event:
        """Append an event; `t` is the daemon's wall clock. Returns it with its sequence."""
        self.head += 1
        if len(text) > MAX_TEXT:
            text = text[:MAX_TEXT] + f" … ({len(text) - MAX_TEXT} more characters)"
        event = {"eseq": self.head, "t": t, "kind": kind, "level": level, "text": text, "source": source, **more}
        self._ring.append(event)
        return event

    def restore(self, events: Iterable[Event], head: int) -> None:
        """Fill an empty ring with older events, oldest first; the next event gets `head` + 1."""
        self._ring.extend(events)
        self.head = head

    def newest(self, count: int) -> list[Event]:
        """The newest `count` events, oldest first."""
        return [self._ring[i] for i in range(max(0, len(self._ring) - count), len(self._ring))]

    def after(self, eseq: int, limit: int) -> tuple[list[Event], tuple[int, int] | None]:
        """At most `limit` events after `eseq`, oldest first, and the range (inclusive) that fell off before them."""
        if eseq >= self.head:
            return [], None
        first = self.first
        gap = (eseq + 1, first - 1) if eseq + 1 < first else None
        wanted = self.head - max(eseq, first - 1)
        if wanted * 2 < len(self._ring):
            # The usual case is "the last few": a deque is slow in its middle, quick at its ends.
            found = [self._ring[-back] for back in range(wanted, max(0, wanted - limit), -1)]
        else:
            found = [event for event in self._ring if event["eseq"] > eseq][:limit]
        return found, gap
