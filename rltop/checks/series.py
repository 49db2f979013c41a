"""Series of a metric and what the rules ask of them: segments, on-policy points, medians, trends.

A trend needs at least 10 points and uses medians, so that one spike never makes one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rltop.checks.observe import Axis, MetricRow, Observations, RunStart, Where

TREND_POINTS = 10
"""Fewest points of a trend."""

OldLogProbs = Literal["measured", "reused", "engine", "old-actor"]


class Point(NamedTuple):
    """One value of one metric."""

    name: str
    value: float
    step: int
    rollout: int | None
    """Rollout id, given or worked out from the step."""
    on_policy: bool | None
    """First optimizer step of its rollout; None where neither row nor arguments say. True on the rollout axis."""
    segment: int
    rank: int | None
    axis: Axis
    where: Where | None
    span: int = 1
    """Rows that the value is the median of; 1 is a value as it was reported."""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sorts points of both axes in the order of events: a rollout's own metrics come before its train steps."""
        rollout = self.rollout if self.rollout is not None else self.step
        return (self.segment, rollout, int(self.axis == "train"), self.step)


def steps_per_rollout(obs: Observations) -> int | None:
    """Optimizer steps per rollout from the arguments: `num_steps_per_rollout`, else rollout_batch_size x
    n_samples_per_prompt // global_batch_size. None where the arguments do not say."""
    explicit = obs.args.number("num_steps_per_rollout")
    if explicit and explicit >= 1:
        return int(explicit)
    prompts, samples = obs.args.number("rollout_batch_size"), obs.args.number("n_samples_per_prompt")
    batch = obs.args.number("global_batch_size")
    if not prompts or not batch:
        return None
    steps = prompts * (samples or 1) / batch
    return int(steps) if 1 <= steps < math.inf else None


def points(obs: Observations, name: str, axis: Axis = "train") -> tuple[Point, ...]:
    """All points of a metric in the order of segment and step, NaN and Inf included.

    One per segment and step: where several ranks report the same step, the lowest rank's. Worked out once per
    observations, since most rules ask for the same few metrics.
    """
    key = ("points", axis, name)
    if key not in obs.memo:
        obs.memo[key] = _points(obs, name, axis)
    found: tuple[Point, ...] = obs.memo[key]
    return found


def _points(obs: Observations, name: str, axis: Axis) -> tuple[Point, ...]:
    found: dict[tuple[int, int], MetricRow] = {}
    for row in _rows_with(obs, name, axis):
        key = (row.segment, row.step)
        old = found.get(key)
        if old is None or _replaces(row, old, name):
            found[key] = row
    per_rollout = steps_per_rollout(obs)
    return tuple(_point(found[key], name, per_rollout) for key in sorted(found))


def bad_points_of_all_ranks(obs: Observations, name: str, axis: Axis = "train") -> tuple[Point, ...]:
    """NaN and infinite points of a metric in the order of events, from every rank that reports it."""
    bad = (point for point in points_of_all_ranks(obs, name, axis) if not math.isfinite(point.value))
    return tuple(sorted(bad, key=lambda point: (point.order, point.rank or 0, not math.isnan(point.value))))


def points_of_all_ranks(obs: Observations, name: str, axis: Axis = "train") -> tuple[Point, ...]:
    """All points of a metric from every rank that reports it, in no order."""
    per_rollout = steps_per_rollout(obs)
    return tuple(_point(row, name, per_rollout) for row in _rows_with(obs, name, axis))


def _rows_with(obs: Observations, name: str, axis: Axis) -> Sequence[MetricRow]:
    key = ("rows", axis, name)
    if key not in obs.memo:
        obs.memo[key] = [row for row in obs.metrics if row.axis == axis and name in row.values]
    found: Sequence[MetricRow] = obs.memo[key]
    return found


def _replaces(row: MetricRow, old: MetricRow, name: str) -> bool:
    """Of two rows of one step the lower rank's holds, then the later one's; without times, any choice that ignores the
    order of rows."""
    new_key, old_key = ((one.rank or 0, -(one.time or 0.0)) for one in (row, old))
    if new_key != old_key:
        return new_key < old_key
    new, before = row.values[name], old.values[name]
    if _less(new, before) or _less(before, new):
        return _less(new, before)
    return _place(row) < _place(old)


def _place(row: MetricRow) -> tuple[int, int, int]:
    """Tells rows with the same value apart."""
    none = -(1 << 31)
    rollout = none if row.rollout_id is None else row.rollout_id
    return rollout, none if row.step_in_rollout is None else row.step_in_rollout, -row.span


def _less(left: float, right: float) -> bool:
    """A total order of floats that puts NaN first, so that a NaN is never lost to a number."""
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and not math.isnan(right)
    return left < right


def _point(row: MetricRow, name: str, per_rollout: int | None) -> Point:
    on_policy: bool | None = True
    rollout: int | None = row.rollout_id if row.rollout_id is not None else row.step
    if row.axis == "train":
        if row.step_in_rollout is not None:
            on_policy = row.step_in_rollout == 0
        else:
            on_policy = row.step % per_rollout == 0 if per_rollout else None
        if row.rollout_id is None:
            rollout = row.step // per_rollout if per_rollout else None
    where = (row.segment, row.rank, row.axis, row.where)
    return Point(name, row.values[name], row.step, rollout, on_policy, *where, row.span)


def not_above(later: Where | None, first: Where | None) -> bool:
    """Nothing in the places says that `later` was written before `first`. Ids alone do not tell: two runs in one log
    have the same ones."""
    if later is None or first is None or later.source != first.source or later.line is None or first.line is None:
        return True
    return later.line >= first.line


def finite(series: Iterable[Point]) -> tuple[Point, ...]:
    """The points that are numbers. A NaN is `train.nan`'s business and never read as a number here."""
    return tuple(point for point in series if math.isfinite(point.value))


def segments(series: Sequence[Point]) -> tuple[tuple[Point, ...], ...]:
    """Points of each run or restart, in order."""
    parts: dict[int, list[Point]] = {}
    for point in series:
        parts.setdefault(point.segment, []).append(point)
    return tuple(tuple(parts[segment]) for segment in sorted(parts))


def surely_on_policy(series: Iterable[Point]) -> tuple[Point, ...]:
    """On-policy points. Where nothing says which ones these are, only the first of each segment is: a run and a resumed
    run both begin with a new rollout."""
    kept: list[Point] = []
    seen: set[int] = set()
    for point in series:
        first = point.segment not in seen
        seen.add(point.segment)
        if point.on_policy or (point.on_policy is None and first):
            kept.append(point)
    return tuple(kept)


def maybe_on_policy(series: Iterable[Point]) -> tuple[Point, ...]:
    """On-policy points; where nothing says which ones these are, every point (one step per rollout is assumed)."""
    return tuple(point for point in series if point.on_policy is not False)


def start_of(obs: Observations, segment: int = 0) -> RunStart:
    """How a segment began: as the source says, else with the smallest id seen, fresh when that is 0 and no argument
    says that something was resumed (then `fresh` is None: unknown)."""
    for start in obs.starts:
        if start.segment == segment:
            return start
    rows = [row for row in obs.metrics if row.segment == segment]
    ids = [row.rollout_id if row.rollout_id is not None else row.step for row in rows]
    ids += [s.rollout_id for s in obs.samples if s.segment == segment and s.rollout_id is not None]
    first = min(ids, default=None)
    if first is None or first > 0 or segment > 0:
        # An excerpt may begin anywhere; a second segment is a restart, fresh or not.
        return RunStart(segment, first, False if segment > 0 and first else None)
    load, reference = obs.args.text("load"), obs.args.text("ref_load")
    return RunStart(segment, first, True if not load or load == reference else None)


def segment_ids(obs: Observations) -> tuple[int, ...]:
    """Segments that the evidence knows, in order."""
    known = {row.segment for row in obs.metrics} | {sample.segment for sample in obs.samples}
    return tuple(sorted(known | {start.segment for start in obs.starts}))


def old_log_probs(obs: Observations, segment: int) -> OldLogProbs:
    """Where the old log-probs of the policy loss come from (facts on slime, its reuse rule).

    `engine`: `--use-rollout-logprobs`. `old-actor`: `--keep-old-actor`. `measured`: a forward pass of their own, before
    the update. `reused`: the training forward's own, detached; then `ppo_kl` is 0 by construction. A pass of its own is
    proved by `rollout/log_probs`, which is not logged otherwise, or by arguments under which there is no reuse.
    """
    args = obs.args
    if args.on("use_rollout_logprobs"):
        return "engine"
    if args.on("keep_old_actor"):
        return "old-actor"
    if obs.actor_pass is not None:
        return "measured" if obs.actor_pass else "reused"
    logged = any(
        row.segment == segment and row.axis == "rollout" and "rollout/log_probs" in row.values for row in obs.metrics
    )
    several = (steps_per_rollout(obs) or 1) > 1
    extra = any(args.on(name) for name in ("kl_coef", "use_critic", "get_mismatch_metrics", "use_opd"))
    return "measured" if logged or several or extra else "reused"


def median(values: Iterable[float]) -> float:
    """Median of the finite values; NaN for none."""
    kept = [value for value in values if math.isfinite(value)]
    return statistics.median(kept) if kept else math.nan


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter (at least one value each); NaN for none."""
    size = max(1, len(values) // 4)
    return median(values[:size]), median(values[-size:])


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's rank correlation of values and position, ties averaged; 0.0 for fewer than 3 values or a constant."""
    kept = [value for value in values if math.isfinite(value)]
    if len(kept) < 3 or min(kept) == max(kept):
        return 0.0
    return statistics.correlation(_ranks(kept), [float(i) for i in range(len(kept))])


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for i in range(at, end + 1):
            ranks[order[i]] = (at + end) / 2
        at = end + 1
    return ranks


@dataclass(frozen=True, slots=True)
class Trend:
    """Direction of a series, by medians."""

    first: float
    """Median of the first quarter."""
    last: float
    """Median of the last quarter."""
    correlation: float
    """Spearman's, with time."""
    points: int


def trend(values: Sequence[float]) -> Trend | None:
    """Trend of at least 10 finite values; None for fewer."""
    kept = [value for value in values if math.isfinite(value)]
    if len(kept) < TREND_POINTS:
        return None
    first, last = quarters(kept)
    return Trend(first, last, rank_correlation(kept), len(kept))
