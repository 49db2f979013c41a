"""`logprob.outliers`: few sequences with a huge error between engine and trainer.

The measure is the multiplicative error of a sequence: the mean over its tokens of exp |trainer - engine|; 1 is equal.
The mean over sequences hides what this is about, so it is never named alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rltop.checks.names import some
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_place, of_points, of_samples, percent
from rltop.checks.series import Point, median, points
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

ID = "logprob.outliers"
NAMES = (
    "train/token_mult_prob_error",
    "train/mult_prob_error",
    "token_mult_prob_error",
    "mult_prob_error",
)
"""Means over sequences (NeMo RL's names); `_median` beside them is the middle sequence."""
METRICS = tuple(name + end for name in NAMES for end in ("", "_median"))
_KEYS = ("mult_prob_error", "token_mult_prob_error", "seq_mult_prob_error")


@dataclass(slots=True)
class Step:
    """The sequences of one step."""

    step: int
    errors: list[float] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    def outliers(self, limit: float) -> list[int]:
        return [at for at, error in enumerate(self.errors) if not error <= limit]


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    steps = _of_rows(obs, t) or _of_samples(obs, t)
    if steps:
        return [_judge(steps, t)]
    for name in NAMES:
        if series := points(obs, name):
            return [_spikes(obs, name, series, t)]
    return [Verdict(ID, "skip", cause=missing(obs, "the error of single sequences (log-probs of engine and trainer)"))]


def _of_rows(obs: Observations, t: Thresholds) -> list[Step]:
    steps: dict[int, Step] = {}
    for row in obs.rows:
        if row.kind != "seq_error":
            continue
        value = next((row.fields[key] for key in _KEYS if isinstance(row.fields.get(key), int | float)), None)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        number = row.fields.get("step", row.fields.get("rollout_id"))
        one = steps.setdefault(number if isinstance(number, int) else 0, Step(number if isinstance(number, int) else 0))
        who = row.fields.get("prompt_id", row.fields.get("sample_index", row.fields.get("index", len(one.errors))))
        one.errors.append(float(value))
        one.prompts.append(str(who))
        if not value <= t.outlier_error and len(one.evidence) < 3:
            one.evidence.append(of_place(row.where))
    return [steps[key] for key in sorted(steps)]


def _of_samples(obs: Observations, t: Thresholds) -> list[Step]:
    """From samples with both log-probs: exp of the mean gap, which is never more than the error itself."""
    steps: dict[tuple[int, int], Step] = {}
    for sample in obs.samples:
        if sample.engine_gap is None or sample.rollout_id is None:
            continue
        one = steps.setdefault((sample.segment, sample.rollout_id), Step(sample.rollout_id))
        one.errors.append(math.exp(min(sample.engine_gap.mean, 700.0)))
        one.prompts.append(str(sample.group if sample.group is not None else sample.index))
        if one.errors[-1] > t.outlier_error and len(one.evidence) < 3:
            one.evidence += of_samples((sample,))
    return [steps[key] for key in sorted(steps)[-t.recovered_rollouts :]]


def _judge(steps: list[Step], t: Thresholds) -> Verdict:
    worst = max(steps, key=lambda one: len(one.outliers(t.outlier_error)) / len(one.errors))
    at = worst.outliers(t.outlier_error)
    share = len(at) / len(worst.errors)
    rest = median(error for error in worst.errors if error <= t.outlier_error)
    again = _again(steps, t)
    threshold = {"error": t.outlier_error, "warn": t.outlier_warn, "fail": t.outlier_fail, "jaccard": t.outlier_same}
    prompts = [worst.prompts[i] for i in at][:50]
    value = {
        "outliers": len(at),
        "sequences": len(worst.errors),
        "share": share,
        "median_of_rest": jnum(rest),
        "prompts": prompts,
        "same_prompts_in": again,
    }
    if 2 * len(at) > len(worst.errors):
        cause = (
            f"{len(at)} of {len(worst.errors)} sequences of step {worst.step} are far apart: that is no outlier but "
        )
        cause += "the rule, and logprob.train-rollout speaks of it."
        return Verdict(ID, "info", step=worst.step, value=value, threshold=threshold, cause=cause)
    if share < t.outlier_warn:
        cause = f"At most {len(at)} of {len(worst.errors)} sequences have an error above {num(t.outlier_error)}; the "
        cause += f"median of the rest is {num(rest)}."
        status: Status = "info" if at else "pass"
        return Verdict(ID, status, step=worst.step, value=value, threshold=threshold, cause=cause)
    fail = share >= t.outlier_fail and again >= 2
    cause = (
        f"{len(at)} of {len(worst.errors)} sequences ({percent(share)}) of step {worst.step} have an error above "
        f"{num(t.outlier_error)} ({_named(prompts)}), while the median of the rest is "
        f"{num(rest)}"
    )
    cause += (
        f"; the same prompts in {again} steps: engine or trainer is wrong for these prompts, whatever the weights."
        if fail
        else ": few sequences carry the whole error."
    )
    return Verdict(
        ID,
        "fail" if fail else "warn",
        step=worst.step,
        value=value,
        threshold=threshold,
        evidence=tuple(worst.evidence),
        cause=cause,
        advice=(
            f"rescore {_named(prompts)} on both sides and compare token by token",
            "another engine version",
            "mask sequences by their error in the loss",
        ),
    )


def _named(prompts: list[str]) -> str:
    return f"prompt{'s' if len(prompts) > 1 else ''} {some(prompts, 12)}"


def _again(steps: list[Step], t: Thresholds) -> int:
    """Steps whose outliers are the same prompts as those of another step."""
    sets = [{one.prompts[at] for at in one.outliers(t.outlier_error)} for one in steps]
    alike = 0
    for i, left in enumerate(sets[:500]):
        others = (right for j, right in enumerate(sets[:500]) if j != i)
        if left and any(len(left & right) / len(left | right) >= t.outlier_same for right in others):
            alike += 1
    return alike


def _spikes(obs: Observations, name: str, series: tuple[Point, ...], t: Thresholds) -> Verdict:
    values = [point.value for point in series]
    usual = median(values)
    high = [p for p in series if not (p.value <= t.outlier_error or p.value <= t.outlier_spike * usual)]
    middle = [point.value for point in points(obs, f"{name}_median")]
    if not high:
        cause = f"{name} has no spike; its median is {num(usual)}."
        return Verdict(ID, "pass", value={"median": jnum(usual)}, cause=cause, confidence="medium")
    top = max(high, key=lambda point: point.value)
    cause = f"{name} jumps to {num(top.value)} at step {top.step}; its median over {len(values)} steps is {num(usual)}"
    cause += f" and that of the middle sequence {num(median(middle))}" if middle else ""
    cause += ": single sequences made that mean, and the trend is unchanged."
    return Verdict(
        ID,
        "info",
        step=top.step,
        value={"spikes": len(high), "largest": jnum(top.value), "median": jnum(usual)},
        threshold={"error": t.outlier_error},
        evidence=of_points((top,)),
        cause=cause,
        advice=("log the error of each sequence, and rescore those above 2",),
        confidence="medium",
    )
