"""The local transport over real unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from rltop.client import Client, ConnectionLost, local_client
from rltop.client.sockets import SocketTransport
from rltop.protocol.codec import decode
from rltop.runs import RunInfo, acquire_lock, write_run_json
from tests.client.model import ModelDaemon
from tests.client.waiting import until


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: unix socket paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as name:
        yield Path(name)


@contextlib.asynccontextmanager
async def serving(path: Path, daemon: ModelDaemon) -> AsyncIterator[zmq.asyncio.Socket]:
    """`daemon` behind a ROUTER on `path`."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")

    async def answer() -> None:
        while True:
            peer, *frames = await router.recv_multipart()
            for reply in daemon.answer(decode(frames)):
                await router.send_multipart([peer, *reply])

    task = asyncio.ensure_future(answer())
    try:
        yield router
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


def run_info(folder: Path, socket_path: Path) -> RunInfo:
    sockets = {"view": f"ipc://{socket_path}", "ctl": f"ipc://{socket_path}"}
    return RunInfo("cedar-1", folder, 1, 0.0, True, sockets, [], "0.1.0")


@contextlib.asynccontextmanager
async def running(client: Client) -> AsyncIterator[Client]:
    task = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        await client.close()
        await task


async def test_a_local_client_is_live_and_notices_the_end_of_the_daemon_at_once(folder: Path) -> None:
    daemon = ModelDaemon()
    daemon.set("run", {"state": "running"})
    async with running(local_client(run_info(folder, folder / "v"))) as client:
        async with serving(folder / "v", daemon):
            await client.wait_live(10)
            assert client.mirror.state == {"run": {"state": "running"}}
        await until(client, lambda: client.status == "lost")
        assert client.problem == "the daemon closed the connection"
        assert client.mirror.state == {"run": {"state": "running"}}
        async with serving(folder / "v", daemon):
            await client.wait_live(10)


async def test_a_daemon_started_again_on_other_sockets_is_found(folder: Path) -> None:
    write_run_json(folder, {"sockets": {"view": f"ipc://{folder}/second"}})
    lock = acquire_lock(folder)
    async with (
        serving(folder / "second", ModelDaemon()),
        running(local_client(run_info(folder, folder / "first"))) as client,
    ):
        await client.wait_live(10)
    os.close(lock)


async def test_a_daemon_without_sockets_yet_is_still_starting(folder: Path) -> None:
    write_run_json(folder, {})
    lock = acquire_lock(folder)
    async with running(local_client(run_info(folder, folder / "first"))) as client:
        await client.wait_change()
        assert client.problem == "the daemon of run cedar-1 is still starting"
    os.close(lock)


async def test_a_cancelled_receive_loses_no_message(folder: Path) -> None:
    async with serving(folder / "v", ModelDaemon()) as router:
        transport = SocketTransport(f"ipc://{folder}/v")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await transport.receive()
        await transport.send([b"RL1", b"\x82\xa1v\x01\xa1t\xa4ping", b"\x80"])
        assert (await transport.receive())[0] == b"RL1"
        await transport.close()
        assert router.closed is False


@pytest.mark.parametrize("kind", ["missing", "stale", "file"])
async def test_nobody_behind_the_socket_is_said_at_once(folder: Path, kind: str) -> None:
    path = folder / "v"
    match kind:
        case "stale":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        case "file":
            path.write_text("")
    with pytest.raises(ConnectionLost, match="the daemon is not running"):
        SocketTransport(f"ipc://{path}")
