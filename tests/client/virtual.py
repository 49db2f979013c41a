"""An event loop whose clock jumps to the next timer instead of waiting: silence costs nothing and is deterministic."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped += 1e-9  # a clock that never moves would keep a timer that fires within its resolution for ever
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: this test would hang")
        self.skipped += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """For tests without real I/O."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.skipped


def run_virtual(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
