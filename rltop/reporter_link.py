"""The reporter's socket: queue, sequence and connection of one process. Nothing here waits, but for `close`.

An address is `ipc://PATH`, or `curve://SERVER_PUBLIC_KEY@HOST:PORT/KEY_FILE` (`rltop keys` prints it), or several of
them with a space between: the first `ipc` whose socket is on this machine, else the last. Plain TCP is refused: nobody
knows who listens there.

ZeroMQ says nothing when a daemon turns a producer away or goes, so the socket's monitor is read as we go. Over TCP
`status` is what it said, in words, and the first refusal is one line in the log `rltop.reporter`. Over a unix socket it
tells since when nobody takes what ZeroMQ has queued: so the last line can say how many records are lost.

What a unix socket still holds when its producer closes is lost if the daemon is behind just then: at its receive mark
libzmq (4.3.5) does not read a connection, and takes the end of it for a reason to throw it away unread. So `close`
keeps the connection by a second handle until the daemon has read it empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import sys
import termios
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

    from rltop.keys import Ingest

QUEUE = 500
"""Records that wait here when the socket takes no more (over a unix socket it holds 1,000 itself)."""
CURVE_QUEUE = 1500
"""The same over TCP, where the socket takes nothing before the daemon let us in."""
SNDHWM = 1000
CLOSE_S = 1.0
"""What `close` gives queued records, and only when a daemon is there to take them."""
READ_EMPTY_S = 0.002
"""So often `close` looks whether the daemon has read what the unix socket holds: nothing tells it."""
RETRY_S = 10.0
"""After a refusal the connection is made anew so often: a key may have become known meanwhile."""
LOOK_S = 0.25
"""The monitor is read no more often."""
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_COUNT = 15, 5, 4
"""TCP: after how many seconds without traffic the other end is asked, and how often before it counts as gone. No
heartbeat of ZeroMQ: a daemon that is behind reads none, and a hang-up loses all that is on its way to it."""
NO_PROGRESS_MS = 120_000
"""TCP: a connection that took nothing for so long is made anew (the daemon's machine is gone, or the daemon hangs)."""
_POLLOUT = 2
# libzmq's numbers (zmq.h): monitor events and what a failed handshake says.
_CONNECTED, _CLOSED, _RETRIED, _DISCONNECTED = 0x1, 0x80, 0x4, 0x200
_NO_DETAIL, _SUCCEEDED, _PROTOCOL, _AUTH = 0x800, 0x1000, 0x2000, 0x4000
_EVENTS = _CONNECTED | _CLOSED | _RETRIED | _DISCONNECTED | _NO_DETAIL | _SUCCEEDED | _PROTOCOL | _AUTH
_MECHANISM_MISMATCH = 0x11000002
_MONITOR = "inproc://rltop-reporter-monitor"


class Link:
    """Socket, queue and sequence of one process."""

    def __init__(self, address: str, source: dict[str, Any]) -> None:
        self.source = source
        """Who reports: role, rank, host, pid."""
        # Reentrant: a signal handler that reports may interrupt a report of the same thread.
        self.lock = threading.RLock()
        self.seq = 0
        self.dropped = 0
        self.status = ""
        """How the connection stands, in words."""
        self.waiting: deque[list[bytes]] = deque()
        self._address = choose(address)
        self._queue = CURVE_QUEUE if self._address.startswith("curve:") else QUEUE
        self._unusable = False
        self._warned = False
        self._refused_at: float | None = None
        self._admitted = False
        self._linked = False
        """Over a unix socket: a daemon has the other end."""
        self._fd = -1
        """Over a unix socket: ZeroMQ's handle of the connection, as its monitor said last."""
        self._sent = 0
        """Records that ZeroMQ took."""
        self._reached = 0
        """Of them those that were not queued for nobody, as far as we saw: the newest may be lost all the same."""
        self._looked = 0.0
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def flush(self) -> None:
        """Hand the socket what it takes without waiting."""
        import zmq

        if self._unusable:
            return
        if self._socket is None:
            self._connect()
        sender = self._socket
        if self._monitor is not None and time.monotonic() - self._looked > LOOK_S:
            self.look()
            sender = self._socket
        if sender is None:
            return
        while self.waiting:
            frames = self.waiting.popleft()
            try:
                sender.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                self.waiting.appendleft(frames)
                return
            self._sent += 1

    def drop_oldest(self) -> int:
        """Keep the newest records; returns how many went."""
        excess = max(0, len(self.waiting) - self._queue)
        for _ in range(excess):
            self.waiting.popleft()
        self.dropped += excess
        return excess

    def close(self) -> int:
        """Close, giving queued records a bounded moment if somebody takes them. Returns how many were left here."""
        if self._socket is None or self._context is None:
            return len(self.waiting)
        deadline = time.monotonic() + CLOSE_S
        listening = self._somebody_takes(deadline)
        while listening and self.waiting and (left := deadline - time.monotonic()) > 0:
            self.flush()
            if self.waiting:
                self._socket.poll(int(left * 1000) + 1, _POLLOUT)
        left = len(self.waiting)
        if not listening and not self._address.startswith("curve:"):
            self.look()
            left += 0 if self._linked else self._sent - self._reached
        hung = self._finish(deadline, listening=listening)
        self._say_last(self.dropped + left, listening=listening, hung=hung)
        return left

    def _finish(self, deadline: float, *, listening: bool) -> bool:
        """Disconnect; returns whether the daemon had not taken everything by then."""
        if not listening:
            self._disconnect(0)
            return False
        held = self._handle(deadline)
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        began = time.monotonic()
        self._disconnect(left_ms)
        hung = time.monotonic() - began >= left_ms * 0.95e-3
        if held is not None:
            with held:
                while (unread := _unread(held)) and time.monotonic() < deadline:
                    time.sleep(READ_EMPTY_S)
            hung = hung or unread > 0
        return hung

    def _handle(self, deadline: float) -> socket.socket | None:
        """A second handle of the unix socket's connection; None over TCP, or when none came about in time."""
        if self._monitor is None or self._address.startswith("curve:"):
            return None
        self.look()
        while self._fd < 0 and (left := deadline - time.monotonic()) > 0:
            self._monitor.poll(int(left * 1000) + 1)
            self.look()
        with contextlib.suppress(OSError):
            held = socket.socket(fileno=os.dup(self._fd))
            # The number is ZeroMQ's: it may be another file's by now.
            if held.family == socket.AF_UNIX and held.getpeername() == self._address.removeprefix("ipc://"):
                return held
            held.close()
        return None

    def _say_last(self, lost: int, *, listening: bool, hung: bool) -> None:
        """The last line in the trainer's log, where something is missing or may be."""
        warn = logging.getLogger("rltop.reporter").warning
        if lost:
            why = "no daemon was there to take them" if not listening else "the daemon did not take them in time"
            # What the socket had taken and not handed on is not known to anybody: only its bound is.
            more = min(SNDHWM, self._sent if listening else self._reached)
            more = min(more, self.seq - lost) if hung or not listening else 0
            also = f"; of the {more} before them some may be lost too" if more else ""
            warn("rltop: %d of %d records are lost: %s%s", lost, self.seq, why, also)
        elif self._sent and (hung or not listening):
            why = f"the daemon was slow (over {CLOSE_S:g} s)" if listening else "the daemon is gone"
            warn("rltop: %s: of the last %d records some may be lost", why, min(SNDHWM, self._sent))

    # ---------------------------------------------------------------- the connection

    def _connect(self) -> None:
        import zmq

        context = zmq.Context()
        sender = context.socket(zmq.PUSH)
        try:
            sender.sndhwm = SNDHWM
            sender.linger = 0
            sender.reconnect_ivl = 100
            sender.reconnect_ivl_max = 5000
            if self._address.startswith("curve:"):
                self._connect_curve(context, sender)
            elif self._address.startswith("tcp:"):
                raise ValueError(
                    "over TCP a producer needs keys: RLTOP_INGEST=curve://…, as `rltop keys NAME` prints it"
                )
            else:
                self._monitor = self._watched(context, sender, _CONNECTED | _SUCCEEDED | _DISCONNECTED)
                sender.connect(self._address)
        except Exception as error:  # no address at all, no key file: it will not get better
            self._unusable = True
            if self._monitor is not None:
                self._monitor.close(linger=0)
                self._monitor = None
            context.destroy(linger=0)
            self._say(f"nothing is sent: {' '.join(str(error).split())}", warn=True)
            raise
        self._context, self._socket = context, sender

    def _connect_curve(self, context: zmq.Context[zmq.Socket[bytes]], sender: zmq.Socket[bytes]) -> None:
        from rltop.keys import parse_ingest, read_pair

        where: Ingest = parse_ingest(self._address)
        pair = read_pair(where.key_file)
        sender.curve_publickey, sender.curve_secretkey = pair.public, pair.secret
        sender.curve_serverkey = where.server
        sender.ipv6 = True
        # Nothing goes into the socket before the daemon let us in: what it never took is counted here.
        sender.immediate = True
        sender.handshake_ivl = 5_000
        sender.tcp_keepalive, sender.tcp_maxrt = 1, NO_PROGRESS_MS
        sender.tcp_keepalive_idle, sender.tcp_keepalive_intvl = KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S
        sender.tcp_keepalive_cnt = KEEPALIVE_COUNT
        self._monitor = self._watched(context, sender)
        self._admitted, self._refused_at = False, None
        self.status = f"connecting to {where.endpoint}"
        sender.connect(where.endpoint)

    def _watched(
        self, context: zmq.Context[zmq.Socket[bytes]], sender: zmq.Socket[bytes], events: int = _EVENTS
    ) -> zmq.Socket[bytes]:
        """The socket's monitor."""
        import zmq

        monitor = context.socket(zmq.PAIR)
        # Without a limit, set before it connects: at one, ZeroMQ's I/O thread would wait for our next report, and
        # `close` for that thread.
        monitor.rcvhwm = 0
        sender.monitor(_MONITOR, events)
        monitor.connect(_MONITOR)
        return monitor

    def _disconnect(self, linger_ms: int) -> None:
        if self._socket is None or self._context is None:
            return
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()  # returns when the queue is empty or the linger time is over
        self._socket = self._context = self._monitor = None

    def _somebody_takes(self, deadline: float) -> bool:
        """Whether a daemon is there: without one, lingering would only waste the caller's time."""
        if self._monitor is None or not self._address.startswith("curve:"):
            return somebody_listens(self._address)
        while not self._admitted and self._refused_at is None and (left := deadline - time.monotonic()) > 0:
            self._monitor.poll(int(left * 1000) + 1)
            self.look()
            if self.status.startswith("nobody"):
                return False
        return self._admitted

    # ---------------------------------------------------------------- what the monitor says

    def look(self) -> None:
        """Read the monitor, without waiting; make the connection anew some time after a refusal."""
        import zmq

        self._looked = now = time.monotonic()
        while self._monitor is not None:
            try:
                event, _ = self._monitor.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            self._told(int.from_bytes(event[:2], "little"), int.from_bytes(event[2:6], "little"), now)
        if self._refused_at is not None and now - self._refused_at > RETRY_S:
            # After a failed handshake ZeroMQ gives up for good.
            self._disconnect(0)
            self._connect()

    def _told(self, event: int, value: int, now: float) -> None:
        if not self._address.startswith("curve:"):
            if event == _DISCONNECTED and self._linked:
                self._reached = self._sent
            self._linked = event == _SUCCEEDED
            if event != _SUCCEEDED:
                self._fd = value if event == _CONNECTED else -1
        elif event == _SUCCEEDED:
            self._admitted, self._refused_at, self.status = True, None, "connected"
        elif event in (_AUTH, _PROTOCOL, _NO_DETAIL):
            if not self._admitted:
                self._refused_at = now
                self._say(f"refused: {_why(event, value)}", warn=True)
        elif event == _DISCONNECTED and self._admitted:
            self._admitted, self.status = False, "the connection is gone; trying again"
        elif event in (_CLOSED, _RETRIED) and self._refused_at is None and not self._admitted:
            self.status = "nobody listens there (yet); trying again"

    def _say(self, text: str, *, warn: bool) -> None:
        self.status = text
        if warn and not self._warned:
            self._warned = True
            logging.getLogger("rltop.reporter").warning("rltop: %s (said once; training goes on without)", text)


def _why(event: int, value: int) -> str:
    if event == _AUTH:
        return "the daemon does not know this key (it was revoked, or is of another run): `rltop keys NAME` makes one"
    if event == _PROTOCOL and value == _MECHANISM_MISMATCH:
        return "what listens there uses no CURVE keys: it is no ingest of rltop"
    if event == _PROTOCOL:
        return f"what listens there broke the rules of the handshake (ZeroMQ code {value:#x})"
    return (
        "the daemon hung up during the handshake: RLTOP_INGEST has another server's public key "
        "(of another run, or out of date)"
    )


def choose(addresses: str) -> str:
    """The address to take of several with spaces between: the first unix socket that is here, else the last."""
    words = addresses.split()
    for word in words[:-1]:
        if word.startswith("ipc://") and os.path.exists(word.removeprefix("ipc://")):
            return word
    return words[-1] if words else ""


def somebody_listens(address: str) -> bool:
    """Whether a daemon is behind a unix socket."""
    scheme, _, path = address.partition("://")
    if scheme != "ipc":
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.2)
            probe.connect(path)
    except (OSError, ValueError):
        return False
    return True


def _unread(connection: socket.socket) -> int:
    """Bytes (with the kernel's own around them) that the other end of a unix socket has not read; 0 where the system
    does not tell (macOS)."""
    try:
        told = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(told, sys.byteorder)


def describe(value: Any) -> str:
    """A value's type and size in a few words; never raises."""
    try:
        shape = getattr(value, "shape", None)
        return f"<{type(value).__name__}{'' if shape is None else ' ' + str(tuple(shape))}>"
    except Exception:  # any object may come in here
        return f"<{type(value).__name__}>"
