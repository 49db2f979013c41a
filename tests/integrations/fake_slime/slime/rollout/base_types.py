"""How a rollout function is called."""

from __future__ import annotations

from typing import Any


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Samples of a rollout or an evaluation."""
    return fn(*args, **kwargs, evaluation=evaluation)
