"""`train.grad-zero`: no gradient although there is something to learn."""

from __future__ import annotations

from collections.abc import Iterable

from rltop.checks.facts import NO_TRAINER
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_points
from rltop.checks.rules.train_grad import NORM
from rltop.checks.series import Point, finite, points, segments
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

ID = "train.grad-zero"
ZERO_STD = "rollout/zero_std/"
"""Prefix of slime's counts of groups whose rewards are all equal, one key per reward."""


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: the first run of zeros that is not followed by many steps with a gradient."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    series = [point for point in finite(points(obs, NORM)) if point.span == 1]
    if not series:
        return [Verdict(ID, "skip", cause=missing(obs, NORM))]
    loss = {(p.segment, p.step): p for p in finite(points(obs, "train/loss"))}
    spread = _reward_spread(obs)
    for part in segments(series):
        if streak := _lost(part, loss, spread, t):
            return [_fail(obs, t, streak, loss)]
    last = series[-1]
    cause = f"There is a gradient: grad_norm is {num(last.value)} at step {last.step}."
    if last.value == 0:
        cause = f"grad_norm is 0 at step {last.step}; only {t.grad_zero_steps} such steps in a row would be wrong."
        if spread.get((last.segment, last.rollout)) is False:
            cause = f"grad_norm is 0 at step {last.step}, as it must be: every group of the rollout has one reward."
    return [
        Verdict(
            ID,
            "pass",
            rollout=last.rollout,
            step=last.step,
            value={"grad_norm": jnum(last.value)},
            threshold={"steps": t.grad_zero_steps},
            evidence=of_points((last,)),
            cause=cause,
        )
    ]


def _lost(
    part: tuple[Point, ...],
    loss: dict[tuple[int, int], Point],
    spread: dict[tuple[int, int | None], bool],
    t: Thresholds,
) -> list[Point]:
    """The first streak of zero gradients with something to learn; one with many good steps after it is over."""
    streak: list[Point] = []
    for at, point in enumerate(part):
        if point.value != 0:
            if len(streak) >= t.grad_zero_steps and len(part) - at < t.grad_spike_recent:
                return streak
            streak = []
            continue
        varied = spread.get((point.segment, point.rollout))
        has_loss = (point.segment, point.step) in loss and loss[point.segment, point.step].value != 0
        if varied or (varied is None and has_loss):
            streak.append(point)
    return streak if len(streak) >= t.grad_zero_steps else []


def _reward_spread(obs: Observations) -> dict[tuple[int, int | None], bool]:
    """(segment, rollout) -> some group has different rewards; absent where unknown.

    From slime's zero_std counts and the number of groups (`--rollout-batch-size`), else from the samples' groups.
    """
    found: dict[tuple[int, int | None], bool] = {}
    groups: dict[tuple[int, int, int], set[float]] = {}
    for sample in obs.samples:
        if sample.group is not None and sample.reward is not None and sample.rollout_id is not None:
            groups.setdefault((sample.segment, sample.rollout_id, sample.group), set()).add(sample.reward)
    for (segment, rollout, _), rewards in groups.items():
        if len(rewards) > 1:
            found[segment, rollout] = True
    prompts = obs.args.number("rollout_batch_size")
    for row in obs.metrics:
        counts = [value for name, value in row.values.items() if name.startswith(ZERO_STD)]
        if row.axis == "rollout" and counts and prompts:
            found.setdefault((row.segment, row.step), sum(counts) < prompts)
    return found


def _fail(obs: Observations, t: Thresholds, streak: list[Point], loss: dict[tuple[int, int], Point]) -> Verdict:
    first = streak[0]
    at = loss.get((first.segment, first.step))
    fused = obs.args.on("cross_entropy_loss_fusion") and obs.args.text("cross_entropy_fusion_impl") == "te"
    learn = f"the loss is {num(at.value)}" if at is not None and at.value != 0 else "groups have different rewards"
    why = "the fused cross-entropy of TransformerEngine loses the gradient" if fused else "the backward pass loses it"
    return Verdict(
        ID,
        "fail",
        rollout=first.rollout,
        step=first.step,
        value={"grad_norm": 0.0, "from": first.step, "to": streak[-1].step, "loss": jnum(at.value) if at else None},
        threshold={"steps": t.grad_zero_steps},
        evidence=of_points((*streak[:2], *((at,) if at else ()))),
        cause=f"grad_norm is exactly 0 from step {first.step} to step {streak[-1].step} while {learn}: {why}.",
        advice=("remove --cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "or update TransformerEngine")
        if fused
        else (
            "check that the log-probs of the loss require grad, and that the optimizer holds the trained parameters",
        ),
        confidence="high" if fused else "medium",
    )
