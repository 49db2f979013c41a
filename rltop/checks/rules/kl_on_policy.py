"""`kl.on-policy`: before the first update of a rollout, old and new policy are the same."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rltop.checks.facts import NO_TRAINER, mixture_of_experts, of_verl
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_points
from rltop.checks.series import Point, finite, old_log_probs, points, surely_on_policy
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Status, Verdict

ID = "kl.on-policy"


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict; the first deviating on-policy step decides where, the largest one how bad."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    if old_log_probs(obs, 0) == "engine":
        return [
            Verdict(ID, "skip", cause="--use-rollout-logprobs: the old log-probs are the engine's, so ppo_kl is not 0")
        ]
    if old_log_probs(obs, 0) == "old-actor":
        return [
            Verdict(ID, "skip", cause="--keep-old-actor: the old log-probs are another model's, so ppo_kl is not 0")
        ]
    logged = points(obs, "train/ppo_kl")
    if _averaged(obs, logged):
        cause = (
            "verl logs ppo_kl as the mean over all mini-batches and epochs of a rollout, so it is not the value before "
            "the first update (train_batch_size = ppo_mini_batch_size and ppo_epochs = 1 would make it so)"
        )
        return [Verdict(ID, "skip", cause=cause)]
    series = surely_on_policy(finite(logged))
    if not series:
        return [Verdict(ID, "skip", cause=_absent(obs, logged))]
    # clipfrac and probs_ratio are looked at on the same steps: they catch deviations whose mean cancels.
    clips = surely_on_policy(finite(points(obs, "train/pg_clipfrac")))
    ratios = surely_on_policy(finite(points(obs, "train/probs_ratio")))
    off = [p for p in series if abs(p.value) > t.kl_tolerance]
    off += [p for p in clips if p.value > 0]
    off += [p for p in ratios if abs(p.value - 1) > t.kl_ratio_tolerance]
    if off:
        return [_deviates(obs, t, sorted(off, key=lambda p: (p.order, p.name != "train/ppo_kl", p.name)))]
    worst = max(series, key=lambda p: abs(p.value))
    measured = worst.value != 0 or any(old_log_probs(obs, p.segment) == "measured" for p in series)
    value = {"ppo_kl": worst.value}
    limits = {"equal": t.kl_tolerance, "fail": t.kl_fail}
    if not measured:
        cause = (
            "ppo_kl is 0 by construction, not measured: with one step per rollout the old log-probs are those of the "
            "training forward itself (rollout/log_probs is not logged)"
        )
        return [Verdict(ID, "skip", value=value, threshold=limits, cause=cause, step=series[0].step)]
    cause = f"Old and new policy are the same before each first update: |ppo_kl| is at most {num(abs(worst.value))}."
    last = series[-1]
    return [
        Verdict(
            ID,
            "pass",
            rollout=last.rollout,
            step=last.step,
            value=value,
            threshold=limits,
            evidence=of_points((last,)),
            cause=cause,
            confidence="high" if mixture_of_experts(obs) else "medium",
        )
    ]


def _averaged(obs: Observations, logged: tuple[Point, ...]) -> bool:
    """The logged value covers several updates of the weights."""
    if not logged or not of_verl(obs, logged[0].where):
        return False
    train = obs.args.number("data.train_batch_size")
    mini = obs.args.number("actor_rollout_ref.actor.ppo_mini_batch_size")
    epochs = obs.args.number("actor_rollout_ref.actor.ppo_epochs") or 1
    return train is None or mini is None or train != mini or epochs > 1


def _absent(obs: Observations, logged: tuple[Point, ...]) -> str:
    if any(not math.isfinite(point.value) for point in logged):
        return "train/ppo_kl is not a number at the on-policy steps (see train.nan)"
    return missing(obs, "train/ppo_kl of an on-policy step")


def _deviates(obs: Observations, t: Thresholds, off: list[Point]) -> Verdict:
    first = off[0]
    kl = [p for p in off if p.name == "train/ppo_kl"]
    largest = max((abs(p.value) for p in kl), default=0.0)
    status: Status = "fail" if largest > t.kl_fail else "warn"
    experts = mixture_of_experts(obs)
    permute = experts and not obs.args.on("moe_permute_fusion")
    kernel = (
        "the unfused expert permute is not deterministic"
        if permute
        else "a Megatron or TransformerEngine kernel is not deterministic"
    )
    return Verdict(
        ID,
        status,
        rollout=first.rollout,
        step=first.step,
        value={first.name.removeprefix("train/"): jnum(first.value), "largest_ppo_kl": jnum(largest)},
        threshold={"equal": t.kl_tolerance, "fail": t.kl_fail},
        evidence=of_points(off),
        cause=f"{first.name} is {num(first.value)} at the on-policy step {first.step}, before any update: two forwards "
        f"over the same weights differ, so {kernel}.",
        advice=("--moe-permute-fusion", "--deterministic-mode") if permute else ("--deterministic-mode",),
        confidence="high" if experts else "medium",
    )
