"""Optimizer steps."""

from __future__ import annotations

from typing import Any

from ...observability import logging_utils


def train_one_step(args: Any, rollout_id: int, step_id: int) -> tuple[dict[str, float], float]:
    """One step; returns its losses and the gradient norm."""
    return {"loss": 0.125, "ppo_kl": 0.0}, 0.5


def train(rollout_id: int, args: Any, steps: int) -> None:
    """All steps of a rollout."""
    for step_id in range(steps):
        losses, grad_norm = train_one_step(args, rollout_id, step_id)
        metrics = {f"train/{key}": value for key, value in losses.items()} | {"train/grad_norm": grad_norm}
        metrics["train/step"] = rollout_id * steps + step_id
        logging_utils.log(args, metrics, step_key="train/step")
