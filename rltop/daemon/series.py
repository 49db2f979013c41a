"""History of metrics in memory: append points, ask for min / max / last / NaN count per bucket of steps.

A series is two float64 columns sorted by step (16 bytes a point). Over every full block of `BLOCK` points lies a
summary (min and max of the finite values, count of the others), made when it is first asked for; a query touches a
bucket's summaries and at most two partial blocks, so 100,000 points cost about as much as 5,000.

Memory is bounded, whatever the run does: of a long series the older half becomes *cells* (`rltop.daemon.cells`: first
and last step, min, max, last, NaN count of some points), and where those are too many two neighbours become one. The
first points of a series stay single: they are what a run is judged by. A spike survives in `max`, a NaN in `nan`; the
journal keeps every point. All series together take at most some 70 MB.

One step has one value. A point at a step that is already there replaces it and a late one is put in its place
(rollouts of an asynchronous run finish out of order); after `restart` the first point at an earlier step cuts
everything from there on, because the run goes over the same steps again and the old tail would look like its future.
In cells a replaced value stays within their min and max, and a cut takes the whole cell that it goes through.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import inf, isfinite, nan

from rltop.daemon.cells import Cells

BLOCK = 32
MAX_BUCKETS = 10_000
MAX_SERIES = 5_000
"""More names than this is a program that makes up names (a step or an id in them), not a set of metrics."""
MAX_POINTS = 8_192
"""Single points of one series; fewer where there are many series, but never less than `MIN_POINTS`."""
MIN_POINTS = 512
TOTAL_POINTS = 1 << 21
CELLS_PER_POINT = 4
"""A series may have a cell for so many points of its limit."""
_F32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Buckets:
    """Answer to a query: columns of equal length, one entry per bucket that has points, ordered by step."""

    step: array[float]
    """float64: last step in the bucket."""
    lo: array[float]
    """float32: least finite value, NaN if there is none. Values beyond float32 are set to its limits."""
    hi: array[float]
    """float32: greatest finite value."""
    last: array[float]
    """float32: last finite value."""
    nan: array[int]
    """uint32: count of NaN and Inf."""
    value: array[float] | None = None
    """float64: the value itself, where every bucket is one point."""

    def exact(self) -> bytes | None:
        """`value` as little-endian bytes."""
        return None if self.value is None else _little(self.value)

    def blobs(self) -> list[bytes]:
        """The columns as little-endian bytes in the order step, lo, hi, last, nan."""
        return [*map(_little, (self.step, self.lo, self.hi, self.last)), _little(self.nan)]


@dataclass(slots=True)
class _Column:
    step: array[float] = field(default_factory=lambda: array("d"))
    value: array[float] = field(default_factory=lambda: array("d"))
    restarted: bool = False
    lo: array[float] = field(default_factory=lambda: array("d"))
    hi: array[float] = field(default_factory=lambda: array("d"))
    bad: array[int] = field(default_factory=lambda: array("I"))
    cells: Cells = field(default_factory=Cells)
    """What is older than the points."""

    def fold(self, limit: int) -> None:
        """Make cells of the older half as long as there are more points than `limit` (a power of two)."""
        half = limit // 2
        while len(self.step) > limit:
            self.cells.take(self.step[:half], self.value[:half])
            del self.step[:half], self.value[:half]
            gone = half // BLOCK
            del self.lo[:gone], self.hi[:gone], self.bad[:gone]
            self.cells.shrink(limit // CELLS_PER_POINT)
        self.cells.shrink(limit // CELLS_PER_POINT)

    def forget(self, index: int) -> None:
        """Drop summaries that cover points from `index` on."""
        full = index // BLOCK
        del self.lo[full:], self.hi[full:], self.bad[full:]

    def cut(self, step: float) -> bool:
        folded = self.cells.cut(step)
        index = bisect_left(self.step, step)
        if index == len(self.step):
            return folded
        del self.step[index:], self.value[index:]
        self.forget(index)
        return True

    def put(self, step: float, value: float) -> None:
        """A point that is not the newest."""
        if self.cells.step and step <= self.cells.step[-1]:
            self.cells.put(step, value)
            return
        index = bisect_left(self.step, step)
        if self.step[index] == step:
            self.value[index] = value
        else:
            self.step.insert(index, step)
            self.value.insert(index, value)
        self.forget(index)

    def summarise(self) -> None:
        for block in range(len(self.lo), len(self.value) // BLOCK):
            low, high, bad = _scan(self.value[block * BLOCK : (block + 1) * BLOCK])
            self.lo.append(low)
            self.hi.append(high)
            self.bad.append(bad)

    def span(self, start: int, stop: int) -> tuple[float, float, int]:
        """(min, max, count of non-finite) of points [start, stop); (inf, -inf, …) when none is finite."""
        first, end = -(-start // BLOCK), stop // BLOCK
        if first >= end:
            return _scan(self.value[start:stop])
        low, high, bad = min(self.lo[first:end]), max(self.hi[first:end]), sum(self.bad[first:end])
        if edge := self.value[start : first * BLOCK] + self.value[end * BLOCK : stop]:
            edge_low, edge_high, edge_bad = _scan(edge)
            return min(low, edge_low), max(high, edge_high), bad + edge_bad
        return low, high, bad

    def last_finite(self, start: int, stop: int) -> float:
        for index in range(stop - 1, start - 1, -1):
            if isfinite(self.value[index]):
                return self.value[index]
        return nan


def _little(column: array[float] | array[int]) -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _scan(values: array[float]) -> tuple[float, float, int]:
    # A sum is finite only if every term is; the converse fails at overflow, where the slow path is right too.
    if isfinite(sum(values)):
        return min(values), max(values), 0
    finite = [value for value in values if isfinite(value)]
    return min(finite, default=inf), max(finite, default=-inf), len(values) - len(finite)


def _f32(value: float) -> float:
    return nan if not isfinite(value) else max(-_F32_MAX, min(_F32_MAX, value))


class SeriesStore:
    """All series of a run. most: single points of one series, a power of two from `MIN_POINTS` on."""

    __slots__ = ("_columns", "_limit")

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._columns: dict[str, _Column] = {}
        self._limit = most

    def keys(self) -> list[str]:
        """Names of all series."""
        return list(self._columns)

    def full(self, key: str) -> bool:
        """Whether `key` would be one series too many."""
        return key not in self._columns and len(self._columns) >= MAX_SERIES

    def append(self, key: str, step: float, value: float) -> bool:
        """Add a point. Returns True when it cut off older points from `step` on (see `restart`)."""
        column = self._columns.get(key) or self._new(key)
        was_cut = False
        if column.restarted:
            column.restarted = False
            was_cut = column.cut(step)
        newest = column.step or column.cells.step
        if not newest or step > newest[-1]:
            column.step.append(step)
            column.value.append(value)
        else:
            column.put(step, value)
        if len(column.step) > self._limit:
            column.fold(self._limit)
        return was_cut

    def _new(self, key: str) -> _Column:
        column = self._columns[key] = _Column()
        while self._limit > MIN_POINTS and len(self._columns) * self._limit > TOTAL_POINTS:
            self._limit //= 2
            for other in self._columns.values():
                other.fold(self._limit)
        return column

    def extend(self, key: str, steps: array[float], values: array[float], *, rising: bool) -> None:
        """Add many points in the order in which they were appended once (a chunk of the journal).

        rising: every step is greater than the one before, so that the columns can be taken as they are.
        """
        column = self._columns.get(key) or self._new(key)
        newest = column.step or column.cells.step
        if rising and (not newest or not steps or steps[0] > newest[-1]):
            column.step.extend(steps)
            column.value.extend(values)
            column.fold(self._limit)
        else:
            for step, value in zip(steps, values, strict=True):
                self.append(key, step, value)

    def cut(self, key: str, step: float) -> None:
        """Drop the points of one series from `step` on."""
        if (column := self._columns.get(key)) is not None:
            column.cut(step)

    def restart(self) -> None:
        """The run starts again from a checkpoint: the next point of each series cuts what it goes over again."""
        for column in self._columns.values():
            column.restarted = True

    def size_bytes(self) -> int:
        """Memory of all columns, as far as it depends on the run."""
        columns = self._columns.values()
        return sum(16 * len(c.step) + 20 * len(c.lo) + 44 * len(c.cells) for c in columns)

    def summarise(self) -> None:
        """Make all summaries now, so that the first query after a load is as quick as the second."""
        for column in self._columns.values():
            column.summarise()

    def query(self, key: str, lo: float | None, hi: float | None, buckets: int) -> Buckets | None:
        """At most `buckets` buckets over the points with lo <= step <= hi (None = open); None for an unknown key.

        Buckets are equal intervals between the first and the last step found; empty ones are left out. When there are
        no more points than buckets, every point is its own bucket.
        """
        column = self._columns.get(key)
        if column is None:
            return None
        start = 0 if lo is None else bisect_left(column.step, lo)
        stop = len(column.step) if hi is None else bisect_right(column.step, hi)
        points = _Range(start, max(start, stop))
        cells = _Range(*column.cells.between(lo, hi))
        buckets = max(1, min(buckets, MAX_BUCKETS))
        if len(points) + len(cells) <= buckets:
            return _single(column, cells, points)
        column.summarise()
        return _bucketed(column, cells, points, buckets)


@dataclass(frozen=True, slots=True)
class _Range:
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def _single(column: _Column, cells: _Range, points: _Range) -> Buckets:
    """Every cell and every point as a bucket of its own."""
    found = column.cells
    part = slice(cells.start, cells.stop)
    values = column.value[points.start : points.stop]
    shown = array("f", map(_f32, values))
    return Buckets(
        step=found.step[part] + column.step[points.start : points.stop],
        lo=array("f", map(_f32, found.lo[part])) + shown,
        hi=array("f", map(_f32, found.hi[part])) + shown,
        last=array("f", map(_f32, found.last[part])) + shown,
        nan=found.bad[part] + array("I", [0 if isfinite(value) else 1 for value in values]),
        value=None if cells else values,
    )


def _bucketed(column: _Column, cells: _Range, points: _Range, buckets: int) -> Buckets:
    """Equal intervals of step, without empty ones. A cell counts where its last step is."""
    found = Buckets(array("d"), array("f"), array("f"), array("f"), array("I"))
    first = column.cells.step[cells.start] if cells else column.step[points.start]
    last = column.step[points.stop - 1] if points else column.cells.step[cells.stop - 1]
    width = (last - first) / buckets
    cell, point = cells.start, points.start
    for number in range(1, buckets + 1):
        if number == buckets:
            cell_stop, point_stop = cells.stop, points.stop
        else:
            bound = first + number * width
            cell_stop = bisect_left(column.cells.step, bound, cell, cells.stop)
            point_stop = bisect_left(column.step, bound, point, points.stop)
        if cell_stop > cell or point_stop > point:
            _add_bucket(found, column, _Range(cell, cell_stop), _Range(point, point_stop))
        cell, point = cell_stop, point_stop
    return found


def _add_bucket(found: Buckets, column: _Column, cells: _Range, points: _Range) -> None:
    low, high, bad, last = inf, -inf, 0, nan
    if cells:
        low, high, bad, last = column.cells.span(cells.start, cells.stop)
    if points:
        point_low, point_high, point_bad = column.span(points.start, points.stop)
        low, high, bad = min(low, point_low), max(high, point_high), bad + point_bad
        newest = column.last_finite(points.start, points.stop)
        last = newest if isfinite(newest) else last
    found.step.append(column.step[points.stop - 1] if points else column.cells.step[cells.stop - 1])
    found.lo.append(_f32(low))
    found.hi.append(_f32(high))
    found.last.append(_f32(last))
    found.nan.append(bad)
