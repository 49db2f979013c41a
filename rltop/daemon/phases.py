"""The phase clock: what each source is doing, since when, and how long that usually takes. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

KEEP = 101
"""Durations kept per phase for the median."""
MAX_OPEN = 256
MAX_NAMES = 256
MEDIAN_FROM = 3
"""Durations needed before a median is shown."""
SLOW_FROM = 5
SLOW_FACTOR = 2.0
SLOW_SLACK_S = 1.0
"""A phase took longer than usual when it took over twice the median and a second more, after five of its kind."""


@dataclass(frozen=True, slots=True)
class _Open:
    source: str
    name: str
    rollout_id: int | None
    since: float
    mono: float


class PhaseClock:
    """Open phases of all sources (they nest) and the durations of the finished ones."""

    __slots__ = ("_durations", "_open")

    def __init__(self) -> None:
        self._open: list[_Open] = []
        self._durations: dict[str, deque[float]] = {}

    def enter(self, source: str, name: str, rollout_id: int | None, *, now: float, mono: float) -> None:
        """A phase begins. now: daemon's wall clock; mono: the producer's monotonic clock."""
        self._drop(source, name)  # entered twice: the leave was lost
        self._open.append(_Open(source, name, rollout_id, now, mono))
        del self._open[:-MAX_OPEN]

    def leave(self, source: str, name: str, elapsed_s: float | None, *, mono: float) -> tuple[float | None, bool]:
        """A phase ends. Returns how long it took (s; None when nobody knows) and whether that was unusually long."""
        opened = self._drop(source, name)
        if elapsed_s is None and opened is not None:
            elapsed_s = max(0.0, mono - opened.mono)
        if elapsed_s is None:
            return None, False
        if name not in self._durations and len(self._durations) >= MAX_NAMES:
            return elapsed_s, False
        durations = self._durations.setdefault(name, deque(maxlen=KEEP))
        slow = False
        if len(durations) >= SLOW_FROM:
            usual = median(durations)
            slow = elapsed_s > max(SLOW_FACTOR * usual, usual + SLOW_SLACK_S)
        durations.append(elapsed_s)
        return elapsed_s, slow

    def median_s(self, name: str) -> float | None:
        """Median duration of a phase, None before there are three."""
        durations = self._durations.get(name, ())
        return median(durations) if len(durations) >= MEDIAN_FROM else None

    def forget(self, source: str) -> bool:
        """The source is gone: close what it had open. Returns whether there was anything."""
        before = len(self._open)
        self._open = [phase for phase in self._open if phase.source != source]
        return len(self._open) != before

    def current(self, last: dict[str, Any] | None, now: float) -> dict[str, Any]:
        """Value of the state key `phase`: the phase entered last among the open ones.

        last: the value so far; between two phases its name is "" and `since` the moment when the last one was left.
        """
        if not self._open:
            since = now if last is None or last["name"] else last["since"]
            rollout_id = None if last is None else last["rollout_id"]
            return {"name": "", "rollout_id": rollout_id, "since": since, "median_s": None, "open": []}
        newest = self._open[-1]
        return {
            "name": newest.name,
            "rollout_id": newest.rollout_id,
            "since": newest.since,
            "median_s": self.median_s(newest.name),
            "open": [phase.name for phase in self._open],
        }

    def _drop(self, source: str, name: str) -> _Open | None:
        for index in range(len(self._open) - 1, -1, -1):
            phase = self._open[index]
            if phase.source == source and phase.name == name:
                return self._open.pop(index)
        return None
