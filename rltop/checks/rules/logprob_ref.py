"""`logprob.ref-equal`: before the first update, actor and reference give the same log-probs.

Both come from the trainer, so this says nothing about trainer against engine (that is `logprob.train-rollout`). The
means of a rollout hide differences that cancel, so per-token differences of the samples count too where they are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.facts import (
    NO_TRAINER,
    context_parallel,
    flash_attention_3,
    latent_attention,
    low_rank,
    routing_replay,
)
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_points, of_samples
from rltop.checks.samples import pooled
from rltop.checks.series import Point, points, points_of_all_ranks, segment_ids, start_of
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

ID = "logprob.ref-equal"
TOKENS = "rollout/token_gap/actor_ref/mean"
"""Mean |log_prob - ref_log_prob| over all tokens of one trainer rank."""
_READABLE = {
    "mean": "|mean log_probs - mean ref_log_probs|",
    "token": "mean |log_prob - ref_log_prob| per token",
    "kl": "|train/kl_loss|",
}


@dataclass(frozen=True, slots=True)
class _Measure:
    """One way to compare actor and reference, in nats."""

    kind: str
    value: float
    evidence: tuple[Evidence, ...]


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict, on rollout 0 of the first fresh start."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    if low_rank(obs):
        return [Verdict(ID, "skip", cause="the actor is an adapter: the reference is another model by design")]
    fresh = [segment for segment in segment_ids(obs) if start_of(obs, segment).fresh]
    if not fresh:
        return [Verdict(ID, "skip", cause=_not_fresh(obs))]
    measures = _measures(obs, fresh[0])
    if not measures:
        return [Verdict(ID, "skip", cause=_no_measure(obs, fresh[0]))]
    return [_judge(obs, t, measures)]


def _not_fresh(obs: Observations) -> str:
    start = start_of(obs)
    if start.rollout_id is None:
        return missing(obs, "rollout 0")
    if start.rollout_id > 0:
        return f"the run begins with rollout {start.rollout_id}: only rollout 0 of a fresh start has equal models"
    if start.fresh is False:
        return "the actor was resumed from --load: it is another model than the reference"
    return "--load and --ref-load differ: whether the actor was resumed is not known"


def _measures(obs: Observations, segment: int) -> list[_Measure]:
    """The finite measures of rollout 0."""
    found = []
    actor = _first(points(obs, "rollout/log_probs", "rollout"), segment)
    reference = _first(points(obs, "rollout/ref_log_probs", "rollout"), segment)
    if actor and reference:
        found.append(_Measure("mean", abs(actor.value - reference.value), of_points((actor, reference))))
    samples = [s for s in obs.samples if s.segment == segment and s.rollout_id == 0 and s.ref_gap is not None]
    gap = pooled([sample.ref_gap for sample in samples if sample.ref_gap is not None])
    if (rank := _worst_rank(obs, segment)) and not routing_replay(obs):
        found.append(_Measure("token", rank.value, of_points((rank,))))
    elif gap and not routing_replay(obs):  # replayed routes move single tokens further than the bound on the means
        worst = max(samples, key=lambda s: (s.ref_gap.mean if s.ref_gap else 0.0, -s.index))
        found.append(_Measure("token", gap.mean, of_samples([worst])))
    if kl := _first(points(obs, "train/kl_loss"), segment):
        found.append(_Measure("kl", abs(kl.value), of_points((kl,))))
    return [measure for measure in found if math.isfinite(measure.value)]


def _worst_rank(obs: Observations, segment: int) -> Point | None:
    """Of the trainer ranks that compared all their tokens of rollout 0 (`rltop.integrations`), the worst."""
    seen = (p for p in points_of_all_ranks(obs, TOKENS, "rollout") if p.segment == segment and p.step == 0)
    return max((p for p in seen if math.isfinite(p.value)), key=lambda p: p.value, default=None)


def _first(series: tuple[Point, ...], segment: int) -> Point | None:
    """The point of step or rollout 0."""
    return next((point for point in series if point.segment == segment and point.step == 0), None)


def _no_measure(obs: Observations, segment: int) -> str:
    seen = [row.rollout_id if row.rollout_id is not None else row.step for row in obs.metrics if row.segment == segment]
    if seen and min(seen) > 0:
        return f"the evidence begins with rollout {min(seen)}: rollout 0 is not in it"
    train = _first(points(obs, "train/loss"), segment)
    actor = points(obs, "rollout/log_probs", "rollout")
    if train is None and not (obs.live and actor):
        return missing(obs, "the first train step (train/kl_loss, rollout/log_probs and rollout/ref_log_probs)")
    if any(not math.isfinite(p.value) for p in (*actor, *points(obs, "train/kl_loss"))):
        return "the log-probs of rollout 0 are not numbers (see train.nan)"
    return "no reference model: neither rollout/ref_log_probs nor train/kl_loss is logged (--use-kl-loss is off)"


def _judge(obs: Observations, t: Thresholds, measures: list[_Measure]) -> Verdict:
    worst = max(measures, key=lambda measure: measure.value)
    replay = routing_replay(obs)
    status: Status = "pass"
    if worst.value > t.ref_equal_fail:
        status = "fail"
    elif worst.value > t.ref_equal_tolerance:
        status = "info" if replay else "warn"
    kinds = {measure.kind: measure.value for measure in measures}
    value = {f"{kind}_difference" if kind != "kl" else "kl_loss": jnum(x) for kind, x in kinds.items()}
    return Verdict(
        ID,
        status,
        rollout=0,
        step=0,
        value=value,
        threshold={"equal": t.ref_equal_tolerance, "fail": t.ref_equal_fail},
        evidence=worst.evidence + tuple(e for m in measures if m is not worst for e in m.evidence),
        cause=_cause(obs, t, status, worst, kinds),
        advice=() if status in ("pass", "info") else _advice(obs, status, kinds, t),
        confidence="medium",
    )


def _cause(obs: Observations, t: Thresholds, status: Status, worst: _Measure, kinds: dict[str, float]) -> str:
    fact = f"{_READABLE[worst.kind]} is {num(worst.value)} at rollout 0"
    if status == "pass":
        return f"Actor and reference are equal before the first update: {fact}."
    if status == "info":
        allowed = num(t.ref_equal_fail)
        return f"{fact}: the actor replays recorded expert routes and the reference does not, which allows {allowed}."
    only_kl = (
        worst.kind == "kl" and max((x for k, x in kinds.items() if k != "kl"), default=1.0) <= t.ref_equal_tolerance
    )
    if only_kl:
        return (
            f"{fact} although log_probs equal ref_log_probs: the training forward itself differs (dropout, or a kernel "
            "that is not deterministic)."
        )
    if status == "fail":
        cause = f"{fact}, above {num(t.ref_equal_fail)}: the reference holds other weights than the actor"
        return (
            f"{cause}, or attention is not deterministic under context parallelism."
            if context_parallel(obs) > 1
            else f"{cause}."
        )
    where = "attention under context parallelism" if context_parallel(obs) > 1 else "often attention"
    return f"{fact}, where two passes over equal weights give exactly 0: a kernel is not deterministic, {where}."


def _advice(obs: Observations, status: Status, kinds: dict[str, float], t: Thresholds) -> tuple[str, ...]:
    same = "--ref-load: give the checkpoint that --load (fresh start: --hf-checkpoint) gives"
    kernel = "--deterministic-mode"
    if context_parallel(obs) > 1:
        # Flash attention is no advice where it is on already, or where it leaves latent attention without a backend.
        barred = latent_attention(obs) and flash_attention_3(obs) is not True
        on = obs.args.text("attention_backend") == "flash"
        return (*(() if on or barred else ("--attention-backend flash",)), kernel, same)
    dropout = (
        ("--attention-dropout 0 --hidden-dropout 0",) if "kl" in kinds and kinds["kl"] > t.ref_equal_tolerance else ()
    )
    return (same, kernel, *dropout) if status == "fail" else (kernel, *dropout, same)
