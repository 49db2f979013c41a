"""What a daemon does once and beside the run: the manifest, tidying up after dead runs, the comparison with the last
good run.

Failure policy: none of it holds up the run, its start or its end. It runs in threads that nobody waits for when the
daemon stops (git on a slow disk may take seconds), and whatever goes wrong is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rltop.daemon.capture import MANIFEST, write_manifest
from rltop.daemon.compare import as_state
from rltop.daemon.core import Core
from rltop.daemon.housekeeping import tidy
from rltop.settings import Settings

T = TypeVar("T")
COMPARE_S = 3.0
"""How often it looks whether there is something new to compare."""


class Aside:
    """committed: waits until the journal holds everything; False when it cannot."""

    def __init__(self, core: Core, run_dir: Path, settings: Settings, committed: Callable[[], Awaitable[bool]]) -> None:
        self._core = core
        self._run_dir = run_dir
        self._settings = settings
        self._committed = committed

    async def run(
        self, command: Sequence[str], env: Mapping[str, str], config: Mapping[str, Any], *, adopted: bool
    ) -> None:
        """Everything, until cancelled. adopted: the trainer is one that an earlier daemon started."""
        if not adopted and (command or not (self._run_dir / MANIFEST).exists()):
            await self._capture(command, env, config)
        await self._tidy()
        await self._compare()

    async def _capture(self, command: Sequence[str], env: Mapping[str, str], config: Mapping[str, Any]) -> None:
        attempt, cwd = (self._core.table.get("run") or {}).get("attempt", 1), Path.cwd()

        def work() -> None:
            write_manifest(self._run_dir, attempt=attempt, command=command, env=env, cwd=cwd, config=config)

        try:
            await beside(work)
        except Exception as error:  # whatever git, a disk or a foreign Python come up with: the run does not care
            self._warn(f"what the run was started with could not be written down: {type(error).__name__}: {error}")

    async def _tidy(self) -> None:
        try:
            for text in await beside(lambda: tidy(self._settings, self._run_dir)):
                self._core.event("log", "info", text, "daemon")
        except Exception as error:
            self._warn(f"could not tidy up after dead runs: {type(error).__name__}: {error}")

    async def _compare(self) -> None:
        """Keep the key `changed` up to date: when the trainer told its arguments, when the checks found a cause."""
        known: object = None
        while True:
            run, checks = self._core.table.get("run") or {}, self._core.table.get("checks") or {}
            now = (run.get("framework"), run.get("attempt"), checks.get("root_causes"))
            if now != known and await self._committed():  # it is read from there, like every other run's
                known = now
                try:
                    self._core.set("changed", await beside(lambda: as_state(self._run_dir)))
                except Exception as error:
                    self._warn(f"cannot compare with the last good run: {type(error).__name__}: {error}")
            await asyncio.sleep(COMPARE_S)

    def _warn(self, text: str) -> None:
        self._core.event("log", "warn", text, "daemon")


async def beside(work: Callable[[], T]) -> T:
    """Result of `work` in a thread of its own, which dies with the process: unlike one of the loop's own threads, for
    which the end of the loop waits."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not done.done():  # else nobody waits any more
            set_it()

    def run() -> None:
        try:
            set_it = partial(done.set_result, work())
        except Exception as error:
            set_it = partial(done.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, set_it)

    threading.Thread(target=run, name="rltop-aside", daemon=True).start()
    return await done
