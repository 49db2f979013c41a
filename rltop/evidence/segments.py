"""Cuts the evidence of a run into segments: a new one begins when an id goes back, or a checkpoint is loaded again.

Rows with a time are walked in the order of time, whatever file they lie in. Rows without one are walked file by file,
each from segment 0 on: another file about the same rows starts over. Several runs under one path (`runs.py`) are cut
one after the other, and each begins a segment of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rltop.checks.found import LogEvent
from rltop.checks.observe import MetricRow, PhaseEvent, Sample, SyncEvent, TextLine, Where
from rltop.evidence.runs import Runs, runs_of

T = TypeVar("T", LogEvent, PhaseEvent, TextLine, SyncEvent)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where the segments begin."""

    times: tuple[tuple[float, ...], ...] = ((),)
    """Of each run: when every segment after its first began, seconds since the epoch."""
    first: tuple[int, ...] = (0,)
    """Number of the first segment of each run."""
    runs: Runs = field(default_factory=Runs)

    def of(self, where: Where | None, time: float | None) -> int:
        """Segment of a moment at a place; the first of its run where there is no time."""
        run = self.runs.of(where)
        return self.first[run] + (bisect.bisect_right(self.times[run], time) if time is not None else 0)


def cut(rows: Sequence[MetricRow], loads: Iterable[LogEvent]) -> tuple[list[MetricRow], Cuts]:
    """The rows with their segments, in order, and where the timed ones were cut."""
    runs, waiting = runs_of(rows), list(loads)
    kept: list[MetricRow] = []
    times: list[tuple[float, ...]] = []
    first: list[int] = []
    for run in range(runs.count):
        start = max((row.segment for row in kept), default=-1) + 1
        own, cuts = _cut([r for r in rows if runs.of(r.where) == run], [e for e in waiting if runs.of(e.where) == run])
        kept += [replace(row, segment=row.segment + start) for row in own] if start else own
        times.append(cuts)
        first.append(start)
    return kept, Cuts(tuple(times), tuple(first), runs)


def _cut(rows: Sequence[MetricRow], loads: Iterable[LogEvent]) -> tuple[list[MetricRow], tuple[float, ...]]:
    """The same of one run."""
    timed = sorted((row for row in rows if row.time is not None), key=_when)
    kept, times = _timed(timed, sorted((e for e in loads if e.time is not None), key=lambda e: e.time or 0.0))
    by_file: dict[str, list[MetricRow]] = {}
    for row in rows:
        if row.time is None:
            by_file.setdefault(row.where.source if row.where else "", []).append(row)
    earlier: dict[tuple[object, ...], tuple[int, int]] = {}
    for part in by_file.values():
        kept += _file(part, earlier)
    return kept, tuple(times)


def _when(row: MetricRow) -> tuple[float, str, int]:
    return (row.time or 0.0, row.where.source if row.where else "", (row.where.line or 0) if row.where else 0)


def _stream(row: MetricRow) -> tuple[object, ...]:
    """Rows that come one after the other: of one axis, rank, and kind of line (async runs print the next rollout's
    before the trainer's)."""
    kind = next(
        (name for name in ("rollout/raw_reward", "rollout/log_probs", "perf/rollout_time") if name in row.values), ""
    )
    critic = any(name.startswith("train/critic-") for name in row.values)
    return (
        row.axis,
        row.rank,
        row.where.source if row.where else "",
        kind,
        critic,
        frozenset(row.values) if row.axis == "rollout" and not kind else "",
    )


def _timed(rows: Sequence[MetricRow], loads: Sequence[LogEvent]) -> tuple[list[MetricRow], list[float]]:
    kept: list[MetricRow] = []
    times: list[float] = []
    last: dict[tuple[object, ...], int] = {}
    has_rollouts = {_source(row) for row in rows if row.axis == "rollout"}
    segment, waiting = 0, list(loads)
    for row in rows:
        while waiting and (waiting[0].time or 0.0) <= (row.time or 0.0):
            load = waiting.pop(0)
            if last:  # loaded again after something was trained
                segment, last = segment + 1, {}
                times.append(load.time or 0.0)
        stream = _stream(row)
        # A step can go back without a restart when rollouts differ in their number of steps; a rollout id can not.
        counts = row.axis == "rollout" or _source(row) not in has_rollouts
        if counts and stream in last and row.step < last[stream]:
            segment, last = segment + 1, {}
            times.append(row.time or 0.0)
        last[stream] = row.step
        kept.append(replace(row, segment=segment) if segment else row)
    return kept, times


def _source(row: MetricRow) -> str:
    return row.where.source if row.where else ""


def _file(rows: list[MetricRow], earlier: dict[tuple[object, ...], tuple[int, int]]) -> list[MetricRow]:
    """Rows of one file without times. `earlier`: per axis, rank and run the last (segment, step) of the files before:
    a file that goes on where another ended continues its segment, one that starts over is a restart."""
    if any(row.segment for row in rows) or len({row.segment for row in rows}) > 1:
        return rows  # the file names its runs itself
    key = (rows[0].axis, rows[0].rank, frozenset(name.split("/")[0] for name in rows[0].values))
    segment = 0
    if key in earlier:
        segment, step = earlier[key]
        if rows[0].step <= step:
            segment += 1
    kept = []
    last: dict[object, int] = {}
    for row in rows:
        stream = (row.axis, row.rank)
        if stream in last and row.step < last[stream]:
            segment, last = segment + 1, {}
        last[stream] = row.step
        kept.append(replace(row, segment=segment) if segment else row)
    earlier[key] = (segment, max((row.step for row in kept if row.segment == segment), default=0))
    return kept


def place(items: Iterable[T], cuts: Cuts) -> list[T]:
    """Events, phases, lines with the segment of their time."""
    if not any(cuts.times) and cuts.runs.count == 1:
        return list(items)
    return [replace(item, segment=cuts.of(item.where, item.time)) for item in items]


def place_samples(samples: Iterable[Sample], rows: Sequence[MetricRow], cuts: Cuts) -> list[Sample]:
    """Printed samples with the segment of their rollout's row nearest above in the same file; others with the first
    one of their run."""
    marks: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        if row.where and row.where.line is not None and row.axis == "rollout":
            marks.setdefault(row.where.source, []).append((row.where.line, row.segment))
    for one in marks.values():
        one.sort()
    kept = []
    for sample in samples:
        found = marks.get(sample.where.source) if sample.where else None
        if not found or sample.where is None or sample.where.line is None or sample.segment:
            start = cuts.of(sample.where, None)
            kept.append(replace(sample, segment=sample.segment + start) if start else sample)
            continue
        at = bisect.bisect_left(found, (sample.where.line, -1))
        segment = found[min(at, len(found) - 1)][1]
        kept.append(replace(sample, segment=segment) if segment else sample)
    return kept
