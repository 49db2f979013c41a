"""A series of metric rows of any length in bounded memory, for a run that is watched for weeks.

Kept whole: the first rows (the step-1 checks), the newest rows (spikes, recovery), and rows that a rule may need as
evidence (`notable`: the first of them and the newest). Between them each block of rows becomes one row that holds, per
metric, the median of the block, so that medians, quarters and rank correlations stay what they were, while single
spikes do not count (they count only while they are new). All finished blocks are of one length: when there are too
many, neighbours are merged and the length doubles. A block of 8 rows holds exact medians; a longer one is merged from
two, and the median of two medians lies between them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rltop.checks.observe import MetricRow
from rltop.checks.series import median


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many rows a `ThinSeries` keeps of each sort."""

    first: int = 48
    blocks: int = 96
    newest: int = 192
    notable: int = 32
    """Of the first, and as many of the newest."""
    block_rows: int = 8
    """Rows of the shortest block."""


@dataclass(slots=True)
class ThinSeries:
    """Rows of one source, axis and kind of step: a block must not mix on-policy with off-policy steps."""

    sizes: Sizes = Sizes()
    seen: int = 0
    block_rows: int = 0
    """Rows of a finished block now; 0 before the first merge."""
    _first: list[MetricRow] = field(default_factory=list)
    _notable: list[MetricRow] = field(default_factory=list)
    _late_notable: deque[MetricRow] = field(default_factory=deque)
    _blocks: list[MetricRow] = field(default_factory=list)
    _parts: list[MetricRow] = field(default_factory=list)
    """Shorter blocks on the way to a finished one, longest first, each at most half as long as the one before."""
    _open: list[MetricRow] = field(default_factory=list)
    _newest: deque[tuple[MetricRow, bool]] = field(default_factory=deque)

    def append(self, row: MetricRow, *, notable: bool = False) -> None:
        """Takes the next row. A notable one keeps its exact values when it is no longer new, and so does the row before
        it: what a change is measured against is evidence too."""
        self.seen += 1
        if len(self._first) < self.sizes.first:
            self._first.append(row)
            return
        if notable and self._newest:
            self._newest[-1] = (self._newest[-1][0], True)
        self._newest.append((row, notable))
        if len(self._newest) > self.sizes.newest:
            old, kept = self._newest.popleft()
            if kept:
                self._keep(old)
            else:
                self._thin(old)

    def rows(self) -> tuple[MetricRow, ...]:
        """The kept rows; the order says nothing."""
        newest = (row for row, _ in self._newest)
        middle = (*self._blocks, *self._parts, *self._open)
        return (*self._first, *self._notable, *self._late_notable, *middle, *newest)

    def _keep(self, row: MetricRow) -> None:
        if len(self._notable) < self.sizes.notable:
            self._notable.append(row)
            return
        self._late_notable.append(row)
        if len(self._late_notable) > self.sizes.notable:
            self._thin(self._late_notable.popleft())

    def _thin(self, row: MetricRow) -> None:
        newest = self._open[-1:] or self._parts[-1:]
        if newest and newest[0].segment != row.segment:
            self._close_segment()
        self._open.append(row)
        if len(self._open) < self.sizes.block_rows:
            return
        self._parts.append(median_row(self._open))
        self._open.clear()
        while len(self._parts) > 1 and self._parts[-1].span >= self._parts[-2].span:
            self._parts[-2:] = [median_row(self._parts[-2:])]
        if self._parts[0].span >= max(self.block_rows, self.sizes.block_rows):
            self._finish(self._parts.pop(0))

    def _close_segment(self) -> None:
        """A block does not reach into the next segment: what is there becomes blocks, however short."""
        if self._open:
            self._parts.append(median_row(self._open))
            self._open.clear()
        while self._parts:
            self._finish(self._parts.pop(0))

    def _finish(self, block: MetricRow) -> None:
        self._blocks.append(block)
        if len(self._blocks) > self.sizes.blocks:
            # Blocks of different segments do not merge; of a run with hundreds of restarts the oldest go.
            self._blocks = _merged(self._blocks)[-self.sizes.blocks :]
            self.block_rows = 2 * max(self.block_rows, self.sizes.block_rows)


def _merged(blocks: Sequence[MetricRow]) -> list[MetricRow]:
    """Half as many blocks: neighbours of one segment become one."""
    merged: list[MetricRow] = []
    pending: MetricRow | None = None
    for block in blocks:
        if pending is None:
            pending = block
        elif pending.segment == block.segment:
            merged.append(median_row([pending, block]))
            pending = None
        else:
            merged.append(pending)
            pending = block
    return merged if pending is None else [*merged, pending]


def median_row(rows: Sequence[MetricRow]) -> MetricRow:
    """One row for several of one segment: per metric the median of its finite values, at the step of the middle row."""
    middle = rows[len(rows) // 2]
    names = dict.fromkeys(name for row in rows for name in row.values)
    medians = {name: median(row.values[name] for row in rows if name in row.values) for name in names}
    values = {name: value for name, value in medians.items() if math.isfinite(value)}
    return replace(middle, values=values, span=sum(row.span for row in rows), where=None)
