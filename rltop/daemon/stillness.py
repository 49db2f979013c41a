"""For how long nothing of the run has moved, as far as the daemon was there to see it. Pure.

Only the daemon's own clock counts: logs and other machines may have others. Time in which the daemon itself stood still
(stopped, a suspended machine) is left out, because what came meanwhile is still to be read; so is time in which the run
is not going on.
"""

from __future__ import annotations

MOST_STEP_S = 5.0
"""Longest time between two ticks (one a second) that counts: the daemon stood still for the rest of it."""


class Stillness:
    """A stopwatch that `moved` sets back. Times are seconds of any one clock."""

    __slots__ = ("_last", "_still")

    def __init__(self) -> None:
        self._last: float | None = None
        self._still = 0.0

    def moved(self) -> None:
        """Something moved just now."""
        self._still = 0.0

    def tick(self, now: float, *, going: bool) -> None:
        """Time goes on; `going`: so does the run. At its end the stopwatch stays where it is."""
        if going and self._last is not None:
            self._still += min(max(now - self._last, 0.0), MOST_STEP_S)
        self._last = now if going else None

    @property
    def seconds(self) -> float:
        """So long nothing has moved."""
        return self._still
