"""Who holds how much memory on the GPUs of the machine beside which a run is watched: the key `gpus`.

Asked of the driver (`rltop.engines.gpu_memory`), in a thread. A machine without GPUs, or without a driver that answers,
is asked once and has no such key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from rltop.daemon.core import Core
from rltop.engines.gpu_memory import Reader, Reading, read_gpus

EVERY_S = 10.0
MOST_HOLDERS = 64
"""Processes of one GPU that are told."""


class Gpus:
    """Asks again and again, where there is somebody to ask. names: pid -> name of a process, "" where it is unknown."""

    def __init__(
        self,
        core: Core,
        *,
        read: Reader = read_gpus,
        names: Callable[[int], str] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._core = core
        self._read = read
        self._names = names or name_of
        self._sleep = sleep

    async def run(self) -> None:
        """Until cancelled, or at once where nobody answers."""
        while await self.once():
            await self._sleep(EVERY_S)

    async def once(self) -> bool:
        """Ask once; whether anybody answered."""
        reading = await asyncio.to_thread(self._read)
        if reading.source == "none":
            if self._core.table.get("gpus") is not None:
                self._core.set("gpus", None)
            return False
        self._core.set("gpus", {"source": reading.source, "gpus": cells_of(reading, self._names)})
        return True


def cells_of(reading: Reading, names: Callable[[int], str]) -> list[dict[str, Any]]:
    """Each GPU that somebody holds memory on, in the driver's order."""
    found: dict[int, dict[str, Any]] = {}
    for holder in sorted(reading.holders, key=lambda one: (one.index, -one.mib)):
        gpu = found.setdefault(holder.index, {"index": holder.index, "uuid": holder.uuid, "used_mib": 0, "holders": []})
        gpu["used_mib"] += holder.mib
        if len(gpu["holders"]) < MOST_HOLDERS:
            gpu["holders"].append({"pid": holder.pid, "name": names(holder.pid), "mib": holder.mib})
    return list(found.values())


def name_of(pid: int) -> str:
    """Name of a process of this machine; "" of one that is gone, or of another namespace."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""
