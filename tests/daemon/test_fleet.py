"""Hundreds of producers that connect at one moment, into a real daemon; and a daemon that does not keep up."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import pytest
import zmq
import zmq.asyncio

from rltop.daemon import server
from rltop.daemon.events import EventRing
from rltop.daemon.sessions import Sessions
from rltop.daemon.state import StateTable
from rltop.protocol.codec import decode, encode
from rltop.protocol.messages import Record, Source
from tests.daemon.util import Viewer, real_daemon

PRODUCERS = 500
RECORDS = 300


def test_all_ranks_may_start_at_once_and_none_is_lost(tmp_path: Path) -> None:
    with real_daemon(tmp_path, "fleet") as run, closing(Viewer(run)) as viewer, ExitStack() as over:
        context = zmq.Context()
        over.callback(context.destroy, linger=0)
        context.max_sockets = PRODUCERS + 8
        sockets = [context.socket(zmq.PUSH) for _ in range(PRODUCERS)]
        for socket in sockets:
            socket.connect(run.sockets["ingest"])
        for step in range(3):
            for rank, socket in enumerate(sockets):
                payload = {"values": {"train/loss": rank / 1000, "perf/step_time": 1.0}, "step": step}
                source = Source("trainer", rank, f"node{rank // 8}", 1000 + rank)
                record = Record(run.name, source, step + 1, time.monotonic(), time.time(), "metrics", payload)
                socket.send_multipart(encode("rec", record, seq=step + 1))
        viewer.hello()
        viewer.until_state(lambda state: state["sources/trainer"]["records"] == 3 * PRODUCERS)
        cell = viewer.state["sources/trainer"]
        assert (cell["count"], cell["lost"], cell["dropped"], cell["malformed"]) == (PRODUCERS, 0, 0, 0)
        viewer.until_state(lambda state: state["ranks/train/loss"]["ranks"] == PRODUCERS)
        assert viewer.state["ranks/train/loss"]["max_rank"] == f"trainer/{PRODUCERS - 1}"
        assert len(viewer.state) < 200


async def test_what_a_daemon_has_no_time_for_waits_at_the_producer_and_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEARTBEAT_MS", 20)
    monkeypatch.setattr(server, "HEARTBEAT_TIMEOUT_MS", 50)
    context, others = zmq.asyncio.Context(), zmq.Context()
    paths = {name: tmp_path / f"{name}.sock" for name in ("ingest", "view")}
    sessions = Sessions(StateTable(), EventRing(), epoch="e", run="r", server="s")
    backend = cast(server.Backend, None)  # it has no time
    busy = server.Server(
        context, paths, sessions=sessions, backend=backend, epoch="e", clock=time.monotonic, wall=time.time
    )
    busy.bind()
    assert context.get(server.ZERO_COPY_RECV) == 0  # else a record that waits holds the buffer that it came in
    with closing(others.socket(zmq.PUSH)) as producer:
        producer.sndhwm = 1000
        monitor = producer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        producer.connect(f"ipc://{paths['ingest']}")
        for step in range(RECORDS):
            payload = {"values": {f"name-{index}": 1.0 for index in range(200)}, "step": step}
            record = Record("r", Source("trainer", 0, "h", 1), step + 1, 0.0, 0.0, "metrics", payload)
            producer.send_multipart(encode("rec", record), flags=zmq.NOBLOCK)
        assert not monitor.poll(500), "ZeroMQ hung up on a producer whose records nobody took yet"
        pull: zmq.Socket[bytes] = zmq.Socket.shadow(busy._sockets["ingest"].underlying)
        taken = [decode(pull.recv_multipart()).body.seq for _ in range(RECORDS)]
        assert taken == list(range(1, RECORDS + 1))
        producer.disable_monitor()
        monitor.close()
    busy.close()
    context.destroy(linger=0)
    others.destroy(linger=0)
