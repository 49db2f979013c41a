"""Waiting for a client to get somewhere, without polling and without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rltop.client import Client


async def until(client: Client, condition: Callable[[], bool]) -> None:
    """Wait for frames or changes of status until `condition` holds; by its own timeout never for ever."""
    async with asyncio.timeout(100):
        while not condition():
            await client.wait_change()
