"""The door of the TCP ingest: who is let in, and what is said of those who are not."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from rltop.daemon import auth
from rltop.daemon.auth import Announcer, Door

KEY, OTHER = b"k" * 32, b"o" * 32


class House:
    """A door, the peers of its descriptors, and what it hung up on."""

    def __init__(self, *, max_connections: int = 100, max_handshakes: int = 100) -> None:
        self.peers: dict[int, str] = {}
        self.hung_up: list[int] = []
        self.door = Door(
            known=lambda: {KEY: "trainer"},
            peer_of=lambda fd: self.peers.get(fd, ""),
            hang_up=self.hung_up.append,
            max_connections=max_connections,
            max_handshakes=max_handshakes,
        )

    def accept(self, fd: int, peer: str = "10.0.0.7") -> None:
        self.peers[fd] = peer
        self.door.monitor(auth.ACCEPTED, fd)

    def ask(
        self, *, key: bytes = KEY, domain: str = auth.DOMAIN, mechanism: bytes = b"CURVE", ip: str = "10.0.0.7"
    ) -> Any:
        return self.door.zap([b"1.0", b"1", domain.encode(), ip.encode(), b"", mechanism, key])

    def told(self, events: Iterable[tuple[int, int]]) -> None:
        for event, value in events:
            self.door.monitor(event, value)

    def refusals(self) -> dict[tuple[str, str], int]:
        return self.door.drain()[0]


def test_the_numbers_are_zeromqs() -> None:
    assert auth.EVENTS == (
        zmq.Event.ACCEPTED | zmq.Event.ACCEPT_FAILED | zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED
        | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_SUCCEEDED
        | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
    )  # fmt: skip


def test_a_known_key_comes_in_under_its_name() -> None:
    house = House()
    house.accept(5)
    assert house.ask() == [b"1.0", b"1", b"200", b"OK", b"trainer", b""]
    house.told([(auth.SUCCEEDED, 0)])
    assert (house.door.connections, house.door.accepted, house.door.refused) == (1, 1, 0)
    house.told([(auth.DISCONNECTED, 5)])
    assert house.door.connections == 0
    assert house.door.drain() == ({}, {("10.0.0.7", "trainer"): 1})


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"key": OTHER}, auth.UNKNOWN_KEY),
        ({"domain": "elsewhere"}, auth.WRONG_DOMAIN),
        ({"domain": ""}, auth.WRONG_DOMAIN),
        ({"mechanism": b"PLAIN"}, auth.WRONG_MECHANISM),
        ({"mechanism": b"NULL"}, auth.WRONG_MECHANISM),
    ],
)
def test_whoever_may_not_is_refused_and_told_once(how: dict[str, Any], why: str) -> None:
    house = House()
    house.accept(5)
    assert house.ask(**how)[2] == b"400"
    house.told([(auth.FAILED_AUTH, 400), (auth.DISCONNECTED, 5)])
    assert house.refusals() == {("10.0.0.7", why): 1}
    assert house.door.connections == 0


@given(st.lists(st.binary(max_size=40), max_size=9))
def test_no_zap_request_lets_anybody_in_but_the_known_key(frames: list[bytes]) -> None:
    reply = House().door.zap(frames)
    assert (reply is None) == (len(frames) < 2)
    assert reply is None or reply[2] == b"400"


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        ((auth.FAILED_PROTOCOL, 0x11000001), auth.WRONG_SERVER_KEY),
        ((auth.FAILED_PROTOCOL, 0x11000002), auth.PLAIN),
        ((auth.FAILED_NO_DETAIL, errno.EPIPE), auth.LEFT),
        ((auth.FAILED_NO_DETAIL, errno.EAGAIN), auth.SILENT),
        (None, auth.NOT_ZEROMQ),
    ],
)
def test_a_connection_that_closes_is_told_with_the_failure_before_it(failed: tuple[int, int] | None, why: str) -> None:
    house = House()
    house.accept(5, "10.0.0.5")
    house.accept(6, "10.0.0.6")
    house.told([failed] if failed else [])
    house.told([(auth.DISCONNECTED, 6)])
    assert house.refusals() == {("10.0.0.6", why): 1}
    house.told([(auth.DISCONNECTED, 5)])
    assert house.refusals() == {("10.0.0.5", auth.NOT_ZEROMQ): 1}


def test_a_success_belongs_to_the_address_that_was_let_in() -> None:
    house = House()
    house.accept(5, "10.0.0.66")
    house.accept(6, "10.0.0.7")
    house.ask()
    house.told([(auth.SUCCEEDED, 0), (auth.DISCONNECTED, 6), (auth.DISCONNECTED, 5)])
    assert house.refusals() == {("10.0.0.66", auth.NOT_ZEROMQ): 1}


def test_a_connection_that_was_gone_too_fast_has_no_address() -> None:
    house = House()
    house.accept(5, "")
    house.told([(auth.FAILED_NO_DETAIL, errno.EPIPE), (auth.DISCONNECTED, 5)])
    assert house.refusals() == {(auth.UNKNOWN_PEER, auth.LEFT): 1}


def test_connections_and_handshakes_are_limited_and_a_flood_keeps_no_producer_out() -> None:
    house = House(max_handshakes=3)
    for fd in range(10, 15):
        house.accept(fd, "10.0.0.66")
    assert house.hung_up == [10, 11], "the oldest that said nothing"
    house.told([(auth.DISCONNECTED, 10), (auth.DISCONNECTED, 11)])
    assert house.refusals() == {("10.0.0.66", auth.SILENT): 2}
    house = House(max_connections=2)
    for fd in (10, 11, 12):
        house.accept(fd)
        house.ask()
        if fd < 12:
            house.told([(auth.SUCCEEDED, 0)])
    assert house.hung_up == [12]
    house.told([(auth.FAILED_NO_DETAIL, errno.EPIPE), (auth.DISCONNECTED, 12)])
    assert house.refusals() == {("10.0.0.7", auth.TOO_MANY): 1}


def test_a_closed_socket_forgets_its_connections() -> None:
    house = House()
    house.accept(5)
    house.told([(auth.SUCCEEDED, 0), (auth.STOPPED, 0)])
    assert house.door.connections == 0
    assert house.refusals() == {}


def test_a_million_addresses_do_not_fill_the_memory() -> None:
    house = House()
    for number in range(auth.MAX_PLACES + 500):
        house.door.refuse(f"10.{number}", auth.LEFT)
    counts = house.refusals()
    assert len(counts) == auth.MAX_PLACES + 1
    assert counts[auth.MANY, auth.LEFT] == 500
    assert house.door.refused == auth.MAX_PLACES + 500


class Told(list[dict[str, Any]]):
    """Events that the announcer told."""

    def __call__(self, kind: str, level: str, text: str, source: str, **more: Any) -> None:
        self.append({"kind": kind, "level": level, "text": text, "source": source, **more})


def test_the_first_refusal_is_told_at_once_and_then_one_a_period_with_the_count() -> None:
    told = Told()
    announcer = Announcer(told, period_s=60)
    place = ("10.0.0.7", auth.LEFT)
    for second in range(120):
        announcer.refusals(1000.0 + second, {place: 1})
    assert [event["count"] for event in told] == [1, 60]
    announcer.refusals(1120.0, {})
    assert sum(event["count"] for event in told) == 120, "none is lost"
    assert told[0] == {
        "kind": "refused", "level": "warn", "source": "ingest", "text": f"refused 10.0.0.7: {auth.LEFT}",
        "peer": "10.0.0.7", "reason": auth.LEFT, "count": 1,
    }  # fmt: skip
    assert told[1]["text"].endswith("(60 times)")


def test_many_places_at_once_are_few_events() -> None:
    told = Told()
    Announcer(told, max_per_drain=5).refusals(0.0, {(f"10.0.0.{i}", auth.LEFT): 2 for i in range(50)})
    assert len(told) == 6
    assert sum(event["count"] for event in told) == 100
