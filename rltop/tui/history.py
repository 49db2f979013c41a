"""History of one metric for its chart: buckets from the daemon, then live points, in bounded memory. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left

from msgspec import Struct, field

from rltop.tui.clientlike import SeriesLike

MAX_BUCKETS = 2048
"""Above this many buckets neighbours are merged; four times what the widest chart can show."""


class Bucket(Struct, frozen=True):
    """Some neighbouring points: last step, extremes and last of the finite values (NaN: none), count of the others."""

    step: float
    lo: float
    hi: float
    last: float
    nan: int = 0

    @property
    def finite(self) -> bool:
        """There is at least one finite value."""
        return not math.isnan(self.lo)


def merge(a: Bucket, b: Bucket) -> Bucket:
    """Both buckets in one; `b` is the later one."""
    if not b.finite:
        return Bucket(b.step, a.lo, a.hi, a.last, a.nan + b.nan)
    if not a.finite:
        return Bucket(b.step, b.lo, b.hi, b.last, a.nan + b.nan)
    return Bucket(b.step, min(a.lo, b.lo), max(a.hi, b.hi), b.last, a.nan + b.nan)


class History(Struct):
    """Buckets of one metric, oldest first, steps strictly rising."""

    buckets: list[Bucket] = field(default_factory=list)
    holes: int = 0
    """Steps that went by between two live points: the mirror shows newest values only. Ask for the series again."""

    def refine(self, series: SeriesLike, lo: float | None = None) -> None:
        """Take the daemon's answer for the steps from `lo` on: coarser buckets there go, newer live points stay."""
        if not len(series.step):
            return
        end = series.step[-1]
        fresh = [
            Bucket(step, lo, hi, last, int(nan))
            for step, lo, hi, last, nan in zip(series.step, series.lo, series.hi, series.last, series.nan, strict=True)
        ]
        before = [] if lo is None else [bucket for bucket in self.buckets if bucket.step < min(lo, fresh[0].step)]
        self.buckets = before + fresh + [bucket for bucket in self.buckets if bucket.step > end]
        self.holes = 0

    def copy(self) -> History:
        """An independent history with the same buckets."""
        return History(list(self.buckets), self.holes)

    def append(self, step: float, value: float) -> None:
        """One live point. A step that goes back is a restart of the run: the old history goes."""
        finite = math.isfinite(value)
        point = Bucket(step, value, value, value) if finite else Bucket(step, math.nan, math.nan, math.nan, 1)
        if self.buckets:
            newest = self.buckets[-1].step
            if step < newest:
                self.buckets = [bucket for bucket in self.buckets if bucket.step < step]
                self.holes += 1
            elif step == newest:
                if self.buckets[-1].lo == self.buckets[-1].hi:
                    self.buckets[-1] = point
                return
            elif step > newest + 1:
                self.holes += int(step - newest - 1)
        self.buckets.append(point)
        if len(self.buckets) > MAX_BUCKETS:
            self._thin()

    def _thin(self) -> None:
        """Merge neighbours to buckets of one width, half the maximum in number, so that old is as fine as new."""
        first, last = self.buckets[0].step, self.buckets[-1].step
        width = (last - first) / (MAX_BUCKETS // 2)
        out: list[Bucket] = []
        start = first
        for bucket in self.buckets:
            if out and bucket.step - start < width:
                out[-1] = merge(out[-1], bucket)
            else:
                out.append(bucket)
                start = bucket.step
        self.buckets = out

    @property
    def span(self) -> tuple[float, float] | None:
        """First and last step; None when empty."""
        return (self.buckets[0].step, self.buckets[-1].step) if self.buckets else None

    def between(self, lo: float, hi: float) -> list[Bucket]:
        """Buckets whose step is in [lo, hi]."""
        start = bisect_left(self.buckets, lo, key=lambda bucket: bucket.step)
        return [bucket for bucket in self.buckets[start:] if bucket.step <= hi]

    @property
    def bad(self) -> int:
        """NaN and Inf values in all buckets."""
        return sum(bucket.nan for bucket in self.buckets)
