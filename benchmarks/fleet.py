"""A fleet of producers into one real daemon: `python -m benchmarks.fleet`

1,024 sources report 20 metrics a second each. Some are real processes with a `rltop.Reporter` each, the rest sockets of
a few processes that send what a reporter sends (a connection, a source and a sequence each): the table says how many
of each. All connect at the same moment, and all report at the same moments: what a step of a large run looks like.

Measured for half a minute or more: the daemon's loop lag (every 10 ms, and the worst of every second as its own ticks
tell it), how much of it can be its own work (`benchmarks.fleet_daemon`), its longest callbacks, how long it takes to
answer a viewer's ping, records lost and dropped, memory over time, CPU time per record beside a bare pyzmq PULL loop
that only decodes with msgpack (the peer, fed by the same producers), what a viewer is sent. Each goal has a line that
says yes, NO, or that this machine has no CPU for it: p99 of the lag under 100 ms, memory flat but for bounded buffers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import psutil
import zmq

from benchmarks.fleet_daemon import waited_s
from rltop.daemon.spawn import start_daemon, stop_daemon
from rltop.protocol.codec import decode, encode
from rltop.protocol.messages import PROTO_MAX, PROTO_MIN, Ack, Delta, Hello, Ping, Snap, Tick
from rltop.reporter import Reporter

SOURCES = 1024
GOAL_LAG_MS = 100.0
WARM_UP_S = 5.0
FRAME_BYTES = 64
"""Of ZeroMQ's queue of a connection for each frame, in pieces of 256 that stay: two pieces and it is full-grown."""
FULL_GROWN = 2 * 256 // 3
"""Records of a source after which it is."""
OTHER_GROWTH = 6.0
"""MB a minute of the rest that fills up within minutes: the rows that the checks keep (some 10 MB), curves, heap."""
NAMES = [
    *(
        f"train/{name}"
        for name in ("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "kl_loss", "grad_norm", "lr-pg_0")
    ),
    *(f"train/{name}" for name in ("train_rollout_logprob_abs_diff", "global_batch_size", "tis", "ois")),
    *(f"perf/{name}_time" for name in ("train", "actor_train", "log_probs", "ref_log_probs", "sleep", "wake_up")),
    *(f"perf/{name}" for name in ("actor_train_tflops", "step_time", "wait_time_ratio")),
]
"""Metrics that slime has, so that the live checks look at them."""
METRICS = len(NAMES)


@dataclass(frozen=True)
class Load:
    """What the fleet does."""

    sources: int = SOURCES
    processes: int = 64
    """Of the sources, so many are processes of their own."""
    calls: int = 1
    """Reports of one source a second; each has its share of the metrics."""
    seconds: float = 30.0

    @property
    def batches(self) -> list[list[str]]:
        """Names of one second, by report."""
        size = -(-METRICS // self.calls)
        return [NAMES[start : start + size] for start in range(0, METRICS, size)]


# ---------------------------------------------------------------- the producers


def moments(load: Load, begin: float) -> Iterator[tuple[int, list[str]]]:
    """(step, names) at the moments of a report, the same for every producer. begin: wall clock."""
    batches, count = load.batches, 0
    while True:
        at = begin + count / len(batches)
        if at > begin + load.seconds + WARM_UP_S:
            return
        time.sleep(max(0.0, at - time.time()))
        yield count // len(batches), batches[count % len(batches)]
        count += 1


def value(step: int, rank: int) -> float:
    """Of every metric: small, and another one at each step of each rank."""
    return 1e-3 + (step % 97) / 1e6 + rank / 1e8


def report(address: str, load: Load, rank: int, begin: float) -> None:
    """One process with a reporter. The daemon counts what is lost: no warnings at its end."""
    logging.disable()
    time.sleep(max(0.0, begin - time.time()))
    with Reporter(role="trainer", rank=rank, run="", address=address) as reporter:
        for step, names in moments(load, begin):
            reporter.metrics(dict.fromkeys(names, step + rank / 10000.0), step=step)


def simulate(address: str, load: Load, ranks: Sequence[int], begin: float) -> None:
    """One process with a socket for each of its sources. What does not go out at once is dropped and counted."""
    context = zmq.Context()
    context.max_sockets = len(ranks) + 8
    host, pid = "simulated", os.getpid()
    sockets = []
    time.sleep(max(0.0, begin - time.time()))
    for _ in ranks:
        socket = context.socket(zmq.PUSH)
        socket.linger, socket.sndhwm = 1000, 1000
        socket.connect(address)
        sockets.append(socket)
    dropped = 0
    header = msgpack.packb({"v": 1, "t": "rec"})
    for seq, (step, names) in enumerate(moments(load, begin), 1):
        for rank, socket in zip(ranks, sockets, strict=True):
            values = dict.fromkeys(names, value(step, rank))
            record = {
                "run": "",
                "source": {"role": "trainer", "rank": rank, "host": f"{host}-{rank // 8}", "pid": pid},
                "seq": seq,
                "mono": time.monotonic(),
                "wall": time.time(),
                "kind": "metrics",
                "payload": {"values": values, "step": step},
                "dropped": dropped,
            }
            try:
                socket.send_multipart([b"RL1", header, msgpack.packb(record)], flags=zmq.NOBLOCK)
            except zmq.Again:
                dropped += 1
    context.destroy(linger=1000)


@contextmanager
def fleet(address: str, load: Load, feeders: int = 2) -> Iterator[float]:
    """Start the producers; yields the wall clock at which they all begin."""
    begin = time.time() + 3.0 + load.processes / 100
    ranks = list(range(load.sources))
    jobs: list[Any] = [(report, rank) for rank in ranks[: load.processes]]
    rest = ranks[load.processes :]
    jobs += [(simulate, rest[part::feeders]) for part in range(feeders) if rest[part::feeders]]
    gc.freeze()
    children = []
    for work, what in jobs:
        child = os.fork()
        if child == 0:
            try:
                os.nice(5)
                work(address, load, what, begin)
            finally:
                os._exit(0)
        children.append(child)
    try:
        yield begin
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        for child in children:
            os.waitpid(child, 0)


# ---------------------------------------------------------------- what is measured


@dataclass
class Seen:
    """What was measured of one receiver."""

    records: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    worst_ms: list[float] = field(default_factory=list)
    """Worst lag of each second."""
    lag_ms: list[float] = field(default_factory=list)
    """Every 10 ms."""
    own_ms: list[float] = field(default_factory=list)
    """At most so much of each is the daemon's own."""
    longest: list[tuple[str, float]] = field(default_factory=list)
    """(callback, CPU seconds), longest first."""
    snapshot_s: float = 0.0
    ping_ms: list[float] = field(default_factory=list)
    rss: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, MB)"""
    snapshot_bytes: int = 0
    delta_bytes: int = 0
    cells: int = 0
    lost: int = 0
    dropped: int = 0
    malformed: int = 0
    starved_s: float = 0.0
    """Time for which its main thread was ready and got no CPU: what of the lag is this machine's."""
    known_after_s: float = 0.0
    """Until every source of the fleet was known, from the moment they connected."""

    @property
    def cpu_us(self) -> float:
        """CPU time per record, microseconds."""
        return self.cpu_s / max(1, self.records) * 1e6

    def slope(self) -> float:
        """MB a minute, a line through the second half of the measurements."""
        half = self.rss[len(self.rss) // 2 :]
        if len(half) < 3:
            return 0.0
        return statistics.linear_regression(*zip(*half, strict=True)).slope * 60


class Viewer:
    """A dashboard's session: says hello, takes frames, acknowledges them."""

    def __init__(self, address: str) -> None:
        self.state: dict[str, Any] = {}
        self.seen = Seen()
        self.ticks: list[Tick] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._pinged = 0.0

    def send(self, tag: str, body: Any) -> None:
        self._socket.send_multipart(encode(tag, body, id="q"))

    def look(self, seconds: float) -> None:
        """Take what comes for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._socket.poll(int(left * 1000) + 1):
                return
            frames = self._socket.recv_multipart()
            size = sum(map(len, frames))
            message = decode(frames)
            match message.body:
                case Snap() as snap:
                    self.state = dict(snap.keys)
                    self.seen.snapshot_bytes = size
                    self.send("ack", Ack(message.header.seq))
                case Delta() as delta:
                    self.state.update(delta.set)
                    for key in delta.gone:
                        self.state.pop(key, None)
                    self.seen.delta_bytes += size
                    self.send("ack", Ack(message.header.seq))
                case Tick() as tick:
                    self.ticks.append(tick)
                    self._pinged = time.monotonic()
                    self.send("ping", Ping())
                case Ping():
                    self.seen.ping_ms.append((time.monotonic() - self._pinged) * 1000)

    def hello(self) -> None:
        self.send("hello", Hello((PROTO_MIN, PROTO_MAX), "benchmark", "view", "fleet", fps=10.0))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def total(self, field_: str) -> int:
        """A counter over all sources, folded or not."""
        folded = [cell for key, cell in self.state.items() if key.startswith("sources/")]
        single = [cell for key, cell in self.state.items() if key.startswith("source/")]
        return sum(int(cell[field_]) for cell in folded or single)


def measure_daemon(load: Load, folder: Path) -> Seen:
    """The fleet against a real daemon."""
    os.environ["RLTOP_DIR"] = str(folder)
    told = folder / "lag.json"
    os.environ["RLTOP_FLEET_LAG"] = str(told)
    run = start_daemon("fleet", module="benchmarks.fleet_daemon")
    viewer = Viewer(run.sockets["view"])
    seen = viewer.seen
    try:
        viewer.hello()
        process = psutil.Process(run.pid)
        with fleet(run.sockets["ingest"], load) as begin:
            while time.time() < begin + 120:
                viewer.look(0.05)
                if sum(_count(key, cell) for key, cell in viewer.state.items()) >= load.sources:
                    break
            seen.known_after_s = time.time() - begin
            while time.time() < begin + WARM_UP_S:
                viewer.look(0.2)
            viewer.ticks.clear()
            seen.ping_ms.clear()
            seen.delta_bytes = 0
            first = time.time()
            records, cpu, began = viewer.total("records"), process.cpu_times(), time.monotonic()
            starved = waited_s(run.pid, run.pid)
            while (now := time.monotonic() - began) < load.seconds - 2:
                viewer.look(1.0)
                seen.rss.append((now, process.memory_info().rss / 1e6))
            after = process.cpu_times()
            seen.starved_s = waited_s(run.pid, run.pid) - starved
            seen.cpu_s = after.user + after.system - cpu.user - cpu.system
            seen.records = viewer.total("records") - records
            seen.wall_s = time.monotonic() - began
            seen.worst_ms = [tick.lag_ms for tick in viewer.ticks]
            deltas, last = seen.delta_bytes, time.time()
        viewer.look(3.0)
        for name in ("lost", "dropped", "malformed"):
            setattr(seen, name, viewer.total(name))
        seen.cells = len(viewer.state)
        again = Viewer(run.sockets["view"])
        again.hello()
        asked = time.monotonic()
        while not again.state and time.monotonic() < asked + 60:
            again.look(0.05)
        seen.snapshot_s = time.monotonic() - asked
        seen.snapshot_bytes, seen.delta_bytes = again.seen.snapshot_bytes, deltas
        again.close()
    finally:
        viewer.close()
        stop_daemon(run)
    found = json.loads(told.read_text())
    for at, lag, own in found["samples"]:
        if first <= at <= last:
            seen.lag_ms.append(lag * 1000)
            seen.own_ms.append(own * 1000)
    seen.longest = found["longest"]
    return seen


def _count(key: str, cell: Any) -> int:
    if key.startswith("sources/"):
        return int(cell["count"])
    return 0


def measure_peer(load: Load, folder: Path) -> Seen:
    """The same fleet against a bare PULL loop that only decodes."""
    address = f"ipc://{folder}/peer.sock"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        context = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.backlog = 4096
        pull.rcvtimeo = 500  # a signal is only seen between two messages
        pull.bind(address)
        count = 0

        def told(*_: object) -> None:
            os.write(writer, f"{count}\n".encode())
            os._exit(0)

        signal.signal(signal.SIGTERM, told)
        os.write(writer, b"ready\n")
        while True:
            with contextlib.suppress(zmq.Again):
                for frame in pull.recv_multipart()[1:]:
                    msgpack.unpackb(frame)
                count += 1
    seen = Seen()
    os.read(reader, 100)
    process = psutil.Process(child)
    with fleet(address, load) as begin:
        time.sleep(max(0.0, begin + load.seconds + WARM_UP_S + 1 - time.time()))
        cpu = process.cpu_times()
        seen.cpu_s = cpu.user + cpu.system
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    seen.records = int(os.read(reader, 100))
    return seen


def p99(values: Sequence[float]) -> float:
    """The value that one of a hundred exceeds; NaN of nothing."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))] if values else float("nan")


def spread(values: Sequence[float]) -> str:
    """Median, p99 and max, milliseconds."""
    if not values:
        return "none came"
    return f"{statistics.median(values):.1f}, {p99(values):.0f}, {max(values):.0f} ms ({len(values):,} samples)"


def lag_verdict(seen: Seen) -> str:
    """Whether the goal is met, and whose fault it is if not."""
    goal = f"p99 < {GOAL_LAG_MS:.0f} ms"
    if p99(seen.lag_ms) < GOAL_LAG_MS:
        return f"{goal}: yes"
    if p99(seen.own_ms) < GOAL_LAG_MS:
        return f"{goal}: not here: the machine had no CPU for it, its own work is {p99(seen.own_ms):.0f} ms at most"
    return f"{goal}: NO"


def memory_verdict(seen: Seen, load: Load) -> str:
    """Whether it is flat, but for bounded buffers that still fill."""
    each = seen.records / load.sources
    filling = 3 * FRAME_BYTES * seen.records / seen.wall_s * 60 / 1e6 if each < FULL_GROWN else 0.0
    allowed = filling + OTHER_GROWTH
    most = FULL_GROWN * 3 * FRAME_BYTES * load.sources / 1e6
    still = f" (ZeroMQ's queues of the connections still fill, {filling:.0f} MB a minute up to {most:.0f} MB)"
    return f"flat: {'yes' if seen.slope() <= allowed else 'NO'}{still if filling > 1 else ''}"


def rows(load: Load, folder: Path) -> list[tuple[str, str, str]]:
    """(what, measured, goal)."""
    seen = measure_daemon(load, folder)
    peer = measure_peer(load, folder)
    rate = seen.records / seen.wall_s
    pings = f"{statistics.median(seen.ping_ms):.0f}, {max(seen.ping_ms):.0f} ms" if seen.ping_ms else "none came"
    memory = f"{seen.rss[-1][1]:.0f} MB, {seen.slope():+.2f} MB a minute"
    longest = ", ".join(f"{name} {took * 1000:.0f} ms" for name, took in seen.longest[:3])
    return [
        ("sources", f"{load.processes} processes, {load.sources - load.processes} sockets of 2 processes", ""),
        ("connect storm: all known after", f"{seen.known_after_s:.1f} s", ""),
        ("records a second", f"{rate:,.0f} ({rate * METRICS / load.calls:,.0f} metrics)", ""),
        ("loop lag, every 10 ms: median, p99, max", spread(seen.lag_ms), lag_verdict(seen)),
        ("of that its own work at most", spread(seen.own_ms), ""),
        ("loop lag, worst of each second: the same", spread(seen.worst_ms), ""),
        ("longest callbacks, CPU time", longest or "none over 2 ms", ""),
        ("a viewer's ping: median, max", pings, ""),
        ("records lost, dropped, malformed", f"{seen.lost}, {seen.dropped}, {seen.malformed}", "counted"),
        ("memory, and its slope", memory, memory_verdict(seen, load)),
        (
            "CPU of the daemon, and waiting for one",
            f"{seen.cpu_s / seen.wall_s * 100:.0f} % of a core, {seen.starved_s / seen.wall_s * 100:.0f} % of the time",
            f"load of the machine {os.getloadavg()[0]:.0f} on {os.cpu_count()} CPUs",
        ),
        (
            "CPU per record: rltop, a bare pyzmq + msgpack loop",
            f"{seen.cpu_us:.0f} us, {peer.cpu_us:.0f} us",
            f"{seen.cpu_us / peer.cpu_us:.1f} times",
        ),
        ("snapshot", f"{seen.snapshot_bytes / 1000:.0f} kB, {seen.cells} cells, after {seen.snapshot_s:.1f} s", ""),
        ("sent to a viewer", f"{seen.delta_bytes / seen.wall_s / 1000:.1f} kB/s", ""),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--sources", type=int, default=SOURCES)
    parser.add_argument("--processes", type=int, default=64, help="so many of them are processes of their own")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 20], help="reports of one source a second")
    options = parser.parse_args(argv)
    from benchmarks.__main__ import table

    load_now = os.getloadavg()[0]
    print(f"load of this machine before: {load_now:.1f} on {os.cpu_count()} CPUs")
    for calls in options.calls:
        load = Load(options.sources, min(options.processes, options.sources), calls, options.seconds)
        with tempfile.TemporaryDirectory(prefix="rltop-fleet-") as name:
            title = f"{load.sources} sources, {METRICS} metrics a second each, in {calls} report{'s' * (calls > 1)}"
            print(table(title, rows(load, Path(name))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
