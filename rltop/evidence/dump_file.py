"""A dump opened without torch and without unpickling: samples are built one by one, when they are asked for.

Reads slime's rollout dumps and train dumps (old and v2), rltop's, Relax's JSONL, and plain pickles of the same.

Failure policy: RltopError (exit code 2) with what, where, why and what to do for a file that is no dump, is cut off, or
that the allow-list refuses as a whole; a part that is refused is named and the rest is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rltop.errors import RltopError
from rltop.evidence import dumps
from rltop.evidence.dump_sample import DumpKind, DumpSample, DumpTensor, Refused, make_sample
from rltop.evidence.pickle_values import Foreign, Known, Map, Seq, TensorRef, Unreadable
from rltop.evidence.samples import is_id, rollout_of_name
from rltop.evidence.saved import Saved, opened
from rltop.evidence.sink import Source

MOST_DEPTH = 8


class DumpFile:
    """A dump that is open: a context manager. Not safe to share between threads."""

    def __init__(self, path: Path, saved: Saved, stack: ExitStack) -> None:
        self._saved = saved
        self._stack = stack
        self.path = path
        self.kind: DumpKind = dumps.kind_of(saved.value)
        self.is_eval = path.name.startswith("eval_")
        listed = saved.value.get("rollout_id") if isinstance(saved.value, Map) else None
        self.rollout_id: int | None = listed if is_id(listed) else rollout_of_name(Source(path, path.name))
        self.foreign: tuple[str, ...] = saved.foreign
        self._entries = dumps._entries(saved.value, self.kind)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a dump. Raises RltopError (exit code 2) where it is none."""
        stack = ExitStack()
        try:
            saved = stack.enter_context(opened(path))
            return cls(path, saved, stack)
        except (Unreadable, OSError) as error:
            stack.close()
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise RltopError("cannot read this dump", where=str(path), why=why, do="was it copied whole?") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; samples that were built stay."""
        self._stack.close()

    def count(self) -> int | None:
        """Samples; None until the end of the dump was reached (`scan`, `page` up to it, or a whole iteration)."""
        return len(self._entries)

    def indexed(self) -> int:
        """Samples whose place is known so far."""
        return len(self._entries)

    def scan(self, upto: int | None = None) -> Iterator[float]:
        """Looks for the places of samples, up to number `upto` (None: the end).

        Yields the share of the file (0 to 1) that was gone over, several times a second: show it, or leave the loop.
        """
        yield 1.0

    def sample(self, at: int) -> DumpSample:
        """The sample at a position. Raises IndexError past the end, RltopError where the file is broken before it."""
        return make_sample(at, {str(k): _plain(v, self._saved) for k, v in self._entries[at].items.items()})

    def page(self, start: int, stop: int) -> list[DumpSample]:
        """Samples `start` to `stop`, fewer at the end."""
        return [self.sample(at) for at in range(start, min(stop, len(self._entries)))]

    def __iter__(self) -> Iterator[DumpSample]:
        """All samples, one at a time, in constant memory."""
        return (self.sample(at) for at in range(len(self._entries)))


def _plain(value: Any, saved: Saved, depth: int = 0) -> Any:
    if isinstance(value, Foreign):
        return Refused(value.name)
    if isinstance(value, TensorRef):
        ref = value

        def values() -> Sequence[float]:
            return saved.floats(ref)

        return DumpTensor(ref.dtype, ref.shape, values)
    if isinstance(value, Known):
        return value.name
    if depth >= MOST_DEPTH:
        return None
    if isinstance(value, Seq):
        if isinstance(value.items, array):
            return list(value.items)
        return [_plain(one, saved, depth + 1) for one in value.items]
    if isinstance(value, tuple):
        return [_plain(one, saved, depth + 1) for one in value]
    if isinstance(value, Map):
        return {str(key): _plain(one, saved, depth + 1) for key, one in value.items.items()}
    return value
