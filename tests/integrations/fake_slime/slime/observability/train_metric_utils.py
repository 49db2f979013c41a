"""Metrics of the trainer."""

from __future__ import annotations

from typing import Any

from . import logging_utils


def gather_log_data(metric_name: str, args: Any, rollout_id: int, log_dict: dict[str, Any]) -> None:
    """One line of a rollout."""
    metrics = {f"{metric_name}/{key}": value for key, value in log_dict.items()} | {"rollout/step": rollout_id}
    logging_utils.log(args, metrics, step_key="rollout/step")


def log_rollout_data(rollout_id: int, args: Any, rollout_data: dict[str, Any]) -> None:
    """`rollout N`."""
    gather_log_data("rollout", args, rollout_id, {"raw_reward": 0.75, "kl": float("nan")})


def log_perf_data(rollout_id: int, args: Any, extra_metrics: Any = None) -> None:
    """`perf N` of the trainer."""
    logging_utils.log(args, {"perf/step_time": 2.5, "rollout/step": rollout_id}, step_key="rollout/step")
