"""Files of `torch.save`, opened without unpickling: the zip format, the older one of several pickles in a row, and a
single plain pickle.

Tensors are read one at a time, when asked for. Failure policy: `Unreadable` with the reason.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.evidence.pickle_values import WIDTH, TensorRef, Unreadable
from rltop.evidence.pickles import Walker

MOST_PICKLE_BYTES = 1 << 30
"""Of the pickle alone; tensors lie outside of it."""
MOST_UNPACKED_BYTES = 256 << 20
"""Of a pickle in a compressed entry (torch compresses none)."""
MOST_TENSOR_BYTES = 64 << 20
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ARRAY = {"float64": "d", "float32": "f", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}


@dataclass(slots=True)
class Saved:
    """One file of `torch.save`, open as long as its context."""

    value: Any
    foreign: tuple[str, ...]
    total_bytes: int
    archive: zipfile.ZipFile | None = None
    prefix: str = ""
    swapped: bool = False

    def floats(self, ref: TensorRef) -> list[float]:
        """Values of a tensor, flat. Empty where it can not be read: other layout, too large, cut off."""
        if self.archive is None or not ref.contiguous or ref.nbytes > MOST_TENSOR_BYTES:
            return []
        width = WIDTH.get(ref.dtype, 0)
        try:
            with self.archive.open(f"{self.prefix}data/{ref.key}") as stream:
                stream.seek(ref.offset * width)
                raw = stream.read(ref.nbytes)
        except Exception:  # absent, cut off, damaged, compressed by a method that is not known
            return []
        return decode(raw, ref.dtype, swapped=self.swapped) if len(raw) == ref.nbytes else []


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
def opened(path: Path) -> Iterator[Saved]:
    """A `.pt` or pickle file. Raises Unreadable, and OSError when it can not be opened."""
    size = path.stat().st_size
    if size == 0:
        raise Unreadable("the file is empty")
    with path.open("rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    view = memoryview(data)
    try:
        if bytes(view[:2]) != b"PK":
            yield _from_stream(view, size)
            return
        with _zip(path) as archive:
            yield _from_zip(archive, view, size)
    finally:
        with suppress(BufferError):  # an error's frames may still look at it
            view.release()
            data.close()


def _zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise Unreadable(f"truncated or damaged archive ({error})") from error


def _from_zip(archive: zipfile.ZipFile, view: memoryview, size: int) -> Saved:
    inside = [info for info in archive.infolist() if info.filename.endswith("data.pkl") and not info.is_dir()]
    if not inside:
        raise Unreadable("a zip archive without data.pkl: not written by torch.save")
    entry = min(inside, key=lambda info: len(info.filename))
    prefix = entry.filename[: -len("data.pkl")]
    walker = Walker(_stored(entry, view) if entry.compress_type == zipfile.ZIP_STORED else _unpacked(archive, entry))
    value = walker.next()
    return Saved(value, tuple(walker.foreign), size, archive, prefix, _swapped(archive, prefix))


def _stored(entry: zipfile.ZipInfo, view: memoryview) -> memoryview:
    """The bytes of an entry that is not compressed, as they lie in the file."""
    head = bytes(view[entry.header_offset : entry.header_offset + 30])
    if len(head) < 30 or head[:4] != b"PK\x03\x04":
        raise Unreadable("damaged archive (an entry without header)")
    begin = entry.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    if begin + entry.file_size > len(view) or entry.file_size > MOST_PICKLE_BYTES:
        raise Unreadable(f"damaged archive (its data.pkl says that it is {entry.file_size} bytes)")
    return view[begin : begin + entry.file_size]


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> memoryview:
    if entry.file_size > MOST_UNPACKED_BYTES:
        raise Unreadable(f"its compressed data.pkl says that it is {entry.file_size} bytes, more than is read")
    try:
        with archive.open(entry) as stream:
            raw = stream.read(MOST_UNPACKED_BYTES + 1)
    except Exception as error:  # zlib.error and its kin have no common base
        raise Unreadable(f"damaged archive ({type(error).__name__}: {error})") from error
    if len(raw) > MOST_UNPACKED_BYTES:
        raise Unreadable("its data.pkl unpacks without end: a zip bomb")
    return memoryview(raw)


def _swapped(archive: zipfile.ZipFile, prefix: str) -> bool:
    try:
        with archive.open(f"{prefix}byteorder") as stream:
            return stream.read(8) == b"big"
    except Exception:  # absent in older files, or damaged: little-endian, as everywhere
        return False


def _from_stream(view: memoryview, size: int) -> Saved:
    if len(view) > MOST_PICKLE_BYTES:
        raise Unreadable(f"a pickle of {size} bytes without an archive, more than is read")
    walker = Walker(view)
    value = walker.next()
    if isinstance(value, int) and value == _LEGACY_MAGIC:
        walker.next()  # protocol
        walker.next()  # sizes of the writer's types
        value = walker.next()
    return Saved(value, tuple(walker.foreign), size)
