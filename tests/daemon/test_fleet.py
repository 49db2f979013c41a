"""Hundreds of producers that connect at one moment, into a real daemon."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import zmq

from rltop.protocol.codec import encode
from rltop.protocol.messages import Record, Source
from tests.daemon.util import Viewer, real_daemon

PRODUCERS = 500


def test_all_ranks_may_start_at_once_and_none_is_lost(tmp_path: Path) -> None:
    with real_daemon(tmp_path, "fleet") as run, closing(Viewer(run)) as viewer:
        context = zmq.Context()
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
        context.destroy(linger=0)
