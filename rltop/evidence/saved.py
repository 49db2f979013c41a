"""Files of `torch.save`, opened without unpickling: the zip format, the older one of several pickles in a row, and a
single plain pickle.

The file is mapped, not read; tensors are read one at a time, when asked for. Failure policy: `Unreadable` with the
reason.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.evidence.archive import Archive
from rltop.evidence.pickle_values import WIDTH, TensorRef, Unreadable
from rltop.evidence.pickles import Walker

MOST_PICKLE_BYTES = 1 << 30
"""Of a pickle that is built as a whole; tensors lie outside of it."""
MOST_TENSOR_BYTES = 64 << 20
FORGET_BYTES = 16 << 20
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_STOP = 0x2E
_LEGACY_HEAD = 4096
"""Bytes in which the three small pickles before the value lie."""
_ARRAY = {"float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}


@dataclass(slots=True)
class Mapped:
    """A file that is mapped: where its pickle lies, and its tensors."""

    data: memoryview
    """The pickle, and with the older formats what follows it."""
    at: int
    """Where in `data` the value's pickle begins."""
    total_bytes: int
    whole: mmap.mmap
    archive: Archive | None = None
    swapped: bool = False
    descriptor: int = -1
    touched_bytes: int = 0
    ending: str = ""
    """What is wrong with the end of a plain pickle."""

    @property
    def damage(self) -> str:
        """Why not all of it can be read, or is what was written, as far as it was seen."""
        return self.archive.damage if self.archive is not None else self.ending

    def floats(self, ref: TensorRef) -> list[float]:
        """Values of a tensor, flat. Empty where it can not be read: other layout, too large, cut off."""
        if self.archive is None or not ref.contiguous or ref.nbytes > MOST_TENSOR_BYTES:
            return []
        try:
            self.touched(ref.nbytes)
        except Unreadable:
            return []
        raw = self.archive.record(f"data/{ref.key}", ref.nbytes)
        begin = ref.offset * WIDTH.get(ref.dtype, 0)
        part = b"" if raw is None else bytes(raw[begin : begin + ref.nbytes])
        return decode(part, ref.dtype, swapped=self.swapped) if len(part) == ref.nbytes else []

    def touched(self, count: int) -> None:
        """So many bytes of the file were gone over. Now and then the system may take back the memory of all of it: the
        file is mapped, and what was read counts as this process's memory. It can be read again at any time.

        Raises Unreadable where the file was cut meanwhile, as slime does that writes every rollout to the same path.
        """
        if os.fstat(self.descriptor).st_size < self.total_bytes:
            raise Unreadable("it was overwritten while it was read")  # the next byte could be a SIGBUS
        self.touched_bytes += count
        if self.touched_bytes > FORGET_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self.touched_bytes = 0
            with suppress(OSError, ValueError):
                self.whole.madvise(mmap.MADV_DONTNEED)


@dataclass(slots=True)
class Saved:
    """One file of `torch.save` whose value was built, open as long as its context."""

    value: Any
    foreign: tuple[str, ...]
    total_bytes: int
    mapped: Mapped

    def floats(self, ref: TensorRef) -> list[float]:
        """Values of a tensor, flat. Empty where it can not be read: other layout, too large, cut off."""
        return self.mapped.floats(ref)


def decode(raw: bytes, dtype: str, *, swapped: bool = False) -> list[float]:
    """Numbers of little-endian bytes; empty for a type that has none here."""
    order = ">" if swapped else "<"
    if dtype in _ARRAY:
        values = array(_ARRAY[dtype], raw)
        if swapped:
            values.byteswap()
        return list(map(float, values))
    if dtype == "float16":
        return list(struct.unpack(f"{order}{len(raw) // 2}e", raw))
    if dtype == "bfloat16":
        words = array("H", raw)
        if swapped:
            words.byteswap()
        return list(array("f", array("I", [word << 16 for word in words]).tobytes()))
    return [float(byte != 0) for byte in raw] if dtype == "bool" else []


@contextmanager
def mapped(path: Path, *, salvage: bool = False) -> Iterator[Mapped]:
    """A `.pt` or pickle file, mapped. Raises Unreadable, and OSError when it can not be opened.

    salvage: of a `.pt` that was cut off take what is there of its pickle, without tensors; `damage` says why.
    """
    with path.open("rb") as stream:
        yield from _mapped(stream.fileno(), salvage)


def _mapped(descriptor: int, salvage: bool) -> Iterator[Mapped]:
    size = os.fstat(descriptor).st_size
    if size == 0:
        raise Unreadable("the file is empty")
    data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    view = memoryview(data)
    try:
        if bytes(view[:2]) == b"PK":
            archive = Archive(view, salvage=salvage)
            order = archive.record("byteorder")  # absent in older files
            swapped = order is not None and bytes(order[:8]) == b"big"
            yield Mapped(archive.pickle(), 0, size, data, archive, swapped, descriptor)
        else:
            at = _begin(view)
            ending = "" if at or view[-1] == _STOP else "truncated: it does not end as a pickle does"
            yield Mapped(view, at, size, data, descriptor=descriptor, ending=ending)
    finally:
        with suppress(BufferError):  # an error's frames may still look at it
            view.release()
            data.close()


@contextmanager
def opened(path: Path) -> Iterator[Saved]:
    """A `.pt` or pickle file with its whole value. Raises Unreadable, and OSError when it can not be opened."""
    with mapped(path) as file:
        if len(file.data) > MOST_PICKLE_BYTES:
            raise Unreadable(f"a pickle of {len(file.data)} bytes, more than is built as a whole")
        walker = Walker(file.data, file.at)
        value = walker.next()
        yield Saved(value, tuple(walker.foreign), file.total_bytes, file)


def _begin(view: memoryview) -> int:
    """Where the value's pickle begins: behind the magic number, protocol and sizes of types in torch's older format."""
    walker = Walker(view[:_LEGACY_HEAD])
    try:
        if walker.next() != _LEGACY_MAGIC:
            return 0
        walker.next()
        walker.next()
    except Unreadable:  # a pickle longer than that is the value
        return 0
    return walker.at
