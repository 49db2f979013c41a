"""Transport over a child process: `ssh … rltop proxy --stdio`, or any other prefix that gives a byte pipe.

The child's stdout carries the pipe form of the wire behind a magic line; what comes before the line is a shell profile
talking. Its stderr is kept (the newest 4 KiB) because that is where ssh and the remote rltop say what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import Callable, Sequence

from rltop.client.transport import ConnectionLost
from rltop.protocol.codec import PipeReader, to_pipe

STDERR_KEPT_BYTES = 4096
CLOSE_GRACE_S = 1.0
"""How long a child may take to end after its stdin was closed, then again after SIGTERM."""
READ_BYTES = 1 << 16

Explain = Callable[[int, str, str], ConnectionLost]
"""(exit status, tail of stderr, noise before the magic line) -> what to tell the operator."""


class PipeTransport:
    """A child process that speaks the pipe form. Made by `open_pipe`."""

    def __init__(self, process: Process, pipes: asyncio.SubprocessTransport, explain: Explain) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self._process = process
        self._pipes = pipes
        self._stdin, self._stdout = process.stdin, process.stdout
        self._explain = explain
        self._reader = PipeReader(skip_to_magic=True)
        self._ready: list[list[bytes]] = []
        self._stderr = b""
        self._drain = asyncio.ensure_future(self._read_stderr(process.stderr))

    async def sync(self) -> None:
        """Wait for the magic line. Raises ConnectionLost when the child ends before it."""
        while not self._reader.synced:
            await self._read()

    async def send(self, frames: Sequence[bytes]) -> None:
        try:
            self._stdin.write(to_pipe(frames))
            await self._stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise await self._ended() from None

    async def receive(self) -> list[bytes]:
        while not self._ready:
            await self._read()
        return self._ready.pop(0)

    async def close(self) -> None:
        self._stdin.close()
        for stop in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._process.wait()
                    break
            with contextlib.suppress(ProcessLookupError):
                stop()
        await self._process.wait()
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)
        # A grandchild (an ssh connection master) may still hold the pipes: their end is not waited for.
        self._pipes.close()

    async def _read(self) -> None:
        data = await self._stdout.read(READ_BYTES)
        if not data:
            raise await self._ended()
        self._ready += self._reader.feed(data)

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(READ_BYTES):
            self._stderr = (self._stderr + data)[-STDERR_KEPT_BYTES:]

    async def _ended(self) -> ConnectionLost:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self._process.wait()
                await asyncio.shield(self._drain)
        status = self._process.returncode
        text = self._stderr.decode(errors="replace")
        noise = self._reader.noise.decode(errors="replace")
        lost = self._explain(-1 if status is None else status, text, noise)
        return ConnectionLost(lost.problem, final=lost.final and not self._reader.synced)


async def open_pipe(
    argv: Sequence[str], explain: Explain, *, sync_timeout_s: float | None, own_session: bool
) -> PipeTransport:
    """Start `argv` and wait for the magic line.

    sync_timeout_s: longest wait for the magic line; None when a person may be typing a password.
    own_session: detach from the terminal, so that nothing can prompt on it and its Ctrl-C does not reach the child.
    Raises ConnectionLost.
    """
    loop = asyncio.get_running_loop()
    try:
        # What asyncio.create_subprocess_exec does, which keeps the transport to itself; closing needs it.
        pipes, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(limit=READ_BYTES, loop=loop),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=own_session,
        )
    except FileNotFoundError:
        raise ConnectionLost(f"{argv[0]} is not installed on this machine", final=True) from None
    except PermissionError:
        raise ConnectionLost(f"{argv[0]} may not be executed on this machine", final=True) from None
    transport = PipeTransport(Process(pipes, protocol, loop), pipes, explain)
    try:
        async with asyncio.timeout(sync_timeout_s):
            await transport.sync()
    except TimeoutError:
        await transport.close()
        raise ConnectionLost(f"{argv[0]} gave no answer in {sync_timeout_s:.0f} s") from None
    except BaseException:
        await transport.close()
        raise
    return transport
