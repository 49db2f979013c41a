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
from rltop.runs import RunInfo, find_run, list_runs

T = TypeVar("T")
LOCAL_S = 5.0
"""Longest wait for the state from a daemon on this machine."""
MOST_LOOKED_AT = 20
"""Dead runs, newest first, that are looked at for something that goes on."""
_REVIVE = "rltop up CONFIG --name {0} gives it a daemon again; rltop down {0} ends it"
_LOOK = "rltop attach {0} shows what it left"
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
        """Longest wait for the first state. A dead run's journal may be long."""
        return LOCAL_S if not self.remote and here(self.target).alive else REMOTE_S

    def client(self, *, role: Role = "view", name: str = "", fps: float = 2.0, want: Sequence[str] = ("*",)) -> Client:
        """A client, not yet running. Raises RltopError: no such run, control of a dead one, not a target."""
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
        run = here(self.target)
        if role == "control" and not run.alive:
            raise not_running(run)
        return local_client(run, role=role, name=name, fps=fps, want=want)


def here(name: str | None) -> RunInfo:
    """`find_run`; where no run is alive, one that goes on without its daemon is said. Raises RltopError."""
    try:
        return find_run(name)
    except RltopError:
        for run in list_runs()[:MOST_LOOKED_AT] if name is None else ():
            if left := what_goes_on(run):
                what = f"no run has a daemon, and {run.name!r} goes on without one"
                raise _without_daemon(run, what, left) from None
        raise


def what_goes_on(run: RunInfo) -> str:
    """`its trainer (process 7) runs on`, of a run without a daemon; empty: nothing of it is seen on this machine."""
    from rltop.checks.phrase import named
    from rltop.daemon.engines_left import left_engines
    from rltop.daemon.trainer_job import adopt_trainer, read_record

    if run.alive:
        return ""
    record = read_record(run.path)
    trainer = record is not None and adopt_trainer(record, run.path) is not None
    found = [f"its trainer (process {record.pid})"] if trainer and record is not None else []
    if engines := left_engines(run.path):
        found.append(named("engine", engines))
    alone = len(found) == 1 and len(engines) < 2
    return f"{' and '.join(found)} run{'s' * alone} on" if found else ""


def not_running(run: RunInfo) -> RltopError:
    """What is said to whoever wants to act on a dead run."""
    left = what_goes_on(run)
    what = "has no daemon: there is nobody to ask" if left else "is not running: there is nothing to control"
    return _without_daemon(run, f"run {run.name!r} {what}", left)


def _without_daemon(run: RunInfo, what: str, left: str) -> RltopError:
    """left: what of the run goes on, as `what_goes_on` says it."""
    why = f"its daemon is gone{', ' if left else ''}{left}"
    do = (_REVIVE if left else _LOOK).format(run.name)
    return RltopError(what, where=str(run.path), why=why, do=do, exit_code=1)


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
