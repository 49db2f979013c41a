"""What the daemon fetches by itself: every two seconds it asks each engine how it is doing.

A failed scrape leaves a gap: the numbers become unknown and the error is shown, never an old or made-up value.
Engines that are stopped, crashed or released (OFFLOADED: an answer would need memory that is lent to the trainer) are
left alone, and so are those that the daemon owns: its fleet asks them itself (`rltop.engines.watch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rltop.daemon.core import Core

if TYPE_CHECKING:
    import httpx

    from rltop.engines.scrape import EngineStats

SCRAPE_S = 2.0
TIMEOUT_S = 4.0
AFTER_PAUSE_S = 5.0
"""Of a scrape so soon after a pause the one before it may be older than the pause."""
_QUIET = frozenset({"STOPPED", "CRASHED", "OFFLOADED", "LOST", "RECLAIMING", "BACKOFF", "QUARANTINED", "LAUNCHING"})
_FIELDS = ("running", "queued", "tokens_per_s", "token_usage", "cuda_graph", "spec_accept_length")

Scrape = Callable[[str], Awaitable["EngineStats"]]
"""url -> what could be seen of the engine."""


class HttpScrape:
    """Scrapes over HTTP. httpx is imported, and a connection made, when the first engine is to be asked."""

    def __init__(self) -> None:
        self._http: httpx.AsyncClient | None = None
        self._making = asyncio.Lock()

    async def __call__(self, url: str) -> EngineStats:
        """Ask one engine."""
        async with self._making:
            if self._http is None:
                self._http = await asyncio.to_thread(_client)
        from rltop.engines.scrape import scrape

        return await scrape(url, self._http)

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()


def _client() -> httpx.AsyncClient:
    """Imports and reads certificates: not in the loop."""
    import httpx

    from rltop.engines.transport import Transport

    # Engines are inside the cluster; a proxy from the environment would only be in the way.
    return httpx.AsyncClient(timeout=TIMEOUT_S, transport=Transport(trust_env=False), trust_env=False)


class EngineScraper:
    """Scrapes every engine in the state table, all at once, each with its own deadline."""

    def __init__(
        self, core: Core, scrape: Scrape, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._core = core
        self._scrape = scrape
        self._sleep = sleep
        self._tokens: dict[str, float] = {}
        """Engine -> tokens decoded so far, at the last scrape."""

    async def run(self) -> None:
        """Scrape until cancelled."""
        while True:
            await self.once()
            await self._sleep(SCRAPE_S)

    async def once(self) -> None:
        """Scrape all engines that may be asked, once."""
        targets = {}
        for key in self._core.table.keys("engine/"):
            engine = self._core.table.get(key)
            if engine.get("owner") == "rltop":
                continue
            if engine.get("url") and engine.get("state") not in _QUIET:
                targets[key] = engine["url"]
            elif engine.get("error") is not None or any(engine.get(name) is not None for name in _FIELDS):
                self._core.update(key, **dict.fromkeys(_FIELDS), error=None)
        await asyncio.gather(*(self._one(key, url) for key, url in targets.items()))

    async def _one(self, key: str, url: str) -> None:
        found: dict[str, Any] = dict.fromkeys(_FIELDS)
        stats: EngineStats | None = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                stats = await self._scrape(url)
        except Exception as error:  # whatever an HTTP client or a foreign server comes up with: no answer
            found["error"] = f"{type(error).__name__}: {error}"[:200]
        else:
            found |= {"error": stats.problem[:400] or None, "unreadable": stats.garbled[:400] or None}
            if stats.reachable:
                found |= {name: getattr(stats, name) for name in _FIELDS} | {"seen": self._core.now()}
                if stats.weight_version is not None:
                    found["weight_version"] = stats.weight_version
        engine = self._core.table.get(key)
        if engine is not None and engine.get("url") == url:  # it may have moved while we asked
            self._core.set(key, {**engine, **found, **self._held(key, engine, found, stats)})

    def _held(
        self, key: str, engine: dict[str, Any], found: dict[str, Any], stats: EngineStats | None
    ) -> dict[str, Any]:
        """Of an engine that somebody paused: no tokens per second (the gauge keeps its last value), until tokens come
        again, which ends the pause: a weight update lets an engine go on."""
        tokens = stats.decode_tokens_total if stats is not None else None
        before = self._tokens.pop(key, None)
        if tokens is not None:
            self._tokens[key] = tokens
        pause = engine.get("paused")
        if not pause:
            return {}
        flow = tokens is not None and before is not None and tokens > before
        if flow and self._core.now() - pause["since"] > AFTER_PAUSE_S:
            return {"paused": None}
        return {} if found["tokens_per_s"] is None else {"tokens_per_s": 0.0}
