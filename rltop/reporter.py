"""`Reporter`: how a training program tells the daemon what it does. Never raises, never blocks, never costs a step.

    with Reporter() as reporter:                       # inert unless RLTOP_INGEST is set
        reporter.run(framework="mine", args=vars(args))
        with reporter.phase("rollout", rollout_id=3):
            ...
        reporter.metrics({"rollout/raw_reward": 0.4}, step=3)

Failure policy: a record that the daemon does not take at once waits in a small queue; when that is full the oldest goes
and is counted, and the next record says how many went. A value that is no number is left out and named once in a log
record. Whatever else goes wrong inside is counted in `errors` and kept in `last_error`; nothing reaches the caller.

After a fork the child gets a socket and a sequence of its own. Only the standard library and msgpack are imported until
the first record is sent; zmq comes then.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import msgpack

if TYPE_CHECKING:
    import zmq

QUEUE = 500
"""Records that wait here when the socket takes no more (it holds 1,000 itself)."""
SNDHWM = 1000
MAX_BYTES = 15 * 1024 * 1024
"""A larger record would cost us the connection: a message is at most 16 MiB."""
CLOSE_S = 1.0
"""What `close` gives queued records, and only when a daemon is there to take them."""
_MAGIC = b"RL1"
_VERSION = 1
_POLLOUT = 2


class Reporter:
    """Sends records of one source (role and rank) to the daemon of the run.

    role: `trainer`, `rollout`, or any short word. rank: 0 for the one whose metrics are the run's.
    run: the run's name, default `RLTOP_RUN`. address: default `RLTOP_INGEST`; without either nothing is ever sent.
    """

    def __init__(
        self, *, role: str = "trainer", rank: int = 0, run: str | None = None, address: str | None = None
    ) -> None:
        self.address = address if address is not None else os.environ.get("RLTOP_INGEST", "")
        self.dropped = 0
        """Records dropped so far because nobody took them."""
        self.errors = 0
        """Things that went wrong in here so far."""
        self.last_error = ""
        self._run = run if run is not None else os.environ.get("RLTOP_RUN", "")
        self._role = role
        self._rank = rank
        self._closed = not self.address
        self._named: set[str] = set()
        self._link = _Link()
        self._inherited: list[_Link] = []
        self._source = self._who()

    @property
    def active(self) -> bool:
        """Whether records go anywhere."""
        return not self._closed

    # ---------------------------------------------------------------- what to report

    def run(self, *, framework: str, **facts: Any) -> None:
        """Facts of the run, once at its start: `args`, `mode`, `backend`, `start_rollout_id`, `fresh_start`,
        `num_rollout`, `vocab_size`, `injected_faults`, `stand_ins` (docs/protocol.md section 2)."""
        self._send("run", {"framework": framework, **facts})

    def metrics(
        self,
        values: Mapping[str, Any],
        *,
        step: int,
        axis: Literal["rollout", "train"] = "rollout",
        rollout_id: int | None = None,
        step_in_rollout: int | None = None,
    ) -> None:
        """Scalars of one rollout or optimizer step. Values are what `float()` takes: numbers, numpy and torch scalars.

        `float()` of a tensor on a GPU waits for it, as it would anywhere.
        """
        if self._closed:
            return
        numbers: dict[str, float] = {}
        try:
            for name, value in values.items():
                try:
                    numbers[str(name)] = float(value)
                except Exception as error:  # any object may come in here, and its float() may raise anything
                    self._not_a_number(str(name), value, error)
        except Exception as error:
            self._failed(error)
            return
        payload: dict[str, Any] = {"values": numbers, "step": step, "axis": axis}
        if rollout_id is not None:
            payload["rollout_id"] = rollout_id
        if step_in_rollout is not None:
            payload["step_in_rollout"] = step_in_rollout
        self._send("metrics", payload)

    def samples(self, rollout_id: int, samples: Sequence[Mapping[str, Any]], total: int = 0) -> None:
        """A few finished samples of a rollout; `total` is how many it has. Arrays and tensors become lists."""
        self._send("samples", {"rollout_id": rollout_id, "samples": samples, "total": total})

    @contextlib.contextmanager
    def phase(self, name: str, rollout_id: int | None = None) -> Iterator[None]:
        """Says that the run enters a phase (`rollout`, `train`, `update_weights`, …) and how long it took."""
        began = time.monotonic()
        self._send("phase", {"name": name, "edge": "enter", "rollout_id": rollout_id})
        try:
            yield
        finally:
            elapsed = time.monotonic() - began
            self._send("phase", {"name": name, "edge": "leave", "rollout_id": rollout_id, "elapsed_s": elapsed})

    def weights(self, *, version: str, rollout_id: int | None, **facts: Any) -> None:
        """One weight sync ended: `ok`, `transport`, `engines`, `digest`, `elapsed_s`."""
        self._send("weights", {"version": str(version), "rollout_id": rollout_id, **facts})

    def engine(self, *, id: str, **facts: Any) -> None:  # noqa: A002 - the wire's name
        """An engine started, changed or went: `url`, `kind`, `state`, `generation`, `pid`, `weight_version`, …"""
        self._send("engine", {"id": str(id), **facts})

    def log(self, level: Literal["debug", "info", "warn", "error"], text: str) -> None:
        """One line for people."""
        self._send("log", {"level": level, "text": text})

    def bye(self, reason: Literal["done", "failed", "interrupted"], text: str = "") -> None:
        """This source ends. Call `close` after it."""
        self._send("bye", {"reason": reason, "text": text})

    # ---------------------------------------------------------------- life

    def close(self) -> None:
        """Close the socket. Queued records get up to a second when a daemon is there, else they are dropped."""
        link, self._closed = self._link, True
        try:
            if link.pid == os.getpid():
                with link.lock:
                    self.dropped += link.close(self.address)
        except Exception as error:
            self._failed(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _who(self) -> dict[str, Any]:
        return {"role": self._role, "rank": self._rank, "host": _host(), "pid": self._link.pid}

    def _send(self, kind: str, payload: dict[str, Any]) -> None:
        if self._closed:
            return
        try:
            if self._link.pid != os.getpid():
                # We are a child: the parent's socket, lock and queue are not ours, not even to be thrown away.
                self._inherited.append(self._link)
                self._link = _Link()
                self._source = self._who()
            with self._link.lock:
                self._enqueue(self._link, kind, payload)
                self._link.flush(self.address)
                self.dropped += self._link.drop_oldest()
        except Exception as error:
            self._failed(error)

    def _enqueue(self, link: _Link, kind: str, payload: dict[str, Any]) -> None:
        link.seq += 1
        record = {
            "run": self._run,
            "source": self._source,
            "seq": link.seq,
            "mono": time.monotonic(),
            "wall": time.time(),
            "kind": kind,
            "payload": payload,
            "dropped": link.dropped,
        }
        try:
            body = msgpack.packb(record, default=_plain)
            if len(body) > MAX_BYTES:
                raise ValueError(f"a record of kind {kind} has {len(body)} bytes, the limit is {MAX_BYTES}")
        except Exception:
            link.dropped += 1
            self.dropped += 1
            raise
        header = msgpack.packb({"v": _VERSION, "t": "rec", "seq": link.seq})
        link.waiting.append([_MAGIC, header, body])

    def _not_a_number(self, name: str, value: object, error: Exception) -> None:
        if name not in self._named and len(self._named) < 100:
            self._named.add(name)
            self.log("warn", f"metric {name} is not a number: {type(value).__name__} ({error}); left out")

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"


class _Link:
    """Socket, queue and sequence of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        # Reentrant: a signal handler that reports may interrupt a report of the same thread.
        self.lock = threading.RLock()
        self.seq = 0
        self.dropped = 0
        self.waiting: deque[list[bytes]] = deque()
        self._unusable = False
        self._socket: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def flush(self, address: str) -> None:
        """Hand the socket what it takes without waiting."""
        import zmq

        if self._unusable:
            return
        sender = self._socket or self._connect(address)
        while self.waiting:
            frames = self.waiting.popleft()
            try:
                sender.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                self.waiting.appendleft(frames)
                return

    def drop_oldest(self) -> int:
        """Keep the newest `QUEUE` records; returns how many went."""
        excess = max(0, len(self.waiting) - QUEUE)
        for _ in range(excess):
            self.waiting.popleft()
        self.dropped += excess
        return excess

    def close(self, address: str) -> int:
        """Close, giving queued records a bounded moment if somebody listens. Returns how many were left here."""
        if self._socket is None or self._context is None:
            return len(self.waiting)
        deadline = time.monotonic() + CLOSE_S
        listening = _somebody_listens(address)
        while listening and self.waiting and (left := deadline - time.monotonic()) > 0:
            self.flush(address)
            if self.waiting:
                self._socket.poll(int(left * 1000) + 1, _POLLOUT)
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        self._socket.close(linger=left_ms if listening else 0)
        self._context.term()  # returns when the queue is empty or the linger time is over
        self._socket = self._context = None
        return len(self.waiting)

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        import zmq

        context = zmq.Context()
        sender = context.socket(zmq.PUSH)
        try:
            sender.sndhwm = SNDHWM
            sender.linger = 0
            sender.reconnect_ivl = 100
            sender.reconnect_ivl_max = 5000
            sender.connect(address)
        except zmq.ZMQError:  # no address at all, for example: it will not get better
            self._unusable = True
            context.destroy()
            raise
        self._context, self._socket = context, sender
        return sender


def _plain(value: Any) -> Any:
    """What msgpack asks for a type that it does not know: arrays and tensors become lists, scalars numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


def _host() -> str:
    try:
        return socket.gethostname()
    except OSError:
        return ""


def _somebody_listens(address: str) -> bool:
    """Whether a daemon is behind the address: without one, lingering would only waste the caller's time."""
    scheme, _, rest = address.partition("://")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(0.2)
                probe.connect(rest)
        elif scheme == "tcp":
            host, _, port = rest.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), timeout=0.2):
                pass
        else:
            return False
    except (OSError, ValueError):
        return False
    return True
