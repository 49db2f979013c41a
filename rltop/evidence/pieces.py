"""A text file of any size as lines, in constant memory.

A line ends at `\\n`; a carriage return (progress bars rewrite their line with it) ends a piece of the same line. Of a
longer piece only the first `MOST` bytes are kept, so one line of 100 MB costs no more than any other. UTF-16 and UTF-32
files (with their mark) become UTF-8 on the way; other encodings are told apart by nobody and come as they are.
"""

from __future__ import annotations

import codecs
import gzip
from collections.abc import Iterator
from typing import BinaryIO

MOST = 64 * 1024
"""Bytes of a piece that are kept."""
CHUNK = 1024 * 1024

_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def encoding_of(head: bytes) -> tuple[str, int]:
    """(encoding, length of its mark) of a file that begins with `head`; ("", 0) without a mark."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name, len(mark)
    return "", 0


def is_binary(head: bytes) -> bool:
    """The first bytes are no text in any encoding that is read: NUL bytes, or mostly control characters."""
    if encoding_of(head)[0]:
        return False
    if b"\0" in head:
        return True
    odd = head.translate(None, _TEXT)
    return len(odd) > len(head) // 10


_TEXT = bytes([*range(0x20, 0x7F), *range(0x80, 0x100), 7, 8, 9, 10, 11, 12, 13, 27])


def chunks(file: BinaryIO | gzip.GzipFile, *, chunk: int = CHUNK) -> Iterator[bytes]:
    """The file's bytes, as UTF-8 where it says that it is in a wider encoding."""
    head = file.read(chunk)
    encoding, mark = encoding_of(head)
    if not encoding or encoding == "utf-8":
        yield head[mark:]
        while head := file.read(chunk):
            yield head
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(head[mark:]).encode("utf-8", "replace")
    while head := file.read(chunk):
        yield decoder.decode(head).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


_PACKED: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip", "gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    (b"\xfd7zXZ\0", "xz", "unxz"),
    (b"BZh", "bzip2", "bunzip2"),
    (b"PK\x03\x04", "zip", "unzip"),
)
GZIP = b"\x1f\x8b"
MOST_UNPACKED = 64 << 30
"""Bytes of a packed file that are unpacked: a file of a few MB can hold any number of zeros."""


def how_packed(head: bytes) -> tuple[str, str] | None:
    """(format, command that unpacks it) of a compressed file by its first bytes; None for one that is not."""
    return next(((name, tool) for mark, name, tool in _PACKED if head.startswith(mark)), None)


def unpacked(file: BinaryIO) -> Iterator[bytes]:
    """The text in a gzip stream, piece by piece in constant memory. Raises OSError, EOFError or zlib.error where the
    stream is damaged or cut off; what stood before has then been given."""
    with gzip.GzipFile(fileobj=file, mode="rb") as stream:
        size = 0
        for data in chunks(stream):
            size += len(data)
            yield data
            if size >= MOST_UNPACKED:
                raise OSError(f"it holds more than {MOST_UNPACKED >> 30} GiB; the rest was not read")


class Splitter:
    """Cuts a stream of chunks into pieces; keeps what is not finished yet."""

    __slots__ = ("_cut", "_rest", "line")

    def __init__(self, line: int = 1) -> None:
        self.line = line
        """Number of the line that is being read, from 1."""
        self._rest = b""
        self._cut = False
        """The piece in `_rest` was longer than `MOST`: what comes until its end is dropped."""

    @property
    def open(self) -> bool:
        """Bytes of a line without its end are waiting."""
        return bool(self._rest) or self._cut

    def feed(self, data: bytes) -> Iterator[tuple[int, list[bytes]]]:
        """(number of the first, whole lines) in one list, or one line cut at its carriage returns (then the number is
        that of the line, and it is the only one)."""
        lines = data.split(b"\n")
        if len(lines) == 1:
            self._keep(data)
            return
        self._keep(lines[0])
        first, self._rest, self._cut = self._rest, b"", False
        tail = lines.pop()
        lines[0] = first
        start = self.line
        self.line += len(lines)
        if b"\r" in data or b"\r" in first or max(map(len, lines)) > MOST:
            yield from _runs(start, lines)
        else:
            yield start, lines
        self._keep(tail)

    def end(self) -> Iterator[tuple[int, list[bytes]]]:
        """What is left when the file ends without a line end."""
        if self._rest:
            last, self._rest = self._rest, b""
            yield from _runs(self.line, [last])

    def _keep(self, data: bytes) -> None:
        if b"\r" in data:
            self._progress(data)
            return
        if self._cut:
            return
        self._rest += data
        if len(self._rest) > MOST:
            self._rest, self._cut = self._rest[:MOST], True

    def _progress(self, data: bytes) -> None:
        """A line that goes on with carriage returns: of what was rewritten only the newest text is worth keeping."""
        parts = [part[:MOST] for part in data.split(b"\r")]
        if not self._cut:
            parts[0] = (self._rest + parts[0])[:MOST]
        kept = b"\r".join(parts)
        if len(kept) > 4 * MOST:
            kept = kept[-4 * MOST :]
        self._rest, self._cut = kept, False


def _runs(start: int, lines: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Runs of lines as they are; a line with carriage returns comes piece by piece, a long one is cut."""
    done = 0
    for at in [i for i, line in enumerate(lines) if b"\r" in line or len(line) > MOST]:
        line = lines[at].removesuffix(b"\r")
        if b"\r" not in line:
            lines[at] = line[:MOST]
            continue
        if at > done:
            yield start + done, lines[done:at]
        for part in line.split(b"\r"):
            if part:
                yield start + at, [part[:MOST]]
        done = at + 1
    if done < len(lines):
        yield start + done, lines[done:] if done else lines


def lines_of(file: BinaryIO, *, chunk: int = CHUNK) -> Iterator[tuple[int, bytes]]:
    """(line number, piece) of a whole file."""
    splitter = Splitter()
    for data in chunks(file, chunk=chunk):
        for number, pieces in splitter.feed(data):
            for i, piece in enumerate(pieces):
                yield number + i, piece
    for number, pieces in splitter.end():
        for piece in pieces:
            yield number, piece
