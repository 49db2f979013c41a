"""`train.nan`: NaN or Inf in loss, gradient or log-probs, or Megatron's own check that aborts on it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.facts import NO_TRAINER, exp_estimator, skips_bad_steps
from rltop.checks.observe import Observations, Sample, SyncEvent, TextLine, Where
from rltop.checks.phrase import brief, jnum, missing, num, of_line, of_points, of_samples, of_sync
from rltop.checks.rules.args_batch import no_accumulation
from rltop.checks.rules.train_skipped import survived_steps
from rltop.checks.series import Point, bad_points_of_all_ranks, finite, not_above, points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

ID = "train.nan"
STEP_METRICS = (
    "train/loss",
    "train/pg_loss",
    "train/kl_loss",
    "train/entropy_loss",
    "train/ppo_kl",
    "train/grad_norm",
)
"""Loss, its parts, and the norm; a cause comes before its effect."""
ROLLOUT_METRICS = ("rollout/rollout_log_probs", "rollout/ref_log_probs", "rollout/log_probs")
ABORT = re.compile(
    r"Rank (?P<rank>\d+), node (?P<node>\S+?), device (?P<device>\S+?), iteration (?P<iteration>-?\d+): "
    r"Unexpected result (?P<result>\S+)(?: \(message='(?P<message>[^']*)')?"
)
"""Megatron-Core's message when its check finds NaN, Inf or a spike in loss or gradient."""
LOSS_OR_GRADIENT = "loss or gradient"
STEP_SKIPPED = "train/step_skipped"
"""1 where the trainer itself says that it left the weights alone (rltop's does)."""


@dataclass(frozen=True, slots=True)
class Incident:
    """The first thing that was not a number."""

    order: tuple[int, int, int, int]
    quantity: str
    value: float
    rollout: int | None
    step: int | None
    rank: int | None
    node: str
    aborted: bool
    evidence: tuple[Evidence, ...]
    where: Where | None = None


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict, on the first incident that was not a skipped step."""
    if obs.mode == "rollout-only" and not obs.metrics:
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    bad = [p for name in STEP_METRICS for p in bad_points_of_all_ranks(obs, name)]
    skipped = {(p.segment, p.step) for p in bad} if skips_bad_steps(obs) else set()
    skipped |= {(p.segment, p.step) for p in survived_steps(obs)}
    bad = [p for p in bad if (p.segment, p.step) not in skipped]
    bad += [p for name in ROLLOUT_METRICS for p in bad_points_of_all_ranks(obs, name, "rollout")]
    several = len({row.rank for row in obs.metrics}) > 1  # metrics of one source are reduced over ranks
    incidents = [_of_point(bad, p, p.rank if several else None) for p in bad]
    incidents += [_of_sample(s) for s in obs.samples if s.bad_log_probs and s.rollout_id is not None]
    incidents += [found for line in obs.lines if (found := _of_line(line))]
    if incidents and no_accumulation(obs) and all((one.step or 0) <= 1 or one.rollout == 0 for one in incidents[:1]):
        cause = (
            "The loss is NaN from the first step on because gradient accumulation is 0 (see args.batch): no numeric "
            "fault."
        )
        return [Verdict(ID, "pass", value={"explained_by": "args.batch"}, threshold="finite", cause=cause)]
    if incidents:
        return [_fail(obs, t, min(incidents, key=lambda one: (one.order, not one.aborted, _rank_of(one.quantity))))]
    return [_fine(obs, len(skipped))]


def _rank_of(quantity: str) -> int:
    names = (*ROLLOUT_METRICS, *STEP_METRICS)
    return names.index(quantity) if quantity in names else len(names)


def _of_point(bad: list[Point], point: Point, rank: int | None) -> Incident:
    same = [p for p in bad if p.order == point.order and p.rank == point.rank]
    step = point.step if point.axis == "train" else None
    told = of_points(same)
    return Incident(point.order, point.name, point.value, point.rollout, step, rank, "", False, told, point.where)


def _of_sample(sample: Sample) -> Incident:
    rollout = sample.rollout_id or 0
    order = (sample.segment, rollout, 0, rollout)
    told = of_samples([sample])
    return Incident(order, "per-token log-probs", math.nan, rollout, None, None, "", False, told, sample.where)


def _of_line(line: TextLine) -> Incident | None:
    found = ABORT.search(line.text)
    if found is None:
        return None
    step = int(found["iteration"])
    result = found["result"].lower().strip("(),")
    value = math.inf if "inf" in result and "nan" not in result else math.nan
    quantity = found["message"] or LOSS_OR_GRADIENT
    order = (line.segment, step, 1, step)
    rank, told = int(found["rank"]), (of_line(line),)
    return Incident(order, quantity, value, None, step, rank, found["node"], True, told, line.where)


def _fine(obs: Observations, skipped: int) -> Verdict:
    seen = [series[-1] for name in STEP_METRICS if (series := points(obs, name))]
    seen += [series[-1] for name in ROLLOUT_METRICS if (series := points(obs, name, "rollout"))]
    if not seen:
        return Verdict(ID, "skip", cause=missing(obs, "a loss, grad_norm or mean log-prob"))
    last = max(seen, key=lambda point: point.order)
    cause = "Loss, gradient and log-probs are numbers at every step."
    if skipped:
        cause = "Steps with a bad gradient were skipped and left the weights alone (see train.skipped-steps)."
    return Verdict(
        ID,
        "pass",
        rollout=last.rollout,
        step=last.step if last.axis == "train" else None,
        value={"bad_steps": 0},
        threshold=0,
        cause=cause,
    )


def _fail(obs: Observations, t: Thresholds, first: Incident) -> Verdict:
    where = f"at step {first.step}" if first.step is not None else f"in rollout {first.rollout}"
    if first.rollout is not None and first.step is not None:
        where += f" (rollout {first.rollout})"
    if first.rank is not None and first.node:
        where += f" on rank {first.rank}, node {first.node}"
    elif first.rank:
        where += f" on rank {first.rank}"
    effect, reached, evidence = _effect(obs, first)
    source = _source(obs, t, first)
    return Verdict(
        ID,
        "fail",
        rollout=first.rollout,
        step=first.step,
        rank=first.rank,
        value={"quantity": first.quantity, "value": jnum(first.value), "reached_weights": reached}
        | ({"iteration": first.step} if first.aborted else {}),
        threshold="finite",
        evidence=first.evidence + evidence,
        cause=f"{_what(first, where)}; {effect}.{source}",
        advice=_advice(obs, reached),
        confidence="medium" if first.quantity == "rollout/rollout_log_probs" else "high",
    )


def _what(first: Incident, where: str) -> str:
    """Megatron's own words are a sentence already."""
    if first.aborted and " " in first.quantity and first.quantity != LOSS_OR_GRADIENT:
        return f"{where[0].upper()}{where[1:]}: {brief(first.quantity)}"
    return f"{first.quantity} is {num(first.value)} {where}"


def _effect(obs: Observations, first: Incident) -> tuple[str, bool | None, tuple[Evidence, ...]]:
    """Whether the bad step reached the weights, in words and as true, false or unknown, with its evidence."""
    if first.aborted:
        return "Megatron's check aborted the step, so the weights do not hold it", False, ()
    told = [p for p in points(obs, STEP_SKIPPED) if p.order == first.order and p.value == 1]
    if told and first.step is not None:
        return "the trainer skipped the step, so the weights do not hold it", False, of_points(told[:1])
    later = [
        p
        for name in ROLLOUT_METRICS
        for p in points(obs, name, "rollout")
        if _after(p, first) and p.name != "rollout/ref_log_probs"
    ]
    if first.step is None:
        return "no train step was bad before, so the weights or the input were bad already", None, ()
    if spoiled := [p for p in later if not math.isfinite(p.value)]:
        text = "the step was neither aborted nor skipped and is in the weights: the log-probs after it are not numbers"
        sync = _sync_after(obs, first)
        if sync is not None:
            return (
                f"{text}, and the sync of version {sync.version} gave them to the engines",
                True,
                (*of_points(spoiled[:1]), of_sync(sync)),
            )
        return text, True, of_points(spoiled[:1])
    if finite(later):
        return "the log-probs after it are numbers, so the step did not reach the weights", False, of_points(later[:1])
    if healthy := _numbers_after(obs, first):
        text = "the numbers of later steps are finite, so the step did not reach the weights, though nothing says why"
        return text, False, of_points(healthy[:1])
    sync = _sync_after(obs, first)
    text = "the step was neither aborted nor skipped, so the weights hold it"
    if sync is not None:
        return f"{text} and the sync of version {sync.version} has given them to the engines", True, (of_sync(sync),)
    return f"{text} and the next sync spoils the engines", True, ()


def _after(point: Point, first: Incident) -> bool:
    """It comes after the incident, by its ids and by its place in the log."""
    return point.segment == first.order[0] and point.order > first.order and not_above(point.where, first.where)


def _numbers_after(obs: Observations, first: Incident) -> list[Point]:
    """Norms (else losses) of later steps of the segment at which norm and loss are finite: after an update with NaN
    there are none."""
    later = [
        point
        for name in ("train/grad_norm", "train/loss")
        for point in points(obs, name)
        if _after(point, first) and point.span == 1
    ]
    bad = {point.step for point in later if not math.isfinite(point.value)}
    return [point for point in later if point.step not in bad]


def _sync_after(obs: Observations, first: Incident) -> SyncEvent | None:
    rollout = first.rollout if first.rollout is not None else first.order[1]
    found = [
        s
        for s in obs.syncs
        if s.segment == first.order[0] and s.rollout_id is not None and s.rollout_id > rollout
        if not_above(s.where, first.where)
    ]
    return min(found, key=lambda sync: (sync.rollout_id or 0, sync.version), default=None)


def _source(obs: Observations, t: Thresholds, first: Incident) -> str:
    """The suspected source: a KL term that jumped at the same step under an estimator that exponentiates."""
    if first.step is None or not exp_estimator(obs):
        return ""
    series = [p for p in points(obs, "train/kl_loss") if p.segment == first.order[0] and p.step <= first.step]
    if len(series) < 2 or series[-1].step != first.step:
        return ""
    now, before = series[-1].value, abs(series[-2].value)
    if math.isfinite(now) and 0 < before < math.inf and now > t.nan_kl_jump * before:
        kind = obs.args.text("kl_loss_type")
        return (
            f" kl_loss jumps from {num(before)} to {num(now)} at the same step: the {kind} estimator overflowed, "
            "suspect the KL term."
        )
    return ""


def _advice(obs: Observations, reached: bool | None) -> tuple[str, ...]:
    stop = ("stop the run before the next save and sync",) if reached is not False else ()
    aux = (
        ("--moe-router-load-balancing-type none (as a test)",)
        if obs.args.given("moe_router_load_balancing_type")
        else ()
    )
    return (
        *stop,
        "--save-debug-rollout-data DIR/{rollout_id}.pt, then --load-debug-rollout-data to replay that rollout",
        "check --lr and the data of that rollout; clamp the log-ratio of the loss",
        *aux,
    )
