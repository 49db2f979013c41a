"""Sequences of everything that can happen between a run, its journal, its daemon and its viewers, without a process.

The real parts: state table, event ring with its publisher, sessions, codec, the client's mirror. The disk is a list
that takes rows in order, a part of them at a time, or refuses. The soak tries ten thousand sequences.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rltop.client.mirror import Mirror, SequenceError
from rltop.daemon.core import Core
from rltop.daemon.events import EventRing
from rltop.daemon.publish import Publisher
from rltop.daemon.sessions import Frame, Sessions
from rltop.protocol.codec import decode, encode
from rltop.protocol.messages import Hello, Welcome
from tests.daemon.fakes import Written
from tests.examples import examples

RING = 6


class Disk(Written):
    """What the daemon told its journal, and how far that is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = 0
        self.works = True

    def events(self) -> list[dict[str, Any]]:
        return [row[1][0] for row in self.rows[: self.committed] if row[0] == "event"]

    def state(self, t: float, key: str, value: Any) -> None:
        super().state(t, key, value)

    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for what, arguments in self.rows[: self.committed]:
            if what == "state":
                found[arguments[1]] = arguments[2]
        return {key: value for key, value in found.items() if value is not None}


class Survival(RuleBasedStateMachine):
    """One run through several daemons, and its viewers."""

    viewers = Bundle("viewers")

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.now = 100.0
        self.epoch = 0
        self.mirrors: dict[bytes, Mirror] = {}
        self.shown: dict[int, str] = {}
        """Events that somebody was shown while the journal worked, as the newest daemon numbers them."""
        self.sent: dict[bytes, list[Frame]] = {}
        self.begin()

    def begin(self) -> None:
        self.epoch += 1
        self.core = Core(self.disk, now=lambda: self.now)
        self.core.ring = EventRing(RING)
        events = self.disk.events()
        self.core.ring.restore(events[-RING:], events[-1]["eseq"] if events else 0)
        for key, value in self.disk.table().items():
            self.core.table.set(key, value)
        self.publisher = Publisher(self.core)
        self.publisher.begin()
        self.sessions = Sessions(self.core.table, self.core.ring, epoch=f"e{self.epoch}", run="r", server="rltop/test")
        self.disk.works = True
        self.opened = self.core.ring.shown
        """Newest event that was shown while the journal did not work."""

    # ---------------------------------------------------------------- the run and the disk

    @rule(key=st.sampled_from("abcd"), value=st.none() | st.integers(0, 3) | st.floats())
    def change(self, key: str, value: float | None) -> None:
        self.core.set(key, value)

    @rule(count=st.integers(1, 8))
    def events(self, count: int) -> None:
        for _ in range(count):
            self.core.event("log", "info", f"{self.epoch}.{self.core.ring.head + 1}")

    @rule(part=st.floats(0, 1))
    def commit(self, part: float) -> None:
        if not self.disk.works:
            return
        self.disk.committed += int((len(self.disk.rows) - self.disk.committed) * part + 0.5)
        events = self.disk.events()
        if events:
            self.publisher.written(events[-1]["eseq"])

    @rule()
    def disk_fails(self) -> None:
        if self.disk.works:
            self.disk.works = False
            self.publisher.problem("error", "no space left on device")
            self.publisher.working(False)

    @rule()
    def disk_works_again(self) -> None:
        if not self.disk.works:
            self.disk.works = True
            self.commit(1.0)
            self.opened = self.core.ring.shown
            self.publisher.working(True)

    @rule()
    def tick(self) -> None:
        self.publisher.tick()
        if not self.core.ring.gated:
            self.opened = self.core.ring.shown

    @rule()
    def kill_daemon(self) -> None:
        del self.disk.rows[self.disk.committed :]
        kept = {event["eseq"]: event["text"] for event in self.disk.events()}
        lost = {eseq: text for eseq, text in self.shown.items() if kept.get(eseq) != text}
        assert not lost, "an event that was shown is not on disk"
        self.begin()
        self.sent = {ident: [] for ident in self.mirrors}
        for ident in self.mirrors:
            self.hello(ident)

    # ---------------------------------------------------------------- viewers

    @rule(target=viewers)
    def join(self) -> bytes:
        ident = b"v%d" % len(self.mirrors)
        self.mirrors[ident] = Mirror()
        self.hello(ident)
        return ident

    def hello(self, ident: bytes) -> None:
        mirror = self.mirrors[ident]
        hello = Hello((1, 1), "c", fps=30, epoch=mirror.epoch, ver=mirror.ver, eseq=mirror.eseq)
        answer = self.sessions.hello(ident, hello, socket_role="view", now=self.now, wall=0.0)
        assert isinstance(answer, Welcome)
        mirror.apply(decode(encode("welcome", answer, epoch=f"e{self.epoch}")))
        self.sent[ident] = []

    @rule(ident=viewers)
    def reconnect(self, ident: bytes) -> None:
        self.hello(ident)

    @rule(ident=viewers, lost=st.booleans())
    def deliver(self, ident: bytes, lost: bool) -> None:
        self.send(ident, lost)

    def send(self, ident: bytes, lost: bool) -> bool:
        """Send what is due; `lost`: on its way, so that the next one meets a hole and the viewer says hello again."""
        session = self.sessions.heard(ident, self.now)
        assert session is not None
        self.now += 1.0
        frame = self.sessions.frame(session, self.now)
        if frame is None:
            return False
        self.sessions.sent(session, frame, self.now)
        self.sent[ident].append(frame)
        if lost:
            return True
        message = decode(encode(frame.tag, frame.body, seq=frame.seq, epoch=f"e{self.epoch}"))
        mirror = self.mirrors[ident]
        try:
            mirror.apply(message)
        except SequenceError:
            self.hello(ident)
            return True
        if self.core.ring.gated:
            self.shown |= {event["eseq"]: event["text"] for event in message.body.events}
        return True

    @rule(ident=viewers)
    def ack(self, ident: bytes) -> None:
        if self.sent[ident]:
            self.sessions.ack(ident, self.sent[ident].pop(0).seq)

    @rule(ident=viewers)
    def refuse(self, ident: bytes) -> None:
        session = self.sessions.heard(ident, self.now)
        assert session is not None
        if self.sessions.frame(session, self.now) is not None:
            self.sessions.refused(session, self.now)

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def what_viewers_may_have_is_on_disk(self) -> None:
        if self.core.ring.gated and self.disk.works:
            events = self.disk.events()
            on_disk = max(events[-1]["eseq"] if events else 0, self.opened)
            assert self.core.ring.shown <= on_disk

    def teardown(self) -> None:
        self.disk_works_again()
        while self.disk.committed < len(self.disk.rows):  # that it keeps up again is an event too
            self.commit(1.0)
        truth = self.core.table.snapshot(lambda key: True)
        for ident, mirror in self.mirrors.items():
            self.hello(ident)
            for _ in range(1000):
                if not self.send(ident, lost=False):
                    break
                self.ack(ident)
            assert str(sorted(mirror.state.items())) == str(sorted(truth.items())), (
                "NaN is equal to itself only in words"
            )
            assert mirror.eseq == self.core.ring.head
            assert self.core.ring.shown == self.core.ring.head
        self.kill_daemon()


TestSurvival = Survival.TestCase
TestSurvival.settings = examples(100, steps=40)
