"""A client written only from docs/protocol.md, with nothing of rltop in it, drives a real daemon."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import msgpack
import zmq

from tests.daemon.util import real_daemon


class SpecClient:
    """The 60 lines."""

    def __init__(self, address: str, role: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.role, self.number, self.epoch, self.seq, self.ver, self.eseq = role, 0, "", 0, 0, 0
        self.state: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.ticks = 0

    def hello(self) -> dict[str, Any]:
        resume = {"epoch": self.epoch, "ver": self.ver, "eseq": self.eseq}
        welcome = self.ask("hello", {"proto": [1, 1], "client": "spec/1", "role": self.role, "fps": 20, **resume})
        self.seq = 0
        return welcome

    def send(self, kind: str, body: dict[str, Any], ident: str = "") -> None:
        self.socket.send_multipart([b"RL1", msgpack.packb({"v": 1, "t": kind, "id": ident}), msgpack.packb(body)])

    def ask(self, kind: str, body: dict[str, Any], ident: str = "") -> dict[str, Any]:
        self.number += 1
        ident = ident or str(self.number)
        self.send(kind, body, ident)
        while True:
            header, answer = self.receive()
            if header.get("re") == ident:
                return {"t": header["t"], **answer}

    def receive(self) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self.socket.poll(20_000), "the daemon is silent"
        magic, raw_header, raw_body, *blobs = self.socket.recv_multipart()
        assert magic == b"RL1"
        header, body = msgpack.unpackb(raw_header), msgpack.unpackb(raw_body)
        self.epoch = header["epoch"]
        if header["t"] in ("snap", "delta"):
            assert header["seq"] == self.seq + 1
            self.seq, self.ver, self.eseq = header["seq"], body["ver"], body["eseq"]
            if header["t"] == "snap":
                self.state, self.events = body["keys"], body["events"]
            else:
                self.state.update(body.get("set", {}))
                for key in body.get("gone", []):
                    self.state.pop(key, None)
                self.events += body.get("events", [])
            self.send("ack", {"seq": self.seq})
        self.ticks += header["t"] == "tick"
        return header, {**body, "blobs": blobs}

    def until(self, done: Any) -> None:
        while not done(self):
            self.receive()

    def curve(self, key: str, **query: Any) -> dict[str, tuple[float, ...]]:
        answer = self.ask("series?", {"keys": [key], **query})
        column, n = answer["cols"][key], answer["cols"][key]["n"]
        kinds = {"step": "d", "min": "f", "max": "f", "last": "f", "nan": "I"}
        return {name: struct.unpack(f"<{n}{kind}", answer["blobs"][column[name]]) for name, kind in kinds.items()}


def push_records(address: str, count: int) -> None:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(address)
    source = {"role": "trainer", "rank": 0, "host": "n1", "pid": 7}
    for step in range(count):
        value = float("nan") if step == 50 else float(step)
        payload = {"values": {"rollout/raw_reward": value}, "step": step, "axis": "rollout", "unheard of": [1]}
        record = {"run": "t-1", "source": source, "seq": step + 1, "mono": time.monotonic(), "wall": time.time()}
        body = {**record, "kind": "metrics", "payload": payload, "future key": None}
        push.send_multipart([b"RL1", msgpack.packb({"v": 1, "t": "rec", "seq": step + 1}), msgpack.packb(body)])
    push.close(linger=5000)
    context.term()


def test_sixty_lines_written_from_the_specification_drive_a_daemon(tmp_path: Path) -> None:
    with real_daemon(tmp_path) as run:
        viewer, operator = SpecClient(run.sockets["view"], "view"), SpecClient(run.sockets["ctl"], "control")

        welcome = viewer.hello()
        assert (welcome["t"], welcome["proto"], welcome["run"], welcome["resumed"]) == ("welcome", 1, "t-1", False)
        viewer.until(lambda c: c.state)
        assert viewer.state["run"]["state"] == "waiting"

        push_records(run.sockets["ingest"], 100)
        viewer.until(lambda c: c.state.get("metric/rollout/raw_reward", {}).get("step") == 99)
        assert viewer.state["metric/rollout/raw_reward"]["nan"] == 1
        curve = viewer.curve("rollout/raw_reward", buckets=10)
        assert len(curve["step"]) == 10
        assert (curve["step"][-1], curve["max"][-1], curve["min"][0], sum(curve["nan"])) == (99.0, 99.0, 0.0, 1)
        assert viewer.curve("rollout/raw_reward", lo=10, hi=12, buckets=10)["last"] == (10.0, 11.0, 12.0)

        assert operator.hello()["role"] == "control"
        note = operator.ask("cmd", {"name": "note", "args": {"text": "hello from the page"}}, "id-1")
        assert note == operator.ask("cmd", {"name": "note", "args": {"text": "again"}}, "id-1")
        viewer.until(lambda c: any("hello from the page" in event["text"] for event in c.events))
        assert viewer.ask("cmd", {"name": "note", "args": {"text": "x"}}, "id-2")["code"] == "not-control"
        assert viewer.ask("dance", {})["code"] == "unsupported"
        assert viewer.ask("ping", {})["t"] == "pong"
        page = viewer.ask("events?", {"kinds": ["op"], "text": "PAGE"})
        assert [event["kind"] for event in page["events"]] == ["op"]
        viewer.until(lambda c: c.ticks)

        assert viewer.hello()["resumed"] is True
        viewer.until(lambda c: c.seq == 1)
        for client in (viewer, operator):
            client.send("bye", {"reason": "done"})
            client.socket.close()
            client.context.term()
