"""`rltop proxy --stdio`: the wire over stdin and stdout, for ssh and for any other byte pipe.

It looks into no message: frames in, frames out. It ends when stdin ends, when nobody reads stdout, and when the daemon
goes away; the other side then starts a new one. Everything that can fail at the start fails before the magic line, so
that the other side can tell "could not start" from "was cut".
"""

from __future__ import annotations

import os
import select

import zmq
from zmq.utils.monitor import recv_monitor_message

from rltop.client.dealer import check_socket, configure_dealer
from rltop.client.transport import ConnectionLost
from rltop.errors import RltopError
from rltop.protocol.codec import STDIO_MAGIC, PipeReader, WireError, encode, to_pipe
from rltop.protocol.messages import Bye, Role
from rltop.runs import RunInfo, find_run

READ_BYTES = 1 << 16
GOODBYE_MS = 500
"""How long the last messages may take to the daemon, which is on this machine."""


def proxy(name: str | None, role: Role) -> int:
    """Carry messages between this process' stdin and stdout and the daemon of a run until either side ends.

    name: of a run on this machine, None = the newest living one.
    Raises RltopError: no such run, it is not running, its socket may not be opened, stdin is not the pipe form.
    """
    run = find_run(name)
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever else prints must not end up between two messages
    context = zmq.Context()
    try:
        dealer = _connect(context, run, role)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        _write(stdout, STDIO_MAGIC)
        _carry(dealer, monitor, run, stdin=0, stdout=stdout)
    except BrokenPipeError:
        pass  # the reader left: so do we
    finally:
        context.destroy(linger=GOODBYE_MS)
    return 0


def _connect(context: zmq.Context[zmq.Socket[bytes]], run: RunInfo, role: Role) -> zmq.Socket[bytes]:
    if not run.alive:
        raise RltopError(f"run {run.name!r} is not running", where=str(run.path), do="rltop ps --all", exit_code=1)
    address = run.sockets.get("ctl" if role == "control" else "view")
    if address is None:
        raise RltopError(f"the daemon of run {run.name!r} is still starting", do="try again", exit_code=1)
    try:
        check_socket(address)
    except ConnectionLost as lost:
        raise RltopError(lost.problem, where=run.name, exit_code=1) from None
    dealer = context.socket(zmq.DEALER)
    configure_dealer(dealer)
    dealer.connect(address)
    return dealer


def _carry(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], run: RunInfo, *, stdin: int, stdout: int) -> None:
    reader = PipeReader(skip_to_magic=False)
    poller = zmq.Poller()
    for source in (dealer, monitor, stdin):
        poller.register(source, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if dealer in ready:
            _write(stdout, to_pipe(dealer.recv_multipart()))
        elif monitor in ready:
            recv_monitor_message(monitor)
            raise RltopError(f"the daemon of run {run.name!r} went away", exit_code=1)
        if stdin in ready:
            data = os.read(stdin, READ_BYTES)
            _forward(dealer, reader, data, run)
            if not data:
                return


def _forward(dealer: zmq.Socket[bytes], reader: PipeReader, data: bytes, run: RunInfo) -> None:
    """Send on what is complete in `data`; no data is the end of stdin, which the daemon is told as a goodbye."""
    try:
        for frames in reader.feed(data) if data else [encode("bye", Bye("stdin ended"))]:
            dealer.send_multipart(frames, zmq.DONTWAIT)
    except WireError as error:
        raise RltopError("stdin carries no messages", why=str(error), do="rltop attach ssh://host/run") from None
    except zmq.Again:
        raise RltopError(f"the daemon of run {run.name!r} takes no messages", exit_code=1) from None


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
