"""Timers of a process."""

from __future__ import annotations


class Timer:
    """Its layout is its own affair."""

    def start(self, name: str) -> None:
        """Begin."""

    def end(self, name: str) -> None:
        """End."""
