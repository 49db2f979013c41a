"""Where every metric goes."""

from __future__ import annotations

from typing import Any

LOGGED: list[tuple[dict[str, Any], str]] = []


def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
    """What slime sends to W&B and TensorBoard."""
    LOGGED.append((dict(metrics), step_key))


def finish_tracking(args: Any) -> None:
    """The end of a run."""
