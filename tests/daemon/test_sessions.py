"""State table, event ring and sessions without sockets: whatever happens, a client ends on the true state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rltop.daemon.events import EventRing
from rltop.daemon.sessions import DELTA_EVENTS, IN_FLIGHT, LEASE_S, Sessions
from rltop.daemon.state import MAX_TOMBSTONES, StateTable
from rltop.protocol.messages import Delta, Err, Hello, Snap, Welcome
from tests.examples import examples

HELLO = Hello((1, 1), "test", fps=30.0)


class Model:
    """Daemon side: table, ring, sessions, and a clock that the test turns."""

    def __init__(self, ring: int = 8) -> None:
        self.table = StateTable()
        self.ring = EventRing(ring)
        self.sessions = Sessions(self.table, self.ring, epoch="e1", run="r", server="rltop/test")
        self.now = 100.0

    def event(self, text: str = "x") -> int:
        return int(self.ring.add(0.0, "log", "info", text)["eseq"])

    def hello(self, ident: bytes = b"a", hello: Hello = HELLO) -> Welcome:
        answer = self.sessions.hello(ident, hello, socket_role="view", now=self.now, wall=0.0)
        assert isinstance(answer, Welcome)
        return answer

    def frame(self, ident: bytes = b"a") -> tuple[int, Snap | Delta] | None:
        """Take the frame that is due now, as a socket would that accepts it."""
        session = self.sessions.heard(ident, self.now)
        assert session is not None
        self.now += 1.0
        frame = self.sessions.frame(session, self.now)
        if frame is None:
            return None
        self.sessions.sent(session, frame, self.now)
        assert isinstance(frame.body, (Snap, Delta))
        return frame.seq, frame.body


class Mirror:
    """Client side."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.got: list[int] = []
        """Event sequences accounted for, shown or named in a gap, in order."""
        self.ver = self.eseq = 0

    def apply(self, body: Snap | Delta) -> None:
        if isinstance(body, Snap):
            self.state = dict(body.keys)
            self.got = [event["eseq"] for event in body.events]
        else:
            self.state.update(body.set)
            for key in body.gone:
                self.state.pop(key, None)
            if body.gap is not None:
                self.got += range(body.gap[0], body.gap[1] + 1)
            self.got += [event["eseq"] for event in body.events]
        self.ver, self.eseq = body.ver, body.eseq


def test_a_session_begins_with_a_snapshot_and_goes_on_with_what_changed() -> None:
    model = Model()
    model.table.set("a", 1)
    model.table.set("b", 2)
    model.event("old")
    assert not model.hello().resumed
    seq, snap = model.frame() or pytest.fail("no snapshot")
    assert (seq, snap) == (1, Snap(2, 1, {"a": 1, "b": 2}, [model.ring.newest(1)[0]]))
    assert model.frame() is None
    model.table.set("a", 1)
    assert model.frame() is None, "an equal value is no change"
    model.table.set("a", 3)
    model.table.remove("b")
    seq, delta = model.frame() or pytest.fail("no delta")
    assert (seq, delta) == (2, Delta(4, 1, {"a": 3}, ["b"]))


def test_without_acknowledgement_there_are_two_frames_and_no_more() -> None:
    model = Model()
    model.hello()
    frames = 0
    for value in range(10):
        model.table.set("a", value)
        frames += model.frame() is not None
    assert frames == IN_FLIGHT
    assert model.sessions.next_due() is None
    model.sessions.ack(b"a", 1)
    _, body = model.frame() or pytest.fail("no frame after the ack")
    assert isinstance(body, Delta)
    assert body.set == {"a": 9}, "what was missed comes at once"


@pytest.mark.parametrize("seq", [0, -1, 3, 10**9])
def test_acknowledging_what_was_never_sent_gives_no_credit(seq: int) -> None:
    model = Model()
    model.hello()
    for value in range(3):
        model.table.set("a", value)
        model.frame()
    model.sessions.ack(b"a", seq)
    assert model.frame() is None


def test_an_ack_covers_every_frame_before_it() -> None:
    model = Model()
    model.hello()
    for value in range(2):
        model.table.set("a", value)
        model.frame()
    model.sessions.ack(b"a", 2)
    for value in range(2, 4):
        model.table.set("a", value)
        assert model.frame() is not None


def test_a_refused_frame_is_not_taken_as_sent() -> None:
    model = Model()
    model.table.set("a", 1)
    model.hello()
    (session,) = model.sessions
    assert model.sessions.frame(session, model.now) is not None
    model.sessions.refused(session, model.now)
    assert model.sessions.frame(session, model.now) is None, "not again before the next frame interval"
    seq, body = model.frame() or pytest.fail("never again")
    assert (seq, type(body)) == (1, Snap)


def test_frames_come_no_faster_than_the_client_asked() -> None:
    model = Model()
    model.hello(hello=Hello((1, 1), "slow", fps=2.0))
    (session,) = model.sessions
    frame = model.sessions.frame(session, model.now)
    assert frame is not None
    model.sessions.sent(session, frame, model.now)
    model.table.set("a", 1)
    assert model.sessions.next_due() == model.now + 0.5
    assert model.sessions.frame(session, model.now + 0.49) is None
    assert model.sessions.frame(session, model.now + 0.5) is not None


@pytest.mark.parametrize("fps", [0.0, -5.0, float("nan"), float("inf"), 1e9])
def test_absurd_frame_rates_are_bounded(fps: float) -> None:
    model = Model()
    model.hello(hello=Hello((1, 1), "odd", fps=fps))
    (session,) = model.sessions
    assert 0.1 <= session.fps <= 30.0


def test_globs_choose_keys_and_unwanted_changes_send_nothing() -> None:
    model = Model()
    model.table.set("metric/a", 1)
    model.table.set("run", 1)
    model.hello(hello=Hello((1, 1), "c", fps=30, want=["metric/*", "["]))
    _, snap = model.frame() or pytest.fail("no snapshot")
    assert isinstance(snap, Snap)
    assert list(snap.keys) == ["metric/a"]
    model.table.set("run", 2)
    assert model.frame() is None
    assert model.sessions.next_due() is None, "nothing to wake up for"
    model.table.set("metric/b", 2)
    _, delta = model.frame() or pytest.fail("no delta")
    assert isinstance(delta, Delta)
    assert delta.set == {"metric/b": 2}


def test_a_long_backlog_of_events_comes_whole_in_several_frames() -> None:
    model = Model(ring=3 * DELTA_EVENTS)
    model.hello()
    mirror = Mirror()
    mirror.apply((model.frame() or pytest.fail("no snapshot"))[1])
    for _ in range(2 * DELTA_EVENTS + 7):
        model.event()
    for seq in (1, 2, 3):
        model.sessions.ack(b"a", seq)
        mirror.apply((model.frame() or pytest.fail("no delta"))[1])
    assert mirror.got == list(range(1, 2 * DELTA_EVENTS + 8))


def test_a_client_that_comes_back_gets_what_it_missed() -> None:
    model = Model()
    model.table.set("a", 1)
    model.table.set("b", 1)
    model.event()
    model.hello()
    mirror = Mirror()
    mirror.apply((model.frame() or pytest.fail("no snapshot"))[1])
    model.table.set("a", 2)
    model.table.remove("b")
    model.event()
    again = Hello((1, 1), "c", fps=30, epoch="e1", ver=mirror.ver, eseq=mirror.eseq)
    assert model.hello(b"another connection", again).resumed
    seq, delta = model.frame(b"another connection") or pytest.fail("no delta")
    assert (seq, delta) == (1, Delta(4, 2, {"a": 2}, ["b"], [model.ring.newest(1)[0]]))


def test_resuming_with_nothing_missed_still_sends_a_delta() -> None:
    model = Model()
    model.table.set("a", 1)
    assert model.hello(hello=Hello((1, 1), "c", fps=30, epoch="e1", ver=1, eseq=0)).resumed
    assert model.frame() == (1, Delta(1, 0))
    assert model.frame() is None


@pytest.mark.parametrize("hello", [{"epoch": "e0", "ver": 1}, {"epoch": "e1", "ver": 9}, {"epoch": "e1", "eseq": 5}])
def test_another_epoch_or_a_future_version_starts_anew(hello: dict[str, Any]) -> None:
    model = Model()
    model.table.set("a", 1)
    assert not model.hello(hello=Hello((1, 1), "c", fps=30, **hello)).resumed
    _, snap = model.frame() or pytest.fail("no frame")
    assert isinstance(snap, Snap)


def test_a_version_from_before_forgotten_removals_starts_anew() -> None:
    model = Model()
    for number in range(MAX_TOMBSTONES + 2):
        model.table.set(f"k{number}", 1)
    for number in range(MAX_TOMBSTONES + 1):
        model.table.remove(f"k{number}")
    old = Hello((1, 1), "c", fps=30, epoch="e1", ver=MAX_TOMBSTONES + 2)
    assert not model.hello(hello=old).resumed
    recent = Hello((1, 1), "c", fps=30, epoch="e1", ver=MAX_TOMBSTONES + 3)
    assert model.hello(hello=recent).resumed


@pytest.mark.parametrize(
    ("proto", "ok"), [((1, 1), True), ((0, 5), True), ((2, 3), False), ((0, 0), False), ((3, 1), False)]
)
def test_versions_are_negotiated_and_a_refusal_names_both_ranges(proto: tuple[int, int], ok: bool) -> None:
    model = Model()
    answer = model.sessions.hello(b"a", Hello(proto, "c"), socket_role="view", now=0.0, wall=0.0)
    if ok:
        assert isinstance(answer, Welcome)
        assert answer.proto == 1
    else:
        assert isinstance(answer, Err)
        assert answer.code == "proto"
        assert f"{proto[0]} to {proto[1]}" in answer.why
        assert "1 to 1" in answer.why
        assert len(model.sessions) == 0


def test_control_is_not_to_be_had_on_the_view_socket() -> None:
    model = Model()
    answer = model.sessions.hello(b"a", Hello((1, 1), "c", role="control"), socket_role="view", now=0.0, wall=0.0)
    assert isinstance(answer, Err)
    assert answer.code == "not-control"


def test_silence_ends_a_session_and_any_message_renews_it() -> None:
    model = Model()
    model.hello(b"quiet")
    model.hello(b"talks")
    model.now += LEASE_S / 2
    model.sessions.heard(b"talks", model.now)
    assert [s.ident for s in model.sessions.expire(model.now + LEASE_S / 2 + 0.1)] == [b"quiet"]
    assert model.sessions.heard(b"quiet", model.now) is None


def test_events_that_fell_off_are_named() -> None:
    ring = EventRing(3)
    for _ in range(10):
        ring.add(0.0, "log", "info", "x")
    events, gap = ring.after(2, 100)
    assert gap == (3, 7)
    assert [event["eseq"] for event in events] == [8, 9, 10]
    assert ring.after(7, 100)[1] is None
    assert ring.after(9, 100)[0] == ring.newest(1)
    assert ring.after(10, 100) == ([], None)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=12), st.integers(1, 9))
def test_the_ring_accounts_for_every_event_exactly_once(steps: list[tuple[int, int]], size: int) -> None:
    ring = EventRing(size)
    seen: list[int] = []
    at = 0
    for added, limit in [*steps, (0, 10**6)]:
        for _ in range(added):
            ring.add(0.0, "log", "info", "x")
        events, gap = ring.after(at, limit)
        if gap is not None:
            seen += range(gap[0], gap[1] + 1)
        seen += [event["eseq"] for event in events]
        at = seen[-1] if seen else 0
    assert seen == list(range(1, ring.head + 1))


class Conversation(RuleBasedStateMachine):
    """Sets, removals, events, frames, acks, lost connections and stuck sockets in any order."""

    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(ring=6)
        self.mirrors: dict[bytes, Mirror] = {}
        self.unacked: dict[bytes, list[int]] = {}

    @rule(target=clients)
    def join(self) -> bytes:
        ident = b"c%d" % len(self.mirrors)
        self.mirrors[ident] = Mirror()
        self.unacked[ident] = []
        assert not self.model.hello(ident).resumed
        return ident

    @rule(key=st.sampled_from("abcd"), value=st.integers(0, 3))
    def set(self, key: str, value: int) -> None:
        self.model.table.set(key, value)

    @rule(key=st.sampled_from("abcd"))
    def remove(self, key: str) -> None:
        self.model.table.remove(key)

    @rule(count=st.integers(1, 9))
    def events(self, count: int) -> None:
        for _ in range(count):
            self.model.event()

    @rule(ident=clients)
    def deliver(self, ident: bytes) -> None:
        taken = self.model.frame(ident)
        if taken is not None:
            self.unacked[ident].append(taken[0])
            self.mirrors[ident].apply(taken[1])

    @rule(ident=clients)
    def refuse(self, ident: bytes) -> None:
        session = self.model.sessions.heard(ident, self.model.now)
        assert session is not None
        if self.model.sessions.frame(session, self.model.now) is not None:
            self.model.sessions.refused(session, self.model.now)

    @rule(ident=clients)
    def ack(self, ident: bytes) -> None:
        if self.unacked[ident]:
            self.model.sessions.ack(ident, self.unacked[ident].pop(0))

    @rule(ident=clients)
    def reconnect(self, ident: bytes) -> None:
        mirror = self.mirrors[ident]
        self.model.hello(ident, Hello((1, 1), "c", fps=30, epoch="e1", ver=mirror.ver, eseq=mirror.eseq))
        self.unacked[ident] = []

    @invariant()
    def no_client_has_more_than_its_credit(self) -> None:
        assert all(len(session.in_flight) <= IN_FLIGHT for session in self.model.sessions)

    def teardown(self) -> None:
        truth = self.model.table.snapshot(lambda key: True)
        for ident, mirror in self.mirrors.items():
            for seq in self.unacked[ident]:
                self.model.sessions.ack(ident, seq)
            while (taken := self.model.frame(ident)) is not None:
                mirror.apply(taken[1])
                self.model.sessions.ack(ident, taken[0])
            assert mirror.state == truth
            assert mirror.eseq == self.model.ring.head
            if mirror.got:
                assert mirror.got == list(range(mirror.got[0], self.model.ring.head + 1))


TestConversation = Conversation.TestCase
TestConversation.settings = examples(60, steps=40)


def test_the_trainers_own_line_is_nobody_who_looks() -> None:
    model = Model()
    model.hello(b"a")
    model.hello(b"t", Hello((1, 1), "rltop/test", name="trainer"))
    assert (len(model.sessions), model.sessions.viewers()) == (2, 1)
