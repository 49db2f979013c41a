"""TensorBoard's event file, written without TensorBoard: scalars only.

A file is a sequence of TFRecords (tensorflow/core/lib/io/record_writer.h): length (uint64), masked CRC-32C of the
length, data, masked CRC-32C of the data, little-endian. The data is an `Event` protobuf (tensorflow/core/util/
event.proto): wall_time = 1 (double), step = 2 (int64), file_version = 3 (string), summary = 5; a `Summary` holds values
= 1 of tag = 1 (string) and simple_value = 2 (float32).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import BinaryIO

_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


@cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of some bytes."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """The CRC as a TFRecord has it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


class EventFile:
    """Appends to an open file; its first record says the version."""

    def __init__(self, file: BinaryIO, *, started: float) -> None:
        """started: wall clock of the file, seconds."""
        self._file = file
        self._tags: dict[str, bytes] = {}
        self._record(b"\x09" + struct.pack("<d", started) + _text(3, b"brain.Event:2"))

    def scalar(self, tag: str, step: int, value: float, time: float) -> None:
        """One value. It becomes a float32, as everywhere in TensorBoard. time: wall clock, seconds."""
        known = self._tags.get(tag)
        if known is None:
            known = self._tags[tag] = _text(1, tag.encode())
        summary = _text(1, known + b"\x15" + _float32(value))
        self._record(b"\x09" + struct.pack("<d", time) + b"\x10" + _varint(step) + _text(5, summary))

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data)))


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # beyond float32
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # a negative step, as protobuf writes it
    found = bytearray()
    while True:
        number, low = number >> 7, number & 0x7F
        if not number:
            found.append(low)
            return bytes(found)
        found.append(low | 0x80)


def _text(field: int, data: bytes) -> bytes:
    """A field of bytes: its key, its length, itself."""
    return bytes([field << 3 | 2]) + _varint(len(data)) + data
