"""A/B comparison of two ways to run engines, on the same traffic at the same time, with its uncertainty.

Half of the engines run with a change (arm B), half without (arm A). What is compared, B minus A:

    tokens_per_s       decoded tokens per engine and second, of seconds in which the engine had work
    log_prob_gap       mean |rollout - train| log-prob per token
    accept_length      tokens accepted per verification (speculative decoding)
    crashes_per_hour   per engine

**Means.** Both arms see the same intervals (10 s of wall clock, or one rollout), so the differences of one interval are
taken and their mean gets a Student t interval: what moves both arms (prompt lengths, the phase of training) cancels
out. An interval is a batch mean, and what correlation is left between neighbours widens it: the number of intervals
is multiplied by (1 - r) / (1 + r), r the lag-1 autocorrelation where it is positive (batch means and AR(1) correction:
Law, Simulation Modeling and Analysis, ch. 9).

**Crashes** are rare counts over engine-hours: exact Poisson limits of each arm (Garwood 1936), combined to limits of
the difference by MOVER (Zou and Donner, Statistics in Medicine 2008). They hold with zero crashes too.

The interval shown is a 95 % one for a single look. People look all the time, and then one of twenty comparisons without
any difference would show one sooner or later: the verdict therefore names a difference only if the 99 % interval
excludes 0, and never below `ENOUGH` intervals of that measure. Less is "not enough yet", which is an answer.
Simulated (tests/engines/test_ab.py): 95 % of independent differences, 94 % of 60 with r = 0.6, but 86 % of 15 such.

Pure, bounded: of intervals the newest 2,000 are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from rltop.engines.scrape import EngineStats

Arm = Literal["A", "B"]
ENOUGH = 12
"""Intervals with both arms, below which nothing is claimed: with fewer the correlation between them is unknown."""
INTERVAL_S = 10.0
"""Of one mean of a rate."""
BUSY_S = 2.0
"""Seconds with work that an arm must have in an interval, to count."""
MOST = 2_000
SHOWN, CLAIMED = 0.95, 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the comparison; None: not enough data."""

    name: str
    a: float | None
    b: float | None
    diff: float | None
    """B minus A."""
    low: float | None
    high: float | None
    """Of `diff`, 95 %."""
    n: int
    """Intervals with both arms; for crashes their number."""
    sure: bool = False
    """The 99 % interval of `diff` excludes 0, and there is enough data."""

    def cell(self) -> dict[str, Any]:
        """For the cell `fleet.ab`."""
        return {name: getattr(self, name) for name in ("name", "a", "b", "diff", "low", "high", "n")}


@dataclass(slots=True)
class _Sum:
    """Weighted sum of one arm in one interval."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.weight


@dataclass(slots=True)
class _Seen:
    at: float
    decoded: float | None
    busy: bool


@dataclass(slots=True)
class Comparison:
    """A running A/B comparison. `arms` says which engine is in which arm; all times are of one monotonic clock."""

    arms: Mapping[str, Arm]
    since: float
    _values: dict[str, dict[int, dict[Arm, _Sum]]] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _crashes: dict[Arm, int] = field(default_factory=lambda: {"A": 0, "B": 0})
    _hours: dict[Arm, float] = field(default_factory=lambda: {"A": 0.0, "B": 0.0})

    def looked(self, engine: str, stats: EngineStats, now: float) -> None:
        """A scrape of an engine that serves. Rates are taken between two of them; a counter that fell starts anew."""
        arm = self.arms.get(engine)
        if arm is None:
            return
        busy = bool(stats.active or stats.running)
        before, self._seen[engine] = self._seen.get(engine), _Seen(now, stats.decode_tokens_total, busy)
        if before is None or now <= before.at:
            return
        self._hours[arm] += (now - before.at) / 3600
        decoded = stats.decode_tokens_total
        interval = int((now - self.since) / INTERVAL_S)
        if before.busy and decoded is not None and before.decoded is not None and decoded >= before.decoded:
            self._add("tokens_per_s", arm, interval, decoded - before.decoded, now - before.at)
        if busy and stats.spec_accept_length:
            self._add("accept_length", arm, interval, stats.spec_accept_length * (now - before.at), now - before.at)

    def left(self, engine: str) -> None:
        """The engine is out of the rotation: the time until it is seen again does not count."""
        self._seen.pop(engine, None)

    def sampled(self, engine: str, rollout_id: int, gap: float, tokens: int) -> None:
        """Mean |rollout - train| log-prob of `tokens` tokens that this engine made for a rollout."""
        arm = self.arms.get(engine)
        if arm is not None and tokens > 0 and math.isfinite(gap):
            self._add("log_prob_gap", arm, rollout_id, gap * tokens, tokens)

    def crashed(self, engine: str) -> None:
        """An end that nobody asked for."""
        arm = self.arms.get(engine)
        if arm is not None:
            self._crashes[arm] += 1
            self.left(engine)

    def rows(self) -> list[Row]:
        """The four comparisons, those without any data left out."""
        found = [
            self._means(name) for name in ("tokens_per_s", "log_prob_gap", "accept_length") if name in self._values
        ]
        return [*found, self._rates()]

    def verdict(self) -> str:
        """One sentence."""
        rows = self.rows()
        sure = [_sentence(row) for row in rows if row.sure]
        if sure:
            return "; ".join(sure)
        others = [
            f"no difference of the {_WORDS[row.name][0]} in {row.n} intervals"
            for row in rows
            if row.name in ("log_prob_gap", "accept_length") and row.n >= ENOUGH
        ]
        return "; ".join([_speed(next((row for row in rows if row.name == "tokens_per_s"), None)), *others])

    def _add(self, name: str, arm: Arm, interval: int, total: float, weight: float) -> None:
        table = self._values.setdefault(name, {})
        both = table.setdefault(interval, {})
        sums = both.setdefault(arm, _Sum())
        sums.total += total
        sums.weight += weight
        while len(table) > MOST:
            del table[min(table)]

    def _means(self, name: str) -> Row:
        enough = BUSY_S if name == "tokens_per_s" else 0.0
        pairs = [
            (both["A"].mean, both["B"].mean)
            for _, both in sorted(self._values[name].items())
            if len(both) == 2 and all(one.weight > enough for one in both.values())
        ]
        if not pairs:
            return Row(name=name, a=None, b=None, diff=None, low=None, high=None, n=0)
        a, b = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        differences = [right - left for left, right in pairs]
        shown, claimed = mean_interval(differences, SHOWN), mean_interval(differences, CLAIMED)
        if shown is None or claimed is None:
            return Row(name=name, a=a, b=b, diff=b - a, low=None, high=None, n=len(pairs))
        sure = claimed[0] > 0 or claimed[1] < 0
        return Row(name=name, a=a, b=b, diff=b - a, low=shown[0], high=shown[1], n=len(pairs), sure=sure)

    def _rates(self) -> Row:
        name, n = "crashes_per_hour", sum(self._crashes.values())
        counts = (self._crashes["A"], self._hours["A"], self._crashes["B"], self._hours["B"])
        if min(counts[1], counts[3]) <= 0:
            return Row(name=name, a=None, b=None, diff=None, low=None, high=None, n=n)
        a, b = counts[0] / counts[1], counts[2] / counts[3]
        low, high = rate_difference(*counts, SHOWN)
        claimed = rate_difference(*counts, CLAIMED)
        sure = claimed[0] > 0 or claimed[1] < 0
        return Row(name=name, a=a, b=b, diff=b - a, low=low, high=high, n=n, sure=sure)


_WORDS = {
    "tokens_per_s": ("tokens per second", "higher", "lower"),
    "log_prob_gap": ("log-prob gap", "larger", "smaller"),
    "accept_length": ("acceptance length", "longer", "shorter"),
    "crashes_per_hour": ("crashes per hour", "more", "fewer"),
}


def _speed(row: Row | None) -> str:
    """Of the tokens per second, where no difference is sure. Intervals of another measure are none of its own."""
    n = 0 if row is None else row.n
    if row is None or n < ENOUGH:
        return f"not enough yet: {n} of {ENOUGH} intervals in which both arms had work"
    if not row.a or row.low is None or row.high is None:
        return f"no difference seen in {n} intervals"
    low, high = 100 * row.low / row.a, 100 * row.high / row.a
    return f"no difference seen in {n} intervals: tokens per second between {low:+.1f} % and {high:+.1f} %"


def _sentence(row: Row) -> str:
    what, more, less = _WORDS[row.name]
    if row.diff is None or row.low is None or row.high is None:
        return ""
    word = more if row.diff > 0 else less
    if not row.a:
        return f"{what} {word} with the change by {abs(row.diff):.3g} ({row.low:.3g} to {row.high:.3g})"
    share, low, high = (100 * value / row.a for value in (row.diff, row.low, row.high))
    return f"{what} {word} with the change: {share:+.1f} % ({low:+.1f} % to {high:+.1f} %)"


# -- statistics


def mean_interval(values: Sequence[float], level: float) -> tuple[float, float] | None:
    """Two-sided interval of the mean of a series in order of time; None with fewer than `ENOUGH` values."""
    n = len(values)
    if n < ENOUGH:
        return None
    mean = math.fsum(values) / n
    off = [value - mean for value in values]
    square = math.fsum(one * one for one in off)
    if square == 0:
        return mean, mean
    lag = math.fsum(left * right for left, right in pairwise(off)) / square
    # The estimate is low by about (1 + 4 r) / n (Marriott and Pope 1954).
    lag = min(0.95, max(0.0, lag + (1 + 4 * max(lag, 0.0)) / n)) if lag > 1 / math.sqrt(n) else 0.0
    effective = max(2.0, n * (1 - lag) / (1 + lag))
    half = student_t((1 + level) / 2, effective - 1) * math.sqrt(square / (n - 1) / effective)
    return mean - half, mean + half


def rate_difference(count_a: int, time_a: float, count_b: int, time_b: float, level: float) -> tuple[float, float]:
    """Interval of rate B minus rate A (MOVER over exact Poisson limits). Times above 0; rates per unit of them."""
    a, b = count_a / time_a, count_b / time_b
    a_low, a_high = (limit / time_a for limit in poisson_limits(count_a, level))
    b_low, b_high = (limit / time_b for limit in poisson_limits(count_b, level))
    low = b - a - math.hypot(b - b_low, a_high - a)
    high = b - a + math.hypot(b_high - b, a - a_low)
    return low, high


def poisson_limits(count: int, level: float) -> tuple[float, float]:
    """Exact two-sided limits of a Poisson mean (Garwood 1936)."""
    tail = (1 - level) / 2
    high = _solve(lambda mean: _poisson_cdf(count, mean) - tail, float(count), count + 20 + 10 * math.sqrt(count + 1))
    if count == 0:
        return 0.0, high
    low = _solve(lambda mean: _poisson_cdf(count - 1, mean) - (1 - tail), 0.0, float(count))
    return low, high


def _poisson_cdf(count: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(count + 1)]
    top = max(logs)
    return min(1.0, math.exp(top) * math.fsum(math.exp(one - top) for one in logs))


def student_t(probability: float, freedom: float) -> float:
    """Quantile of Student's t, for probabilities from 0.5 up; `freedom` need not be whole."""
    if probability == 0.5:
        return 0.0
    high = 1.0
    while _t_cdf(high, freedom) < probability:
        high *= 2
    return _solve(lambda value: probability - _t_cdf(value, freedom), 0.0, high)


def _t_cdf(value: float, freedom: float) -> float:
    """For values from 0 up."""
    return 1 - 0.5 * _beta(freedom / (freedom + value * value), freedom / 2, 0.5)


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Numerical Recipes, section 6.4)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _fraction(1 - x, b, a) / b
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), tiny)
    result = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / _away(1 + even * d, tiny), _away(1 + even / c, tiny)
        result *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / _away(1 + odd * d, tiny), _away(1 + odd / c, tiny)
        step = d * c
        result *= step
        if abs(step - 1) < 1e-14:
            break
    return result


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def _solve(function: Callable[[float], float], low: float, high: float) -> float:
    """Root of a decreasing function between two values, by bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
