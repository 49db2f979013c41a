"""The event log in memory: a ring with a sequence of its own. Never conflated; what fell off is named, not hidden.

With a journal that works the ring is *gated*: an event is added at once but shown to viewers only when `release` says
that it is on disk. So nothing that anybody saw is lost when the daemon is killed. Without one, `open` shows everything.
"""

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
    """The newest `size` events. `head` is the sequence of the newest event, `shown` of the newest one that viewers may
    have; both 0 before the first, and equal unless the ring is gated."""

    __slots__ = ("_ring", "gated", "head", "shown")

    def __init__(self, size: int = RING_SIZE) -> None:
        self._ring: deque[Event] = deque(maxlen=size)
        self.gated = False
        self.head = self.shown = 0

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
        if not self.gated:
            self.shown = self.head
        return event

    def release(self, eseq: int) -> bool:
        """Every event up to `eseq` may be shown. Returns whether that is news."""
        if eseq <= self.shown:
            return False
        self.shown = min(eseq, self.head)
        return True

    def open(self) -> None:
        """Show every event, those to come too, until `gated` is set again."""
        self.gated = False
        self.shown = self.head

    def restore(self, events: Iterable[Event], head: int) -> None:
        """Fill an empty ring with older events, oldest first; the next event gets `head` + 1."""
        self._ring.extend(events)
        self.head = self.shown = head

    def newest(self, count: int) -> list[Event]:
        """The newest `count` events that may be shown, oldest first."""
        end = max(0, len(self._ring) - (self.head - self.shown))
        return [self._ring[i] for i in range(max(0, end - count), end)]

    def after(self, eseq: int, limit: int) -> tuple[list[Event], tuple[int, int] | None]:
        """At most `limit` shown events after `eseq`, oldest first, and the range (inclusive) that fell off before."""
        if eseq >= self.shown:
            return [], None
        first = self.first
        gap = (eseq + 1, min(first - 1, self.shown)) if eseq + 1 < first else None
        wanted = self.head - max(eseq, first - 1)
        take = max(0, min(limit, wanted - (self.head - self.shown)))
        if wanted * 2 < len(self._ring):
            # The usual case is "the last few": a deque is slow in its middle, quick at its ends.
            found = [self._ring[-back] for back in range(wanted, wanted - take, -1)]
        else:
            found = [event for event in self._ring if event["eseq"] > eseq][:take]
        return found, gap
