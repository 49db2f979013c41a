"""`logprob.magnitude`: the responses are likely under the model that wrote them.

The log shows negative means, so the absolute value is judged. A fair model on prompts of its own chat template stays
below 0.7 nat per token; ln(vocabulary) is what a uniform guess gives and so the top of the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.facts import pretrained
from rltop.checks.observe import Observations
from rltop.checks.phrase import jnum, missing, num, of_points, of_samples
from rltop.checks.series import finite, points, segment_ids, start_of
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Status, Verdict

ID = "logprob.magnitude"
_ORDER: tuple[Status, ...] = ("pass", "info", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Level:
    """How large the log-probs of the first rollout are."""

    status: Status
    name: str
    """Where the number is from."""
    mean: float
    """Mean log-prob per token, nats."""
    rollout: int | None
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    excuse: str
    """Why the level was lowered by one; empty when it was not."""


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict, on the first rollout of the run with the worst level."""
    found = [level for segment in segment_ids(obs) if (level := _level(obs, t, segment))]
    if not found:
        return [Verdict(ID, "skip", cause=_absent(obs))]
    level = max(found, key=lambda one: _ORDER.index(one.status))
    top = math.log(obs.vocab_size) if obs.vocab_size and obs.vocab_size > 1 else None
    return [
        Verdict(
            ID,
            level.status,
            rollout=level.rollout,
            value={"mean": jnum(level.mean), "abs": jnum(abs(level.mean)), "from": level.name, "ln_vocab": jnum(top)},
            threshold={"warn": t.magnitude_warn, "fail": t.magnitude_fail},
            evidence=level.evidence,
            cause=_cause(level, t, top),
            advice=_advice(level, t),
            confidence=level.confidence,
        )
    ]


def first_rollout_likely(obs: Observations, t: Thresholds) -> bool | None:
    """Whether the rule passes on all runs of the evidence: False when it fires, None when it cannot say."""
    levels = [level.status for segment in segment_ids(obs) if (level := _level(obs, t, segment))]
    if any(status in ("warn", "fail") for status in levels):
        return False
    return True if levels and all(status == "pass" for status in levels) else None


def _level(obs: Observations, t: Thresholds, segment: int) -> Level | None:
    start = start_of(obs, segment)
    first = start.rollout_id
    if first is None or (first > 0 and segment == 0 and not obs.starts):
        return None  # an excerpt: its first rollout is not the run's
    found = _mean(obs, segment, first, bool(start.fresh))
    if found is None:
        return None
    name, mean, confidence, evidence = found
    size = abs(mean)
    at = 3 if size >= t.magnitude_fail else 2 if size >= t.magnitude_warn else 0
    excuse = ""
    if at and pretrained(obs):
        excuse = "a pretrained model follows no chat template"
    elif at and (temperature := obs.args.number("rollout_temperature")) and temperature > 1:
        excuse = f"temperature {num(temperature)} flattens the distribution"
    return Level(_ORDER[at - 1 if excuse else at], name, mean, first, confidence, evidence, excuse)


def _mean(
    obs: Observations, segment: int, first: int, fresh: bool
) -> tuple[str, float, Confidence, tuple[Evidence, ...]] | None:
    """The trainer's mean log-prob of the first rollout; else the reference's (equal at a fresh start), the samples', or
    the engine's own, which cannot show wrong weights in the trainer."""
    names: list[tuple[str, Confidence]] = [("rollout/log_probs", "medium")]
    if fresh:
        names.append(("rollout/ref_log_probs", "medium"))
    for name, confidence in names:
        for point in finite(points(obs, name, "rollout")):
            if point.segment == segment and point.step == first:
                return name, point.value, confidence, of_points((point,))
    samples = [s for s in obs.samples if s.segment == segment and s.rollout_id == first and s.mean_log_prob is not None]
    if samples:
        tokens = sum(s.response_length or 1 for s in samples)
        mean = math.fsum((s.mean_log_prob or 0.0) * (s.response_length or 1) for s in samples) / max(tokens, 1)
        return "samples' log_probs", mean, "medium", of_samples(samples[:1])
    for point in finite(points(obs, "rollout/rollout_log_probs", "rollout")):
        if point.segment == segment and point.step == first:
            return "rollout/rollout_log_probs", point.value, "low", of_points((point,))
    return None


def _absent(obs: Observations) -> str:
    seen = [row.rollout_id if row.rollout_id is not None else row.step for row in obs.metrics]
    begun = obs.starts[0].rollout_id if obs.starts else 0
    if seen and min(seen) > (begun or 0):
        return f"the evidence begins with rollout {min(seen)}: the first rollout of the run is not in it"
    series = points(obs, "rollout/log_probs", "rollout")
    if any(not math.isfinite(point.value) for point in series):
        return "the log-probs of the first rollout are not numbers (see train.nan)"
    return missing(obs, "the mean log-prob of the first rollout")


def _cause(level: Level, t: Thresholds, top: float | None) -> str:
    fact = f"The mean {level.name.removeprefix('rollout/')} of rollout {level.rollout} is {num(level.mean)} nat"
    scale = f" (a uniform guess over the vocabulary gives -{num(top)})" if top else ""
    if abs(level.mean) < t.magnitude_warn:
        return f"{fact}: the responses are likely under the model."
    if abs(level.mean) < t.magnitude_fail:
        why = "the prompts do not follow the model's chat template, or the distribution of its cold start"
    else:
        why = f"too large for a template mistake{scale}: configuration, tokenizer or weights are wrong"
    return f"{fact}: {why}." if not level.excuse else f"{fact}: {why}; one level lower because {level.excuse}."


def _advice(level: Level, t: Thresholds) -> tuple[str, ...]:
    if level.status == "pass":
        return ()
    template = (
        "--apply-chat-template (once: not when the data holds templated text already)",
        "compare the first printed sample with tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
    )
    if abs(level.mean) < t.magnitude_fail:
        return template
    return (
        "--hf-checkpoint and --load: the same model, and its own tokenizer",
        "loss mask and data packing: print the tokens whose log-probs are averaged",
        *template,
    )
