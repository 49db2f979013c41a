"""What `rltop train --json` prints: one object, in a fixed schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rltop.train.arguments import TrainConfig
from rltop.train.loop import History, stand_ins
from rltop.train.sample import mean

SCHEMA = 1
LAST = 10
"""`final_reward` is the mean over this many rollouts."""


def summary(config: TrainConfig, history: History, *, reason: str, seconds: float) -> dict[str, Any]:
    """Plain values; NaN and Inf are the strings "NaN", "Infinity", "-Infinity" (JSON has no numbers for them).

    reason: done, failed or interrupted. What was not measured is absent from `first_rollout` and `first_step`.
    """
    gap = "train_rollout_logprob_abs_diff"
    result: dict[str, Any] = speakable(
        {
            "schema": SCHEMA,
            "reason": reason,
            "rewards": history.rewards,
            "final_reward": mean(history.rewards[-LAST:]) if history.rewards else None,
            "rollouts": len(history.rewards),
            "steps": len(history.steps),
            "losses": [step["loss"] for step in history.steps],
            "grad_norms": [step["grad_norm"] for step in history.steps],
            "first_rollout": history.first_rollout,
            "first_step": history.steps[0] if history.steps else {},
            "train_rollout_logprob_abs_diff_max": _largest([step[gap] for step in history.steps if gap in step]),
            "syncs": history.syncs,
            "weight_mismatches": history.mismatches,
            "mode": config.mode,
            "evaluations": history.evaluations,
            "dumps_lost": history.dumps_lost,
            "replay": history.replay,
            "seconds": round(seconds, 3),
            "seed": config.seed,
            "deterministic": config.deterministic,
            "backend": history.backend,
            "stand_ins": stand_ins(config),
            "injected_faults": list(config.inject),
        }
    )
    return result


def speakable(value: Any) -> Any:
    """The value with every NaN and Inf replaced by its name."""
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case Mapping():
            return {key: speakable(item) for key, item in value.items()}
        case list() | tuple():
            return [speakable(item) for item in value]
        case _:
            return value


def _largest(values: list[float]) -> float | None:
    """NaN if there is one: the largest of a set with NaN is not known."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=None)
