"""Metrics of the rollout side."""

from __future__ import annotations

from typing import Any

from . import logging_utils


def _custom(path: str | None, *args: Any) -> Any:
    if path is None:
        return False
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)(*args)


def log_rollout_data(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> None:
    """`perf N` of the rollout side."""
    path = getattr(args, "custom_rollout_log_function_path", None)
    if _custom(path, rollout_id, args, samples, rollout_extra_metrics, rollout_time):
        return
    metrics = {**(rollout_extra_metrics or {}), "rollout/response_len/mean": 3.5, "perf/rollout_time": rollout_time}
    step = rollout_id * 4 if getattr(args, "wandb_always_use_train_step", False) else rollout_id
    logging_utils.log(args, metrics | {"rollout/step": step}, step_key="rollout/step")


def log_eval_rollout_data(rollout_id: int, args: Any, data: Any, extra_metrics: Any = None) -> None:
    """`eval N`."""
    if _custom(getattr(args, "custom_eval_rollout_log_function_path", None), rollout_id, args, data, extra_metrics):
        return
    logging_utils.log(args, {"eval/aime": 0.5, "eval/step": rollout_id}, step_key="eval/step")
