"""rltop: top for LLM reinforcement-learning post-training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltop.reporter import Reporter as Reporter

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `from rltop import Reporter` for training programs; everything else of rltop does not pay for it.
    if name == "Reporter":
        from rltop.reporter import Reporter

        return Reporter
    raise AttributeError(f"module 'rltop' has no attribute {name!r}")
