"""Metrics of the trainer side."""

from __future__ import annotations

from typing import Any

from ...utils import tracking_utils


def log_rollout_data(rollout_id: int, args: Any, rollout_data: Any) -> None:
    """`rollout N` of the trainer."""
    tracking_utils.log(args, {"rollout/raw_reward": 0.25, "rollout/step": rollout_id}, step_key="rollout/step")


def log_perf_data_fwd(args: Any, rollout_id: int) -> None:
    """Times of a role that has no optimizer."""
    metrics = {"perf/log_probs_time": 3.0, "actor_fwd/step": rollout_id}
    tracking_utils.log(args, metrics, step_key="actor_fwd/step")
