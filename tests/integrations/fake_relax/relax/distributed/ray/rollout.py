"""Metrics of the rollout side."""

from __future__ import annotations

from typing import Any


def _custom(path: str | None, *args: Any) -> Any:
    if path is None:
        return False
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)(*args)


def _log_rollout_data(
    rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float
) -> None:
    from ...utils import tracking_utils

    path = args.custom_rollout_log_function_path
    if _custom(path, rollout_id, args, samples, rollout_extra_metrics, rollout_time):
        return
    metrics = {"perf/rollout_time": rollout_time, "rollout/response_len/mean": 2.0, "rollout/step": rollout_id}
    tracking_utils.log(args, metrics, step_key="rollout/step")


def _log_eval_rollout_data(rollout_id: int, args: Any, data: Any, extra_metrics: Any = None) -> None:
    from ...utils import tracking_utils

    tracking_utils.log(args, {"eval/aime": 0.5, "eval/step": rollout_id}, step_key="eval/step")
