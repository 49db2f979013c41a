"""An HTTP transport that leaves no socket behind when it is closed while somebody asks through it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """httpx's own. Its `aclose` first ends what has no answer yet; each of those raises `httpx.ConnectError`.

    httpcore forgets a connection that is still being made when its pool is closed: the request then comes to its end,
    and the socket stays open until the garbage collector finds it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._asked: set[asyncio.Task[httpx.Response]] = set()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.ConnectError` when the transport is closed before the answer begins."""
        if self._closed:
            raise httpx.ConnectError("the client was closed", request=request)
        asked = asyncio.ensure_future(super().handle_async_request(request))
        self._asked.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            if not asked.cancelled() and asked.exception() is None:
                await asked.result().aclose()  # it came in the moment in which nobody wanted it any more
            if self._ended_by_close():
                raise httpx.ConnectError("the client was closed", request=request) from None
            raise
        finally:
            self._asked.discard(asked)

    def _ended_by_close(self) -> bool:
        """And not because whoever asked was cancelled."""
        task = asyncio.current_task()
        return self._closed and (task is None or not task.cancelling())

    async def aclose(self) -> None:
        self._closed = True
        asked = list(self._asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await super().aclose()


def certified(url: str) -> bool:
    """What httpx's `verify` should be: reading the certificates that are trusted costs more than many requests."""
    return url.startswith("https:")
