"""Engines in bundles of a Ray cluster, on whatever node: a `Launcher` that talks to `rltop.engines.ray_gateway`.

Ray never runs in this process. The gateway is a child with a socket to it; when it dies (Ray ends a driver whose
cluster is gone) the open calls fail with "no answer", and the next call starts another, at most every few seconds.
Engines and their places outlive the gateway, this process and each other.

Where a slot was placed is written beside its lock, `<run_dir>/engines/<id>/ray.json` on this machine: a later daemon
finds the node again even when the actor there has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rltop.engines.launcher import Launched, LaunchSpec, Look, LostNode, Remains
from rltop.engines.ray_gateway import FRAME_HEAD, PLACE_S, SLOW_S, frame_length, pack
from rltop.errors import RltopError
from rltop.runs.own_python import own_python

PLACED = "ray.json"
NAMESPACE = "rltop"
CONNECT_S = 60.0
AGAIN_S = 5.0
"""Between two attempts to reach a cluster that is not there."""
PATIENCE_S = 2 * PLACE_S + SLOW_S + 10.0
"""The gateway has bounds of its own for everything; this is for a gateway that hangs."""
END_S = 5.0


class RayLauncher:
    """A `Launcher` (see `rltop.engines.launcher`)."""

    name = "ray"

    def __init__(
        self,
        *,
        address: str,
        namespace: str = NAMESPACE,
        token_file: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """address: `host:port` of the cluster's head. token_file: where its token is, if it wants one; "": what the
        environment says."""
        self._options = {"address": address, "namespace": namespace, "token_file": token_file}
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._connecting = asyncio.Lock()
        self._failed: tuple[float, RltopError] | None = None
        self._known: dict[str, Launched] = {}
        """Newest engine per slot, for `close`."""
        self._places: dict[str, dict[str, Any]] = {}
        """By marker."""

    async def start(self, spec: LaunchSpec) -> Launched:
        launched = msgspec.convert(await self._ask("start", spec=spec), Launched)
        await asyncio.to_thread(_write_placed, launched, spec.place)
        self._places[launched.marker] = dict(spec.place or {})
        self._know(launched)
        return launched

    async def look(self, launched: Launched) -> Look:
        return msgspec.convert(await self._ask("look", launched=launched, place=self._place(launched)), Look)

    async def read_log(self, launched: Launched, offset: int, limit: int) -> bytes:
        found = await self._ask("read_log", launched=launched, place=self._place(launched), offset=offset, limit=limit)
        return bytes(found)

    async def terminate(self, launched: Launched) -> None:
        await self._ask("terminate", launched=launched, place=self._place(launched))

    async def kill(self, launched: Launched) -> None:
        await self._ask("kill", launched=launched, place=self._place(launched))

    async def remains(self, launched: Launched) -> Remains:
        return msgspec.convert(await self._ask("remains", launched=launched, place=self._place(launched)), Remains)

    async def environ(self, launched: Launched) -> dict[str, str] | None:
        found = await self._ask("environ", launched=launched, place=self._place(launched))
        return None if found is None else dict(found)

    async def adopt(self, directory: str, marker: str) -> Launched | None:
        placed = _read_placed(directory)
        args = {"place": placed.get("place") or {}, "node_id": str(placed.get("node_id", ""))}
        found = await self._ask("adopt", directory=directory, marker=marker, **args)
        if found is None:
            return None
        launched = msgspec.convert(found, Launched)
        self._know(launched)
        return launched

    async def close(self) -> None:
        """Give the places of engines that are gone back to the cluster, and end the gateway."""
        if self._writer is not None:
            for launched in list(self._known.values()):
                with contextlib.suppress(RltopError, TimeoutError):
                    await asyncio.wait_for(self._ask("release", launched=launched, place=self._place(launched)), END_S)
        await self._hang_up()

    # ------------------------------------------------------------------ the gateway

    def _know(self, launched: Launched) -> None:
        self._known[launched.marker.rpartition("/")[0]] = launched

    def _place(self, launched: Launched) -> dict[str, Any]:
        if launched.marker not in self._places:
            self._places[launched.marker] = dict(_read_placed(launched.directory).get("place") or {})
        return self._places[launched.marker]

    async def _ask(self, method: str, **args: Any) -> Any:
        writer = await self._connected()
        self._next += 1
        number = self._next
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(pack({"id": number, "method": method, "args": args}))
            return await asyncio.wait_for(future, PATIENCE_S)
        except TimeoutError:
            await self._hang_up()
            raise _unreachable(self._options["address"], "its gateway did not answer") from None
        finally:
            self._waiting.pop(number, None)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is not None and self._process is not None and self._process.poll() is None:
                return self._writer
            if self._failed is not None and self._clock() - self._failed[0] < AGAIN_S:
                raise self._failed[1]
            await self._hang_up()
            try:
                return await self._dial()
            except RltopError as error:
                self._failed = (self._clock(), error)
                await self._hang_up()
                raise

    async def _dial(self) -> asyncio.StreamWriter:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.to_thread(_spawn, theirs.fileno(), json.dumps(self._options))
        reader, writer = await asyncio.open_connection(sock=ours)
        self._writer = writer
        hello = self._waiting[0] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read(reader, writer))
        try:
            await asyncio.wait_for(hello, CONNECT_S)
        except TimeoutError:
            raise _unreachable(self._options["address"], f"no connection within {CONNECT_S:g} s") from None
        finally:
            self._waiting.pop(0, None)
        return writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                length = frame_length(await reader.readexactly(FRAME_HEAD))
                self._settle(msgspec.msgpack.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has ended
        finally:
            writer.close()
            self._writer = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_unreachable(self._options["address"], "the connection to it was lost"))

    def _settle(self, message: Mapping[str, Any]) -> None:
        future = self._waiting.get(message["id"])
        if future is None or future.done():
            return  # whoever asked has given up
        if (error := message.get("error")) is not None:
            future.set_exception(_error(error))
        else:
            future.set_result(message["value"])

    async def _hang_up(self) -> None:
        writer = self._writer
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        if writer is not None:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if (process := self._process) is not None:
            self._process = None
            await asyncio.to_thread(_end, process)


def _spawn(channel: int, options: str) -> subprocess.Popen[bytes]:
    command = [*own_python("rltop.engines.ray_gateway"), str(channel), options]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[channel], start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _error(told: Mapping[str, Any]) -> RltopError:
    kind = LostNode if told["lost"] else RltopError
    return kind(told["what"], where=told["where"], why=told["why"], do=told["do"], exit_code=told["exit_code"])


def _unreachable(address: object, why: str) -> RltopError:
    return RltopError("Ray cannot be reached", where=str(address), why=why, exit_code=1)


# ---------------------------------------------------------------------- where a slot was placed


def _write_placed(launched: Launched, place: Mapping[str, Any] | None) -> None:
    """Not a reason to fail: without it only an engine whose actor died while no daemon was there is not found."""
    path = Path(launched.directory).parent / PLACED
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_suffix(".tmp")
        staging.write_text(json.dumps({"place": place, "node_id": launched.node_id}), encoding="utf-8")
        os.replace(staging, path)


def _read_placed(directory: str) -> dict[str, Any]:
    try:
        found = json.loads((Path(directory).parent / PLACED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
