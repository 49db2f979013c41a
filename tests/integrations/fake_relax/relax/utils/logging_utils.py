"""What Relax's launcher has every worker run."""

from __future__ import annotations

FILTERED: list[bool] = []


def install_asyncio_noise_filter() -> None:
    """Once."""
    FILTERED.append(True)
