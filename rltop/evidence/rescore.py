"""What a second scoring of a dump's samples changed: means, counts by status, groups, the largest changes.

Pure arithmetic; numbers only are kept per sample (26 bytes), so that a dump of a million samples fits.

A group whose rewards are all equal has no spread: GRPO's advantages are 0 there and the group teaches nothing.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

SAME = 1e-9
"""Rewards that are closer are equal: a reward that was float32 once is not exactly what it was."""
_NONE = math.nan


@dataclass(frozen=True, slots=True)
class Change:
    """One sample, before and after. None: it had no reward."""

    rollout_id: int | None
    at: int
    """Position in its dump."""
    index: int | None
    group_index: int | None
    status: str
    before: float | None
    after: float | None
    prompt: str = ""
    response: str = ""

    @property
    def size(self) -> float:
        """How far the reward moved; infinite where it appeared, vanished or is NaN on one side only."""
        if self.before is None or self.after is None:
            return 0.0 if self.before is self.after else math.inf
        if math.isnan(self.before) or math.isnan(self.after):
            return 0.0 if math.isnan(self.before) and math.isnan(self.after) else math.inf
        return abs(self.after - self.before)


@dataclass(slots=True)
class Side:
    """Sum and count of the rewards of one side."""

    total: float = 0.0
    count: int = 0
    """Finite rewards."""
    odd: int = 0
    """NaN and infinite ones, which no mean has."""

    def add(self, value: float | None) -> None:
        """One reward; None is none."""
        if value is None:
            return
        if math.isfinite(value):
            self.total += value
            self.count += 1
        else:
            self.odd += 1

    @property
    def mean(self) -> float | None:
        """None without a reward."""
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class Row:
    """All samples, or those of one status."""

    samples: int = 0
    changed: int = 0
    up: int = 0
    down: int = 0
    before: Side = field(default_factory=Side)
    after: Side = field(default_factory=Side)

    def add(self, one: Change, changed: bool) -> None:
        """One sample that was scored."""
        self.samples += 1
        self.changed += changed
        if changed and one.before is not None and one.after is not None:
            self.up += one.after > one.before
            self.down += one.after < one.before
        self.before.add(one.before)
        self.after.add(one.after)


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of at least two scored samples."""

    count: int
    spread_before: int
    """With at least two different rewards."""
    spread_after: int
    lost: int
    """Had a spread, and have none now."""
    gained: int
    examples: tuple[tuple[str, int | None, int], ...]
    """(what happened, rollout id, group index) of the first that changed."""


class Rescore:
    """Collects samples as they are scored. Not for several threads at once."""

    def __init__(self, *, largest: int = 20) -> None:
        """largest: how many of the largest changes are kept."""
        self.total = Row()
        self.by_status: dict[str, Row] = {}
        self._largest = largest
        self._heap: list[tuple[float, int, Change]] = []
        self._rollouts: array[int] = array("q")
        self._groups: array[int] = array("q")
        self._before, self._after = array("d"), array("d")

    def add(self, one: Change) -> None:
        """One sample that was scored."""
        changed = one.size > SAME
        self.total.add(one, changed)
        self.by_status.setdefault(one.status or "-", Row()).add(one, changed)
        if changed and self._largest:
            # Of equal changes the first in the dump stays.
            entry = (one.size, -self.total.samples, one)
            if len(self._heap) < self._largest:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heappushpop(self._heap, entry)
        if one.group_index is not None:
            self._rollouts.append(-1 if one.rollout_id is None else one.rollout_id)
            self._groups.append(one.group_index)
            self._before.append(_NONE if one.before is None else one.before)
            self._after.append(_NONE if one.after is None else one.after)

    @property
    def largest(self) -> list[Change]:
        """The largest changes, largest first."""
        return [one for _, _, one in sorted(self._heap, key=lambda entry: (-entry[0], -entry[1]))]

    def groups(self, *, examples: int = 8) -> Groups:
        """Which groups got or lost a spread."""
        count = before = after = lost = gained = 0
        shown: list[tuple[str, int | None, int]] = []
        for rollout, group, rows in self._by_group():
            if len(rows) < 2:
                continue
            had, has = (_spreads(side, rows) for side in (self._before, self._after))
            count, before, after = count + 1, before + had, after + has
            lost, gained = lost + (had and not has), gained + (has and not had)
            if had != has and len(shown) < examples:
                shown.append(("lost" if had else "gained", None if rollout == -1 else rollout, group))
        return Groups(count, before, after, lost, gained, tuple(shown))

    def _by_group(self) -> Iterator[tuple[int, int, list[int]]]:
        found: dict[tuple[int, int], list[int]] = {}
        for row, key in enumerate(zip(self._rollouts, self._groups, strict=True)):
            found.setdefault(key, []).append(row)
        for (rollout, group), rows in found.items():
            yield rollout, group, rows


def _spreads(values: array[float], rows: list[int]) -> bool:
    finite = [values[row] for row in rows if math.isfinite(values[row])]
    return bool(finite) and max(finite) - min(finite) > SAME
