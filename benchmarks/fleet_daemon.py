"""The daemon of `benchmarks.fleet`: a real one that also measures its loop, every `SAMPLE_S`, and its callbacks.

How late a sample is says nothing about the daemon on a machine that has no CPU for it. So each comes with a bound on
what the daemon itself may have had to do with it: the CPU time that the whole process used meanwhile, or, when that is
more, the lateness without the time for which its Python threads were ready and got no CPU (a loop that waits for a
disk). Written as JSON to the file that `RLTOP_FLEET_LAG` names, when the daemon ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rltop.daemon import app
from rltop.daemon.__main__ import main

SAMPLE_S = 0.01
MOST = 5
"""Longest callbacks that are told."""


def waited_s(pid: int | str, thread: int) -> float:
    """Seconds for which a thread was ready and had no CPU so far (Linux; else 0)."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Watch:
    """Samples of the loop's lag, and the longest pieces of its work."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        """(wall clock, lag, bound on the daemon's part), seconds."""
        self.longest: dict[str, float] = {}
        """Callback -> CPU seconds of the longest one."""

    async def sample(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        cpu, waited = time.process_time(), self._waited()
        while True:
            due = loop.time() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            late = max(0.0, loop.time() - due)
            cpu_now, waited_now = time.process_time(), self._waited()
            own = max(min(late, cpu_now - cpu), late - (waited_now - waited))
            self.samples.append((time.time(), late, own))
            cpu, waited = cpu_now, waited_now

    @staticmethod
    def _waited() -> float:
        threads = (thread.native_id for thread in threading.enumerate())
        return sum(waited_s("self", thread) for thread in threads if thread is not None)

    def time_callbacks(self) -> None:
        """From now on every callback of every loop is timed."""
        plain = asyncio.Handle._run

        def timed(handle: Any) -> None:
            began = time.thread_time()
            plain(handle)
            if (took := time.thread_time() - began) > 0.002:
                name = _name(handle)
                self.longest[name] = max(took, self.longest.get(name, 0.0))

        asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]

    def write(self, path: str) -> None:
        """As JSON."""
        longest = sorted(self.longest.items(), key=lambda item: -item[1])[:MOST]
        Path(path).write_text(json.dumps({"samples": self.samples, "longest": longest}))


def _name(handle: Any) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return str(getattr(task.get_coro(), "__qualname__", task.get_coro()))
    return str(getattr(callback, "__qualname__", callback))


def measured() -> int:
    """Run the daemon, and write what was measured."""
    watch, plain = Watch(), app.Daemon._measure_lag

    async def both(daemon: app.Daemon) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(plain(daemon))
            group.create_task(watch.sample())

    app.Daemon._measure_lag = both  # type: ignore[method-assign,assignment]
    watch.time_callbacks()
    try:
        return main()
    finally:
        watch.write(os.environ["RLTOP_FLEET_LAG"])


if __name__ == "__main__":
    sys.exit(measured())
