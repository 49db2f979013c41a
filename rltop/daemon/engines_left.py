"""Engines that outlived their daemon: whether there are any, and how they are ended without one.

On this machine an engine's slot is locked as long as any process of it lives (`rltop.engines.keeper`), so that a glance
needs no list of processes. Whether a run is really down is told by the processes themselves: each carries its run's
marker and its folder. Engines in a Ray cluster can not be seen from here; they are asked for when they are to end.

Failure policy: the brake needs no file. What a fleet could not end (a disk that takes nothing, slots of a newer rltop)
gets TERM and then KILL by its marker, and whatever lives after that is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rltop.daemon.core import Core
from rltop.daemon.engines import EngineOptions, Engines, MakeFleet, make_fleet, present
from rltop.engines import processes
from rltop.engines.launcher import DIRECTORY, MARKER
from rltop.engines.processes import Ident, locked
from rltop.errors import RltopError
from rltop.runs import acquire_lock, lock_holder

Stage = Callable[[str], None]
TERM_S, KILL_S, POLL_S = 20.0, 5.0, 0.05
"""SGLang polls for SIGTERM every 5 s and then needs up to 15 s."""
MARGIN_S = 45.0
"""What ending engines may take beyond the trainer: TERM, KILL and the wait for their memory."""


def left_engines(run_dir: Path) -> list[str]:
    """Ids of the run's engines of which a process lives on this machine."""
    return sorted(lock.parent.name for lock in (run_dir / "engines").glob("*/lock") if locked(lock))


def has_engines(run_dir: Path) -> bool:
    """Whether the run ever had engines of its daemon's."""
    return present(run_dir)


def living(run_dir: Path) -> dict[Ident, str]:
    """Every process on this machine that carries the marker of an engine of this run and its folder: its engine's id.

    A keeper carries no marker; it ends with the engine that it keeps. Reads every process of this user.
    """
    run, engines = f"{run_dir.name}/", os.path.join(os.path.realpath(run_dir), "engines", "")

    def ours(environ: Mapping[str, str]) -> bool:
        return environ.get(MARKER, "").startswith(run) and environ.get(DIRECTORY, "").startswith(engines)

    found = processes.carrying(ours)
    return {one: environ[MARKER].removeprefix(run).rpartition("/")[0] for one, environ in found.items()}


def make_sure(run_dir: Path, stage: Stage, *, make: MakeFleet = make_fleet) -> list[str]:
    """End every engine of a run that has no daemon, on this machine; the ids of those that lived.

    Raises RltopError: a daemon has taken the run up meanwhile, or some process lives in spite of all. It names each.
    """
    had = sorted({*living(run_dir).values(), *left_engines(run_dir)})
    if not had:
        return []
    try:
        end_engines(run_dir, stage, make=make)
    except RltopError as error:
        if lock_holder(run_dir) is not None:
            raise
        stage(" ".join(str(error).split()))
    if living(run_dir):
        stage("ending what still carries the marker of its engines: TERM, then KILL")
        _end_marked(run_dir)
    if left := living(run_dir):
        named = ", ".join(f"engine {left[one]}: process {one.pid} ({processes.name(one.pid)})" for one in sorted(left))
        raise RltopError(
            f"run {run_dir.name!r} is not down: it has engines that live",
            where=str(run_dir / "engines"),
            why=named,
            do="a process inside a system call ends when that returns: look again, then kill it by hand",
            exit_code=1,
        )
    return had


def _end_marked(run_dir: Path) -> None:
    """TERM to the leaders (SGLang's children must not get it, see `rltop.engines.launch`), then KILL to all."""
    left, rows = set(living(run_dir)), processes.table()
    pids = {one.pid for one in left}
    for one in left:
        if one.pid in rows and rows[one.pid].parent not in pids:
            processes.send(one, signal.SIGTERM)
    for kill, patience_s in ((False, TERM_S), (True, KILL_S)):
        deadline = time.monotonic() + patience_s
        while left and time.monotonic() < deadline:
            for one in left if kill else ():
                processes.send(one, signal.SIGKILL)
            time.sleep(POLL_S)
            # Those that are known are asked every time, all others once more before the end: it costs a look at each.
            left = {one for one in left if processes.alive(one)} or set(living(run_dir))


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
