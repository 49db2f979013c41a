"""Values of state cells read without trust: what has another type than expected counts as unknown, nothing raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def as_map(value: Any) -> Mapping[str, Any]:
    """A map; anything else is an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """A list; anything else is an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def as_number(value: Any) -> float | None:
    """A number; booleans are none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def as_int(value: Any) -> int | None:
    """A whole number; booleans are none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: Any) -> str:
    """Text; None is empty."""
    return "" if value is None else str(value)
