"""A client that is closed while it is used leaves no connection behind, whatever moment that is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import httpx
import pytest

from rltop.engines.client import AsyncEngineClient, EngineUnreachable
from rltop.engines.transport import Transport

MOMENTS = range(1, 13)
"""Turns of the event loop after the first request: before, while and after it connects, and while it waits."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that lets everybody in and answers nobody."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        listening.setblocking(False)
        yield listening


def assert_left(listener: socket.socket) -> int:
    """Everybody who came has closed the connection; how many came."""
    came = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            with listener.accept()[0] as one:
                one.settimeout(10)
                while one.recv(4096):
                    pass
                came += 1
    return came


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_whoever_still_asks_is_told_and_leaves_no_connection(listener: socket.socket) -> None:
    async def life(moment: int) -> None:
        client = AsyncEngineClient(url_of(listener))
        asking = [asyncio.ensure_future(client.loads()) for _ in range(4)]
        for _ in range(moment):
            await asyncio.sleep(0)
        await client.close()
        for one in asking:
            with pytest.raises(EngineUnreachable, match="the client was closed"):
                await one

    came = set()
    for moment in MOMENTS:
        asyncio.run(life(moment))
        came.add(assert_left(listener))
    assert came == {0, 4}, "closed before they connected, and after"


def test_a_request_that_is_cancelled_stays_so(listener: socket.socket) -> None:
    async def life(moment: int) -> None:
        async with AsyncEngineClient(url_of(listener)) as client:
            asking = asyncio.ensure_future(client.loads())
            for _ in range(moment):
                await asyncio.sleep(0)
            asking.cancel()
            closing = asyncio.ensure_future(client.close())
            with pytest.raises(asyncio.CancelledError):
                await asking
            await closing

    for moment in MOMENTS:
        asyncio.run(life(moment))
        assert_left(listener)


async def test_an_answer_that_came_as_its_request_was_cancelled_gives_its_connection_back() -> None:
    """The pool would hold the connection for ever."""
    closed: list[str] = []

    class Body(httpx.AsyncByteStream):
        async def aclose(self) -> None:
            closed.append("body")

    answered = asyncio.Event()

    async def answer(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        answered.set()
        return httpx.Response(200, stream=Body(), request=request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", answer)
        async with Transport(trust_env=False) as transport:
            asking = asyncio.ensure_future(transport.handle_async_request(httpx.Request("GET", "http://engine/")))
            await answered.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    assert closed == ["body"]


async def test_a_closed_transport_takes_no_request() -> None:
    transport = Transport(trust_env=False)
    await transport.aclose()
    with pytest.raises(httpx.ConnectError, match="the client was closed"):
        await transport.handle_async_request(httpx.Request("GET", "http://127.0.0.1:1/"))
