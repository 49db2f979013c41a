"""rltop's hooks with the marks that slime's contract tests ask of a hook: the tests' affair, not the hooks'."""

from __future__ import annotations

from typing import Any

from rltop.integrations import slime


def log_rollout_data(rollout_id: Any, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: Any) -> Any:
    """With its mark."""
    args.logged_rollout_id = rollout_id
    return slime.log_rollout_data(rollout_id, args, samples, rollout_extra_metrics, rollout_time)


def log_eval_rollout_data(rollout_id: Any, args: Any, data: Any, extra_metrics: Any) -> Any:
    """With its mark."""
    args.logged_eval_rollout_id = rollout_id
    return slime.log_eval_rollout_data(rollout_id, args, data, extra_metrics)


def rollout_data_postprocess(args: Any, rollout_id: Any, rollout_data: Any) -> Any:
    """With its mark."""
    args.rollout_data_postprocess_called = True
    return slime.rollout_data_postprocess(args, rollout_id, rollout_data)
