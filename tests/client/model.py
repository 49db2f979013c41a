"""A daemon in memory, written from `docs/protocol.md`: a versioned table, an event ring, one viewer's frames."""

from __future__ import annotations

import random
import struct
from collections import deque
from typing import Any

from rltop.protocol.codec import Message, decode, encode
from rltop.protocol.messages import (
    PROTO_MAX,
    Accepted,
    Command,
    Delta,
    Err,
    EventsAnswer,
    EventsQuery,
    Hello,
    Ping,
    SeriesAnswer,
    SeriesQuery,
    Snap,
    Tick,
    Welcome,
)


class ModelDaemon:
    """State of one run and the frames that one viewer gets. Answers are frames, ready for a socket or a pipe."""

    def __init__(self, *, ring: int = 50, epoch: str = "") -> None:
        self.epoch = epoch or f"{random.getrandbits(32):08x}"
        self.ver = 0
        self.table: dict[str, tuple[Any, int]] = {}
        self.removed: dict[str, int] = {}
        self.ring: deque[dict[str, Any]] = deque(maxlen=ring)
        self.eseq = 0
        self.seq = 0
        self.sent_ver = 0
        self.sent_eseq = 0
        self.said_hello = False
        self.commands: dict[str, Accepted] = {}

    # ---------------------------------------------------------------- what happens in the run

    def set(self, key: str, value: Any) -> None:
        self.ver += 1
        self.table[key] = (value, self.ver)
        self.removed.pop(key, None)

    def remove(self, key: str) -> None:
        if self.table.pop(key, None) is not None:
            self.ver += 1
            self.removed[key] = self.ver

    def event(self, text: str) -> None:
        self.eseq += 1
        event = {"eseq": self.eseq, "t": 0.0, "kind": "log", "level": "info", "text": text, "source": "trainer/0"}
        self.ring.append(event)

    def truth(self) -> dict[str, Any]:
        return {key: value for key, (value, _) in self.table.items()}

    # ---------------------------------------------------------------- what the viewer gets

    def welcome(self, hello: Hello | None = None) -> list[list[bytes]]:
        """Welcome and the first frame: a delta when `hello` can be resumed, else a snapshot."""
        self.said_hello = True
        self.seq = 0
        resumed = hello is not None and hello.epoch == self.epoch and hello.epoch != ""
        body = Welcome(PROTO_MAX, "cedar-1", "rltop/test", 1000.0, "view", resumed=resumed, limits={"lease_s": 10})
        welcome = encode("welcome", body, epoch=self.epoch)
        if resumed:
            assert hello is not None
            self.sent_ver, self.sent_eseq = hello.ver, hello.eseq
            return [welcome, self.delta()]
        self.seq = 1
        self.sent_ver, self.sent_eseq = self.ver, self.eseq
        snap = Snap(self.ver, self.eseq, self.truth(), list(self.ring)[-200:])
        return [welcome, encode("snap", snap, seq=1, epoch=self.epoch)]

    def delta(self) -> list[bytes]:
        """Everything that changed since the last frame."""
        self.seq += 1
        changed = {key: value for key, (value, ver) in self.table.items() if ver > self.sent_ver}
        gone = [key for key, ver in self.removed.items() if ver > self.sent_ver]
        events = [event for event in self.ring if event["eseq"] > self.sent_eseq]
        first = events[0]["eseq"] if events else self.eseq + 1
        gap = (self.sent_eseq + 1, first - 1) if first > self.sent_eseq + 1 else None
        self.sent_ver, self.sent_eseq = self.ver, self.eseq
        body = Delta(self.ver, self.eseq, changed, gone, events, gap)
        return encode("delta", body, seq=self.seq, epoch=self.epoch)

    def tick(self) -> list[bytes]:
        return encode("tick", Tick(1001.0, 0.1, {"trainer/0": 0.5}, 1), epoch=self.epoch)

    def answer(self, message: Message) -> list[list[bytes]]:
        """Frames in answer to one message of the viewer."""
        header = message.header
        if not self.said_hello and header.t != "hello":
            return [encode("err", Err("hello-first", "say hello"), re=header.id, epoch=self.epoch)]
        match message.body:
            case Hello() as hello:
                return self.welcome(hello)
            case SeriesQuery() as query:
                known = [key for key in query.keys if key == "rollout/raw_reward"]
                cols = {key: {"n": 2, "step": 0, "min": 1, "max": 2, "last": 1, "nan": 3} for key in known}
                blobs = [
                    struct.pack("<2d", 0.0, 1.0),
                    struct.pack("<2f", 0.25, float("nan")),
                    struct.pack("<2f", 0.5, float("nan")),
                    struct.pack("<2I", 0, 7),
                ]
                body = SeriesAnswer(cols, [key for key in query.keys if key not in known])
                return [encode("series", body, blobs=blobs, re=header.id, epoch=self.epoch)]
            case EventsQuery() as query:
                found = [event for event in self.ring if query.text in event["text"]]
                page = EventsAnswer(found[-query.limit :], more=len(found) > query.limit)
                return [encode("events", page, re=header.id, epoch=self.epoch)]
            case Command():
                accepted = self.commands.setdefault(header.id, Accepted(f"op-{len(self.commands) + 1}"))
                return [encode("accepted", accepted, re=header.id, epoch=self.epoch)]
            case Ping():
                return [encode("pong", Ping(), epoch=self.epoch)]
            case _ if header.id:  # a question that came into the protocol after it was written
                why = f"unknown message type {header.t!r}"
                return [encode("err", Err("unsupported", why), re=header.id, epoch=self.epoch)]
            case _:
                return []


def messages(frames: list[list[bytes]]) -> list[Message]:
    """Frames, decoded."""
    return [decode(each) for each in frames]
