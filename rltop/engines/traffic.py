"""The traffic that a crash came under, and its replay against an engine on trial.

`Traffic` is plain data; `Traffic.replay(seed)` makes a `Replay`, which loops the requests until it is told to stop or
the engine dies. The requests go out in waves of odd and changing sizes, up to the concurrency of the original: a batch
that shrinks through odd sizes is what padded CUDA graphs meet.

Failure policy: a dead engine ends a replay, it never raises for one; requests that an engine refuses are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rltop.engines.client import AsyncEngineClient, EngineRefused, EngineUnreachable

SYNTHETIC = "synthetic"
MOST_TOKENS = 24
"""Of a synthetic response; the shortest has one."""
END_S = 2.0
"""For the requests that run when a replay is told to stop: they are aborted, and may answer."""
REFUSED_PAUSE_S = 0.2
"""After a refused request: an engine that refuses everything is not asked in a tight loop."""
VOCABULARY = 256
"""Synthetic prompts use the ids that every vocabulary has."""


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """What became of the requests of a replay."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    """Refused, or cut off."""
    tokens: int = 0


class Replay(Protocol):
    """One run of captured traffic against one engine."""

    async def run(self, client: AsyncEngineClient, *, stop: asyncio.Event) -> ReplayCounts:
        """Loop the traffic until `stop` or until the engine dies; never raises for a dead engine."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Requests and how many of them ran at once."""

    source: str
    """For people: `captured from engine 1, generation 3`, `synthetic`."""
    requests: tuple[Mapping[str, Any], ...]
    """Bodies of `/generate`."""
    concurrency: int

    @classmethod
    def synthetic(cls, *, requests: int = 64, concurrency: int = 13, seed: int = 0) -> Traffic:
        """Fixed prompts of odd lengths: for an engine whose real traffic nobody kept."""
        draw = random.Random(f"traffic/{seed}")
        made: list[Mapping[str, Any]] = []
        for _ in range(requests):
            length, most = draw.randrange(1, 48) * 2 + 1, draw.randrange(1, MOST_TOKENS)
            prompt = [draw.randrange(1, VOCABULARY) for _ in range(length)]
            params = {"max_new_tokens": most, "temperature": draw.choice((0.0, 1.0)), "ignore_eos": True}
            made.append({"input_ids": prompt, "sampling_params": params})
        return cls(source=SYNTHETIC, requests=tuple(made), concurrency=concurrency)

    def replay(self, seed: int) -> Replay:
        """A replay in an order of its own."""
        return _Waves(self, seed)


def captured(run_dir: Path, engine: str, generation: int) -> Traffic | None:
    """The traffic of a generation's last minutes; None: nobody kept it."""
    return None


class _Waves:
    """Waves of odd sizes, each of them some requests at once."""

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self._traffic = traffic
        self._draw = random.Random(f"replay/{seed}")

    async def run(self, client: AsyncEngineClient, *, stop: asyncio.Event) -> ReplayCounts:
        counts = _Counting()
        ended = asyncio.ensure_future(stop.wait())
        work: set[asyncio.Future[None]] = set()
        try:
            while not stop.is_set() and not counts.dead and self._traffic.requests:
                size = self._draw.randrange(1, max(2, self._traffic.concurrency + 1), 2)
                while len(work) < size and not counts.dead:
                    work.add(asyncio.ensure_future(counts.ask(client, self._draw.choice(self._traffic.requests))))
                # The next wave begins while the last requests of this one still run: batches shrink and grow.
                while len(work) > size // 3 and not stop.is_set() and not counts.dead:
                    waited: set[asyncio.Future[Any]] = {*work, ended}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    work = {task for task in work if not task.done()}
        finally:
            ended.cancel()
            # Its requests end by its answer: one that is cut off while it connects leaves a socket behind.
            if work and not counts.dead:
                with contextlib.suppress(EngineUnreachable, EngineRefused, TimeoutError):
                    async with asyncio.timeout(END_S):
                        await client.abort()
            if work:
                await asyncio.wait(work, timeout=END_S)
            for task in work:
                task.cancel()
            await asyncio.gather(ended, *work, return_exceptions=True)
        return counts.told()


class _Counting:
    def __init__(self) -> None:
        self.sent = self.done = self.failed = self.tokens = 0
        self.dead = False

    def told(self) -> ReplayCounts:
        return ReplayCounts(self.sent, self.done, self.failed, self.tokens)

    async def ask(self, client: AsyncEngineClient, body: Mapping[str, Any]) -> None:
        self.sent += 1
        try:
            answers: Sequence[Any] = await client.generate(body)
        except EngineUnreachable:
            self.failed += 1
            self.dead = True
        except EngineRefused:
            self.failed += 1
            await asyncio.sleep(REFUSED_PAUSE_S)
        else:
            self.done += 1
            told = (one.get("meta_info") or {} for one in answers if isinstance(one, dict))
            self.tokens += sum(int(one.get("completion_tokens") or 0) for one in told)
