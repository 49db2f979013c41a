"""A real daemon in a temporary directory, and a plain blocking client for it. For any test that needs one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from rltop import reporter_link
from rltop.daemon import spawn
from rltop.protocol.codec import Message, decode, encode
from rltop.protocol.messages import (
    PROTO_MAX,
    PROTO_MIN,
    Accepted,
    Ack,
    Bye,
    Command,
    Delta,
    Err,
    EventsAnswer,
    EventsQuery,
    Hello,
    Record,
    Rejected,
    Role,
    SeriesAnswer,
    SeriesQuery,
    Snap,
    Source,
    Tick,
    Welcome,
)
from rltop.reporter_link import Link
from rltop.runs import RunInfo

PATIENCE_S = 20.0
"""How long a test waits for something that must happen; it is not a measure of anything."""


@contextmanager
def real_daemon(
    root: Path,
    name: str = "t-1",
    *,
    trainer: list[str] | None = None,
    env: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    ingest_tcp: str = "",
    module: str = "rltop.daemon",
) -> Iterator[RunInfo]:
    """A daemon process over `root`/runs/`name`, stopped at the end. `root` stands for RLTOP_DIR."""
    with _rltop_dir(root):
        run = spawn.start_daemon(name, trainer=trainer, env=env, config=config, ingest_tcp=ingest_tcp, module=module)
        try:
            yield run
        finally:
            spawn.stop_daemon(run)


@contextmanager
def _rltop_dir(root: Path) -> Iterator[None]:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLTOP_DIR", str(root))
        yield


def wait_for(what: Callable[[], Any], why: str = "") -> Any:
    """The first true result of `what`; fails after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, why or "it never happened"
        time.sleep(0.01)
    return found


class Producer:
    """Sends records as a reporter would, but with a sequence of the test's choice."""

    def __init__(self, run: RunInfo, *, role: str = "trainer", rank: int = 0, pid: int = 1, host: str = "elsewhere"):
        self.run = run.name
        self.source = Source(role, rank, host, pid)
        self.seq = 0
        self._link = Link(run.sockets["ingest"], {})

    def send(self, kind: str, payload: dict[str, Any], *, seq: int | None = None) -> None:
        """One record."""
        self.seq = self.seq + 1 if seq is None else seq
        record = Record(self.run, self.source, self.seq, time.monotonic(), time.time(), kind, payload)
        self.raw(encode("rec", record, seq=self.seq))

    def metrics(self, step: int, **values: float) -> None:
        """A metrics record; `__` in a name stands for `/`."""
        named = {name.replace("__", "/"): value for name, value in values.items()}
        self.send("metrics", {"values": named, "step": step, "axis": "rollout"})

    def raw(self, frames: list[bytes]) -> None:
        """Any frames at all."""
        self._link.waiting.append(frames)
        wait_for(self._handed_over, "the daemon takes nothing")

    def _handed_over(self) -> bool:
        self._link.flush()
        return not self._link.waiting

    def close(self) -> None:
        """Deliver what is queued and close."""
        import pytest

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reporter_link, "CLOSE_S", PATIENCE_S)
            self._link.close()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Viewer:
    """A blocking client that mirrors the state and acknowledges every frame (unless told not to)."""

    def __init__(self, run: RunInfo, role: Role = "view", *, name: str = "", rcvhwm: int = 1000):
        self.state: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.gaps: list[tuple[int, int]] = []
        self.frames: list[str] = []
        self.tick: Tick | None = None
        self.ver = self.eseq = self.seq = 0
        self.epoch = ""
        self.acking = True
        self.welcome: Welcome | None = None
        self.bye: Bye | None = None
        self._role: Role = role
        self._name = name
        self._ids = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvhwm = rcvhwm
        self._socket.connect(run.sockets["ctl" if role == "control" else "view"])

    def hello(self, *, resume: bool = False, **fields: Any) -> Welcome:
        """Open the session and wait for the welcome."""
        if resume:
            fields = {"epoch": self.epoch, "ver": self.ver, "eseq": self.eseq, **fields}
        body = Hello((PROTO_MIN, PROTO_MAX), "test", self._role, self._name, **{"fps": 30.0, **fields})
        answer = self.ask("hello", body)
        assert isinstance(answer.body, Welcome), answer.body
        self.welcome, self.epoch, self.seq = answer.body, answer.header.epoch, 0
        return answer.body

    def send(self, tag: str, body: msgspec.Struct, *, message_id: str = "") -> None:
        """Send one message."""
        self._socket.send_multipart(encode(tag, body, id=message_id))

    def raw(self, frames: list[bytes]) -> None:
        """Any frames at all."""
        self._socket.send_multipart(frames)

    def ask(self, tag: str, body: msgspec.Struct, *, message_id: str = "") -> Message:
        """Send a request and wait for its answer; frames that come first are applied."""
        self._ids += 1
        message_id = message_id or f"q{self._ids}"
        self.send(tag, body, message_id=message_id)
        return self.until(lambda message: message.header.re == message_id)

    def series(self, keys: list[str], **query: Any) -> tuple[SeriesAnswer, tuple[bytes, ...]]:
        """A series query."""
        answer = self.ask("series?", SeriesQuery(keys, **query))
        assert isinstance(answer.body, SeriesAnswer), answer.body
        return answer.body, answer.blobs

    def event_page(self, **query: Any) -> EventsAnswer:
        """An events query."""
        answer = self.ask("events?", EventsQuery(**query)).body
        assert isinstance(answer, EventsAnswer), answer
        return answer

    def command(self, name: str, *, message_id: str = "", **fields: Any) -> Accepted | Rejected | Err:
        """A command and its answer."""
        answer = self.ask("cmd", Command(name, **fields), message_id=message_id).body
        assert isinstance(answer, (Accepted, Rejected, Err)), answer
        return answer

    def until(self, matches: Callable[[Message], bool], *, patience_s: float = PATIENCE_S) -> Message:
        """Apply messages until one matches; returns it."""
        deadline = time.monotonic() + patience_s
        while True:
            message = self.receive(max(0.0, deadline - time.monotonic()))
            assert message is not None, f"waited in vain; last frames {self.frames[-5:]}, state {list(self.state)}"
            if matches(message):
                return message

    def until_state(
        self, matches: Callable[[dict[str, Any]], Any], *, patience_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Apply messages until the mirrored state matches; a key that is not there yet is no match."""

        def matched() -> bool:
            try:
                return bool(matches(self.state))
            except KeyError:
                return False

        if not matched():
            self.until(lambda message: matched(), patience_s=patience_s)
        return self.state

    def until_event(self, **fields: Any) -> dict[str, Any]:
        """Apply messages until an event with these fields was seen; returns the first such."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self.events if all(e.get(k) == v for k, v in fields.items())), None)

        if found() is None:
            self.until(lambda message: found() is not None)
        event = found()
        assert event is not None
        return event

    def receive(self, timeout_s: float = PATIENCE_S) -> Message | None:
        """Take one message, None when none comes in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        message = decode(self._socket.recv_multipart())
        self._apply(message)
        return message

    def _apply(self, message: Message) -> None:
        body = message.body
        self.frames.append(message.header.t)
        if isinstance(body, Tick):
            self.tick = body
        elif isinstance(body, Bye):
            self.bye = body
        elif isinstance(body, (Snap, Delta)):
            assert message.header.seq == self.seq + 1, (message.header.seq, self.seq)
            self.seq = message.header.seq
            if isinstance(body, Snap):
                self.state, self.events = dict(body.keys), list(body.events)
            else:
                self.state.update(body.set)
                for key in body.gone:
                    self.state.pop(key, None)
                if body.gap is not None:
                    self.gaps.append(body.gap)
                self.events += body.events
            self.ver, self.eseq = body.ver, body.eseq
            if self.acking:
                self.send("ack", Ack(self.seq))

    def close(self) -> None:
        """Close without a goodbye."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
