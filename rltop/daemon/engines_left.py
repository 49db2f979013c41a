"""Engines that outlived their daemon: whether there are any, and how they are ended without one.

On this machine an engine's slot is locked as long as any process of it lives (`rltop.engines.keeper`), so that looking
needs no list of processes. Engines in a Ray cluster can not be seen from here; they are asked for when they are to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from rltop.daemon.core import Core
from rltop.daemon.engines import EngineOptions, Engines, MakeFleet, make_fleet
from rltop.engines.processes import locked
from rltop.runs import acquire_lock

Stage = Callable[[str], None]
MARGIN_S = 45.0
"""What ending engines may take beyond the trainer: TERM, KILL and the wait for their memory."""


def left_engines(run_dir: Path) -> list[str]:
    """Ids of the run's engines of which a process lives on this machine."""
    return sorted(lock.parent.name for lock in (run_dir / "engines").glob("*/lock") if locked(lock))


def has_engines(run_dir: Path) -> bool:
    """Whether the run ever had engines of its daemon's."""
    return any((run_dir / "engines").glob("*/slot.json"))


def end_engines(run_dir: Path, stage: Stage, *, make: MakeFleet = make_fleet) -> str:
    """End every engine of a run whose daemon is gone; a closing sentence.

    Raises RltopError: a daemon has taken the run up meanwhile, or they can not be ended.
    """
    lock = acquire_lock(run_dir)
    try:
        return asyncio.run(_end(run_dir, stage, make))
    finally:
        os.close(lock)


async def _end(run_dir: Path, stage: Stage, make: MakeFleet) -> str:
    core = Core(_NoJournal(), now=lambda: 0.0)
    engines = Engines(core, EngineOptions({}), run_dir=run_dir, trainer_lives=lambda: False, make=make)
    await engines.begin(stale=False)
    running = asyncio.get_running_loop().create_task(engines.run())
    try:
        return await engines.stop_all(stage)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await engines.close()


class _NoJournal:
    """A sink that keeps nothing: the run's journal is its daemon's."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None
