"""Engines as processes of this machine: `Host` in threads, so that the caller's loop never waits for `/proc`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rltop.engines.host import Host
from rltop.engines.launcher import Launched, LaunchSpec, Look, Remains

THREADS = 8
P = ParamSpec("P")
R = TypeVar("R")


class LocalLauncher:
    """A `Launcher` (see `rltop.engines.launcher`)."""

    name = "local"

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()
        # A pool of its own: a kill that takes seconds must not hold up whatever else the loop gives to threads.
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="engines")

    async def start(self, spec: LaunchSpec) -> Launched:
        return await self._do(self._host.start, spec)

    async def look(self, launched: Launched) -> Look:
        return await self._do(self._host.look, launched)

    async def read_log(self, launched: Launched, offset: int, limit: int) -> bytes:
        return await self._do(self._host.read_log, launched, offset, limit)

    async def terminate(self, launched: Launched) -> None:
        await self._do(self._host.terminate, launched)

    async def kill(self, launched: Launched) -> None:
        await self._do(self._host.kill, launched)

    async def remains(self, launched: Launched) -> Remains:
        return await self._do(self._host.remains, launched)

    async def environ(self, launched: Launched) -> dict[str, str] | None:
        return await self._do(self._host.environ, launched)

    async def adopt(self, directory: str, marker: str) -> Launched | None:
        return await self._do(self._host.adopt, directory, marker)

    async def close(self) -> None:
        self._pool.shutdown(wait=False)

    async def _do(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: work(*args, **kwargs))
