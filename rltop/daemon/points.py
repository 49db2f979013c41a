"""Every point of a run, exactly as it was reported, read from its journal a chunk at a time.

Memory does not grow with the run: of a curve whose steps rise, as nearly all do, one chunk of 512 points is held. A
curve with late or repeated steps is put in order in memory, 16 bytes a point.

A curve is cut where the run went over steps again (a restart from a checkpoint): what stands is what came last. With
`every` the points before are told too, each with its attempt: 1 and one more for every cut of this curve.
"""

from __future__ import annotations

import heapq
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import inf, nan

import msgspec

from rltop.daemon.journal import unpack, unpack_times
from rltop.protocol.messages import axis_of


@dataclass(frozen=True, slots=True)
class Curve:
    """One series of the journal."""

    key: str
    """Name of the metric; `name@3` of rank 3."""
    axis: str
    """What its steps count: `train` or `rollout`."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value."""

    step: float
    value: float
    attempt: int
    time: float | None
    """Wall clock when it came, where the journal knows it. An older rltop kept it of the last point of every chunk."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    steps: array[float]
    values: array[float]
    attempt: int
    ends: float
    """Points from this step on were cut away later; inf: none."""
    times: Sequence[float | None]
    rising: bool


def curves(connection: sqlite3.Connection) -> list[Curve]:
    """All curves of a run by name."""
    told = {
        key.removeprefix("metric/"): msgspec.msgpack.decode(value).get("axis")
        for key, value in connection.execute("SELECT key, value FROM state WHERE key GLOB 'metric/*'")
    }
    keys = connection.execute("SELECT key FROM series WHERE n > 0 UNION SELECT key FROM points ORDER BY key")
    return [Curve(key, told.get(key) or axis_of(key.partition("@")[0], None)) for (key,) in keys]


def points(connection: sqlite3.Connection, curve: Curve, *, every: bool = False) -> Iterator[Point]:
    """Points of a curve in the order of their steps (with `every`: within each attempt). One step has one value, the
    last that came for it."""
    chunks = list(_outline(connection, curve.key))
    for _, of_attempt in groupby(chunks, key=lambda chunk: chunk[1]):
        yield from _of_attempt(connection, curve.key, list(of_attempt), every=every)


def rows(
    connection: sqlite3.Connection, chosen: Sequence[Curve]
) -> Iterator[tuple[float, float | None, list[tuple[int, float]]]]:
    """(step, when the first of its values came, [(index of the curve, value)]) over curves of one axis, in the order
    of steps."""

    def numbered(index: int, curve: Curve) -> Iterator[tuple[float, int, Point]]:
        return ((point.step, index, point) for point in _standing(connection, curve))

    merged = heapq.merge(*(numbered(index, curve) for index, curve in enumerate(chosen)), key=lambda row: row[:2])
    for step, of_step in groupby(merged, key=lambda row: row[0]):
        cells = [(index, point) for _, index, point in of_step]
        time = min((point.time for _, point in cells if point.time is not None), default=None)
        yield step, time, [(index, point.value) for index, point in cells]


def _standing(connection: sqlite3.Connection, curve: Curve) -> Iterator[Point]:
    """What stands of a curve, in the order of steps over all attempts: late points of one may lie before its cut."""
    if _outline(connection, curve.key)[-1][1] == 1:
        return points(connection, curve)
    newest = {point.step: point for point in points(connection, curve)}
    return (newest[step] for step in sorted(newest))


_Outline = tuple[int | None, int, float]
"""Row of a chunk (None: the single points at the end), its attempt, and the step from which on it was cut away."""


def _outline(connection: sqlite3.Connection, key: str) -> list[_Outline]:
    found: list[_Outline] = []
    attempt = 1
    cuts: list[tuple[int, float]] = []
    """(chunks before it, step)"""
    for number, count, cut in connection.execute("SELECT id, n, cut FROM series WHERE key = ? ORDER BY id", (key,)):
        if cut is not None:
            attempt += 1
            cuts.append((len(found), cut))
        if count:
            found.append((number, attempt, inf))
    found.append((None, attempt, inf))
    return [
        (number, attempt, min((cut for before, cut in cuts if index < before), default=inf))
        for index, (number, attempt, _) in enumerate(found)
    ]


def _of_attempt(
    connection: sqlite3.Connection, key: str, chunks: Sequence[_Outline], *, every: bool
) -> Iterator[Point]:
    if _rises(connection, key, chunks):
        for outline in chunks:
            yield from _points(_read(connection, key, outline), every=every)
        return
    newest: dict[float, Point] = {}
    for outline in chunks:
        for point in _points(_read(connection, key, outline), every=every):
            newest[point.step] = point
    yield from (newest[step] for step in sorted(newest))


def _rises(connection: sqlite3.Connection, key: str, chunks: Sequence[_Outline]) -> bool:
    """Whether the steps of these chunks are strictly increasing; looks at the edges of packed ones only."""
    before = -inf
    for outline in chunks:
        chunk = _read(connection, key, outline)
        if not chunk.steps:
            continue
        if not chunk.rising or chunk.steps[0] <= before:
            return False
        before = chunk.steps[-1]
    return True


def _read(connection: sqlite3.Connection, key: str, outline: _Outline) -> _Chunk:
    number, attempt, ends = outline
    timed = _keeps_times(connection)
    if number is None:
        t = "t" if timed else "NULL"
        found = connection.execute(f"SELECT step, value, {t} FROM points WHERE key = ? ORDER BY n", (key,)).fetchall()
        steps = array("d", [step for step, _, _ in found])
        values = array("d", [nan if value is None else value for _, value, _ in found])
        times = [time for _, _, time in found]
        return _Chunk(steps, values, attempt, ends, times, all(one < two for one, two in pairwise(steps)))
    packed, packed_values, packed_times, last, rising = connection.execute(
        f"SELECT steps, vals, {'times' if timed else 'NULL'}, t, rising FROM series WHERE id = ?", (number,)
    ).fetchone()
    steps = unpack(packed)
    times = [*[None] * (len(steps) - 1), last] if packed_times is None else unpack_times(packed_times)
    return _Chunk(steps, unpack(packed_values), attempt, ends, times, bool(rising))


def _keeps_times(connection: sqlite3.Connection) -> bool:
    """The daemon of a living run may be of an older rltop."""
    return any(row[1] == "times" for row in connection.execute("PRAGMA table_info(series)"))


def _points(chunk: _Chunk, *, every: bool) -> Iterator[Point]:
    for step, value, time in zip(chunk.steps, chunk.values, chunk.times, strict=True):
        if every or step < chunk.ends:
            yield Point(step, value, chunk.attempt, time)
