"""Timers."""

from __future__ import annotations

import time


class Timer:
    """Named timers of a process."""

    def __init__(self) -> None:
        self.start_time: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Begin."""
        assert name not in self.start_time, f"Timer {name} already started."
        self.start_time[name] = time.time()

    def end(self, name: str) -> None:
        """End."""
        assert name in self.start_time, f"Timer {name} not started."
        del self.start_time[name]
