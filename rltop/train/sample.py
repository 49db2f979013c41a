"""Samples of a rollout, and the arithmetic on them that needs no tensors: means and counts under slime's names."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["completed", "truncated", "aborted", "failed", "pending"]


@dataclass(frozen=True, slots=True)
class Asked:
    """How an engine was asked for a sample, and what it said of its work besides the tokens."""

    began: float
    """Seconds since 1970, as are all times here."""
    ended: float
    params: Mapping[str, Any]
    """SGLang's sampling parameters, with the seed: the same weights give the same answer again."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """Counts and times of its `meta_info`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One response and everything known about it when its rollout is complete."""

    index: int
    """Position in the rollout, from 0."""
    group_index: int
    """Which prompt of the rollout; samples of a group are neighbours."""
    prompt: str
    prompt_ids: tuple[int, ...]
    response: str
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    """Per response token, from the engine at sampling time: natural log at the sampling temperature. Empty: not known,
    in samples that were loaded."""
    reward: float
    label: str
    status: Status
    finish_reason: str
    weight_version: str
    engine: str
    engine_generation: int = 1
    """Of the engine: how often it was started."""
    loss_mask: tuple[int, ...] | None = None
    """One bit per response token, 0 = not trained on; None: all are. Only samples that were loaded have one."""
    source_index: int | None = None
    """Of a sample that was loaded: its index over the whole run that made it."""
    asked: Asked | None = field(default=None, compare=False)
    """None where nobody was asked: a sample that was loaded."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and response."""
        return self.prompt_ids + self.response_ids

    def trained(self, values: Sequence[float]) -> Sequence[float]:
        """Of one value per response token those that are trained on."""
        if self.loss_mask is None:
            return values
        return [value for value, bit in zip(values, self.loss_mask, strict=False) if bit]


def token_mean(values: Iterable[Sequence[float]]) -> float:
    """Mean over all tokens of all samples; NaN for no tokens. Exact summation: independent of the order."""
    tokens = [value for sample in values for value in sample]
    return math.fsum(tokens) / len(tokens) if tokens else math.nan


def mean(values: Sequence[float]) -> float:
    """Plain mean; NaN for nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def rollout_metrics(
    samples: Sequence[Sample],
    advantages: Sequence[float] | None,
    *,
    log_probs: Sequence[Sequence[float]] | None,
    ref_log_probs: Sequence[Sequence[float]] | None,
) -> dict[str, float]:
    """What slime's trainer logs on its line `rollout N`. What was not worked out has no key: absent, never zero.

    advantages: None where nothing trains.
    """
    metrics = {
        "rollout/response_lengths": mean([float(len(s.response_ids)) for s in samples]),
        "rollout/total_lengths": mean([float(len(s.tokens)) for s in samples]),
        "rollout/raw_reward": mean([s.reward for s in samples]),
        "rollout/truncated": mean([float(s.status == "truncated") for s in samples]),
    }
    if any(s.rollout_log_probs for s in samples):
        metrics["rollout/rollout_log_probs"] = token_mean(s.trained(s.rollout_log_probs) for s in samples)
    if advantages is not None:
        metrics["rollout/rewards"] = mean(advantages)
        metrics["rollout/advantages"] = token_mean(
            s.trained([advantage] * len(s.response_ids)) for advantage, s in zip(advantages, samples, strict=True)
        )
    for name, values in (("log_probs", log_probs), ("ref_log_probs", ref_log_probs)):
        if values is not None:
            metrics[f"rollout/{name}"] = token_mean(s.trained(part) for s, part in zip(samples, values, strict=True))
    return metrics


def zero_spread_groups(rewards: Sequence[float], group_size: int) -> dict[str, float]:
    """`rollout/zero_std/count_R`: groups whose rewards are all R. The set of keys changes from rollout to rollout."""
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    flat = Counter(round(group[0], 2) for group in groups if len(set(group)) == 1)
    return {f"rollout/zero_std/count_{reward}": float(count) for reward, count in sorted(flat.items())}


def generation_metrics(samples: Sequence[Sample], *, group_size: int, seconds: float, engines: int) -> dict[str, float]:
    """What slime's rollout manager logs on its line `perf N`."""
    lengths = sorted(len(s.response_ids) for s in samples)
    metrics = response_lengths(samples) | {
        "rollout/truncated_ratio": mean([float(s.status == "truncated") for s in samples]),
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(lengths) / max(seconds, 1e-9) / engines,
        "perf/longest_sample_tokens_per_sec": lengths[-1] / max(seconds, 1e-9),
    }
    return metrics | zero_spread_groups([s.reward for s in samples], group_size)


FEW_TOKENS = 8
"""Below so many tokens of an engine equal numbers prove nothing."""
SAME_NATS = 1e-3


def without_weights(samples: Sequence[Sample]) -> dict[str, tuple[str, int]]:
    """Engine -> how its answers show that it has no weights, and how many samples it made.

    SGLang whose weights were released, resumed and not updated holds zeros (0.5.14): all logits are equal, so greedy
    requests get token 0 for ever, and sampled ones any token with the log-prob -ln(vocabulary), every time.
    """
    made: dict[str, list[Sample]] = {}
    for sample in samples:
        made.setdefault(sample.engine, []).append(sample)
    found: dict[str, tuple[str, int]] = {}
    for engine, own in made.items():
        values = [value for sample in own for value in sample.rollout_log_probs]
        if len(own) < 2 or sum(len(sample.response_ids) for sample in own) < FEW_TOKENS:
            continue
        if not any(any(sample.response_ids) for sample in own):
            found[engine] = ("answered token 0 alone", len(own))
        elif len(values) >= FEW_TOKENS and min(values) < -1.0 and max(values) - min(values) < SAME_NATS:
            found[engine] = (f"gave every token the log-prob {values[0]:.4f}", len(own))
    return found


def pass_rates(rewards: Sequence[float], group_size: int) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to the group: the chance that one of k responses to a prompt has reward 1.

    The estimator without bias of the HumanEval paper (arXiv 2107.03374, section 2.1), which slime uses too:
    1 - C(n - c, k) / C(n, k) with c of n right, mean over the prompts. Empty for groups of one.
    """
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    right = [sum(reward == 1 for reward in group) for group in groups]
    sizes = [2**power for power in range(group_size.bit_length())] if group_size > 1 else []
    return {
        f"pass@{k}": mean([1.0 - math.comb(group_size - c, k) / math.comb(group_size, k) for c in right]) for k in sizes
    }


def evaluation_metrics(dataset: str, samples: Sequence[Sample], *, group_size: int, passrate: bool) -> dict[str, float]:
    """What slime logs on its line `eval N`: the mean reward, lengths, truncation, and pass@k with `passrate`."""
    prefix = f"eval/{dataset}"
    metrics = {prefix: mean([s.reward for s in samples])}
    metrics |= {name.replace("rollout/", f"{prefix}/", 1): value for name, value in response_lengths(samples).items()}
    metrics[f"{prefix}-truncated_ratio"] = mean([float(s.status == "truncated") for s in samples])
    if passrate:
        rates = pass_rates([s.reward for s in samples], group_size)
        metrics |= {f"{prefix}-{name}": value for name, value in rates.items()}
    return metrics


def response_lengths(samples: Sequence[Sample]) -> dict[str, float]:
    """`rollout/response_len/…`: tokens of the responses."""
    lengths = sorted(len(s.response_ids) for s in samples)
    return {
        "rollout/response_len/mean": mean([float(n) for n in lengths]),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(lengths[-1]),
        "rollout/response_len/min": float(lengths[0]),
    }


def for_viewers(
    samples: Sequence[Sample], log_probs: Sequence[Sequence[float]] | None, *, group_size: int, limit: int = 16
) -> list[dict[str, Any]]:
    """Up to `limit` samples for the record `samples`: the first of each group, then the second of each, and so on.

    A reader sees many prompts rather than sixteen answers to one.
    """
    order = sorted(range(len(samples)), key=lambda at: (at % group_size, at))[:limit]
    return [_for_viewer(samples[at], None if log_probs is None else log_probs[at]) for at in sorted(order)]


def _for_viewer(sample: Sample, log_probs: Sequence[float] | None) -> dict[str, Any]:
    view: dict[str, Any] = {
        "index": sample.index,
        "group_index": sample.group_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "response_length": len(sample.response_ids),
        "reward": sample.reward,
        "label": sample.label,
        "status": sample.status,
        "finish_reason": sample.finish_reason,
        "weight_version": sample.weight_version,
        "engine": sample.engine,
        "token_ids": list(sample.response_ids),
        "rollout_log_probs": list(sample.rollout_log_probs),
    }
    if log_probs is not None:
        view["log_probs"] = list(log_probs)
    return view


def largest_gap(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference of two sets of per-token values; NaN if any is NaN."""
    gaps = [abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps, default=math.nan)
