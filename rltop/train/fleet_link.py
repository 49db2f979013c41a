"""The trainer's line to the daemon that owns its engines: commands one way, the engines' cells the other.

A thread of its own keeps the connection, so that the trainer never waits for it. Failure policy: while the daemon is
gone the last cells stay and the thread tries to reach it again; a daemon that was started again is found by the run's
directory, because its socket may be another one. A command is sent once per id, however often the connection broke.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rltop.client import Client, ConnectionLost, Transport
from rltop.errors import RltopError
from rltop.protocol.messages import Accepted, Rejected
from rltop.runs import read_run

NAME = "trainer"
"""How the trainer calls itself to the daemon."""
FPS = 10.0
"""Most changes per second that are wanted: a restarted engine waits for the next one."""
_log = logging.getLogger("rltop.train")


class FleetLink:
    """Use as a context manager. `changed` counts what came in, so that a reader can tell whether to look."""

    def __init__(self, address: str, run_dir: Path | None = None) -> None:
        """address: the control socket (`ipc://...`). run_dir: of the run, where a later daemon leaves its own."""
        self._address, self.run_dir = address, run_dir
        self._lock = threading.Lock()
        self._state: dict[str, Mapping[str, Any]] = {}
        self._problem = "not connected yet"
        self._loop = asyncio.new_event_loop()
        self._client: Client | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-link", daemon=True)
        self.changed = 0

    def __enter__(self) -> FleetLink:
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()

    @property
    def problem(self) -> str:
        """Why there is no connection now, one sentence; empty while there is one."""
        with self._lock:
            return self._problem

    def engines(self) -> dict[str, Mapping[str, Any]]:
        """Engine id -> its newest cell."""
        with self._lock:
            return {key.removeprefix("engine/"): cell for key, cell in self._state.items() if key.startswith("engine/")}

    def operation(self, op: str) -> Mapping[str, Any]:
        """The newest state of an operation; empty while nothing is known of it."""
        with self._lock:
            return self._state.get(f"op/{op}", {})

    def command(self, name: str, target: str = "", *, wait_s: float, **kw: Any) -> Accepted:
        """Send a command and wait for the answer, over reconnects if need be. Keywords: see `Client.command`.

        Raises RltopError when the daemon rejects it, or has not answered within `wait_s` seconds.
        """
        answer = self._submit(name, target, wait_s, kw).result()
        if isinstance(answer, Rejected):
            raise RltopError(
                f"the daemon rejected {name}", where=self._address, why=f"{answer.code}: {answer.why}", do=answer.do
            )
        return answer

    def send(self, name: str, target: str = "", *, wait_s: float, **kw: Any) -> None:
        """Send a command whose answer changes nothing here; a rejection is a line in the log."""

        def told(future: Future[Accepted | Rejected]) -> None:
            if future.cancelled():
                return
            error, words = future.exception(), f"{name} {target}".strip()
            if error is not None:
                _log.warning("%s: %s", words, str(error).replace("\n", "; "))
            elif isinstance(answer := future.result(), Rejected):
                # Nothing to worry about: another generation is there by now, and its cell says so.
                _log.info("%s was rejected: %s: %s", words, answer.code, answer.why)

        self._submit(name, target, wait_s, kw).add_done_callback(told)

    def _submit(self, name: str, target: str, wait_s: float, kw: dict[str, Any]) -> Future[Accepted | Rejected]:
        return asyncio.run_coroutine_threadsafe(self._command(name, target, wait_s, kw), self._loop)

    async def _command(self, name: str, target: str, wait_s: float, kw: dict[str, Any]) -> Accepted | Rejected:
        assert self._client is not None
        command_id, deadline = uuid.uuid4().hex, self._loop.time() + wait_s
        while True:
            try:
                return await self._client.command(name, target, id=command_id, **kw)
            except RltopError:
                if self._loop.time() >= deadline:
                    raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._follow())
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        self._stop = asyncio.Event()
        client = self._client = Client(self._dial, role="control", name=NAME, fps=FPS, want=["engine/*", "op/*"])
        stopped = asyncio.ensure_future(self._stop.wait())
        connected = asyncio.ensure_future(client.run())
        self._up.set()
        while not stopped.done():
            changed = asyncio.ensure_future(client.wait_change())
            await asyncio.wait({stopped, changed, connected}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if connected.done():
                break
            self._take(client)
        await client.close()
        connected.cancel()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    def _take(self, client: Client) -> None:
        """A look at the mirror, for the other threads. The last cells outlive the daemon."""
        with self._lock:
            self._problem = "" if client.status == "live" else client.problem or "connecting"
            if client.status == "live":
                self._state = dict(client.mirror.state)
            self.changed += 1

    async def _dial(self) -> Transport:
        from rltop.client.sockets import SocketTransport

        run = read_run(self.run_dir) if self.run_dir is not None else None
        address = run.sockets.get("ctl", self._address) if run is not None else self._address
        try:
            return SocketTransport(address)
        except ConnectionLost as lost:
            raise ConnectionLost(lost.problem) from lost  # never final: a later daemon may be ours again

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()
