"""What the HTTP handlers share: the settings, the scheduler, and what changes between requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.generate import RequestReader
from rltop.train.cpu_engine.scheduler import Scheduler

HEALTH_TIMEOUT_S = 20.0
"""SGLang's SGLANG_HEALTH_CHECK_TIMEOUT: how long `/health` waits for one token before it answers 503."""

T = TypeVar("T")


@dataclass(slots=True)
class Engine:
    """What the handlers share."""

    args: EngineArgs
    scheduler: Scheduler
    reader: RequestReader
    model_info: dict[str, Any]
    startup_s: float
    """From the first look at the checkpoint to a scheduler that could run."""
    started: float = field(default_factory=time.time)
    model_path: str = ""
    """Of the weights served now; a disk update moves it."""
    released: set[str] = field(default_factory=set)
    ready: bool = False
    health_timeout_s: float = HEALTH_TIMEOUT_S

    async def do(self, work: Callable[[], T], *, exclusive: bool = False) -> T:
        """Run `work` in the scheduler's thread."""
        future: Future[T] = self.scheduler.call(work, exclusive=exclusive)
        return await asyncio.wrap_future(future)
