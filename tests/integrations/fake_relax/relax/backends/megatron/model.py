"""Optimizer steps."""

from __future__ import annotations

from typing import Any

from ...utils import tracking_utils


def train_one_step(args: Any, rollout_id: int, step_id: int, model: Any) -> None:
    """One."""


def train(args: Any, rollout_id: int, steps: int) -> None:
    """All of a rollout."""
    for step_id in range(steps):
        train_one_step(args, rollout_id, step_id, None)
        metrics = {"train/loss": 0.1, "train/grad_norm": 1.0, "train/step": rollout_id * steps + step_id}
        tracking_utils.log(args, metrics, step_key="train/step")
