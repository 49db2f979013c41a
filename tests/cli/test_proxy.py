"""The proxy as a process on real pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rltop.client import Client, ssh_client
from rltop.protocol.codec import STDIO_MAGIC, PipeReader, decode, encode, to_pipe
from rltop.protocol.messages import Hello, Role
from tests.cli.conftest import rltop
from tests.client.router import spec_daemon
from tests.client.waiting import until
from tests.daemon.util import wait_for

HELLO = to_pipe(encode("hello", Hello(proto=(1, 1), client="test")))


@contextlib.contextmanager
def proxy_process() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", "rltop", "proxy", "--stdio"], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_types(process: subprocess.Popen[bytes], count: int) -> list[str]:
    """Types of the first `count` messages."""
    assert process.stdout is not None
    reader = PipeReader(skip_to_magic=True)
    types: list[str] = []
    while len(types) < count:
        data = os.read(process.stdout.fileno(), 65536)
        assert data, "the proxy ended"
        types += [decode(frames).header.t for frames in reader.feed(data)]
    return types[:count]  # a tick may have come along


def test_messages_go_both_ways_behind_the_magic_line(runs_dir: Path) -> None:
    with spec_daemon() as (daemon, _), proxy_process() as process:
        assert process.stdin is not None
        process.stdin.write(HELLO)
        process.stdin.flush()
        assert read_types(process, 2) == ["welcome", "snap"]
        process.stdin.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        wait_for(lambda: "bye" in daemon.heard, "the end of stdin was not told to the daemon")


def test_the_magic_line_comes_first(runs_dir: Path) -> None:
    with spec_daemon():
        process = subprocess.run(
            [sys.executable, "-m", "rltop", "proxy", "--stdio"], input=b"", capture_output=True, timeout=60, check=True
        )
    assert process.stdout == STDIO_MAGIC


def test_a_reader_that_leaves_ends_it_quietly(runs_dir: Path) -> None:
    with spec_daemon(), proxy_process() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HELLO)
        process.stdin.flush()
        read_types(process, 2)
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_the_end_of_the_daemon_is_said_and_ends_it(runs_dir: Path) -> None:
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(contextlib.ExitStack())
        daemon.enter_context(spec_daemon())
        process = stack.enter_context(proxy_process())
        assert process.stdin is not None
        process.stdin.write(HELLO)
        process.stdin.flush()
        read_types(process, 2)
        daemon.close()
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b"rltop: the daemon of run 'cedar-1' went away\n"


def test_garbage_on_stdin_is_said(runs_dir: Path) -> None:
    with spec_daemon():
        ended = rltop("proxy", "--stdio", stdin="GET / HTTP/1.1\r\n\r\n")
    assert ended.returncode == 2
    assert "stdin carries no messages" in ended.stderr


@pytest.mark.parametrize("name", [[], ["nosuch"]])
def test_no_run_is_said_before_the_magic_line(runs_dir: Path, name: list[str]) -> None:
    ended = rltop("proxy", "--stdio", *name)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("rltop: ")


@contextlib.asynccontextmanager
async def through_a_pipe(role: Role = "view") -> AsyncIterator[Client]:
    """The client of `attach --via`, with an interpreter as the prefix."""
    client = ssh_client("cedar-1", via=f"{sys.executable} -m", role=role, ask=False)
    task = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        await client.close()
        await task


async def test_a_client_comes_back_after_the_daemon_was_started_again(runs_dir: Path) -> None:
    async with through_a_pipe() as client:
        with spec_daemon():
            await client.wait_live(20)
            first = client.mirror.epoch
        await until(client, lambda: client.status == "lost")
        assert client.problem.endswith(": the daemon of run 'cedar-1' went away")
        assert client.mirror.state["run"]["name"] == "cedar-1"
        await until(client, lambda: "left no journal" in client.problem)
        with spec_daemon():
            await until(client, lambda: client.status == "live")
            assert client.mirror.epoch != first


async def test_changes_reach_a_client_through_the_pipe(runs_dir: Path) -> None:
    with spec_daemon() as (daemon, _):
        async with through_a_pipe(role="control") as client:
            await client.wait_live(20)
            daemon.change(lambda model: model.set("phase", {"name": "rollout"}))
            await until(client, lambda: client.mirror.state["phase"]["name"] == "rollout")
            await client.command("note", args={"text": "hello"})
