"""What the HTTP handlers share: the settings, the scheduler, and what changes between requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from starlette.exceptions import HTTPException

from rltop.train.cpu_engine import MARKER
from rltop.train.cpu_engine.args import EngineArgs
from rltop.train.cpu_engine.crash_dump import CrashDump
from rltop.train.cpu_engine.generate import RequestReader
from rltop.train.cpu_engine.injection import Injection, SchedulerDied, signature

if TYPE_CHECKING:
    from rltop.train.cpu_engine.loop import Loop

HEALTH_TIMEOUT_S = 20.0
"""SGLang's SGLANG_HEALTH_CHECK_TIMEOUT: how long `/health` waits for one token before it answers 503."""

T = TypeVar("T")


@dataclass(slots=True)
class Engine:
    """What the handlers share."""

    args: EngineArgs
    scheduler: Loop
    reader: RequestReader
    model_info: dict[str, Any]
    startup_s: float
    """From the first look at the checkpoint to a scheduler that could run."""
    started: float = field(default_factory=time.time)
    model_path: str = ""
    """Of the weights served now; a disk update moves it."""
    released: set[str] = field(default_factory=set)
    ready: bool = False
    unhealthy: bool = False
    """The last `/health` got no token in time: SGLang then does not drain."""
    warm_up_s: float = 0.0
    """Longer between listening and being ready, an injected fault."""
    health_timeout_s: float = HEALTH_TIMEOUT_S
    marker: str = MARKER
    """What it calls itself, so that nobody takes it for SGLang."""
    takes_tensors: bool = True
    """It has weights (the null engine has none)."""
    update_groups: dict[str, Any] = field(default_factory=dict)
    """Process groups over which weights come, by name."""
    crash_dump: CrashDump = field(init=False)

    def __post_init__(self) -> None:
        self.crash_dump = CrashDump(str(self.args.sglang.get("crash_dump_folder") or ""), self.args.sglang)

    @property
    def injection(self) -> Injection:
        """Its armed faults."""
        return self.scheduler.injection

    @property
    def open_requests(self) -> int:
        """`/generate` requests that are not answered yet."""
        return sum(count for (path, _), count in self.scheduler.stats.http_active.items() if path == "/generate")

    @contextmanager
    def answering(self, key: tuple[str, str]) -> Iterator[None]:
        """An HTTP request (endpoint, method), for as long as it is open. In the HTTP thread."""
        active = self.scheduler.stats.http_active
        active[key] = active.get(key, 0) + 1
        try:
            yield
        finally:
            active[key] -= 1

    async def die(self, name: str) -> NoReturn:
        """End the scheduler with a signature's exception. Where the process ends with it, nobody is answered."""
        self.scheduler.crash(SchedulerDied(signature(name)))
        while not self.scheduler.fatal or self.scheduler.on_death is not None:  # noqa: ASYNC110 - the end comes by signal
            await asyncio.sleep(0.01)
        raise HTTPException(500, f"the scheduler died: {name}")

    async def do(self, work: Callable[[], T], *, exclusive: bool = False) -> T:
        """Run `work` in the scheduler's thread."""
        future: Future[T] = self.scheduler.call(work, exclusive=exclusive)
        return await asyncio.wrap_future(future)
