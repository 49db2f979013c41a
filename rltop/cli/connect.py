"""From what the operator typed to a connected client, and short sessions for one-shot commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rltop.client import Client, local_client, ssh_client
from rltop.errors import RltopError
from rltop.protocol.messages import Role
from rltop.runs import RunInfo, find_run

T = TypeVar("T")
LOCAL_S = 5.0
"""Longest wait for the state from a daemon on this machine."""
REMOTE_S = 60.0
"""The same over ssh, jump hosts and second factors included."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run is, as typed: a run name or nothing (here), `ssh://…`, or behind a prefix."""

    target: str | None = None
    remote_rltop: str = "rltop"
    via: str | None = None

    @property
    def remote(self) -> bool:
        """Not on this machine."""
        return self.via is not None or (self.target is not None and "://" in self.target)

    @property
    def patience_s(self) -> float:
        """Longest wait for the first state."""
        return REMOTE_S if self.remote else LOCAL_S

    def client(self, *, role: Role = "view", name: str = "", fps: float = 2.0, want: Sequence[str] = ("*",)) -> Client:
        """A client, not yet running. Raises RltopError: no such run, it is not running, not a target."""
        if self.remote:
            return ssh_client(
                self.target or "",
                remote_rltop=self.remote_rltop,
                via=self.via,
                role=role,
                name=name,
                fps=fps,
                want=want,
            )
        return local_client(living_run(self.target), role=role, name=name, fps=fps, want=want)


def living_run(name: str | None) -> RunInfo:
    """Raises RltopError when there is no such run or it has no daemon."""
    run = find_run(name)
    if not run.alive:
        raise RltopError(
            f"run {run.name!r} is not running", where=str(run.path), why="its daemon is gone", do="rltop ps --all"
        )
    return run


@contextlib.asynccontextmanager
async def running(client: Client) -> AsyncIterator[Client]:
    """Run `client` in the background; goodbye at the end."""
    task = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        await client.close()
        await asyncio.gather(task, return_exceptions=True)


def ask(place: Place, question: Callable[[Client], Awaitable[T]], *, want: Sequence[str] = ("*",)) -> T:
    """Connect, wait for the state, ask, leave. Raises RltopError."""

    async def session() -> T:
        async with running(place.client(want=want)) as client:
            await client.wait_live(place.patience_s)
            return await question(client)

    return asyncio.run(session())
