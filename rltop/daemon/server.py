"""The sockets: ingest (PULL), view and control (one ROUTER each). docs/protocol.md is what it does.

Failure policy: nothing that a peer sends or fails to read stops the daemon or another peer. Sends never wait
(ROUTER_MANDATORY, DONTWAIT): a full pipe makes that client lag, a vanished one loses its session. Bytes that are no
message are counted and, where there is somebody to tell, answered with `err`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from rltop.daemon.sessions import Session, Sessions
from rltop.errors import RltopError
from rltop.protocol.codec import MAX_MESSAGE_BYTES, Message, WireError, decode, encode
from rltop.protocol.messages import (
    PROTO_MAX,
    PROTO_MIN,
    Accepted,
    Ack,
    Bye,
    Command,
    DumpPageAnswer,
    DumpPageQuery,
    DumpsAnswer,
    DumpsQuery,
    Err,
    EventsAnswer,
    EventsQuery,
    Hello,
    LinesAnswer,
    LinesQuery,
    Ping,
    Record,
    Rejected,
    Role,
    SeriesAnswer,
    SeriesQuery,
    Tick,
    Welcome,
)

SNDHWM = 8
INGEST_HWM = 256
"""Records of every producer that wait here; what is more waits in its socket, then in its own queue, which drops the
oldest and counts them. It is what bounds our memory while we are behind: 1,024 producers of 20 metrics a record fill
some 250 MB. A connection at its mark is read again as soon as half of that was taken, but at its mark it must not end:
libzmq (4.3.5, stream_engine_base_t::in_event_internal) takes the hang-up of a unix socket at its mark for a reason to
stop reading, and what the socket still holds is lost. So a producer keeps the connection until it was read empty
(`rltop.reporter_link`), and one that is killed at that moment loses at most what its socket holds (200 KB)."""
ZERO_COPY_RECV = 10
"""Context option of libzmq (zmq.h; pyzmq has no name for it). On, as it is by default, every waiting record holds the
whole buffer of 8 to 18 KB that it was read into, however small it is: gigabytes for a thousand producers."""
BACKLOG = 4_096
"""Connections that may wait to be accepted: all ranks of a run come at one moment."""
BURST = 128
"""Messages taken from one socket before everybody else gets a turn."""
BURST_S = 0.01
"""The same in time."""
MAX_PENDING = 256
"""Requests of all clients that are being answered at once."""
TICK_S = 1.0
HANDSHAKE_MS = 5_000
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
_SOCKET: Mapping[Role, str] = {"view": "view", "control": "ctl"}
_MARK: Mapping[Role, bytes] = {"view": b"v", "control": b"c"}


@dataclass(slots=True)
class Counters:
    """What went wrong on the sockets so far."""

    malformed: int = 0
    """Messages that were none, or none for that socket."""
    refused: int = 0
    """Frames and answers that a client's full pipe would not take."""


class Backend(Protocol):
    """What the server asks the rest of the daemon."""

    def record(self, record: Record, key: str = "") -> None:
        """A record came in; key: name of its producer's key, "" on the unix socket."""

    def not_a_record(self, why: str) -> None:
        """Something else came in on the ingest socket."""

    async def series(self, query: SeriesQuery) -> tuple[SeriesAnswer, list[bytes]]:
        """Answer a series query with its blobs."""

    async def events(self, query: EventsQuery) -> EventsAnswer:
        """Answer an events query."""

    async def lines(self, query: LinesQuery) -> LinesAnswer:
        """Answer a lines query."""

    async def dumps(self, query: DumpsQuery) -> DumpsAnswer:
        """Say which dumps the run has."""

    async def dump_page(self, query: DumpPageQuery) -> DumpPageAnswer:
        """Answer a query for samples of a dump."""

    async def command(self, command: Command, command_id: str, session: Session) -> Accepted | Rejected:
        """Take a command of an operator."""

    def client(self, what: str, session: Session) -> None:
        """A client came or went (audit)."""

    def tick(self, viewers: int, counters: Counters) -> Tick:
        """Once a second: bring everything up to date and say how it stands."""

    def trouble(self, where: str, error: Exception) -> None:
        """A fault of the daemon's own, caught so that it goes on."""


class Server:
    """Binds and serves the sockets of a run: those that have a path; `view` always.

    clock: monotonic seconds, for leases and frame rates. wall: wall clock, for `welcome`.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        paths: Mapping[str, Path],
        *,
        sessions: Sessions,
        backend: Backend,
        epoch: str,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._context = context
        self._paths = paths
        self._sessions = sessions
        self._backend = backend
        self._epoch = epoch
        self._clock = clock
        self._wall = wall
        self._wake = asyncio.Event()
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters = Counters()
        context.set(ZERO_COPY_RECV, 0)

    def wake(self) -> None:
        """Something changed that a viewer should see."""
        self._wake.set()

    def bind(self) -> None:
        """Bind the sockets, each mode 0600. Stale files of a dead daemon are replaced: the caller holds the run's lock.

        Raises RltopError when the path cannot be bound.
        """
        for name, path in self._paths.items():
            socket = self._context.socket(zmq.PULL if name == "ingest" else zmq.ROUTER)
            self._sockets[name] = socket
            socket.linger = 0
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.handshake_ivl = HANDSHAKE_MS
            if name == "ingest":
                # No heartbeats: at its mark a connection is not read, the answers in it neither, and ZeroMQ would hang
                # up on the producer and lose what is on its way. A unix socket says itself that its other end is gone.
                socket.rcvhwm = INGEST_HWM
                socket.backlog = BACKLOG
            else:
                socket.heartbeat_ivl = HEARTBEAT_MS
                socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
                socket.router_mandatory = True
                socket.sndhwm = SNDHWM
            try:
                path.unlink(missing_ok=True)
                socket.bind(f"ipc://{path}")
                path.chmod(0o600)
            except (zmq.ZMQError, OSError) as error:
                self.close()
                raise RltopError(
                    f"cannot bind the {name} socket",
                    where=str(path),
                    why=str(error),
                    do="set RLTOP_DIR to a short path on a local disk",
                ) from error

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            if "ingest" in self._sockets:
                group.create_task(self._ingest(self._sockets["ingest"]))
            group.create_task(self._clients("view"))
            if "ctl" in self._sockets:
                group.create_task(self._clients("control"))
            group.create_task(self._flush())
            group.create_task(self._tick())

    async def goodbye(self, reason: str) -> None:
        """Give every client the last news, whatever its frame rate, and tell it that the daemon leaves."""
        for session in self._sessions:
            self._frame(session, math.inf)
            self._send(session.ident, "bye", Bye(reason))
        for socket in self._sockets.values():
            socket.linger = 200
        await asyncio.sleep(0)

    def close(self) -> None:
        """Close the sockets and remove their files."""
        for task in self._tasks:
            task.cancel()
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
        for path in self._paths.values():
            with contextlib.suppress(OSError):
                path.unlink()

    # ---------------------------------------------------------------- receiving

    async def _ingest(self, socket: zmq.asyncio.Socket) -> None:
        # Waiting through asyncio costs more than a record does: what else is there is taken without it.
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        while True:
            frames: list[bytes] | None = await socket.recv_multipart()
            until, left = self._clock() + BURST_S, BURST
            while frames is not None:
                try:
                    self.take(frames)
                except Exception as error:  # a bug of ours must not cost the run its monitor
                    self._backend.trouble("ingest", error)
                left -= 1
                frames = _now(plain) if left and self._clock() < until else None
            await asyncio.sleep(0)  # a ready socket never yields to the loop by itself

    def take(self, frames: Sequence[bytes], key: str = "") -> None:
        """Take what came in as a record. key: name of the producer's key, "" on the unix socket."""
        sender = f"from key {key}: " if key else ""
        try:
            message = decode(frames)
        except WireError as error:
            self.counters.malformed += 1
            self._backend.not_a_record(sender + str(error))
            return
        if isinstance(message.body, Record):
            self._backend.record(message.body, key)
        else:
            self.counters.malformed += 1
            self._backend.not_a_record(f"{sender}{message.header.t!r} is not for the ingest socket")

    async def _clients(self, role: Role) -> None:
        socket = self._sockets[_SOCKET[role]]
        burst = 0
        while True:
            identity, *frames = await socket.recv_multipart()
            # A client may choose the same identity on both sockets: the socket is part of who it is.
            ident = _MARK[role] + identity
            try:
                self._message(ident, role, decode(frames))
            except WireError as error:
                self._reject(ident, error)
            except Exception as error:
                self._backend.trouble(f"{role} socket", error)
            burst += 1
            if burst >= BURST:
                burst = 0
                await asyncio.sleep(0)

    def _reject(self, ident: bytes, error: WireError) -> None:
        self.counters.malformed += 1
        self._sessions.heard(ident, self._clock())
        why = str(error)
        if error.code == "proto":
            why += f"; this daemon speaks {PROTO_MIN} to {PROTO_MAX}"
        self._send(ident, "err", Err(error.code, why), re=error.header.id if error.header else "")

    def _message(self, ident: bytes, role: Role, message: Message) -> None:
        now, re = self._clock(), message.header.id
        if isinstance(message.body, Hello):
            self._hello(ident, role, message.body, re)
            return
        session = self._sessions.heard(ident, now)
        if session is None:
            self._send(ident, "err", Err("hello-first", "say hello first (a silent client is forgotten)"), re=re)
            return
        match message.body:
            case Ack(seq=seq):
                self._sessions.ack(ident, seq)
                self.wake()
            case Ping() if message.header.t == "ping":
                self._send(ident, "pong", Ping(), re=re)
            case SeriesQuery() as query:
                self._start(ident, re, self._series(ident, query, re))
            case EventsQuery() as query:
                self._start(ident, re, self._events(ident, query, re))
            case LinesQuery() as query:
                self._start(ident, re, self._lines(ident, query, re))
            case DumpsQuery() as query:
                self._start(ident, re, self._dumps(ident, query, re))
            case DumpPageQuery() as query:
                self._start(ident, re, self._dump_page(ident, query, re))
            case Command() as command:
                self._start(ident, re, self._command(session, command, re))
            case Bye():
                self._sessions.drop(ident)
                self._backend.client("bye", session)
            case _:
                self._send(ident, "err", Err("unsupported", f"{message.header.t!r} is not for the daemon"), re=re)

    def _hello(self, ident: bytes, role: Role, hello: Hello, re: str) -> None:
        answer = self._sessions.hello(ident, hello, socket_role=role, now=self._clock(), wall=self._wall())
        if not isinstance(answer, Welcome):
            self._send(ident, "err", answer, re=re)
            return
        self._send(ident, "welcome", answer, re=re)
        session = self._sessions.heard(ident, self._clock())
        if session is not None:
            self._backend.client("hello", session)
        self.wake()

    # ---------------------------------------------------------------- answering

    def _start(self, ident: bytes, re: str, work: Coroutine[None, None, None]) -> None:
        if len(self._tasks) >= MAX_PENDING:
            work.close()
            self._send(ident, "err", Err("busy", f"{MAX_PENDING} requests are being answered already"), re=re)
            return

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._backend.trouble("answering a client", error)
                self._send(ident, "err", Err("internal", f"{type(error).__name__}: {error}"), re=re)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _series(self, ident: bytes, query: SeriesQuery, re: str) -> None:
        answer, blobs = await self._backend.series(query)
        self._send(ident, "series", answer, re=re, blobs=blobs)

    async def _events(self, ident: bytes, query: EventsQuery, re: str) -> None:
        self._send(ident, "events", await self._backend.events(query), re=re)

    async def _lines(self, ident: bytes, query: LinesQuery, re: str) -> None:
        self._send(ident, "lines", await self._backend.lines(query), re=re)

    async def _dumps(self, ident: bytes, query: DumpsQuery, re: str) -> None:
        self._send(ident, "dumps", await self._backend.dumps(query), re=re)

    async def _dump_page(self, ident: bytes, query: DumpPageQuery, re: str) -> None:
        self._send(ident, "dump-page", await self._backend.dump_page(query), re=re)

    async def _command(self, session: Session, command: Command, re: str) -> None:
        answer: Accepted | Rejected
        if session.role != "control":
            answer = Rejected("not-control", "this session only looks", "connect to ctl.sock with role control")
        elif not re:
            answer = Rejected("bad-args", "a command needs an id in its header", "use a fresh uuid per command")
        else:
            answer = await self._backend.command(command, re, session)
        self._send(session.ident, "accepted" if isinstance(answer, Accepted) else "rejected", answer, re=re)

    # ---------------------------------------------------------------- sending

    def _send(
        self, ident: bytes, tag: str, body: msgspec.Struct, *, re: str = "", seq: int = 0, blobs: Sequence[bytes] = ()
    ) -> bool:
        """Hand a message to the socket without waiting; False when the client's pipe is full or the client is gone."""
        socket = self._sockets.get("view" if ident[:1] == _MARK["view"] else "ctl")
        if socket is None:
            return False
        frames = encode(tag, body, re=re, seq=seq, epoch=self._epoch, blobs=blobs)
        if (size := sum(map(len, frames))) > MAX_MESSAGE_BYTES:
            self._backend.trouble("sending", ValueError(f"{tag} of {size} bytes is over the limit of a message"))
            return False
        sent = socket.send_multipart([ident[1:], *frames], flags=zmq.NOBLOCK)
        # With NOBLOCK the future is already done when it is returned.
        error = sent.exception() if isinstance(sent, asyncio.Future) else None
        if error is None:
            return True
        self.counters.refused += 1
        if isinstance(error, zmq.ZMQError) and error.errno == zmq.EHOSTUNREACH:
            session = self._sessions.drop(ident)
            if session is not None:
                self._backend.client("gone", session)
        return False

    async def _flush(self) -> None:
        """Send every session what it is due, now or when its frame rate allows."""
        while True:
            due = self._sessions.next_due()
            wait = None if due is None else max(0.0, due - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            self._wake.clear()
            now = self._clock()
            for session in self._sessions:
                self._frame(session, now)
            await asyncio.sleep(0)

    def _frame(self, session: Session, now: float) -> None:
        frame = self._sessions.frame(session, now)
        if frame is None:
            return
        if self._send(session.ident, frame.tag, frame.body, seq=frame.seq):
            self._sessions.sent(session, frame, now)
        else:
            self._sessions.refused(session, now)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for session in self._sessions.expire(self._clock()):
                self._send(session.ident, "bye", Bye("lease"))
                self._backend.client("lease", session)
            try:
                tick = self._backend.tick(self._sessions.viewers(), self.counters)
            except Exception as error:
                self._backend.trouble("tick", error)
                continue
            for session in self._sessions:
                self._send(session.ident, "tick", tick)


def _now(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message, if there is one."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None
