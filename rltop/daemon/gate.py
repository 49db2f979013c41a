"""The ingest socket for producers on other machines: TCP, CURVE only, records only.

It has a ZeroMQ context of its own, so that handshakes and floods cost the viewers nothing, and a thread that answers
ZAP and reads the socket's monitor (`rltop.daemon.auth` decides and explains). Everything else is in the daemon's loop.

What a broken or hostile peer can make the daemon hold is bounded: a frame by ZeroMQ, finished messages by the
high-water mark of each connection, connections and unfinished handshakes by number. A message of endless frames is
bounded by none of these; so when the process has grown by `MAX_GROWTH_BYTES` the socket is closed, which frees what it
held, and opened again a moment later, with an event that says so. Producers connect again by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket as sockets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from rltop import keys
from rltop.daemon import auth
from rltop.daemon.core import Core
from rltop.errors import RltopError
from rltop.protocol.codec import MAX_MESSAGE_BYTES

RCVHWM = 256
"""Finished messages of one connection that wait here; the rest wait at the producer. One that closes its connection
meanwhile loses nothing: TCP's end of a stream comes after all that was sent, unlike that of a unix socket."""
BACKLOG = 1024
"""A thousand ranks come back at once when a daemon starts again."""
HANDSHAKE_MS = 5_000
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 15, 5, 4
"""After how many seconds without traffic a producer is asked whether it is there, and how often before it is gone. The
kernel asks: with heartbeats of ZeroMQ both ends hung up on connections at their mark, which are not read, and lost what
was on its way; and each that came back could fill another mark's worth of memory."""
MAX_CONNECTIONS = 20_000
MAX_HANDSHAKES = 512
MAX_GROWTH_BYTES = 2 * 1024**3
REOPEN_S = 2.0
TICK_S = 1.0
BURST = 64
NAMES_S = 0.1
"""So long may records of a key that was just revoked still be taken."""
_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://rltop-ingest-monitor-{}"
"""With a number of its own for every socket: ZeroMQ's I/O thread waits for ever in a monitor without a reader, and a
reader that came for the next socket could still meet the endpoint of the last."""
_STOP = "inproc://rltop-ingest-stop"


class Gate:
    """Binds HOST:PORT and passes on what comes in.

    listen: `HOST:PORT`. folder: the run's key folder. take: the frames of one message and the name of the key that
    it came under. max_growth: bytes that the process may grow by before the socket is closed and opened again.
    """

    def __init__(
        self,
        listen: str,
        folder: Path,
        core: Core,
        *,
        take: Callable[[Sequence[bytes], str], None],
        max_growth: int = MAX_GROWTH_BYTES,
    ) -> None:
        try:
            self._host, self._port = keys.parse_listen(listen)
        except ValueError as error:
            raise RltopError("not an address to listen at", where=f"--ingest-tcp {listen}", why=str(error)) from None
        self._folder = folder
        self._core = core
        self._take = take
        self._max_growth = max_growth
        self._pair = keys.server_pair(folder)
        if not keys.clients(folder):
            keys.add_client(folder, keys.FIRST_CLIENT)
        self._known = _Known(folder)
        self._context = zmq.asyncio.Context()
        self._thread = threading.Thread(target=self._attend, name="ingest-door", daemon=True)
        soft = raise_file_limit()
        self._door = auth.Door(
            known=self._known,
            peer_of=self._peer_of,
            hang_up=self._hang_up,
            max_connections=min(MAX_CONNECTIONS, soft // 2),
            max_handshakes=min(MAX_HANDSHAKES, soft // 4),
        )
        self._ready = threading.Event()
        self._announcer = auth.Announcer(core.event)
        self._arrived: set[str] = set()
        self._bindings = 0
        self._pull: zmq.asyncio.Socket | None = None
        self._stop: zmq.Socket[bytes] | None = None

    # ---------------------------------------------------------------- life

    def open(self) -> None:
        """Start the thread and bind. Raises RltopError when the address cannot be bound."""
        plain = self._plain()
        self._stop = plain.socket(zmq.PAIR)
        self._stop.bind(_STOP)
        self._thread.start()
        self._ready.wait()
        self._bind()
        keys.write_listen(self._folder, f"tcp://{self._reachable()}:{self._port}", self._pair.public)
        self._show()

    @property
    def endpoint(self) -> str:
        """`tcp://HOST:PORT` as another machine writes it."""
        return f"tcp://{self._reachable()}:{self._port}"

    def url(self, name: str = keys.FIRST_CLIENT) -> str:
        """RLTOP_INGEST for the holder of the key `name`; "" when its key file is not here (any more)."""
        path = keys.client_file(self._folder, name)
        return keys.Ingest(self.endpoint, self._pair.public, path).url() if path.exists() else ""

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._receive())
            group.create_task(self._watch())

    def close(self) -> None:
        """Close everything. Never raises, never waits for a peer."""
        self._unbind()
        if self._stop is not None:
            self._stop.send(b"", zmq.NOBLOCK)
            self._thread.join(5)
            self._stop.close(linger=0)
            self._stop = None
        self._context.destroy(linger=0)

    def _bind(self) -> None:
        pull = self._context.socket(zmq.PULL)
        pull.linger = 0
        pull.maxmsgsize = MAX_MESSAGE_BYTES
        pull.rcvhwm = RCVHWM
        pull.backlog = BACKLOG
        pull.handshake_ivl = HANDSHAKE_MS
        pull.tcp_keepalive = 1
        pull.tcp_keepalive_idle, pull.tcp_keepalive_intvl = KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S
        pull.tcp_keepalive_cnt = KEEPALIVE_COUNT
        pull.ipv6 = True
        pull.curve_server = True
        pull.curve_publickey = self._pair.public
        pull.curve_secretkey = self._pair.secret
        pull.zap_domain = auth.DOMAIN.encode()
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            self._bindings += 1
            pull.monitor(_MONITOR.format(self._bindings), auth.EVENTS)
            pull.bind(f"tcp://{host}:{self._port or '*'}")
        except zmq.ZMQError as error:
            pull.close()
            raise RltopError(
                "cannot listen for records",
                where=f"--ingest-tcp {host}:{self._port}",
                why=str(error),
                do="HOST is an address of this machine (or *), PORT one that is free",
            ) from error
        self._port = int(str(bytes(pull.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0"), "ascii").rpartition(":")[2])
        self._pull = pull

    def _unbind(self) -> None:
        if self._pull is not None:
            self._pull.close(linger=0)
            self._pull = None

    def _plain(self) -> zmq.Context[zmq.Socket[bytes]]:
        return zmq.Context.shadow(self._context.underlying)

    def _reachable(self) -> str:
        host = sockets.gethostname() if self._host in ("*", "0.0.0.0", "::") else self._host
        return f"[{host}]" if ":" in host else host

    # ---------------------------------------------------------------- the loop's side

    async def _receive(self) -> None:
        burst = 0
        while True:
            pull = self._pull
            if pull is None or pull.closed:
                await asyncio.sleep(0.1)
                continue
            try:
                frames = await pull.recv_multipart(copy=False)
            except (zmq.ZMQError, asyncio.CancelledError):
                if self._pull is pull:
                    raise
                continue  # closed under us, to be opened again
            name = _user(frames[0])
            # A name that the kept list lacks may be a key that was made just now.
            if name in self._known.names() or name in self._known().values():
                self._take([frame.bytes for frame in frames], name)
            else:
                self._door.refuse(f"key {name}", auth.REVOKED)
            del frames
            burst += 1
            if burst >= BURST:
                burst = 0
                await asyncio.sleep(0)

    async def _watch(self) -> None:
        process = psutil.Process()
        ceiling = process.memory_info().rss + self._max_growth
        while True:
            await asyncio.sleep(TICK_S)
            self._tell()
            self._show()
            if process.memory_info().rss > ceiling:
                await self._reopen()
                # What is still there belongs to something else: that must not close the socket again and again.
                ceiling = process.memory_info().rss + self._max_growth

    async def _reopen(self) -> None:
        mib = self._max_growth // 2**20
        text = f"closed for a moment: the daemon had grown by {mib} MiB, likely by messages without an end"
        self._core.event("refused", "error", f"ingest {text}", "ingest", peer="", reason=text, count=1)
        self._unbind()
        await asyncio.sleep(REOPEN_S)
        while True:
            try:
                self._bind()
                return
            except RltopError as error:  # the old connections may hold the port a little longer
                self._core.event("log", "warn", f"ingest: {error.what}: {error.why}", "ingest")
                await asyncio.sleep(REOPEN_S)

    def _tell(self) -> None:
        refusals, arrivals = self._door.drain()
        for peer, name in arrivals:
            if name not in self._arrived:
                self._arrived.add(name)
                self._core.event("log", "info", f"a producer with the key {name!r} came in from {peer}", "ingest")
        self._announcer.refusals(time.monotonic(), refusals)

    def _show(self) -> None:
        self._core.set(
            "ingest",
            {
                "address": self.endpoint,
                "server_key": self._pair.public.hex(),
                "keys": sorted(self._known.names()),
                "connections": self._door.connections,
                "accepted": self._door.accepted,
                "refused": self._door.refused,
            },
        )

    # ---------------------------------------------------------------- the thread's side

    def _attend(self) -> None:
        plain = self._plain()
        with plain.socket(zmq.REP) as zap, plain.socket(zmq.PAIR) as stop:
            zap.linger = 0
            zap.bind(_ZAP)
            stop.connect(_STOP)
            binding = 1
            while self._attend_one(plain, zap, stop, _MONITOR.format(binding)):
                binding += 1  # the socket was closed, and will be opened again

    def _attend_one(
        self, plain: zmq.Context[zmq.Socket[bytes]], zap: zmq.Socket[bytes], stop: zmq.Socket[bytes], endpoint: str
    ) -> bool:
        with plain.socket(zmq.PAIR) as monitor:
            # Without a limit: at one, ZeroMQ's I/O thread would wait for this thread.
            monitor.rcvhwm = 0
            monitor.connect(endpoint)
            poller = zmq.Poller()
            for one in (zap, monitor, stop):
                poller.register(one, zmq.POLLIN)
            self._ready.set()
            while True:
                for ready, _ in poller.poll():
                    if ready is stop:
                        return False
                    if ready is zap:
                        reply = self._door.zap(zap.recv_multipart())
                        if reply is not None:
                            zap.send_multipart(reply)
                        continue
                    told = parse_monitor_message(monitor.recv_multipart())
                    self._door.monitor(int(told["event"]), int(told["value"]))
                    if told["event"] == zmq.Event.MONITOR_STOPPED:
                        return True

    def _peer_of(self, fd: int) -> str:
        with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as one:
            # The number may be another file's by now: ours is a connection to our port.
            if one.family in (sockets.AF_INET, sockets.AF_INET6) and one.getsockname()[1] == self._port:
                return auth.plain_address(str(one.getpeername()[0]))
        return ""

    def _hang_up(self, fd: int) -> None:
        if self._peer_of(fd):
            with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as one:
                one.shutdown(sockets.SHUT_RDWR)


class _Known:
    """The clients' keys, read again when their folder changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_at = -1
        self._found: Mapping[bytes, str] = {}
        self._names: frozenset[str] = frozenset()
        self._named_at = float("-inf")

    def names(self) -> frozenset[str]:
        """Names of all keys, at most `NAMES_S` old: asked for every record."""
        now = time.monotonic()
        if now - self._named_at > NAMES_S:
            self._names, self._named_at = frozenset(self().values()), now
        return self._names

    def __call__(self) -> Mapping[bytes, str]:
        try:
            changed = (self._folder / "clients").stat().st_mtime_ns
        except OSError:
            return {}
        # A file system's clock may be coarse: what changed a moment ago may change again without a newer time.
        if changed != self._read_at or time.time_ns() - changed < 2_000_000_000:
            self._found, self._read_at = keys.clients(self._folder), changed
        return self._found


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have (each connection is one); returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
