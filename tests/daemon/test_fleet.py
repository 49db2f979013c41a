"""Hundreds of producers that connect at one moment, into a real daemon; and a daemon that does not keep up."""

from __future__ import annotations

import socket
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
MOST_WAIT = 256
"""Records of a producer that a daemon may keep while it is behind: for 1,024 of them that is some 250 MB."""


def test_all_ranks_may_start_at_once_and_none_is_lost(tmp_path: Path) -> None:
    with real_daemon(tmp_path, "fleet") as run, closing(Viewer(run)) as viewer, ExitStack() as over:
        context = zmq.Context()
        over.callback(context.destroy, linger=0)
        context.max_sockets = PRODUCERS + 8
        sockets = [context.socket(zmq.PUSH) for _ in range(PRODUCERS)]
        for one in sockets:
            one.connect(run.sockets["ingest"])
        for step in range(3):
            for rank, one in enumerate(sockets):
                payload = {"values": {"train/loss": rank / 1000, "perf/step_time": 1.0}, "step": step}
                source = Source("trainer", rank, f"node{rank // 8}", 1000 + rank)
                record = Record(run.name, source, step + 1, time.monotonic(), time.time(), "metrics", payload)
                one.send_multipart(encode("rec", record, seq=step + 1))
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
    payload = {"values": {f"name-{index}": 1.0 for index in range(200)}, "step": 1}
    source = Source("trainer", 0, "h", 1)
    size = sum(map(len, encode("rec", Record("r", source, 100, 0.0, 0.0, "metrics", payload))))
    with closing(others.socket(zmq.PUSH)) as producer, socket.socket(socket.AF_UNIX) as unix:
        producer.sndhwm = 16
        monitor = producer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        producer.connect(f"ipc://{paths['ingest']}")
        sent, quiet = 0, 0
        while sent < 4 * MOST_WAIT and quiet < 10:
            record = Record("r", source, sent + 1, 0.0, 0.0, "metrics", payload)
            try:
                producer.send_multipart(encode("rec", record), flags=zmq.NOBLOCK)
                sent, quiet = sent + 1, 0
            except zmq.Again:
                quiet += not producer.poll(50, zmq.POLLOUT)
        assert not monitor.poll(0), "ZeroMQ hung up on a producer whose records nobody took yet"
        kernel = unix.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert (sent - producer.sndhwm - MOST_WAIT) * size < kernel + 65_536, "more than the mark waits in the daemon"
        pull: zmq.Socket[bytes] = zmq.Socket.shadow(busy._sockets["ingest"].underlying)
        taken = [decode(pull.recv_multipart()).body.seq for _ in range(sent)]
        assert taken == list(range(1, sent + 1))
        producer.disable_monitor()
        monitor.close()
    busy.close()
    context.destroy(linger=0)
    others.destroy(linger=0)
