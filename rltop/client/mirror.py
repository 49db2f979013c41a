"""The client's copy of a run's state. Pure: no sockets, no clock.

Invariant: after every frame that `apply` took, `state` equals the daemon's table at version `ver`. A hole in the
per-client sequence means that a frame is missing, so the frame behind the hole is refused (`SequenceError`) and the
mirror stays at the last version that it really has; the session then resumes from there. Events that are missing are
never hidden: the ranges are in `gaps`.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rltop.protocol.codec import Message, WireError
from rltop.protocol.messages import Delta, SeriesAnswer, Snap, Tick, Welcome

EVENTS_KEPT = 5000
"""Newest events held in memory; older ones are asked from the daemon (`events?`)."""


class SequenceError(RuntimeError):
    """A frame between the last one and this one is missing; nothing of this one was applied."""


class Mirror:
    """State table, event log and facts of the session, as last told by the daemon."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        """State key -> value, `docs/protocol.md` section 4."""
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        """Oldest first, `docs/protocol.md` section 5."""
        self.gaps: list[tuple[int, int]] = []
        """Ranges of event sequences, inclusive, that can not be shown because they were lost on the way."""
        self.run = ""
        self.server = ""
        """The daemon's name and version, `rltop/0.1.0`."""
        self.role = ""
        self.epoch = ""
        self.ver = 0
        self.eseq = 0
        """Sequence of the newest event that this mirror took."""
        self.server_time = 0.0
        """The daemon's wall clock (seconds since the epoch) in its newest welcome or tick."""
        self.limits: dict[str, int] = {}
        self.tick: Tick | None = None
        self._seq = 0
        self._pending_epoch = ""
        self._resumed = False
        self._dirty: set[str] = set()

    def apply(self, message: Message) -> None:
        """Take one frame of the session; other message types are ignored.

        Raises SequenceError: the frame's `seq` is not the next one, or a delta came where only a snapshot makes sense;
        WireError: an event without a sequence number.
        """
        header = message.header
        match message.body:
            case Welcome() as welcome:
                self._welcome(welcome, header.epoch)
            case Snap() as snap:
                self._advance(header.seq)
                self._snap(snap)
            case Delta() as delta:
                if not self._resumed:
                    raise SequenceError("a delta came before the snapshot that it builds on")
                self._advance(header.seq)
                self._delta(delta)
            case Tick() as tick:
                self.tick = tick
                self.server_time = tick.time
            case _:
                pass

    def take_dirty(self) -> set[str]:
        """State keys set or removed since the last call."""
        dirty, self._dirty = self._dirty, set()
        return dirty

    def _advance(self, seq: int) -> None:
        if seq != self._seq + 1:
            raise SequenceError(f"frame {seq} came after frame {self._seq}")
        self._seq = seq

    def _welcome(self, welcome: Welcome, epoch: str) -> None:
        self.run, self.server, self.role = welcome.run, welcome.server, welcome.role
        self.limits, self.server_time = welcome.limits, welcome.server_time
        self._seq = 0
        self._pending_epoch = epoch
        # A resume into another epoch would mix two tables; the old picture stays until the snapshot replaces it.
        self._resumed = welcome.resumed and epoch == self.epoch

    def _snap(self, snap: Snap) -> None:
        self._dirty |= self.state.keys() | snap.keys.keys()
        self.state = dict(snap.keys)
        self.events.clear()
        self.events.extend(snap.events)
        self.gaps.clear()
        self.epoch, self.ver, self.eseq = self._pending_epoch, snap.ver, snap.eseq
        self._resumed = True

    def _delta(self, delta: Delta) -> None:
        self.state.update(delta.set)
        for key in delta.gone:
            self.state.pop(key, None)
        self._dirty |= delta.set.keys()
        self._dirty.update(delta.gone)
        self.ver = delta.ver
        if delta.gap is not None:
            self._miss(*delta.gap)
        for event in delta.events:
            self._event(event)
        if delta.eseq > self.eseq:
            self._miss(self.eseq + 1, delta.eseq)

    def _event(self, event: dict[str, Any]) -> None:
        eseq = event.get("eseq")
        if not isinstance(eseq, int):
            raise WireError("malformed", "an event without a sequence number")
        if eseq <= self.eseq:
            return  # sent again after a reconnect
        if eseq > self.eseq + 1:
            self._miss(self.eseq + 1, eseq - 1)
        self.events.append(event)
        self.eseq = eseq

    def _miss(self, first: int, last: int) -> None:
        first = max(first, self.eseq + 1)
        if first <= last:
            self.gaps.append((first, last))
            self.eseq = last


@dataclass(frozen=True, slots=True)
class Series:
    """History of one metric in buckets by step; all columns have the same length.

    A bucket covers the steps behind the previous one up to `step`; `lo`, `hi`, `last` are over its finite values and
    NaN where there is none; `nan` counts its NaN and Inf values.
    """

    key: str
    step: array[float]
    """float64, last step in the bucket."""
    lo: array[float]
    hi: array[float]
    last: array[float]
    nan: array[int]
    value: array[float] | None = None
    """float64, the values as they were; only where they were asked for and every bucket is one."""

    def __len__(self) -> int:
        return len(self.step)


def series_from_answer(answer: SeriesAnswer, blobs: Sequence[bytes]) -> dict[str, Series]:
    """Columns of a `series` answer by key. Raises WireError when an index or a length does not fit the blobs."""
    return {key: _series(key, cols, blobs) for key, cols in answer.cols.items()}


def _series(key: str, cols: dict[str, int], blobs: Sequence[bytes]) -> Series:
    def floats(name: str, typecode: str) -> array[float]:
        column: array[float] = array(typecode)
        _fill(column, name)
        return column

    def counts(name: str) -> array[int]:
        column: array[int] = array("I")
        _fill(column, name)
        return column

    def _fill(column: array[float] | array[int], name: str) -> None:
        try:
            blob = blobs[cols[name]]
            want = cols["n"] * column.itemsize
        except (KeyError, IndexError) as error:
            raise WireError("malformed", f"series {key!r} has no column {name!r}") from error
        if len(blob) != want:
            raise WireError("malformed", f"series {key!r}: column {name!r} has {len(blob)} bytes, expected {want}")
        column.frombytes(blob)
        if sys.byteorder == "big":
            column.byteswap()

    value = floats("value", "d") if "value" in cols else None
    low, high, last = (floats(name, "f") for name in ("min", "max", "last"))
    return Series(key, floats("step", "d"), low, high, last, counts("nan"), value)
