"""The one small interface that a session needs of its connection, and how a connection says that it is gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol


class ConnectionLost(Exception):
    """The connection can not be made, or ended.

    problem: one sentence for the operator.
    final: trying again will not help unless a person does something; one-shot commands give up at once.
    """

    def __init__(self, problem: str, *, final: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.final = final


class Transport(Protocol):
    """An open connection that carries whole messages, in order, in both directions."""

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message. Raises ConnectionLost."""

    async def receive(self) -> list[bytes]:
        """The next message; may be cancelled without losing one. Raises ConnectionLost, WireError."""

    async def close(self) -> None:
        """Give back sockets and processes; may be called twice."""


Dial = Callable[[], Awaitable[Transport]]
"""Open a connection. Raises ConnectionLost."""
