"""`logprob.train-rollout`: trainer and engine give the same tokens the same log-probs.

The gap of a rollout is slime's `train_rollout_logprob_abs_diff` at its on-policy step; where a rollout has no train
step (or none yet), the samples' per-token difference; else the difference of the rollout's means, a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rltop.checks.facts import NO_TRAINER, emptied, mixture_of_experts, quantised_rollout, routing_replay
from rltop.checks.observe import Observations, Sample, SyncEvent
from rltop.checks.phrase import jnum, mismatches, missing, num, of_points, of_samples, of_sync
from rltop.checks.samples import pooled
from rltop.checks.series import Point, finite, maybe_on_policy, points, quarters
from rltop.checks.syncs import COMPARE
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Status, Verdict

ID = "logprob.train-rollout"
METRIC = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True, slots=True)
class Gap:
    """Mean |trainer - engine| per token of one rollout, in nats."""

    segment: int
    rollout: int
    value: float
    source: str
    """`metric`, `samples` or `means`."""
    step: int | None
    points: tuple[Point, ...] = ()
    samples: tuple[Sample, ...] = ()

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Where the value is from."""
        return of_points(self.points) + of_samples(self.samples)


def gaps(obs: Observations) -> tuple[Gap, ...]:
    """One gap per rollout, the best source of each, in order. Values that are not finite are left out."""
    found = {(gap.segment, gap.rollout): gap for gap in _of_means(obs)}
    found |= {(gap.segment, gap.rollout): gap for gap in _of_samples(obs)}
    for point in maybe_on_policy(finite(points(obs, METRIC))):
        rollout = point.rollout if point.rollout is not None else point.step
        gap = Gap(point.segment, rollout, abs(point.value), "metric", point.step, (point,))
        found[gap.segment, gap.rollout] = gap
    return tuple(found[key] for key in sorted(found))


def _of_means(obs: Observations) -> Iterable[Gap]:
    engine = {(p.segment, p.step): p for p in finite(points(obs, "rollout/rollout_log_probs", "rollout"))}
    measured = bool(points(obs, METRIC))
    for point in finite(points(obs, "rollout/log_probs", "rollout")):
        if measured and point.span > 1:
            continue  # thinned: its rollout has a thinned step too, at another place
        if other := engine.get((point.segment, point.step)):
            gap = abs(point.value - other.value)
            yield Gap(point.segment, point.step, gap, "means", None, (point, other))


def _of_samples(obs: Observations) -> Iterable[Gap]:
    parts: dict[tuple[int, int], list[Sample]] = {}
    for sample in obs.samples:
        if sample.engine_gap and sample.rollout_id is not None:
            parts.setdefault((sample.segment, sample.rollout_id), []).append(sample)
    for (segment, rollout), members in parts.items():
        gap = pooled([sample.engine_gap for sample in members if sample.engine_gap])
        worst = max(members, key=lambda s: (s.engine_gap.mean if s.engine_gap else 0.0, -s.index))
        if gap:
            yield Gap(segment, rollout, gap.mean, "samples", None, samples=(worst,))


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all rollouts: the first bad one decides where, the largest gap how bad."""
    if obs.mode == "rollout-only":
        return [Verdict(ID, "skip", cause=NO_TRAINER)]
    series = gaps(obs)
    if not series:
        logged = points(obs, METRIC)
        if logged and not any(math.isfinite(point.value) for point in logged):
            return [Verdict(ID, "skip", cause=f"{METRIC} is not a number (see train.nan)")]
        return [
            Verdict(ID, "skip", cause=missing(obs, f"{METRIC}, or rollout/log_probs with rollout/rollout_log_probs"))
        ]
    bad = [i for i, gap in enumerate(series) if gap.value > t.gap_warn]
    if not bad:
        return [_fine(obs, t, series)]
    worst = max(series, key=lambda gap: gap.value)
    if worst.value <= t.gap_fail and (offset := _constant_offset(obs, t, series)):
        return [_offset(t, series, offset)]
    return [_alarm(obs, t, series, bad, worst)]


def _verdict(
    t: Thresholds,
    status: Status,
    gap: Gap,
    cause: str,
    value: dict[str, object],
    *,
    evidence: tuple[Evidence, ...] | None = None,
    advice: tuple[str, ...] = (),
    confidence: Confidence | None = None,
) -> Verdict:
    return Verdict(
        ID,
        status,
        rollout=gap.rollout,
        step=gap.step,
        value=value,
        threshold={"warn": t.gap_warn, "fail": t.gap_fail},
        evidence=gap.evidence if evidence is None else evidence,
        cause=cause,
        advice=advice,
        confidence=confidence or ("low" if gap.source == "means" else "medium"),
    )


def _fine(obs: Observations, t: Thresholds, series: Sequence[Gap]) -> Verdict:
    worst, last = max(series, key=lambda gap: gap.value), series[-1]
    later = [p for p in finite(points(obs, METRIC)) if p.on_policy is False and abs(p.value) > t.gap_warn]
    value: dict[str, object] = {"last": jnum(last.value), "largest": jnum(worst.value)}
    if not later:
        cause = f"Trainer and engine agree: the gap is {num(last.value)} nat per token, at most {num(worst.value)}."
        return _verdict(t, "pass", last, cause, value)
    top = max(later, key=lambda p: p.value)
    cause = (
        f"The gap grows inside a rollout (to {num(top.value)} at step {top.step}) and returns to {num(last.value)} at "
        "the on-policy step: the later steps of a rollout are off-policy by design; no kernel or sync is at fault."
    )
    value["off_policy"] = jnum(top.value)
    advice = ("--use-tis", "--num-steps-per-rollout 1, or a larger --rollout-batch-size")
    return _verdict(t, "info", last, cause, value, evidence=of_points((top,)), advice=advice)


def _constant_offset(obs: Observations, t: Thresholds, series: Sequence[Gap]) -> str:
    """Why a flat gap is a constant offset and no fault; empty when it is one."""
    for segment in {gap.segment for gap in series}:  # two runs may have two levels
        first, last = quarters([gap.value for gap in series if gap.segment == segment])
        if abs(last - first) > t.gap_flat * first:
            return ""
    if quantised_rollout(obs):
        return "the engines run FP8 or INT4 weights, the trainer does not"
    if mixture_of_experts(obs) and not routing_replay(obs) and max(gap.value for gap in series) <= t.gap_moe_info:
        return "trainer and engine route tokens to experts by themselves"
    return ""


def _offset(t: Thresholds, series: Sequence[Gap], why: str) -> Verdict:
    newest = [gap for gap in series if gap.segment == series[-1].segment]
    first, last = quarters([gap.value for gap in newest])
    since = f"flat since rollout {newest[0].rollout}"
    cause = f"The gap is {num(last)} nat per token and {since}: a constant offset, because {why}."
    advice = ("--use-tis", "--use-rollout-routing-replay (weights and slot order)")
    return _verdict(t, "info", series[-1], cause, {"first": jnum(first), "last": jnum(last)}, advice=advice)


def _alarm(obs: Observations, t: Thresholds, series: Sequence[Gap], bad: Sequence[int], worst: Gap) -> Verdict:
    gap, last = series[bad[0]], series[bad[-1]]
    before = [g for g in series[: bad[0]] if g.segment == gap.segment]
    sync = _sync_of(obs, gap)
    over = len(series) - 1 - bad[-1] >= t.recovered_rollouts
    status: Status = "fail" if worst.value > t.gap_fail else "info" if over else "warn"
    stays = all(g.value > t.gap_warn for g in series[bad[0] :])
    cause = _cause(obs, gap, before, sync, worst, stays)
    if not stays:
        cause += f" The last bad rollout is {last.rollout}; the newest gap is {num(series[-1].value)}."
    value: dict[str, object] = {"gap": jnum(gap.value), "largest": jnum(worst.value)}
    if before:
        value["before"] = jnum(max(g.value for g in before))
    if sync and before:
        value["change_point"] = {"rollout": gap.rollout, "weights_version": sync.version}
    confidence: Confidence = "low" if gap.source == worst.source == "means" else "medium"
    if before and sync and mismatches(sync):
        confidence = "high"
    evidence = (*(before[-1].evidence if before else ()), *gap.evidence, *((of_sync(sync),) if sync else ()))
    if worst is not gap:
        evidence += worst.evidence
    return _verdict(
        t, status, gap, cause, value, evidence=evidence, advice=_advice(before, sync), confidence=confidence
    )


def _cause(obs: Observations, gap: Gap, before: Sequence[Gap], sync: SyncEvent | None, worst: Gap, stays: bool) -> str:
    level = f"{num(gap.value)} nat per token"
    top = f" (largest {num(worst.value)} in rollout {worst.rollout})" if worst is not gap else ""
    if not before:
        served = f", which is served with weights version {sync.version}" if sync else ""
        return (
            f"Trainer and engine disagree by {level} from the first rollout of the run on, rollout "
            f"{gap.rollout}{served}{top}: they hold different weights (load or first sync), or compute the "
            "log-probs differently (temperature, precision)."
        )
    when = f"from rollout {gap.rollout} on" if stays else f"in rollout {gap.rollout}"
    change = f"The gap was at most {num(max(g.value for g in before))} through rollout {before[-1].rollout} and is "
    change += f"{level} {when}{top}"
    if sync is not None:
        return f"{change}, the first rollout sampled with weights version {sync.version}: {_blame(obs, sync)}."
    # A finished step between two rollouts implies a sync, recorded or not.
    if any(
        p.segment == gap.segment and p.rollout is not None and before[-1].rollout <= p.rollout < gap.rollout
        for p in points(obs, "train/loss")
    ):
        return f"{change}; a finished train step lies between, and the weight sync after it is the suspect."
    return f"{change}; neither a weight sync nor a train step is recorded between: the engine changed by itself."


def _blame(obs: Observations, sync: SyncEvent) -> str:
    """What the sync at the change point did, as far as its record tells."""
    if spoiled := mismatches(sync):
        engines = ", ".join(engine.engine for engine in spoiled)
        return (
            "that sync is the change point, the engines do not hold what the trainer pushed; the digest of engine "
            f"{engines} differs from the trainer's"
        )
    if refused := [engine.engine for engine in sync.engines if not engine.ok]:
        return f"that sync is the change point, engine {', '.join(refused)} refused it"
    if _equal(sync):
        if later := emptied(obs, sync.rollout_id):
            return (
                "the digests of all engines equalled the trainer's at that sync, but memory was released and resumed "
                f"after it ({later.id}), so they do not speak for what was served"
            )
        return (
            "that sync is the change point, but the digests of all engines equal the trainer's, so the parameters are "
            "right; what no digest covers are suspects: buffers (rotary tables: see weights.compare), a reused KV "
            "cache, the sampling path"
        )
    return "that sync is the change point, the engines do not hold what the trainer pushed"


def _equal(sync: SyncEvent) -> bool:
    """Every engine holds the parameters that were pushed, as far as digests tell."""
    return bool(sync.engines) and all(e.same or (e.digest and e.digest == sync.digest) for e in sync.engines)


def _advice(before: Sequence[Gap], sync: SyncEvent | None) -> tuple[str, ...]:
    if before and sync and _equal(sync):
        return (
            "rltop weights diff ENGINE_URL CHECKPOINT: equal parameters with other log-probs are a lost buffer",
            COMPARE,
            "restart the engines with a full load: no weight update brings a buffer back",
        )
    if before and sync:
        return (
            COMPARE,
            f"compare one tensor of the engine after version {sync.version} with the trainer's, layer by layer",
            "restart the engines with a full load: a gap that the next sync brings back is in name map or transport",
        )
    if before:
        return (
            COMPARE,
            "look at the engine log between the two rollouts for a restart or a refused update",
        )
    return (
        COMPARE,
        "--hf-checkpoint and --load (or --ref-load): the same model",
        "rescore one response by both sides with the same temperature",
    )


def _sync_of(obs: Observations, gap: Gap) -> SyncEvent | None:
    """The sync whose weights this rollout was the first to use."""
    found = [s for s in obs.syncs if s.segment == gap.segment and s.rollout_id == gap.rollout]
    return max(found, key=lambda sync: (sync.time or 0.0, sync.version), default=None)
