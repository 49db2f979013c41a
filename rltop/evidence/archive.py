"""The zip archive that torch.save writes, looked into without a list of its entries.

A dump has one entry per tensor, a million samples a million of them: `zipfile` would hold all their names. Here an
entry is searched for by name in the directory at the end of the file, where torch writes them in the order in which
they are asked for. Entries are read as torch writes them, uncompressed; only a small compressed `data.pkl` is unpacked.

Failure policy: `Unreadable` with the reason. No size that the archive claims is believed beyond the bytes of the file.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

from rltop.evidence.pickle_values import Unreadable

MOST_WALKED_BYTES = 256 << 10
"""Of a directory that is gone over when the file is opened; entries of a larger one are checked when they are read."""
MOST_UNPACKED_BYTES = 256 << 20
"""Of a pickle in a compressed entry (torch compresses none)."""
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MOST_COMMENT = 1 << 16
_STORED, _DEFLATED = 0, 8
_ALL_ONES = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: where its header lies, and its size."""

    name: str
    header: int
    size: int
    packed: int
    """Bytes in the file."""
    method: int
    crc: int
    """CRC-32 of its bytes; 0: none was computed, as `torch.serialization.set_crc32_options(False)` has it."""
    after: int
    """Where the next entry of the directory begins."""


class Archive:
    """A zip archive in `view`, the bytes of the whole file."""

    def __init__(self, view: memoryview, *, salvage: bool = False) -> None:
        """salvage: of a file without directory take the pickle that it begins with, and say so in `damage`."""
        self._view = view
        self._hint = 0
        self.damage = ""
        """What is wrong with the archive itself, as far as it was seen."""
        self._limit = len(view)
        try:
            begin, end, count = _directory(view)
        except Unreadable as error:
            entry = _first(view) if salvage else None
            if entry is None:
                raise
            self._names, self.damage = view[:0], str(error)
        else:
            self._names, self._limit = view[begin:end], begin
            entry = self._pickle_entry()
            if end - begin <= MOST_WALKED_BYTES:
                self.damage = self._walked(count)
        self.prefix = entry.name[: -len("data.pkl")]
        """What the names of the archive's entries begin with."""
        self._entry = entry

    def pickle(self) -> memoryview:
        """The bytes of `data.pkl`, as they lie in the file."""
        return self._stored(self._entry) if self._entry.method == _STORED else self._unpacked(self._entry)

    def record(self, name: str, reads: int = 0) -> memoryview | None:
        """The bytes of the entry `prefix + name`. None where it is absent, damaged, or compressed.

        reads: so many of them will be read; if that is all of them, their checksum is compared.
        """
        full = (self.prefix + name).encode("utf-8", "replace")
        found = self._search(full, self._hint) or self._search(full, 0)
        if found is None or found.method != _STORED:
            return None
        self._hint = found.after
        try:
            raw = self._stored(found)
            if reads and reads == len(raw) and found.crc:
                self._compare(found, zlib.crc32(raw))
            return raw
        except Unreadable as error:
            self.damage = self.damage or str(error)
            return None

    @property
    def has_sum(self) -> bool:
        """Whether the archive says what the bytes of its pickle, as they lie in the file, add up to."""
        return self._entry.method == _STORED and self._entry.crc != 0

    def summed(self, crc: int) -> None:
        """The CRC-32 of the pickle as it was read: another than the directory's is damage."""
        self._compare(self._entry, crc)

    def _compare(self, entry: Entry, crc: int) -> None:
        if entry.crc != crc and not self.damage:
            self.damage = f"damaged archive (the bytes of {entry.name} have another checksum than when it was written)"

    def _walked(self, count: int) -> str:
        """Why the directory is no list of `count` entries that lie before it; empty where it is."""
        at = found = 0
        while at < len(self._names):
            entry = self._parse(at)
            if entry is None:
                return f"damaged archive (its directory is broken behind entry {found})"
            if entry.header + _LOCAL.size + entry.packed > self._limit:
                return f"damaged archive (its {entry.name} says that it is {entry.size} bytes)"
            at, found = entry.after, found + 1
        return "" if found == count else f"damaged archive (it lists {found} entries and says that it has {count})"

    def _pickle_entry(self) -> Entry:
        first = self._parse(0)
        if first is not None and first.name.endswith("data.pkl"):
            return first
        found = [
            entry
            for match in re.finditer(rb"data\.pkl", self._names)
            if (entry := self._ending(match.end())) is not None
        ]
        if not found:
            raise Unreadable("a zip archive without data.pkl: not written by torch.save")
        return min(found, key=lambda entry: len(entry.name))

    def _search(self, name: bytes, begin: int) -> Entry | None:
        """The entry of this name at or after `begin` of the directory."""
        for match in re.compile(re.escape(name)).finditer(self._names, begin):
            entry = self._parse(match.start() - _ENTRY.size)
            if entry is not None and entry.name.encode("utf-8", "replace") == name:
                return entry
        return None

    def _ending(self, end: int) -> Entry | None:
        """The entry whose name ends at `end` of the directory."""
        for size in range(len("data.pkl"), min(end, 512) + 1):
            entry = self._parse(end - size - _ENTRY.size)
            if entry is not None and len(entry.name.encode("utf-8", "replace")) == size:
                return entry
        return None

    def _parse(self, at: int) -> Entry | None:
        """The entry of the directory that begins at `at`. None if there is none."""
        if at < 0 or at + _ENTRY.size > len(self._names):
            return None
        fields = _ENTRY.unpack_from(self._names, at)
        if fields[0] != b"PK\x01\x02":
            return None
        method, packed, size, name_size, extra_size, comment = fields[4], *fields[8:13]
        header = fields[16]
        begin = at + _ENTRY.size
        name = bytes(self._names[begin : begin + name_size]).decode("utf-8", "replace")
        extra = self._names[begin + name_size : begin + name_size + extra_size]
        size, packed, header = _wide(extra, size, packed, header)
        return Entry(name, header, size, packed, method, fields[7], begin + name_size + extra_size + comment)

    def _begin(self, entry: Entry) -> int:
        head = bytes(self._view[entry.header : entry.header + _LOCAL.size])
        if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
            raise Unreadable("damaged archive (an entry without header)")
        name_size, extra_size = _LOCAL.unpack(head)[9:11]
        return entry.header + _LOCAL.size + int(name_size) + int(extra_size)

    def _stored(self, entry: Entry) -> memoryview:
        begin = self._begin(entry)
        if begin + entry.size > self._limit:
            raise Unreadable(f"damaged archive (its {entry.name} says that it is {entry.size} bytes)")
        return self._view[begin : begin + entry.size]

    def _unpacked(self, entry: Entry) -> memoryview:
        if entry.method != _DEFLATED:
            raise Unreadable(f"its data.pkl is compressed by a method that torch does not use ({entry.method})")
        if entry.size > MOST_UNPACKED_BYTES:
            raise Unreadable(f"its compressed data.pkl says that it is {entry.size} bytes, more than is read")
        begin = self._begin(entry)
        try:
            raw = zlib.decompressobj(-15).decompress(self._view[begin : begin + entry.packed], MOST_UNPACKED_BYTES + 1)
        except zlib.error as error:
            raise Unreadable(f"damaged archive ({error})") from error
        if len(raw) > MOST_UNPACKED_BYTES:
            raise Unreadable("its data.pkl unpacks without end: a zip bomb")
        return memoryview(raw)


def _directory(view: memoryview) -> tuple[int, int, int]:
    """(begin, end, number of entries) of the directory of a zip file.

    Raises Unreadable where it has none, as a file that was cut off."""
    tail = bytes(view[-(_MOST_COMMENT + _END.size) :])
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise Unreadable("truncated or damaged archive (it ends without a directory)")
    count, size, begin = _END.unpack_from(tail, at)[4:7]
    end = len(view) - len(tail) + at
    if at >= _LOCATOR.size and tail[at - _LOCATOR.size :][:4] == b"PK\x06\x07":
        place = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2]
        if place + _END64.size > len(view) or bytes(view[place : place + 4]) != b"PK\x06\x06":
            raise Unreadable("truncated or damaged archive (its 64 bit directory is not where it should be)")
        count, size, begin = _END64.unpack_from(view, place)[7:10]
        end = place
    if begin + size != end:
        what = "are missing from" if begin + size > end else "were added to"
        raise Unreadable(f"truncated or damaged archive ({abs(begin + size - end)} bytes {what} its middle)")
    return begin, end, count


def _first(view: memoryview) -> Entry | None:
    """The pickle that a file of torch.save begins with, up to the end of the file: the directory was to come last."""
    head = bytes(view[: _LOCAL.size])
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        return None
    method, name_size, extra_size = (_LOCAL.unpack(head)[at] for at in (3, 9, 10))
    name = bytes(view[_LOCAL.size : _LOCAL.size + name_size]).decode("utf-8", "replace")
    size = len(view) - _LOCAL.size - name_size - extra_size
    if method != _STORED or not name.endswith("data.pkl") or size <= 0:
        return None
    return Entry(name, 0, size, size, method, 0, 0)


def _wide(extra: memoryview, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Sizes and place of a zip64 entry: those that do not fit are in its extra field, in this order."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = [one for (one,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + min(length, 24) // 8 * 8])]
            size = values.pop(0) if size == _ALL_ONES and values else size
            packed = values.pop(0) if packed == _ALL_ONES and values else packed
            header = values.pop(0) if header == _ALL_ONES and values else header
            break
        at += 4 + length
    return size, packed, header
