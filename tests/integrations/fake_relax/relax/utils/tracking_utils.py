"""The metric function."""

from __future__ import annotations

from typing import Any

LOGGED: list[tuple[dict[str, Any], str]] = []


def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
    """To the metrics service."""
    assert isinstance(metrics[step_key], int)
    LOGGED.append((metrics, step_key))
