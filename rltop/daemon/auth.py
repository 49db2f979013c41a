"""Who may send over TCP, and why somebody was turned away. Pure but for what it is given: no sockets, no threads.

ZeroMQ turns strangers away in silence. What it does tell comes in three pieces, joined here:

- ZAP (RFC 27) asks for every client that finished the CURVE handshake whether its public key may come in;
- the socket's monitor tells accepted connections (with their file descriptor), handshakes that ended, and closed
  connections (with the descriptor, but not why);
- a failed handshake is followed at once by the closing of its connection (one I/O thread tells both).

So a connection that closes is known by its descriptor, and why is the failure told just before, or, if there was none
and it never came through the handshake, that it did not speak ZeroMQ. A successful handshake carries no descriptor: it
is taken for the oldest open one of the address that ZAP let in last. When strangers and producers of one address
connect in the same millisecond, those two may be taken for each other in the counts; nobody is let in by that.

Failure policy: whatever is not understood is refused.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

DOMAIN = "rltop-ingest"
"""ZAP domain of the TCP ingest socket; a question about any other is refused."""
MAX_PLACES = 1000
"""Pairs of address and reason that are told apart between two drains; the rest become `many addresses`."""
MANY = "many addresses"
UNKNOWN_PEER = "an unknown address"
"""The connection was gone before its address could be asked for."""

PLAIN = "it uses no CURVE keys (a plain ZeroMQ client)"
LEFT = "it hung up during the handshake, as a ZeroMQ client without CURVE keys does, or a port scan"
WRONG_SERVER_KEY = "it has another server's public key: its RLTOP_INGEST is of another run, or out of date"
NOT_ZEROMQ = "it does not speak ZeroMQ"
SILENT = "it said nothing until the time for the handshake was over"
UNKNOWN_KEY = "its key is not known here: `rltop keys NAME` makes one that is"
WRONG_DOMAIN = "it asked for another ZAP domain"
WRONG_MECHANISM = "it wants another way to authenticate than CURVE"
REVOKED = "its key was revoked"
TOO_MANY = "too many connections are open"

# libzmq's numbers (zmq.h), written out so that this module needs no zmq.
ACCEPTED, ACCEPT_FAILED, DISCONNECTED, STOPPED = 0x20, 0x40, 0x200, 0x400
FAILED_NO_DETAIL, SUCCEEDED, FAILED_PROTOCOL, FAILED_AUTH = 0x800, 0x1000, 0x2000, 0x4000
EVENTS = (
    ACCEPTED | ACCEPT_FAILED | DISCONNECTED | STOPPED | FAILED_NO_DETAIL | SUCCEEDED | FAILED_PROTOCOL | FAILED_AUTH
)
_CRYPTOGRAPHIC, _MECHANISM_MISMATCH = 0x11000001, 0x11000002


def why_failed(event: int, value: int) -> str:
    """What a failed handshake means, seen from the daemon. event, value: as the socket monitor tells them."""
    if event == FAILED_PROTOCOL:
        if value == _CRYPTOGRAPHIC:
            return WRONG_SERVER_KEY
        if value == _MECHANISM_MISMATCH:
            return PLAIN
        return f"it broke the rules of the handshake (ZeroMQ code {value:#x})"
    if value == errno.EAGAIN:
        return SILENT
    if value in (errno.EPIPE, errno.ECONNRESET, 0):
        return LEFT
    return f"the handshake failed: {os.strerror(value)}"


def plain_address(text: str) -> str:
    """An IPv4 address as people write it, also where an IPv6 socket took the connection."""
    return text.removeprefix("::ffff:")


@dataclass(slots=True)
class Door:
    """Answers ZAP and reads the monitor. Called from one thread; `drain` and the counters from any.

    known: public key (32 bytes) -> name of everybody who may send, read anew at every question.
    peer_of: address of the peer of a descriptor, "" when it is gone. hang_up: ends the connection of a descriptor.
    """

    known: Callable[[], Mapping[bytes, str]]
    peer_of: Callable[[int], str]
    hang_up: Callable[[int], None]
    max_connections: int
    max_handshakes: int
    accepted: int = 0
    """Handshakes that succeeded so far."""
    refused: int = 0
    """Connections that were turned away so far."""
    _open: dict[int, str] = field(default_factory=dict)
    """Descriptor -> peer, handshake not ended; the oldest first."""
    _inside: set[int] = field(default_factory=set)
    _admitted: deque[str] = field(default_factory=lambda: deque(maxlen=10_000))
    """Addresses that ZAP let in and whose success was not told yet."""
    _failure: str | None = None
    """Why the connection that closes next failed; "" when that is told already."""
    _cut: dict[int, str] = field(default_factory=dict)
    """Descriptors that we hung up on, and why."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _refusals: dict[tuple[str, str], int] = field(default_factory=dict)
    _arrivals: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def connections(self) -> int:
        """Connections that came through the handshake and are open."""
        return len(self._inside)

    # ---------------------------------------------------------------- ZAP

    def zap(self, frames: list[bytes]) -> list[bytes] | None:
        """The reply to one ZAP request; None when there is nothing to reply to."""
        if len(frames) < 2:
            return None
        if len(frames) < 7 or frames[0] != b"1.0":
            return [b"1.0", frames[1], b"400", b"no such request", b"", b""]
        domain, mechanism, key = frames[2], frames[5], frames[6]
        address = plain_address(frames[3].decode(errors="replace"))
        name = self.known().get(key) if len(frames) == 7 else None
        if domain.decode(errors="replace") != DOMAIN:
            why = WRONG_DOMAIN
        elif mechanism != b"CURVE":
            why = WRONG_MECHANISM
        elif name is None:
            why = UNKNOWN_KEY
        else:
            self._admitted.append(address)
            self._note(self._arrivals, address, name)
            return [b"1.0", frames[1], b"200", b"OK", name.encode(), b""]
        self.refuse(address, why)
        return [b"1.0", frames[1], b"400", why.encode(), b"", b""]

    # ---------------------------------------------------------------- monitor

    def monitor(self, event: int, value: int) -> None:
        """One event of the socket's monitor; value is a descriptor or a code, depending on the event."""
        if event == ACCEPTED:
            self._accepted(value)
        elif event == SUCCEEDED:
            self.accepted += 1
            self._came_in()
        elif event == FAILED_AUTH:
            self._failure = ""  # ZAP said no, and that is told
        elif event in (FAILED_NO_DETAIL, FAILED_PROTOCOL):
            self._failure = why_failed(event, value)
        elif event == DISCONNECTED:
            self._closed(value)
        elif event == STOPPED:  # the socket was closed, and with it every connection
            self._open.clear()
            self._inside.clear()
            self._cut.clear()
        elif event == ACCEPT_FAILED:
            self.refuse(UNKNOWN_PEER, f"no connection can be taken: {os.strerror(value)}")

    def _accepted(self, fd: int) -> None:
        self._open[fd] = self.peer_of(fd)
        if len(self._inside) + len(self._open) > self.max_connections:
            self._cut[fd] = TOO_MANY
            self.hang_up(fd)
        elif len(self._open) > self.max_handshakes:
            # The oldest has had its time: a handshake takes milliseconds. So a flood keeps no producer out.
            oldest = next((other for other in self._open if other not in self._cut), fd)
            self._cut[oldest] = SILENT
            self.hang_up(oldest)

    def _came_in(self) -> None:
        address = self._admitted.popleft() if self._admitted else ""
        mine = [fd for fd, peer in self._open.items() if peer == address] or list(self._open)
        if mine:
            del self._open[mine[0]]
            self._inside.add(mine[0])

    def _closed(self, fd: int) -> None:
        why, self._failure = self._failure, None
        cut, peer = self._cut.pop(fd, None), self._open.pop(fd, None)
        if peer is None:
            self._inside.discard(fd)
        elif cut is not None:
            self.refuse(peer, cut)
        elif why is None:
            self.refuse(peer, NOT_ZEROMQ)
        elif why:
            self.refuse(peer, why)

    # ---------------------------------------------------------------- what is told

    def refuse(self, peer: str, why: str) -> None:
        """Note that somebody was turned away."""
        self.refused += 1
        self._note(self._refusals, peer or UNKNOWN_PEER, why)

    def drain(self) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
        """Since the last call: (peer, reason) -> refusals, and (peer, name of the key) -> arrivals."""
        with self._lock:
            found = self._refusals, self._arrivals
            self._refusals, self._arrivals = {}, {}
        return found

    def _note(self, where: dict[tuple[str, str], int], peer: str, word: str) -> None:
        with self._lock:
            key = (peer, word) if (peer, word) in where or len(where) < MAX_PLACES else (MANY, word)
            where[key] = where.get(key, 0) + 1


@dataclass(slots=True)
class Announcer:
    """Turns counts into events for people: the first of its kind at once, then one a period with the count.

    tell: kind, level, text, and the event's own keys.
    """

    tell: Callable[..., object]
    period_s: float = 60.0
    max_per_drain: int = 5
    """Events in one call; the rest are one more event that says how many."""
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    _waiting: dict[tuple[str, str], int] = field(default_factory=dict)

    def refusals(self, now: float, counts: Mapping[tuple[str, str], int]) -> None:
        """Tell refusals. now: seconds."""
        for key, count in counts.items():
            self._waiting[key] = self._waiting.get(key, 0) + count
        due = [key for key in self._waiting if now - self._last.get(key, -self.period_s) >= self.period_s]
        for key in due[: self.max_per_drain]:
            self._last[key] = now
            self._say(*key, self._waiting.pop(key))
        if left := due[self.max_per_drain :]:
            total = 0
            for key in left:
                self._last[key] = now
                total += self._waiting.pop(key)
            self._say(MANY, f"{len(left)} more pairs of address and reason", total)
        if len(self._last) > 10 * MAX_PLACES:
            self._last = {key: at for key, at in self._last.items() if now - at < self.period_s}

    def _say(self, peer: str, why: str, count: int) -> None:
        times = "" if count == 1 else f" ({count} times)"
        self.tell("refused", "warn", f"refused {peer}: {why}{times}", "ingest", peer=peer, reason=why, count=count)
