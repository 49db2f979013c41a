"""Samples of a JSON-lines file (Relax's `rollout_result/{train,eval}/N.jsonl`), each read when it is asked for.

Failure policy: `Unreadable` for a file that begins with no sample; another line that can not be read is a None.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rltop.evidence import jsonl
from rltop.evidence.pickle_values import Unreadable

MOST_LINE = 64 << 20
STEP_LINES = 256


class Lines:
    """Lines of a mapped file; 8 bytes are kept of each."""

    def __init__(self, data: mmap.mmap, descriptor: int) -> None:
        self._data = data
        self._descriptor = descriptor
        self._begins = array("Q", [0])
        self.ended = False

    @property
    def share(self) -> float:
        """Part of the file that was gone over, 0 to 1."""
        return 1.0 if self.ended else self._begins[-1] / max(len(self._data), 1)

    def __len__(self) -> int:
        return len(self._begins) - 1

    def steps(self) -> Iterator[None]:
        """Finds lines, one per step. Raises Unreadable where the file was cut meanwhile."""
        data, end = self._data, len(self._data)
        while not self.ended:
            self._check()
            at = data.find(b"\n", self._begins[-1])
            stop = end if at < 0 else at + 1
            if stop > self._begins[-1] and (at >= 0 or data[self._begins[-1] : stop].strip()):
                self._begins.append(stop)
            self.ended = stop >= end
            yield

    def reach(self, count: int) -> bool:
        """Finds lines up to a number of them; False where there are fewer."""
        if len(self) < count:
            for _ in self.steps():
                if len(self) >= count:
                    break
        return len(self) >= count

    def element(self, at: int) -> dict[str, Any] | None:
        """The sample of a line whose place is known. None where the line is none."""
        self._check()
        begin, end = self._begins[at], self._begins[at + 1]
        return jsonl.read_map(self._data[begin:end]) if end - begin <= MOST_LINE else None

    def _check(self) -> None:
        if os.fstat(self._descriptor).st_size < len(self._data):
            raise Unreadable("it was overwritten while it was read")  # the next byte could be a SIGBUS


@contextmanager
def lines(path: Path) -> Iterator[Lines]:
    """The lines of a file. Raises Unreadable, and OSError when it can not be opened."""
    if path.stat().st_size == 0:
        raise Unreadable("the file is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = Lines(data, stream.fileno())
        if not found.reach(1) or found.element(0) is None:
            raise Unreadable("its first line is no JSON object")
        with suppress(BufferError):
            yield found
