"""The engines' memory, lent to the trainer and taken back: `--offload-rollout`, over SGLang's own endpoints.

What a real engine does not survive is never asked of it: nothing but `/flush_cache` before a release, nothing that runs
a forward pass while it is released, no request before an update after a resume (the loop's order sees to that). After a
release the memory of every engine's processes is measured, because an answer of 200 is only a word: who still holds
what it should have given back is named before the trainer takes memory that is not there.

Failure policy: an engine that refuses or does not answer is in the result, not an exception. What cannot be measured
(another machine, a container that hides its processes) is not judged.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil

from rltop.engines.client import EngineClient, EngineRefused, EngineUnreachable
from rltop.engines.gpu_memory import Reader, read_gpus
from rltop.train.ports import EngineFacts, Holding

WEIGHTS = ("weights",)
CACHES = ("kv_cache", "cuda_graph")
"""What is resumed before and after the weight update, as in slime."""
FLUSH_TRIES, FLUSH_EVERY_S = 60, 1.0
"""slime's: an engine whose last request has not quite ended refuses the flush."""
SETTLE_S = 3.0
"""How long released memory may take to be seen as free. SGLang answers when every rank has let go (0.02 s)."""
LOOK_EVERY_S = 0.05
FREED = 0.25
"""A process has released when at least this part of what its rank says it holds is gone. SGLang measures that as a fall
of the device's free memory, so others that start on it at the same time are in it: 0.93 GiB were said where 0.43 were
(three engines on an H200)."""
LARGE = 0.5
"""Processes that held less than this part of what a rank says have nothing of it: HTTP, tokenizers."""
_SMALLEST_GB = 1e-3
_GIB = 1 << 30


@dataclass(slots=True)
class EngineMemory:
    """Engines by id, from their release to their resume."""

    footprint: Callable[[EngineFacts], Mapping[int, float] | None] = field(default_factory=lambda: Footprint().of)
    """Pid -> GiB that each of an engine's processes holds on the device now; None: it cannot be seen."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lent: dict[tuple[str, int], EngineFacts] = field(default_factory=dict)
    _before: dict[tuple[str, int], tuple[Mapping[int, float] | None, float]] = field(default_factory=dict)
    """What each held before its release (measured), and what each of its ranks said it holds."""

    @property
    def lent(self) -> Sequence[EngineFacts]:
        """Engines whose memory is with the trainer. Nobody may ask them for a token."""
        return list(self._lent.values())

    def release(self, engines: Sequence[EngineFacts], *, late: str = "") -> dict[str, str]:
        """Have them give everything back; engine -> why not. late: a planted fault, this one is told and does not."""
        self._before |= {_key(one): (self.footprint(one), _says_it_holds(one)) for one in engines}
        failed = _together([one for one in engines if one.id != late], self._release)
        self._lent |= {_key(one): one for one in engines if one.id not in failed}
        return failed

    def _release(self, client: EngineClient) -> None:
        for left in range(FLUSH_TRIES, 0, -1):
            try:
                client.flush_cache()
                break
            except EngineRefused:
                if left == 1:
                    raise
            self.sleep(FLUSH_EVERY_S)
        client.release_memory()

    def holdings(self) -> list[Holding]:
        """What each lent engine still holds, after it had time to let go. Only of those that can be measured."""
        deadline = self.clock() + SETTLE_S
        while True:
            found = [one for engine in self.lent if (one := self._holding(engine)) is not None]
            if not any(one.held for one in found) or self.clock() >= deadline:
                return found
            self.sleep(LOOK_EVERY_S)

    def _holding(self, engine: EngineFacts) -> Holding | None:
        """Of the process that let go of least."""
        before, said = self._before[_key(engine)]
        now = None if before is None or said < _SMALLEST_GB else self.footprint(engine)
        if now is None or before is None:
            return None
        ranks = [pid for pid, size in before.items() if size >= LARGE * min(said, max(before.values()))]
        if not ranks:
            return None
        pid = min(ranks, key=lambda pid: before[pid] - now.get(pid, 0.0))
        left = now.get(pid, 0.0)
        return Holding(
            engine=engine.id,
            pid=pid,
            device="cpu" if engine.kind == "cpu" else "gpu",
            before_gb=before[pid],
            now_gb=left,
            said_gb=said,
            held=before[pid] - left < FREED * min(said, before[pid]),
        )

    def resume(self, tags: Sequence[str], engines: Iterable[EngineFacts] | None = None) -> dict[str, str]:
        """Have the lent engines (or those of them) take this memory again; engine -> why not."""
        chosen = self.lent if engines is None else [one for one in engines if _key(one) in self._lent]
        return _together(chosen, lambda client: client.resume_memory(tags))

    def back(self) -> list[EngineFacts]:
        """All memory is with the engines again; returns whose it was."""
        engines = self.lent
        self._lent.clear()
        self._before.clear()
        return list(engines)

    def forget(self, engines: Iterable[EngineFacts]) -> None:
        """These are gone: their memory went with them."""
        for one in engines:
            self._lent.pop(_key(one), None)

    def lose_weights(self, engine: EngineFacts) -> None:
        """A planted fault: release and resume its weights once more, with no update after it."""

        def lose(client: EngineClient) -> None:
            client.release_memory(WEIGHTS)
            client.resume_memory(WEIGHTS)

        _together([engine], lose)


def _key(engine: EngineFacts) -> tuple[str, int]:
    return (engine.id, engine.generation)


def _together(engines: Sequence[EngineFacts], work: Callable[[EngineClient], None]) -> dict[str, str]:
    """Do it with all of them at a time; engine -> why it failed."""

    def one(engine: EngineFacts) -> str:
        try:
            with EngineClient(engine.url) as client:
                work(client)
        except (EngineRefused, EngineUnreachable) as error:
            return f"{error.what}: {error.why}"
        return ""

    if not engines:
        return {}
    with ThreadPoolExecutor(max_workers=len(engines), thread_name_prefix="memory") as pool:
        told = pool.map(one, engines)
        return {engine.id: why for engine, why in zip(engines, told, strict=True) if why}


def _says_it_holds(engine: EngineFacts) -> float:
    """GiB of weights and KV pool of a rank, in the engine's own words; 0 where it has none."""
    try:
        with EngineClient(engine.url) as client:
            states = client.server_info().get("internal_states") or []
    except (EngineRefused, EngineUnreachable):
        return 0.0
    usages = [state.get("memory_usage") for state in states if isinstance(state, dict)]
    sizes = [
        sum(float(usage[name]) for name in ("weight", "kvcache") if isinstance(usage.get(name), int | float))
        for usage in usages
        if isinstance(usage, dict)
    ]
    return min(sizes, default=0.0)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Measures engines on this machine: of a CPU engine the resident size of its processes, of SGLang their memory on
    the GPUs as the driver tells it."""

    gpus: Reader = read_gpus
    host: str = field(default_factory=socket.gethostname)

    def of(self, engine: EngineFacts) -> dict[int, float] | None:
        """Pid -> GiB; None: not here, or not visible."""
        if engine.host not in ("", self.host) or not engine.pid:
            return None
        pids = _tree(engine.pid)
        if engine.kind == "cpu":
            return {pid: size / _GIB for pid in pids if (size := _resident(pid)) is not None} or None
        held: dict[int, float] = {}
        for holder in self.gpus().holders:
            if holder.pid in pids:
                held[holder.pid] = held.get(holder.pid, 0.0) + holder.mib / 1024
        return held or None


def _tree(pid: int) -> set[int]:
    found = {pid}
    with contextlib.suppress(psutil.Error):
        found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def _resident(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
