"""`train.grad-scale` and `train.grad-high`: the norm of the gradient before clipping.

A huge norm with a healthy loss is a matter of scaling (grad-scale); only what that does not own is read as high.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rltop.checks.facts import NO_TRAINER
from rltop.checks.observe import Axis, Observations
from rltop.checks.phrase import jnum, missing, num, of_points, percent
from rltop.checks.rules.logprob_magnitude import first_rollout_likely
from rltop.checks.series import Point, finite, median, points, segments, start_of
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Status, Verdict

SCALE = "train.grad-scale"
HIGH = "train.grad-high"
NORM = "train/grad_norm"
AXES: tuple[Axis, ...] = ("train", "rollout")
TOKENS = tuple(
    f"{side}{name}"
    for side in ("train/", "")
    for name in (
        "tokens_per_micro_batch",
        "tokens_per_microbatch",
        "micro_batch_tokens",
        "num_tokens_per_micro_batch",
        "num_tokens",
        "n_tokens",
        "tokens",
        "total_tokens",
    )
)
"""Names under which trainers log the tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class ScaleFault:
    """The norm is a matter of scaling. `kind`: `constant` (huge and flat) or `tokens` (grows with the token count)."""

    kind: str
    spread: float
    points: tuple[Point, ...]


def scale_fault(obs: Observations, t: Thresholds) -> ScaleFault | None:
    """Evidence that gradients are scaled wrongly, over the newest healthy steps of each segment; None without."""
    tokens = next(
        (found for name in TOKENS for axis in AXES if (found := finite(points(obs, name, axis)))),
        (),
    )
    for part in segments(_healthy(obs, t, finite(points(obs, NORM)))):
        recent = part[-t.scale_recent :]
        norms = [point.value for point in recent]
        if len(norms) >= t.scale_steps and min(norms) >= t.scale_norm:
            spread = statistics.pstdev(norms) / statistics.fmean(norms)
            if spread < t.scale_spread:
                return ScaleFault("constant", spread, recent)
        if fault := _follows_tokens(recent, tokens, t):
            return fault
    return None


def _healthy(obs: Observations, t: Thresholds, norms: Sequence[Point]) -> tuple[Point, ...]:
    """Steps whose loss is finite and small and, where logged, whose ppo_kl and gap are fine."""
    loss = {(p.segment, p.step): abs(p.value) for p in finite(points(obs, "train/loss"))}
    off = {(p.segment, p.step) for p in points(obs, "train/ppo_kl") if not abs(p.value) <= t.scale_ppo_kl}
    off |= {
        (p.segment, p.step)
        for p in points(obs, "train/train_rollout_logprob_abs_diff")
        if not abs(p.value) <= t.gap_warn
    }
    keys = {key for key, size in loss.items() if size < t.scale_loss} - off
    return tuple(p for p in norms if (p.segment, p.step) in keys)


def _follows_tokens(norms: Sequence[Point], tokens: Sequence[Point], t: Thresholds) -> ScaleFault | None:
    count = {(p.segment, p.step): p.value for p in tokens if p.value > 0}
    pairs = [(p, count[p.segment, p.step]) for p in norms if (p.segment, p.step) in count and p.value > 0]
    if len(pairs) < t.scale_token_steps:
        return None
    sizes = [size for _, size in pairs]
    rates = [point.value / size for point, size in pairs]
    spread = (max(rates) - min(rates)) / statistics.fmean(rates)
    if max(sizes) < t.scale_token_range * min(sizes) or spread >= t.scale_token_spread:
        return None
    return ScaleFault("tokens", spread, tuple(point for point, _ in pairs))


def check_scale(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict of `train.grad-scale`."""
    if obs.mode == "rollout-only":
        return [Verdict(SCALE, "skip", cause=NO_TRAINER)]
    healthy = _healthy(obs, t, finite(points(obs, NORM)))
    fault = scale_fault(obs, t)
    limits = {
        "norm": t.scale_norm,
        "spread": t.scale_spread if not fault or fault.kind == "constant" else t.scale_token_spread,
    }
    if fault is None:
        if len(healthy) < t.scale_steps:
            cause = missing(obs, f"a series of {t.scale_steps} train steps with a grad_norm and a healthy loss")
            return [Verdict(SCALE, "skip", cause=cause)]
        last = healthy[-1]
        cause = "The gradient norm is neither huge and constant nor proportional to the token count."
        value = {"grad_norm": jnum(last.value)}
        where = of_points((last,))
        return [
            Verdict(
                SCALE,
                "pass",
                rollout=last.rollout,
                step=last.step,
                value=value,
                threshold=limits,
                evidence=where,
                cause=cause,
            )
        ]
    first = fault.points[0]
    if fault.kind == "constant":
        how = (
            f"stays at {num(first.value)} within {percent(fault.spread)} while loss, ppo_kl and the log-prob gap are "
            "healthy: loss or gradient scaling, or a fused kernel"
        )
    else:
        how = (
            f"is proportional to the tokens of a micro-batch within {percent(fault.spread)}: the loss is not divided "
            "by the token count"
        )
    return [
        Verdict(
            SCALE,
            "fail",
            rollout=first.rollout,
            step=first.step,
            value={"grad_norm": jnum(first.value), "spread": jnum(fault.spread), "kind": fault.kind},
            threshold=limits,
            evidence=of_points(fault.points[:4]),
            cause=f"grad_norm {how}; after clipping almost nothing is left of the update.",
            advice=(
                "compare the loss normalisation with the framework's contract (--calculate-per-token-loss)",
                "run one step in fp32, and one without the suspect fused kernel",
            ),
        )
    ]


def check_high(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict of `train.grad-high`: the first step first, then the newest spikes."""
    if obs.mode == "rollout-only":
        return [Verdict(HIGH, "skip", cause=NO_TRAINER)]
    series = finite(points(obs, NORM))
    if not series:
        return [Verdict(HIGH, "skip", cause=missing(obs, NORM))]
    if scale_fault(obs, t) is not None:
        return [Verdict(HIGH, "skip", cause="the norm is a matter of scaling: train.grad-scale owns it")]
    firsts = [part[0] for part in segments(series) if _begins(obs, part[0])]
    high = [point for point in firsts if point.value > t.grad_first_warn]
    spikes = [found for part in segments(series) for found in _spikes(part, t)]
    if high:
        worst = max(high, key=lambda point: point.value)
        return [
            _high(obs, t, worst, f"at the first step of the run, where {num(t.grad_first_warn)} is already much", None)
        ]
    if spikes:
        point, level = max(spikes, key=lambda found: found[0].value / max(found[1], 1e-30))
        return [
            _high(obs, t, point, f"at step {point.step}, where the median of the steps before is {num(level)}", level)
        ]
    last = series[-1]
    return [
        Verdict(
            HIGH,
            "pass",
            rollout=last.rollout,
            step=last.step,
            value={"grad_norm": jnum(last.value), "first": jnum(firsts[0].value) if firsts else None},
            threshold={"warn": t.grad_first_warn, "fail": t.grad_first_fail},
            evidence=of_points((last,)),
            cause=f"The gradient norm is {num(last.value)}; no spike among the newest steps.",
            confidence="medium",
        )
    ]


def _begins(obs: Observations, point: Point) -> bool:
    """The point is the first step of its run: known from its start, a restart, or a step number of 0 or 1."""
    if point.on_policy is False or point.span > 1:
        return False
    known = any(start.segment == point.segment for start in obs.starts)
    first = start_of(obs, point.segment).rollout_id
    if known and first is not None and point.rollout is not None:
        return point.rollout <= first
    return point.segment > 0 or point.step <= 1


def _spikes(part: Sequence[Point], t: Thresholds) -> list[tuple[Point, float]]:
    """(point, median before it) of the spikes among the newest steps of one segment."""
    found = []
    for at in range(max(t.grad_spike_history, len(part) - t.grad_spike_recent), len(part)):
        level = median(point.value for point in part[max(0, at - t.grad_spike_window) : at])
        if part[at].value > t.grad_spike_factor * level and part[at].value > t.grad_spike_floor:
            found.append((part[at], level))
    return found


def _high(obs: Observations, t: Thresholds, point: Point, where: str, level: float | None) -> Verdict:
    first = level is None
    likely = first_rollout_likely(obs, t)
    status: Status = "fail" if first and point.value > t.grad_first_fail else "warn"
    why = {
        False: "the data is the cause: its prompts do not follow the model's chat template",
        True: "the data is likely under the model, so the loss (divided by the tokens?) or a kernel is the suspect",
        None: "data, loss or a kernel",
    }[likely if first else None]
    template = "compare the chat template of the data with the model's: --apply-chat-template once, not twice"
    loss = "check that the loss is divided by the number of tokens (--calculate-per-token-loss)"
    others = "look at logprob.magnitude, logprob.train-rollout and kl.on-policy of the same rollout"
    return Verdict(
        HIGH,
        status,
        rollout=point.rollout,
        step=point.step,
        value={"grad_norm": jnum(point.value), "median": jnum(level)},
        threshold={"warn": t.grad_first_warn, "fail": t.grad_first_fail}
        if first
        else {"factor": t.grad_spike_factor, "floor": t.grad_spike_floor},
        evidence=of_points((point,)),
        cause=f"grad_norm is {num(point.value)} {where}: {why}.",
        advice=(loss, others) if first and likely else (template, others, loss),
        confidence="medium",
    )
