"""The older part of a long series: some points each, of which a cell keeps what a plot needs.

Cells are sorted, do not overlap, and are 44 bytes each. The first `SINGLE` ones hold one point each and stay so.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import inf, isfinite, nan

SINGLE = 64


def _doubles() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Cells:
    """Columns of equal length, one entry a cell."""

    first: array[float] = field(default_factory=_doubles)
    """First step."""
    step: array[float] = field(default_factory=_doubles)
    """Last step."""
    lo: array[float] = field(default_factory=_doubles)
    """Least finite value; inf when there is none."""
    hi: array[float] = field(default_factory=_doubles)
    """Greatest finite value; -inf when there is none."""
    last: array[float] = field(default_factory=_doubles)
    """Last finite value; NaN when there is none."""
    bad: array[int] = field(default_factory=lambda: array("I"))
    """Count of NaN and Inf."""
    width: int = 1
    """Points that a new cell takes."""

    def __len__(self) -> int:
        return len(self.step)

    def take(self, steps: array[float], values: array[float]) -> None:
        """Make cells of points that follow on the newest cell, sorted by step."""
        single = max(0, min(SINGLE - len(self), len(steps)))
        for start in range(single):
            self._add(steps[start : start + 1], values[start : start + 1])
        for start in range(single, len(steps), self.width):
            stop = min(start + self.width, len(steps))
            self._add(steps[start:stop], values[start:stop])

    def shrink(self, most: int) -> None:
        """Make one cell of two neighbours until there are at most `most` (more than twice `SINGLE`)."""
        while len(self) > most:
            self.width *= 2
            begin, end = SINGLE, len(self) - (len(self) - SINGLE) % 2
            even, odd = slice(begin, end, 2), slice(begin + 1, end, 2)
            last = [new if isfinite(new) else old for old, new in zip(self.last[even], self.last[odd], strict=True)]
            merged = (
                (self.first, self.first[even]),
                (self.step, self.step[odd]),
                (self.lo, array("d", map(min, self.lo[even], self.lo[odd]))),
                (self.hi, array("d", map(max, self.hi[even], self.hi[odd]))),
                (self.last, array("d", last)),
            )
            for column, pairs in merged:
                column[begin:end] = pairs
            self.bad[begin:end] = array(
                "I", [one + two for one, two in zip(self.bad[even], self.bad[odd], strict=True)]
            )

    def put(self, step: float, value: float) -> None:
        """A late point, at or before the last step of the newest cell."""
        index = bisect_left(self.step, step)
        good = isfinite(value)
        if self.first[index] == step == self.step[index]:  # a single one: replaced
            self.lo[index], self.hi[index], self.last[index] = (value, value, value) if good else (inf, -inf, nan)
            self.bad[index] = 0 if good else 1
            return
        self.first[index] = min(self.first[index], step)
        if good:
            self.lo[index], self.hi[index] = min(self.lo[index], value), max(self.hi[index], value)
            if step == self.step[index] or not isfinite(self.last[index]):
                self.last[index] = value
        else:
            self.bad[index] += 1

    def cut(self, step: float) -> bool:
        """Drop every cell that reaches `step`; whether there was one."""
        index = bisect_left(self.step, step)
        if index == len(self):
            return False
        for column in (self.first, self.step, self.lo, self.hi, self.last):
            del column[index:]
        del self.bad[index:]
        return True

    def between(self, lo: float | None, hi: float | None) -> tuple[int, int]:
        """Range of the cells that have to do with lo <= step <= hi (None: open)."""
        start = 0 if lo is None else bisect_left(self.step, lo)
        stop = len(self) if hi is None else bisect_right(self.first, hi)
        return start, max(start, stop)

    def span(self, start: int, stop: int) -> tuple[float, float, int, float]:
        """(min, max, count of non-finite, last finite) of cells [start, stop), at least one."""
        last = next((self.last[i] for i in range(stop - 1, start - 1, -1) if isfinite(self.last[i])), nan)
        return min(self.lo[start:stop]), max(self.hi[start:stop]), sum(self.bad[start:stop]), last

    def _add(self, steps: array[float], values: array[float]) -> None:
        finite = [value for value in values if isfinite(value)]
        self.first.append(steps[0])
        self.step.append(steps[-1])
        self.lo.append(min(finite, default=inf))
        self.hi.append(max(finite, default=-inf))
        self.last.append(finite[-1] if finite else nan)
        self.bad.append(len(values) - len(finite))
