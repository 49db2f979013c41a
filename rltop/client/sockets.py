"""Local transport: a DEALER on the run's unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from rltop.client.dealer import GONE, check_socket, configure_dealer
from rltop.client.transport import ConnectionLost

GOODBYE_MS = 100
"""How long a last message may take to the daemon, which is on this machine."""


class SocketTransport:
    """A DEALER socket; notices the end of the daemon at once through ZeroMQ's monitor."""

    def __init__(self, address: str) -> None:
        """Raises ConnectionLost when nobody listens on `address`."""
        check_socket(address)
        self._context = zmq.asyncio.Context()
        try:
            self._dealer = self._context.socket(zmq.DEALER)
            configure_dealer(self._dealer)
            monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._dealer.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConnectionLost(f"can not connect to {address}: {error}") from error
        self._gone: asyncio.Future[Any] = asyncio.ensure_future(self._watch(monitor))
        # Kept over cancelled calls of receive(): a message that arrives in the moment of a timeout is not lost.
        self._receiving: asyncio.Future[list[bytes]] | None = None

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        await recv_monitor_message(monitor)

    async def send(self, frames: Sequence[bytes]) -> None:
        try:
            await self._dealer.send_multipart(list(frames), flags=zmq.DONTWAIT)
        except zmq.Again:
            raise ConnectionLost("the daemon takes no messages") from None
        except zmq.ZMQError as error:
            raise ConnectionLost(f"can not send: {error}") from error

    async def receive(self) -> list[bytes]:
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._dealer.recv_multipart())
        await asyncio.wait({self._receiving, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        if not self._receiving.done():
            raise ConnectionLost(GONE)
        receiving, self._receiving = self._receiving, None
        try:
            return receiving.result()
        except zmq.ZMQError as error:
            raise ConnectionLost(f"can not receive: {error}") from error

    async def close(self) -> None:
        pending = [self._gone] + ([self._receiving] if self._receiving is not None else [])
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._context.destroy(linger=GOODBYE_MS)
