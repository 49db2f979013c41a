"""`logprob.drift`: the gap between trainer and engine grows over a run that began clean."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rltop.checks.facts import NO_TRAINER
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_points
from rltop.checks.rules.logprob_gap import Gap, gaps
from rltop.checks.series import TREND_POINTS, Point, finite, maybe_on_policy, points, segments, trend
from rltop.checks.syncs import COMPARE
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ID = "logprob.drift"
MULTIPLICATIVE = ("train/token_mult_prob_error", "train/mult_prob_error")
"""Error metrics of other trainers whose level means nothing: mean of exp |difference|, 1 at best."""
_SMOOTH = 5
"""Points of a running median, so that no spike counts."""


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: the longest run whose gap grows, or none does."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    parts = _parts(gaps(obs))
    errors = [part for name in MULTIPLICATIVE for part in segments(maybe_on_policy(finite(points(obs, name))))]
    longest = max([len(part) for part in parts] + [len(part) for part in errors], default=0)
    if longest < TREND_POINTS:
        cause = missing(obs, f"a series of {TREND_POINTS} on-policy points of the train/rollout log-prob gap")
        return [Verdict(ID, "skip", cause=cause)]
    for part in sorted(parts, key=len, reverse=True):
        if found := _of_gaps(t, part):
            return [found]
    for errs in sorted(errors, key=len, reverse=True):
        if found := _of_errors(t, errs):
            return [found]
    last = parts[-1][-1] if parts else None
    return [
        Verdict(
            ID,
            "pass",
            rollout=last.rollout if last else errors[-1][-1].rollout,
            step=last.step if last else errors[-1][-1].step,
            value={"last": jnum(last.value if last else errors[-1][-1].value)},
            threshold=_limits(t),
            cause="The train/rollout log-prob gap shows no upward trend.",
            confidence="medium",
        )
    ]


def _limits(t: Thresholds) -> dict[str, float]:
    return {"factor": t.drift_factor, "rise": t.drift_rise, "correlation": t.drift_correlation}


def _parts(series: Sequence[Gap]) -> list[list[Gap]]:
    found: dict[int, list[Gap]] = {}
    for gap in series:
        found.setdefault(gap.segment, []).append(gap)
    return [found[segment] for segment in sorted(found)]


def _of_gaps(t: Thresholds, part: Sequence[Gap]) -> Verdict | None:
    grown = trend([gap.value for gap in part])
    first = part[0].value if part else 0.0
    if grown is None or first > max(t.gap_warn, 0.0):
        # A run that began with a gap has a configuration error or a constant offset: logprob.train-rollout.
        return None
    if grown.last < t.drift_factor * grown.first or grown.last - grown.first < t.drift_rise:
        return None
    if grown.correlation < t.drift_correlation:
        return None
    last = part[-1]
    onset = next((gap for gap in part if gap.value >= t.drift_factor * grown.first), last)
    value: dict[str, object] = {
        "first": jnum(first),
        "last": jnum(last.value),
        "first_quarter": jnum(grown.first),
        "last_quarter": jnum(grown.last),
        "correlation": round(grown.correlation, 3),
        "points": len(part),
    }
    cause = (
        f"The gap is clean at rollout {part[0].rollout} ({num(first)} nat per token) and grows to {num(last.value)} at "
        f"rollout {last.rollout}, so it is no configuration error: the rollout path departs from the trainer (sync, KV "
        "reuse, graph or frozen weights)."
    )
    evidence = part[0].evidence[:1] + onset.evidence[:1] + last.evidence[:1]
    return _verdict(t, part[0].rollout, part[0].step, value, cause, evidence)


def _of_errors(t: Thresholds, part: Sequence[Point]) -> Verdict | None:
    """A multiplicative error is 1 at best; only its smoothed trend above 1 counts."""
    values = [point.value - 1 for point in part]
    half = _SMOOTH // 2
    smooth = [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    grown = trend(smooth)
    if grown is None or grown.last < t.drift_factor * max(grown.first, 0.0) or grown.correlation < t.drift_correlation:
        return None
    if grown.last - grown.first < t.drift_rise:
        return None
    first, last = part[0], part[-1]
    value: dict[str, object] = {
        "first": jnum(first.value),
        "last": jnum(last.value),
        "first_quarter": jnum(1 + grown.first),
        "last_quarter": jnum(1 + grown.last),
        "correlation": round(grown.correlation, 3),
        "points": len(part),
    }
    cause = (
        f"{first.name} rises from {num(1 + grown.first)} to {num(1 + grown.last)} (medians, smoothed): the rollout "
        "path departs from the trainer."
    )
    return _verdict(t, first.rollout, first.step, value, cause, of_points((first, last)))


def _verdict(
    t: Thresholds,
    rollout: int | None,
    step: int | None,
    value: dict[str, object],
    cause: str,
    evidence: tuple[Evidence, ...],
) -> Verdict:
    return Verdict(
        ID,
        "warn",
        rollout=rollout,
        step=step,
        value=value,
        threshold=_limits(t),
        evidence=evidence,
        cause=cause,
        advice=(
            "sync once more and measure again",
            "flush the prefix cache after every update and check the answer",
            COMPARE,
            "rescore one prompt by both sides",
        ),
        confidence="medium",
    )
