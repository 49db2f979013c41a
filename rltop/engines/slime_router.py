"""The router of a slime run, as far as an engine that comes and goes has to do with it: its list of workers.

slime registers an external engine itself when it attaches (POST /workers), and an answer of 4xx ends it. So nothing is
put into the list that slime had not put there: an engine that leaves the rotation is taken out, remembered as it stood
there, and put back when it serves again. The memory is dropped when the router is gone: slime fills the next one anew.

Failure policy: no method raises. What the router does not do is told once, and tried again while it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

Tell = Callable[[str, str], None]
"""Level and text."""
TIMEOUT_S = 3.0
GONE_POLLS = 3
"""Refused connections in a row after which the router is taken for gone."""
AGAIN_POLLS = 30
"""Before a router is asked again to take one back: it answers first and asks the engine afterwards."""
_CARRIED = ("worker_type", "bootstrap_port")
"""Of an entry in the list, what slime's own request has too."""


class SlimeRouter:
    """Client and memory. `removed`: URL -> the request that puts it back; kept over a daemon's end by its owner."""

    def __init__(
        self,
        address: str,
        tell: Tell,
        *,
        removed: Mapping[str, Mapping[str, Any]] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self.removed: dict[str, dict[str, Any]] = {url: dict(entry) for url, entry in (removed or {}).items()}
        self.listed: frozenset[str] | None = None
        """URLs in its list when it last answered; None: it did not."""
        self._tell = tell
        self._told = ""
        self._refused = 0
        self._asked: dict[str, int] = {}
        """URL -> polls since it was asked to take it back."""
        self._http = httpx.AsyncClient(
            base_url=f"http://{address}", timeout=TIMEOUT_S, trust_env=False, transport=transport
        )

    async def keep(self, engines: Mapping[str, bool]) -> None:
        """Bring the list in line. engines: URL of each engine of ours -> whether it serves."""
        workers = await self._workers()
        if workers is None:
            return
        for url, serves in engines.items():
            here = workers.get(_plain(url))
            if here is not None and not serves:
                await self._remove(url, here)
            elif here is not None and url in self.removed:
                del self.removed[url]
                self._tell("info", f"{url} is back in slime's router")
            elif here is None and serves and url in self.removed:
                await self._put_back(url)
            if url not in self.removed or not serves:
                self._asked.pop(url, None)

    async def leave(self, url: str) -> None:
        """Take one engine out now: it drains next, and must be sent nothing more."""
        workers = await self._workers()
        if workers is not None and (here := workers.get(_plain(url))) is not None:
            await self._remove(url, here)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    # ---------------------------------------------------------------- requests

    async def _workers(self) -> dict[str, dict[str, Any]] | None:
        """URL -> entry; None when it does not say."""
        try:
            answer = await self._http.get("/workers")
            answer.raise_for_status()
            told = answer.json()["workers"]
            workers = {_plain(str(one["url"])): dict(one) for one in told if isinstance(one, dict) and "url" in one}
        except httpx.ConnectError:
            self._refused += 1
            self.listed = None
            if self._refused == GONE_POLLS and self.removed:
                self._tell("info", f"slime's router {self.address} is gone: a new one is filled by slime itself")
                self.removed.clear()
            return None
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self.listed = None
            self._once("warn", f"slime's router {self.address} does not list its workers: {_words(error)}")
            return None
        self._refused = 0
        self.listed = frozenset(workers)
        return workers

    async def _remove(self, url: str, entry: Mapping[str, Any]) -> None:
        back = {"url": str(entry["url"]), "worker_type": "regular"}
        back |= {key: entry[key] for key in _CARRIED if entry.get(key) is not None}
        try:
            answer = await self._http.delete(f"/workers/{entry.get('id')}")
            if answer.status_code != httpx.codes.NOT_FOUND:
                answer.raise_for_status()
        except httpx.HTTPError as error:
            self._once("warn", f"slime's router {self.address} does not let {url} go: {_words(error)}")
            return
        if url not in self.removed:
            self._tell("info", f"{url} is out of slime's router: it is sent nothing more")
        self.removed[url] = back
        self._told = ""

    async def _put_back(self, url: str) -> None:
        # Forgotten when the list shows it, not when the router says yes.
        polls = self._asked.get(url, 0)
        self._asked[url] = (polls + 1) % AGAIN_POLLS
        if polls:
            return
        try:
            answer = await self._http.post("/workers", json=self.removed[url])
            answer.raise_for_status()
        except httpx.HTTPError as error:
            self._once("error", f"slime's router {self.address} does not take {url} back: {_words(error)}")
            return

    def _once(self, level: str, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(level, text)


def _plain(url: str) -> str:
    return url.rstrip("/")


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
