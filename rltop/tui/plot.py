"""A line chart in braille (or ASCII) characters: pure, no Textual.

Points are folded to the lowest and highest value per dot column, so a spike of one step survives any zoom. A bucket
without a finite value breaks the line and leaves a mark; it is never drawn as a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from rltop.tui.history import Bucket, merge
from rltop.tui.text import num

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of a braille dot: [column 0..1][row 0..3 from the top]."""
_DOTS_HIGH = 16
"""Ends of the y axis are rounded to one dot of the smallest chart."""
_LARGEST, _SMALLEST = 1e300, 1e-290
"""Beyond these the arithmetic of an axis would overflow or lose its digits."""
_LEAST_STEPS = 10
_GROWTH = 1.15


class Axis(Struct, frozen=True):
    """Range of the y axis, in values or their decimal logarithms."""

    lo: float
    hi: float
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top; on a log axis what is not positive lies at the bottom."""
        if self.log:
            value = math.log10(value) if value > 0 else self.lo
        return min(1.0, max(0.0, (value - self.lo) / (self.hi - self.lo)))

    @property
    def labels(self) -> tuple[str, str]:
        """Texts for the top and the bottom."""
        return (num(10**self.hi), num(10**self.lo)) if self.log else (num(self.hi), num(self.lo))


class Plot(Struct, frozen=True):
    """A drawn chart: `rows` of equal length, `marks` = cells (row, column) that show a NaN mark, `limit` = row of the
    threshold line or None, `axis` None when there is nothing finite."""

    rows: tuple[str, ...]
    marks: frozenset[tuple[int, int]]
    limit: int | None
    axis: Axis | None
    below: int = 0
    """Dot columns that a log axis cannot show because all their values are 0 or less."""


def y_axis(buckets: Sequence[Bucket], *, log: bool = False, limit: float | None = None) -> Axis | None:
    """The range that holds all finite values, with round ends, so that it seldom moves.

    The threshold is in it when the data come within a third of it.
    """
    values = [value for bucket in buckets if bucket.finite for value in (bucket.lo, bucket.hi)]
    if log:
        values = [math.log10(value) for value in values if value > 0]
        limit = math.log10(limit) if limit and limit > 0 else None
    if not values:
        return None
    lo, hi = max(min(values), -_LARGEST), min(max(values), _LARGEST)
    if limit is not None and (hi >= limit - 0.5 if log else hi >= limit / 3):
        lo, hi = min(lo, limit), max(hi, limit)
    if hi - lo <= 1e-12 * max(abs(lo), abs(hi), _SMALLEST):
        room = 0.5 if log else abs(hi) * 0.1 or 1.0
        return Axis(lo - room, hi + room, log) if lo != 0 or log else Axis(0.0, 1.0)
    unit = _round_unit((hi - lo) / _DOTS_HIGH)
    return Axis(math.floor(lo / unit + 1e-9) * unit, math.ceil(hi / unit - 1e-9) * unit, log)


def _round_unit(width: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is at most `width`."""
    power = 10.0 ** math.floor(math.log10(width))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= width * (1 + 1e-9))


def headroom(length: float) -> float:
    """Length of the x axis for a run of `length` steps: up to 15 % more, in jumps.

    Between two jumps the drawn points stay where they are: the picture is calm and little has to be painted.
    """
    if length <= _LEAST_STEPS:
        return _LEAST_STEPS
    return float(_LEAST_STEPS * _GROWTH ** math.ceil(math.log(length / _LEAST_STEPS, _GROWTH) - 1e-9))


def draw(
    buckets: Sequence[Bucket],
    width: int,
    height: int,
    span: tuple[float, float],
    *,
    log: bool = False,
    limit: float | None = None,
    ascii_only: bool = False,
    mark: str = "✗",
) -> Plot:
    """Chart of `width` x `height` cells for the steps in `span`, which lie at its left and right edge.

    Steps outside the span are ignored. `limit`: threshold line, drawn where no data is. `mark`: sign for NaN and Inf.
    """
    across, down = (1, 1) if ascii_only else (2, 4)
    wide, high = width * across, height * down
    inside = [bucket for bucket in buckets if span[0] <= bucket.step <= span[1]]
    axis = y_axis(inside, log=log, limit=limit)
    ink: list[set[int]] = [set() for _ in range(wide)]
    marks: set[int] = set()
    below = 0
    previous: tuple[int, int] | None = None  # (dot column, dot row of the last value)
    for column, bucket in _fold(inside, span, wide):
        if bucket.nan:
            marks.add(column // across)
        if not bucket.finite or axis is None:
            previous = None
            continue
        below += log and bucket.hi <= 0
        low, top, last = _dot(axis, bucket.lo, high), _dot(axis, bucket.hi, high), _dot(axis, bucket.last, high)
        ink[column].update(range(low, top + 1))
        if previous is not None:
            _connect(ink, previous, (column, min(max(previous[1], low), top)))
        previous = (column, last)
    limit_row = None
    if axis is not None and limit is not None:
        value = math.log10(limit) if log and limit > 0 else limit
        if axis.lo <= value <= axis.hi:
            limit_row = (high - 1 - _dot(axis, limit, high)) // down
    rows = [_row(ink, y, width, high, ascii_only) for y in range(height)]
    return Plot(*_with_marks(rows, marks, mark, ascii_only), limit_row, axis, below)


def _fold(buckets: Sequence[Bucket], span: tuple[float, float], wide: int) -> list[tuple[int, Bucket]]:
    """(dot column, all its buckets in one), left to right."""
    length = span[1] - span[0]
    scale = (wide - 1) / length if length > 0 else 0.0
    shift = 0.0 if length > 0 else (wide - 1) / 2
    out: list[tuple[int, Bucket]] = []
    for bucket in buckets:
        column = round((bucket.step - span[0]) * scale + shift)
        if out and out[-1][0] == column:
            out[-1] = (column, merge(out[-1][1], bucket))
        else:
            out.append((column, bucket))
    return out


def _dot(axis: Axis, value: float, high: int) -> int:
    """Dot row from the bottom."""
    return round(axis.share(value) * (high - 1))


def _connect(ink: list[set[int]], a: tuple[int, int], b: tuple[int, int]) -> None:
    """Line between two dots, steep parts filled so that it has no gaps."""
    (x0, y0), (x1, y1) = a, b
    if x1 == x0:
        ink[x0].update(range(min(y0, y1), max(y0, y1) + 1))
        return
    before = y0
    for x in range(x0 + 1, x1 + 1):
        y = round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
        step = (y > before) - (y < before)
        ink[x].update(range(before + step, y + step, step) if step else (y,))
        before = y


def _row(ink: list[set[int]], y: int, width: int, high: int, ascii_only: bool) -> str:
    if ascii_only:
        return "".join("*" if high - 1 - y in column else " " for column in ink)
    out: list[str] = []
    for x in range(width):
        bits = 0
        for dx in (0, 1):
            column = ink[2 * x + dx]
            if column:
                for dy in range(4):
                    if high - 1 - (4 * y + dy) in column:
                        bits |= _DOTS[dx][dy]
        out.append(chr(0x2800 + bits) if bits else " ")
    return "".join(out)


def _with_marks(
    rows: list[str], marks: set[int], mark: str, ascii_only: bool
) -> tuple[tuple[str, ...], frozenset[tuple[int, int]]]:
    """Marks go to the bottom row, or to the top row where the bottom holds data."""
    placed: set[tuple[int, int]] = set()
    cells = [list(row) for row in rows]
    for x in marks:
        y = 0 if cells and cells[-1][x] != " " and cells[0][x] == " " else len(cells) - 1
        if y >= 0:
            cells[y][x] = mark
            placed.add((y, x))
    return tuple("".join(row) for row in cells), frozenset(placed)
