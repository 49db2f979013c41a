"""`Reporter`: how a training program tells the daemon what it does. Never raises, never blocks, never costs a step.

    with Reporter(framework="verl") as reporter:       # inert unless RLTOP_INGEST is set
        reporter.run(args=vars(args))
        with reporter.phase("rollout", rollout_id=3):
            ...
        reporter.metrics({"rollout/raw_reward": 0.4}, step=3)

Failure policy: a record that the daemon does not take at once waits in a small queue; when that is full the oldest goes
and is counted, and the next record says how many went. A value that is no number is left out and named once in a log
record. What msgpack does not take (cycles, integers over 64 bits, broken text) is replaced, what is too large is
dropped and counted. Whatever else goes wrong inside is counted in `errors` and kept in `last_error`; nothing reaches
the caller.

After a fork the child gets a socket and a sequence of its own; a pickled reporter arrives as a new one. Only the
standard library and msgpack are imported until the first record is sent; zmq comes then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgpack

from rltop.reporter_link import Link, describe

MAX_VALUES = 5_000
"""Scalars in one record of metrics; more are left out, counted and named once."""
MAX_BYTES = 15 * 1024 * 1024
"""A larger record would cost us the connection: a message is at most 16 MiB."""
_MAGIC = b"RL1"
_VERSION = 1


class Reporter:
    """Sends records of one source (role and rank) to the daemon of the run.

    framework: whose names the metrics have (`verl`, `trl`, `openrlhf`, `nemo-rl`, …): the daemon shows them under
    rltop's too (docs/reporter.md). Default: that of the run.
    role: `trainer`, `rollout`, or any short word. rank: 0 for the one whose metrics are the run's.
    run: the run's name, default `RLTOP_RUN`. address: default `RLTOP_INGEST`; without either nothing is ever sent.
    """

    def __init__(
        self,
        *,
        framework: str = "",
        role: str = "trainer",
        rank: int = 0,
        run: str | None = None,
        address: str | None = None,
    ) -> None:
        self.address = address if address is not None else os.environ.get("RLTOP_INGEST", "")
        self.dropped = 0
        """Records dropped so far because nobody took them."""
        self.errors = 0
        """Things that went wrong in here so far."""
        self.last_error = ""
        self.left_out = 0
        """Values that were no numbers, or one too many for a record, so far."""
        self._framework = str(framework)
        self._run = run if run is not None else os.environ.get("RLTOP_RUN", "")
        self._role = role
        self._rank = rank
        self._closed = not self.address
        self._named: set[str] = set()
        # By process: after a fork the parent's socket, lock and queue are not ours, not even to be thrown away.
        self._links: dict[int, Link] = {}
        # Not our own method: that would keep us alive. At the end of the interpreter it gives records their moment.
        self._finalizer = weakref.finalize(self, _end, self._links)

    @property
    def active(self) -> bool:
        """Whether records go anywhere."""
        return not self._closed

    @property
    def status(self) -> str:
        """How the connection stands, in words; `refused: …` says why the daemon turned us away (TCP only)."""
        link = self._links.get(os.getpid())
        if link is None:
            return "" if self._closed else "nothing was reported yet"
        try:
            with link.lock:
                link.look()
                link.flush()
        except Exception as error:
            self._failed(error)
        return link.status

    def __reduce__(self) -> tuple[object, ...]:
        # A socket cannot cross to another process (multiprocessing, Ray); who reports and where can.
        return (_rebuild, (type(self), self._role, self._rank, self._run, self.address, self._framework))

    # ---------------------------------------------------------------- what to report

    def run(self, *, framework: str = "", **facts: Any) -> None:
        """Facts of the run, once at its start: `args`, `mode`, `backend`, `start_rollout_id`, `fresh_start`,
        `num_rollout`, `vocab_size`, `injected_faults`, `stand_ins` (docs/protocol.md section 2). framework: default
        the reporter's."""
        self._send("run", {"framework": framework or self._framework, **facts})

    def metrics(
        self,
        values: Mapping[str, Any],
        *,
        step: int,
        axis: Literal["rollout", "train"] | None = None,
        rollout_id: int | None = None,
        step_in_rollout: int | None = None,
    ) -> None:
        """Scalars of one rollout or optimizer step. Values are what `float()` takes: numbers, numpy and torch scalars.

        axis: what `step` counts. Without it the names say it: `train/…` are of an optimizer step, all others of a
        rollout.

        `float()` of a tensor on a GPU waits for it, as it would anywhere.
        """
        if self._closed:
            return
        numbers: dict[str, float] = {}
        try:
            if len(values) > MAX_VALUES:
                self._too_many(len(values) - MAX_VALUES)
            for name, value in itertools.islice(values.items(), MAX_VALUES):
                try:
                    numbers[str(name)] = float(value)
                except Exception as error:  # any object may come in here, and its float() may raise anything
                    self._not_a_number(str(name), value, error)
        except Exception as error:
            self._failed(error)
            return
        payload: dict[str, Any] = {"values": numbers, "step": step}
        if axis is not None:
            payload["axis"] = axis
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

    def phase_edge(
        self,
        name: str,
        edge: Literal["enter", "leave"],
        *,
        rollout_id: int | None = None,
        elapsed_s: float | None = None,
    ) -> None:
        """One edge of a phase, for hooks that see the two apart. `leave` should say how long it took."""
        payload: dict[str, Any] = {"name": name, "edge": edge, "rollout_id": rollout_id}
        self._send("phase", payload if elapsed_s is None else {**payload, "elapsed_s": elapsed_s})

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

    def count_dropped(self, count: int) -> None:
        """Records that never came here because a queue before this one was full: the next record tells them too."""
        self.dropped += count
        if not self._closed:
            pid = os.getpid()
            link = self._links.get(pid) or self._new_link(pid)
            with link.lock:
                link.dropped += count

    # ---------------------------------------------------------------- life

    def close(self) -> None:
        """Close the socket. Queued records get up to a second when a daemon is there, else they are dropped."""
        self._closed = True
        link = self._links.pop(os.getpid(), None)
        if link is None:
            return
        try:
            with link.lock:
                self.dropped += link.close()
        except Exception as error:
            self._failed(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _new_link(self, pid: int) -> Link:
        source = {"role": self._role, "rank": self._rank, "host": _host(), "pid": pid}
        if self._framework:
            source["framework"] = self._framework
        return self._links.setdefault(pid, Link(self.address, source))  # atomic: two threads get the same one

    def _send(self, kind: str, payload: dict[str, Any]) -> None:
        if self._closed:
            return
        try:
            pid = os.getpid()
            link = self._links.get(pid) or self._new_link(pid)
            with link.lock:
                self._enqueue(link, kind, payload)
                link.flush()
                self.dropped += link.drop_oldest()
        except Exception as error:
            self._failed(error)

    def _enqueue(self, link: Link, kind: str, payload: dict[str, Any]) -> None:
        link.seq += 1
        record = {
            "run": self._run,
            "source": link.source,
            "seq": link.seq,
            "mono": time.monotonic(),
            "wall": time.time(),
            "kind": kind,
            "payload": payload,
            "dropped": link.dropped,
        }
        try:
            try:
                body = msgpack.packb(record, default=_plain)
            except Exception as error:  # any object may be in there, and packing it may raise anything
                self._failed(error)
                body = msgpack.packb(_clean(record))
            if len(body) > MAX_BYTES:
                raise ValueError(f"a record of kind {kind} has {len(body)} bytes, the limit is {MAX_BYTES}")
        except Exception:
            link.dropped += 1
            self.dropped += 1
            raise
        header = msgpack.packb({"v": _VERSION, "t": "rec", "seq": link.seq})
        link.waiting.append([_MAGIC, header, body])

    def _too_many(self, excess: int) -> None:
        self.left_out += excess
        if "" not in self._named:
            self._named.add("")
            self.log("warn", f"a record has at most {MAX_VALUES} metrics; {excess} were left out")

    def _not_a_number(self, name: str, value: object, error: Exception) -> None:
        self.left_out += 1
        if name not in self._named and len(self._named) < 100:
            self._named.add(name)
            self.log("warn", f"metric {name} is not a number: {type(value).__name__} ({error}); left out")

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        try:
            self.last_error = f"{type(error).__name__}: {error}"
        except Exception:  # its text may be somebody's code too
            self.last_error = type(error).__name__


def _rebuild(cls: type[Reporter], role: str, rank: int, run: str, address: str, framework: str) -> Reporter:
    return cls(framework=framework, role=role, rank=rank, run=run, address=address)


_MAX_ARRAY = 1_000_000
_MAX_DEPTH = 12
_MAX_ITEMS = 100_000
_HUGE = 2**63


def _end(links: dict[int, Link]) -> None:
    """Close the socket of this process when the reporter is collected or the interpreter ends."""
    link = links.pop(os.getpid(), None)
    if link is not None:
        with contextlib.suppress(Exception), link.lock:
            link.close()


def _plain(value: Any) -> Any:
    """What msgpack asks for a type that it does not know: arrays and tensors become lists, scalars numbers."""
    if hasattr(value, "tolist"):
        # Asked before it is made: a tensor of a billion numbers as a list would take the machine's memory.
        size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
        return describe(value) if size > _MAX_ARRAY else value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    return str(value)


def _clean(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """The same value as msgpack surely takes it: no cycles, no integers over 64 bits, no broken text.

    Never raises. Slow; only for what was refused as it is.
    """
    try:
        if value is None or isinstance(value, (bool, float)):
            return value
        if isinstance(value, int):
            return (
                int(value)
                if -_HUGE <= value < 2 * _HUGE
                else float(value)
                if abs(value) < 1 << 1000
                else str(value)[:99]
            )
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bytes(value)
        if isinstance(value, Mapping):
            if depth == 0:
                return describe(value)
            return {str(_clean(k, 0)): _clean(v, depth - 1) for k, v in itertools.islice(value.items(), _MAX_ITEMS)}
        if isinstance(value, (list, tuple, set, frozenset)):
            return (
                describe(value) if depth == 0 else [_clean(v, depth - 1) for v in itertools.islice(value, _MAX_ITEMS)]
            )
        plain = _plain(value)
        return plain if type(plain) is type(value) else _clean(plain, max(0, depth - 1))
    except Exception:  # whatever an object does when it is looked at
        return describe(value)


def _host() -> str:
    try:
        return socket.gethostname()
    except OSError:
        return ""
