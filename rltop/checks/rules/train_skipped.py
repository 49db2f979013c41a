"""`train.skipped-steps`: the optimizer did not step.

With `--no-check-for-nan-in-loss-and-grad` slime skips a step whose gradient is not finite: the weights stay, grad_norm
is logged as NaN or Inf, and nothing else is said. fp16 training skips on overflow and lowers its loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rltop.checks.events import number, of_kind, whole
from rltop.checks.facts import NO_TRAINER, may_skip_bad_steps, skips_bad_steps
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import count, missing, num, of_event, of_points, percent
from rltop.checks.series import Point, points, segments
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Status, Verdict

ID = "train.skipped-steps"
NORM = "train/grad_norm"
TOLD = "train/step_skipped"
"""1 where the trainer itself says that it left the weights alone."""


@dataclass(frozen=True, slots=True)
class _Streak:
    """Skipped steps in a row, of one segment."""

    points: tuple[Point, ...]


def skipped_steps(obs: Observations) -> tuple[Point, ...]:
    """Steps that were skipped: said so by the trainer, or not finite while such steps are skipped."""
    told = {(p.segment, p.step): p for p in points(obs, TOLD) if p.value == 1}
    for point in survived_steps(obs):
        told.setdefault((point.segment, point.step), point)
    return tuple(told[key] for key in sorted(told))


def survived_steps(obs: Observations) -> tuple[Point, ...]:
    """Steps whose gradient is not finite and that left the weights alone, by the arguments or by what came after."""
    norms = points(obs, NORM)
    always = skips_bad_steps(obs)
    if not always and not may_skip_bad_steps(obs):
        return ()
    return tuple(
        point
        for at, point in enumerate(norms)
        if not math.isfinite(point.value) and (always or _comes_back(obs, norms[at + 1 :], point.segment))
    )


def _comes_back(obs: Observations, later: Sequence[Point], segment: int) -> bool:
    """Norm and loss are numbers again after the step: the weights do not hold it."""
    loss = {(p.segment, p.step): p.value for p in points(obs, "train/loss")}
    return any(
        p.segment == segment and math.isfinite(p.value) and math.isfinite(loss.get((p.segment, p.step), 0.0))
        for p in later
    )


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on skipped steps, one on fp16 overflows where the log tells of them."""
    if obs.mode == "rollout-only" and not obs.metrics:
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    series = points(obs, NORM)
    scale = _overflows(obs, t)
    if not series and not points(obs, TOLD):
        return scale or [Verdict(ID, "skip", cause=missing(obs, NORM))]
    skipped = skipped_steps(obs)
    if not skipped:
        return scale or [Verdict(ID, "pass", value={"skipped": 0}, cause="No step is known to have been skipped.")]
    return [_judge(obs, t, series or skipped, skipped), *scale]


def _judge(obs: Observations, t: Thresholds, series: Sequence[Point], skipped: Sequence[Point]) -> Verdict:
    keys = {(p.segment, p.step) for p in skipped}
    longest: tuple[Point, ...] = ()
    share, window = 0.0, 0
    for part in segments(series):
        row: list[Point] = []
        for point in part:
            row = [*row, point] if (point.segment, point.step) in keys else []
            longest = max(longest, tuple(row), key=len)
        recent = part[-t.skipped_window :]
        bad = sum((p.segment, p.step) in keys for p in recent)
        if len(recent) >= t.skipped_window and bad / len(recent) > share:
            share, window = bad / len(recent), len(recent)
    often = share > t.skipped_share
    status: Status = "warn" if len(longest) >= t.skipped_row or often else "info"
    shown = longest if len(longest) > 1 or not often else tuple(skipped)
    first, last = (shown[0], shown[-1]) if shown else (skipped[0], skipped[-1])
    steps = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
    cause = f"The optimizer skipped {steps}"
    cause += f", {len(longest)} in a row" if len(longest) > 1 else ""
    cause += f" and {percent(share)} of the newest {window} steps" if often else ""
    cause += f" ({len(skipped)} in all): their gradient is not finite, the weights did not change"
    ended = longest and not often and longest[-1].order < max(point.order for point in series)
    cause += (", the model learned nothing from them." if ended else ", the model does not learn.") * (status == "warn")
    cause += "." * (status != "warn")
    return Verdict(
        ID,
        status,
        rollout=first.rollout,
        step=first.step,
        value={
            "skipped": len(skipped),
            "in_a_row": len(longest),
            "first_step": first.step,
            "last_step": last.step,
            "share": round(share, 4),
        },
        threshold={"in_a_row": t.skipped_row, "share": t.skipped_share},
        evidence=of_points(shown[:4] or skipped[:4]),
        cause=cause,
        advice=(
            f"--save-debug-rollout-data DIR/{{rollout_id}}.pt: the data of {steps}",
            "a lower --lr",
            *(("--bf16 instead of --fp16",) if obs.args.on("fp16") else ()),
        ),
    )


def _overflows(obs: Observations, t: Thresholds) -> list[Verdict]:
    """fp16: steps skipped because the scaled loss overflowed, while the loss scale falls."""
    lines = [event for event in of_kind(obs, "iteration") if whole(event, "skipped") is not None]
    streak: list[LogEvent] = []
    longest: list[LogEvent] = []
    for event in lines:
        several = whole(event, "skipped") or 0
        streak = [*streak, event] if several > 0 else []
        if _count(streak) > _count(longest):
            longest = streak
    notes = of_kind(obs, "overflow")
    if not longest and not notes:
        return []
    total = max(_count(longest), 0)
    scales = [s for event in (longest or list(notes)) if (s := number(event, "scale")) is not None]
    least = obs.args.number("min_loss_scale")
    at_least = bool(scales) and least is not None and scales[-1] <= least
    falling = len(scales) < 2 or scales[-1] <= scales[0]
    many = total > t.skipped_fp16_row
    status: Status = "warn" if many or at_least or not falling else "info"
    shown = longest or list(notes)
    steps = [whole(event, "step") for event in longest]
    cause = f"The fp16 loss overflowed, and {count(total or len(notes), 'step')} did nothing"
    cause += f" (loss scale {num(scales[0])} to {num(scales[-1])})" if len(scales) > 1 else ""
    if at_least:
        cause += (
            f"; the scale is at --min-loss-scale {num(least or 0.0)} and cannot fall further, the model does not learn."
        )
    elif many:
        cause += f", more than {t.skipped_fp16_row} in a row: the falling loss scale does not catch it."
    else:
        cause += ": the loss scale adapts, which is normal."
    return [
        Verdict(
            ID,
            status,
            step=steps[0] if steps else None,
            value={"skipped": total or len(notes), "scales": scales[-4:], "first_step": steps[0] if steps else None},
            threshold={"in_a_row": t.skipped_fp16_row, "min_loss_scale": least},
            evidence=tuple(of_event(event) for event in shown[:3]),
            cause=cause,
            advice=("--bf16 instead of --fp16", "a lower --lr"),
        )
    ]


def _count(events: Sequence[LogEvent]) -> int:
    return sum(whole(event, "skipped") or 0 for event in events)
