"""One answer of a server that may be anything: read up to a byte limit, and by one deadline, whatever it sends.

httpx's time-outs are per read, so a server that sends a byte a second is never late, and its bodies have no limit. Here
the whole answer has a deadline and a limit. Answers are asked for uncompressed, and a compressed one is not read: a few
kilobytes of gzip become gigabytes.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

LIMIT_BYTES = 8 << 20
"""Of an answer. `/metrics` of a busy SGLang has 50 KB, `/server_info` less."""
PLAIN = {"accept-encoding": "identity"}


class Unreadable(Exception):
    """It answered with something that is not read: too long, or compressed."""


async def fetch(
    http: httpx.AsyncClient, request: httpx.Request, *, timeout_s: float, limit_bytes: int = LIMIT_BYTES
) -> tuple[int, bytes]:
    """Status and body. Raises `Unreadable`, TimeoutError (the whole answer did not come in time), httpx.HTTPError."""
    async with asyncio.timeout(timeout_s):
        response = await http.send(request, stream=True)
        try:
            _check(response, limit_bytes)
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                _check_size(len(body), limit_bytes)
        finally:
            await response.aclose()
    return response.status_code, bytes(body)


def fetch_blocking(
    http: httpx.Client, request: httpx.Request, *, timeout_s: float, limit_bytes: int = LIMIT_BYTES
) -> tuple[int, bytes]:
    """The same, blocking. The body must come within `timeout_s` of the status, as seen after each of its parts: what
    was sent may have been large, and what comes before has the time-outs of the request."""
    response = http.send(request, stream=True)
    deadline = time.monotonic() + timeout_s
    try:
        _check(response, limit_bytes)
        body = bytearray()
        for part in response.iter_bytes():
            body += part
            _check_size(len(body), limit_bytes)
            if time.monotonic() > deadline:
                raise TimeoutError
    finally:
        response.close()
    return response.status_code, bytes(body)


def cut(value: Any, most: int = 256) -> str:
    """A foreign server's text, no longer than what is shown."""
    return str(value)[:most]


def _check(response: httpx.Response, limit_bytes: int) -> None:
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise Unreadable(f"compressed ({cut(encoding, 20)}), which was not asked for")
    length = response.headers.get("content-length", "")
    if length.isascii() and length.isdigit():
        _check_size(int(length[:20]), limit_bytes)


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise Unreadable(f"longer than {limit_bytes >> 20} MiB")
