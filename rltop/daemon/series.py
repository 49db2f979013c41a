"""History of metrics in memory: append points, ask for min / max / last / NaN count per bucket of steps.

A series is two float64 columns sorted by step (16 bytes a point). Over every full block of `BLOCK` points lies a
summary (min and max of the finite values, count of the others), made when it is first asked for; a query touches a
bucket's summaries and at most two partial blocks, so 100,000 points cost about as much as 5,000.

One step has one value. A point at a step that is already there replaces it and a late one is put in its place
(rollouts of an asynchronous run finish out of order); after `restart` the first point at an earlier step cuts
everything from there on, because the run goes over the same steps again and the old tail would look like its future.
The journal keeps it all.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isfinite, nan

BLOCK = 32
MAX_BUCKETS = 10_000
MAX_SERIES = 5_000
"""More names than this is a program that makes up names (a step or an id in them), not a set of metrics."""
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

    def forget(self, index: int) -> None:
        """Drop summaries that cover points from `index` on."""
        full = index // BLOCK
        del self.lo[full:], self.hi[full:], self.bad[full:]

    def cut(self, step: float) -> bool:
        index = bisect_left(self.step, step)
        if index == len(self.step):
            return False
        del self.step[index:], self.value[index:]
        self.forget(index)
        return True

    def put(self, step: float, value: float) -> None:
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
    """All series of a run."""

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def keys(self) -> list[str]:
        """Names of all series."""
        return list(self._columns)

    def full(self, key: str) -> bool:
        """Whether `key` would be one series too many."""
        return key not in self._columns and len(self._columns) >= MAX_SERIES

    def append(self, key: str, step: float, value: float) -> bool:
        """Add a point. Returns True when it cut off older points from `step` on (see `restart`)."""
        column = self._columns.get(key)
        if column is None:
            column = self._columns[key] = _Column()
        was_cut = False
        if column.restarted:
            column.restarted = False
            was_cut = column.cut(step)
        if not column.step or step > column.step[-1]:
            column.step.append(step)
            column.value.append(value)
        else:
            column.put(step, value)
        return was_cut

    def extend(self, key: str, steps: array[float], values: array[float], *, rising: bool) -> None:
        """Add many points in the order in which they were appended once (a chunk of the journal).

        rising: every step is greater than the one before, so that the columns can be taken as they are.
        """
        column = self._columns.setdefault(key, _Column())
        if rising and (not column.step or not steps or steps[0] > column.step[-1]):
            column.step.extend(steps)
            column.value.extend(values)
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
        buckets = max(1, min(buckets, MAX_BUCKETS))
        if stop - start <= buckets:
            return _points(column, start, max(start, stop))
        column.summarise()
        return _bucketed(column, _edges(column.step, start, stop, buckets))


def _points(column: _Column, start: int, stop: int) -> Buckets:
    values = column.value[start:stop]
    shown = array("f", [_f32(value) for value in values])
    bad = array("I", [0 if isfinite(value) else 1 for value in values])
    return Buckets(column.step[start:stop], shown, shown[:], shown[:], bad)


def _edges(steps: array[float], start: int, stop: int, buckets: int) -> Iterable[int]:
    """Indices that divide [start, stop) into equal intervals of step, without empty ones."""
    first = steps[start]
    width = (steps[stop - 1] - first) / buckets
    edges = [start]
    for number in range(1, buckets):
        index = bisect_left(steps, first + number * width, edges[-1], stop)
        if index > edges[-1]:
            edges.append(index)
    if stop > edges[-1]:
        edges.append(stop)
    return edges


def _bucketed(column: _Column, edges: Iterable[int]) -> Buckets:
    found = Buckets(array("d"), array("f"), array("f"), array("f"), array("I"))
    at = iter(edges)
    start = next(at)
    for stop in at:
        low, high, bad = column.span(start, stop)
        found.step.append(column.step[stop - 1])
        found.lo.append(_f32(low))
        found.hi.append(_f32(high))
        found.last.append(_f32(column.last_finite(start, stop)))
        found.nan.append(bad)
        start = stop
    return found
