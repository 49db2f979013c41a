"""Sessions of viewers and operators: what each client gets next, and who is gone. Pure: no socket, no clock of its own.

Failure policy: a client that does not acknowledge gets nothing more (two frames in flight) and costs nothing more; a
client whose socket is full is tried again one frame interval later; a client that says nothing for the lease is
dropped. None of that touches another client. What was sent counts as taken only within one session: whoever comes back
says in `hello` what it has.
"""

from __future__ import annotations

import fnmatch
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from rltop.daemon.events import RING_SIZE, EventRing
from rltop.daemon.state import StateTable
from rltop.protocol.codec import MAX_MESSAGE_BYTES
from rltop.protocol.messages import PROTO_MAX, PROTO_MIN, Delta, Err, Hello, Role, Snap, Welcome

IN_FLIGHT = 2
LEASE_S = 10.0
SNAP_EVENTS = 200
DELTA_EVENTS = 500
"""Events in one delta; more follow in the next. 500 of the longest texts are 2 of the 16 MiB of a message."""
FPS_RANGE = (0.1, 30.0)
_EVERYTHING = ("*",)
TRAINER = "trainer"
"""What a trainer calls itself whose engines are the daemon's (`rltop.train.fleet_link`)."""


@dataclass(slots=True)
class Session:
    """One client on one socket. `ident` is its ROUTER identity."""

    ident: bytes
    role: Role
    name: str
    client: str
    fps: float
    want: re.Pattern[str] | None
    """None: every key."""
    heard: float
    sent_ver: int | None
    """State version of the last frame sent; None: the next frame is a snapshot."""
    sent_eseq: int
    forced: bool = True
    """The next frame goes out even when nothing changed."""
    seq: int = 0
    in_flight: deque[int] = field(default_factory=deque)
    next_at: float = 0.0
    refusals: int = 0
    """Frames that the socket would not take, in a row."""

    def wants(self, key: str) -> bool:
        """Whether the client asked for this key."""
        return self.want is None or self.want.match(key) is not None


@dataclass(frozen=True, slots=True)
class Frame:
    """A `snap` or `delta` that a session is due. Nothing changes until `Sessions.sent`."""

    tag: str
    body: msgspec.Struct
    seq: int
    ver: int
    eseq: int


class Sessions:
    """All sessions of a daemon, over its state table and event ring."""

    __slots__ = ("_by_ident", "_epoch", "_ring", "_run", "_server", "_table")

    def __init__(self, table: StateTable, ring: EventRing, *, epoch: str, run: str, server: str) -> None:
        self._table = table
        self._ring = ring
        self._epoch = epoch
        self._run = run
        self._server = server
        self._by_ident: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_ident)

    def viewers(self) -> int:
        """Sessions of people and their programs; the trainer's own line to the daemon is nobody who looks."""
        return sum(session.name != TRAINER for session in self)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_ident.values()))

    # ---------------------------------------------------------------- client -> daemon

    def hello(self, ident: bytes, hello: Hello, *, socket_role: Role, now: float, wall: float) -> Welcome | Err:
        """Open (or open again) the session of `ident`. On a refusal there is no session."""
        self.drop(ident)
        low, high = hello.proto
        proto = min(high, PROTO_MAX)
        if proto < max(low, PROTO_MIN):
            ours = f"this daemon ({self._server}) speaks {PROTO_MIN} to {PROTO_MAX}"
            return Err("proto", f"client speaks protocol {low} to {high}, {ours}")
        if hello.role == "control" and socket_role != "control":
            return Err("not-control", "this is the view socket; the control role is on ctl.sock")
        resumed = hello.epoch == self._epoch and self._table.knows(hello.ver) and hello.eseq <= self._ring.shown
        self._by_ident[ident] = Session(
            ident=ident,
            role=hello.role,
            name=hello.name,
            client=hello.client,
            fps=_clamp(hello.fps),
            want=_compile(hello.want),
            heard=now,
            sent_ver=hello.ver if resumed else None,
            sent_eseq=max(0, hello.eseq) if resumed else 0,
            next_at=now,
        )
        limits = {
            "lease_s": int(LEASE_S),
            "in_flight": IN_FLIGHT,
            "max_message_bytes": MAX_MESSAGE_BYTES,
            "event_ring": RING_SIZE,
        }
        return Welcome(
            proto=proto,
            run=self._run,
            server=self._server,
            server_time=wall,
            role=hello.role,
            resumed=resumed,
            limits=limits,
        )

    def heard(self, ident: bytes, now: float) -> Session | None:
        """A message came: renew the lease. None for a client without a session."""
        session = self._by_ident.get(ident)
        if session is not None:
            session.heard = now
        return session

    def ack(self, ident: bytes, seq: int) -> None:
        """The client took every frame up to `seq`. Numbers that were never sent are ignored."""
        session = self._by_ident.get(ident)
        if session is not None and seq <= session.seq:
            while session.in_flight and session.in_flight[0] <= seq:
                session.in_flight.popleft()

    def drop(self, ident: bytes) -> Session | None:
        """Forget a session; returns it if there was one."""
        return self._by_ident.pop(ident, None)

    def expire(self, now: float) -> list[Session]:
        """Drop and return the sessions whose lease ran out."""
        silent = [session for session in self._by_ident.values() if now - session.heard > LEASE_S]
        for session in silent:
            self.drop(session.ident)
        return silent

    # ---------------------------------------------------------------- daemon -> client

    def frame(self, session: Session, now: float) -> Frame | None:
        """What to send to this client now; None when nothing changed, it has no credit, or its frame rate says wait."""
        if now < session.next_at or not self._pending(session):
            return None
        table, ring, seq = self._table, self._ring, session.seq + 1
        if session.sent_ver is None:
            events = ring.newest(SNAP_EVENTS)
            snap = Snap(ver=table.ver, eseq=ring.shown, keys=table.snapshot(session.wants), events=events)
            return Frame("snap", snap, seq, table.ver, ring.shown)
        changed, gone = table.changes(session.sent_ver, session.wants)
        events, gap = ring.after(session.sent_eseq, DELTA_EVENTS)
        eseq = int(events[-1]["eseq"]) if events else ring.shown
        if not (changed or gone or events or gap or session.forced):
            session.sent_ver = table.ver  # only keys changed that this client does not want
            return None
        delta = Delta(ver=table.ver, eseq=eseq, set=changed, gone=gone, events=events, gap=gap)
        return Frame("delta", delta, seq, table.ver, eseq)

    def sent(self, session: Session, frame: Frame, now: float) -> None:
        """The socket took the frame."""
        session.seq = frame.seq
        session.in_flight.append(frame.seq)
        session.sent_ver, session.sent_eseq = frame.ver, frame.eseq
        session.forced = False
        session.refusals = 0
        session.next_at = now + 1.0 / session.fps

    def refused(self, session: Session, now: float) -> None:
        """The socket of this client is full: nothing was sent; try again one frame interval later."""
        session.refusals += 1
        session.next_at = now + 1.0 / session.fps

    def next_due(self) -> float | None:
        """Earliest time at which some session may be due, given what is known now; None: not before the next change."""
        return min((session.next_at for session in self._by_ident.values() if self._pending(session)), default=None)

    def _pending(self, session: Session) -> bool:
        if len(session.in_flight) >= IN_FLIGHT:
            return False
        behind = session.sent_ver != self._table.ver or session.sent_eseq != self._ring.shown
        return behind or session.forced


def _clamp(fps: float) -> float:
    low, high = FPS_RANGE
    return min(max(fps, low), high) if fps == fps else low


def _compile(want: Sequence[str]) -> re.Pattern[str] | None:
    if tuple(want) == _EVERYTHING:
        return None
    return re.compile("|".join(fnmatch.translate(glob) for glob in want[:256]) or r"(?!)")
