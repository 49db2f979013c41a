"""`rltop proxy --stdio`: the wire over stdin and stdout, for ssh and for any other byte pipe.

It looks into no message: frames in, frames out. A run that has no daemon any more is served from its journal, in this
process. It ends when stdin ends, when nobody reads stdout, and when the daemon
goes away; the other side then starts a new one. Everything that can fail at the start fails before the magic line, so
that the other side can tell "could not start" from "was cut".
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from rltop.cli.connect import not_running
from rltop.client.dealer import check_socket, configure_dealer
from rltop.client.transport import ConnectionLost
from rltop.errors import RltopError
from rltop.protocol.codec import STDIO_MAGIC, PipeReader, WireError, encode, to_pipe
from rltop.protocol.messages import Bye, Role
from rltop.runs import RunInfo, find_run, read_run

READ_BYTES = 1 << 16
GOODBYE_MS = 500
"""How long the last messages may take to the daemon, which is on this machine."""


def proxy(name: str | None, role: Role, *, run_dir: Path | None = None) -> int:
    """Carry messages between this process' stdin and stdout and the daemon of a run until either side ends.

    A run whose daemon is gone is shown from its journal, by an archive that lives as long as this does.

    name: of a run on this machine, None = the newest living one. run_dir: this very run, whatever it is called.
    Raises RltopError: no such run, its socket may not be opened, its journal can not be read, control of a dead run,
    stdin is not the pipe form.
    """
    run = read_run(run_dir) if run_dir is not None else find_run(name)
    if run is None:
        raise RltopError("there is no run in that directory", where=str(run_dir))
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever else prints must not end up between two messages
    context = zmq.Context()
    try:
        with _address(run, role) as address:
            dealer = _connect(context, run, address)
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            _write(stdout, STDIO_MAGIC)
            _carry(dealer, monitor, run, stdin=0, stdout=stdout)
    except BrokenPipeError:
        pass  # the reader left: so do we
    finally:
        context.destroy(linger=GOODBYE_MS)
    return 0


@contextlib.contextmanager
def _address(run: RunInfo, role: Role) -> Iterator[str]:
    """Where the run is served: by its daemon or, for as long as the block runs, by an archive."""
    if run.alive:
        address = run.sockets.get("ctl" if role == "control" else "view")
        if address is None:
            raise RltopError(f"the daemon of run {run.name!r} is still starting", do="try again", exit_code=1)
        yield address
        return
    if role == "control":
        raise not_running(run)
    from rltop.daemon.archive import archived

    with archived(run.path) as address:
        yield address


def _connect(context: zmq.Context[zmq.Socket[bytes]], run: RunInfo, address: str) -> zmq.Socket[bytes]:
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
