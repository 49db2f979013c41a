"""The model daemon behind real sockets, as a run that `find_run` finds. A thread; nothing of `rltop.daemon`."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from rltop.protocol.codec import WireError, decode
from rltop.runs import RunInfo, acquire_lock, make_run_dir, read_run, socket_paths, write_run_json
from tests.client.model import ModelDaemon

TICK_MS = 500


class SpecDaemon:
    """Serves one run to any number of viewers; every viewer gets its own `ModelDaemon` with the same epoch."""

    def __init__(self, run_dir: Path, fill: Callable[[ModelDaemon], None]) -> None:
        self.run_dir = run_dir
        self._fill = fill
        self._epoch = ModelDaemon().epoch
        self._viewers: dict[bytes, ModelDaemon] = {}
        self._todo: queue.SimpleQueue[Callable[[ModelDaemon], None] | None] = queue.SimpleQueue()
        self.heard: list[str] = []
        """Types of the messages that viewers sent."""
        self._thread = threading.Thread(target=self._serve, name="spec-daemon")
        self._bound = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self._bound.wait()

    def change(self, what: Callable[[ModelDaemon], None]) -> None:
        """Change the state; every viewer gets a delta."""
        self._todo.put(what)

    def stop(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _serve(self) -> None:
        context = zmq.Context()
        paths = socket_paths(self.run_dir)
        routers = []
        for name in ("view", "ctl"):
            router = context.socket(zmq.ROUTER)
            router.bind(f"ipc://{paths[name]}")
            routers.append(router)
        write_run_json(self.run_dir, {"sockets": {name: f"ipc://{path}" for name, path in paths.items()}})
        self._bound.set()
        try:
            self._loop(routers)
        finally:
            context.destroy(linger=0)

    def _loop(self, routers: list[zmq.Socket[bytes]]) -> None:
        poller = zmq.Poller()
        homes: dict[bytes, zmq.Socket[bytes]] = {}
        for router in routers:
            poller.register(router, zmq.POLLIN)
        quiet = 0
        while True:
            ready = dict(poller.poll(20))
            for router in routers:
                if router in ready:
                    peer, *frames = router.recv_multipart()
                    homes[peer] = router
                    for answer in self._answer(peer, frames):
                        router.send_multipart([peer, *answer])
            quiet += 20
            if quiet >= TICK_MS:
                quiet = 0
                for peer, viewer in self._viewers.items():
                    homes[peer].send_multipart([peer, *viewer.tick()])
            while not self._todo.empty():
                change = self._todo.get()
                if change is None:
                    return
                change_fill = self._fill
                self._fill = _both(change_fill, change)
                for peer, viewer in self._viewers.items():
                    change(viewer)
                    homes[peer].send_multipart([peer, *viewer.delta()])

    def _answer(self, peer: bytes, frames: list[bytes]) -> list[list[bytes]]:
        try:
            message = decode(frames)
        except WireError:
            return []
        self.heard.append(message.header.t)
        if message.header.t == "hello":
            self._viewers[peer] = ModelDaemon(epoch=self._epoch)
            self._fill(self._viewers[peer])
        return (self._viewers.get(peer) or ModelDaemon()).answer(message)


def _both(first: Callable[[ModelDaemon], None], second: Callable[[ModelDaemon], None]) -> Callable[[ModelDaemon], None]:
    def run(model: ModelDaemon) -> None:
        first(model)
        second(model)

    return run


def small_run(model: ModelDaemon) -> None:
    """A state with something of everything."""
    model.set(
        "run",
        {
            "name": "cedar-1",
            "framework": "rltop",
            "mode": "full",
            "state": "running",
            "started": 900.0,
            "ended": None,
            "backend": "megatron-core 0.16.1",
            "num_rollout": 10,
            "injected_faults": ["nan-grad@1"],
            "stand_ins": ["the engine is rltop's CPU engine, not SGLang"],
        },
    )
    model.set("phase", {"name": "train", "rollout_id": 3, "since": 990.0, "median_s": 4.5, "open": ["train"]})
    model.set("metric/rollout/raw_reward", {"step": 3, "value": 0.5, "t": 999.0, "axis": "rollout", "nan": 0})
    model.set("metric/train/grad_norm", {"step": 3, "value": float("nan"), "t": 999.0, "axis": "train", "nan": 2})
    model.set(
        "engine/0",
        {
            "id": "0",
            "kind": "cpu",
            "state": "HEALTHY",
            "running": 4,
            "queued": None,
            "tokens_per_s": 812.5,
            "seen": 999.0,
        },
    )
    model.set(
        "check/kl.on-policy", {"id": "kl.on-policy", "status": "pass", "value": 0.0, "threshold": 1e-8, "cause": ""}
    )
    model.set(
        "check/train.nan",
        {
            "id": "train.nan",
            "status": "fail",
            "value": 2,
            "threshold": 0,
            "cause": "grad_norm is \x1b[31mNaN\nat step 3",
        },
    )
    model.set("checks", {"root_causes": ["train.nan"], "summary": {"pass": 1, "fail": 1}})
    model.event("step 3 done")


@contextlib.contextmanager
def spec_daemon(
    name: str = "cedar-1", fill: Callable[[ModelDaemon], None] = small_run
) -> Iterator[tuple[SpecDaemon, RunInfo]]:
    """A living run; RLTOP_DIR must point to a folder of the test."""
    run_dir = make_run_dir(name)
    lock = acquire_lock(run_dir)
    daemon = SpecDaemon(run_dir, fill)
    daemon.start()
    try:
        run = read_run(run_dir)
        assert run is not None
        yield daemon, run
    finally:
        daemon.stop()
        os.close(lock)
