"""What viewers are shown waits for the journal: an event is published when it is on disk.

So an event that anybody saw is still there after the daemon was killed. The journal commits in groups, some hundred
times a second at most, and the loop never waits for it.

Failure policy: a journal that fails, or that makes no headway for two or three seconds (a hanging disk), must not keep
the news from people: everything is shown at once, the key `daemon` and an event say that it is in memory only, and the
waiting begins again when the journal works again.
"""

from __future__ import annotations

from rltop.daemon.core import Core

STUCK_TICKS = 2
"""Seconds without headway that are enough: a busy machine may well keep a commit waiting for one."""


class Publisher:
    """Opens and closes the gate of the event ring. All methods are called in the daemon's loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._stuck_at = 0
        self._stuck_ticks = 0
        self._working = True

    def begin(self) -> None:
        """From now on events wait for the journal."""
        self._core.ring.gated = True

    def written(self, eseq: int) -> None:
        """The journal holds every event up to `eseq`."""
        ring = self._core.ring
        if ring.release(eseq):
            self._core.changed()
        if self._working and not ring.gated and eseq >= ring.head:
            ring.gated = True
            self._core.update("daemon", journal="ok")
            self._core.event("log", "info", "the journal keeps up again", "journal")

    def problem(self, level: str, text: str) -> None:
        """The journal has something to say."""
        self._core.event("log", level, text, "journal")
        if level == "error":
            self._core.update("daemon", journal=text)

    def working(self, works: bool) -> None:
        """Writing begins to fail, or works again."""
        self._working = works
        if works:
            self._core.ring.gated = True
            self._core.update("daemon", journal="ok")
        else:
            self._core.ring.open()
            self._core.changed()

    def tick(self) -> None:
        """Once a second: do not wait for a journal that stands still."""
        ring = self._core.ring
        if not ring.gated or ring.shown == ring.head:
            self._stuck_ticks = 0
            return
        self._stuck_ticks = self._stuck_ticks + 1 if self._stuck_ticks and ring.shown == self._stuck_at else 1
        self._stuck_at = ring.shown
        if self._stuck_ticks > STUCK_TICKS:
            self._stuck_ticks = 0
            waiting = ring.head - ring.shown
            text = f"the journal hangs: {waiting} events are shown that are not on disk; the daemon goes on in memory"
            ring.open()
            self.problem("error", text)
