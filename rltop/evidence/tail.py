"""Follows a log that is being written: new lines in constant memory, through rotation and truncation.

A rotated file (renamed, a new one in its place) is read to its end before the new one is begun; a truncated one
(`copytruncate`) starts over. UTF-16 and UTF-32 (with their mark) become UTF-8 on the way, as in `pieces`. `position`
can be kept and given to another `Tail` later: it then goes on after the last whole line, also if the file was renamed
in between. Nothing here waits: call `poll` as often as you like.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rltop.evidence.pieces import Splitter, encoding_of

READ = 1024 * 1024
"""Bytes of one read; also what `poll` gives at most between two looks at the clock of its caller."""
HEAD = 256
"""Bytes at the start of a file that tell it from another one with the same inode."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a `Tail` is: enough to go on after a restart."""

    device: int = 0
    inode: int = 0
    offset: int = 0
    """Bytes up to the end of the last whole line."""
    line: int = 1
    """Number of the line that comes next."""
    head: bytes = b""
    """First bytes of the file, at most `HEAD`."""


class Tail:
    """Follows one path. The file need not exist yet. Raises nothing: an unreadable file is one without new lines."""

    def __init__(self, path: Path, position: Position | None = None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._identity = (0, 0)
        self._read = 0
        self._whole = 0
        self._head = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._splitter = Splitter()
        self.restarts = 0
        """Times that a new file, or a truncated one, was begun."""
        if position is not None and position.inode:
            self._resume(position)

    @property
    def position(self) -> Position:
        """After the last whole line that was given."""
        return Position(*self._identity, self._whole, self._splitter.line, self._head)

    def poll(self, limit: int = 16 * READ) -> Iterator[tuple[int, list[bytes]]]:
        """New whole lines as (number of the first, lines), as `Splitter.feed` gives them; at most about `limit` bytes.
        Numbers start at 1 again in a new file."""
        left = limit
        while left > 0:
            if self._file is None and not self._open():
                return
            data = self._more(min(READ, left))
            if data:
                left -= len(data)
                if self._decoder is not None:
                    yield from self._splitter.feed(self._decoder.decode(data).encode("utf-8", "replace"))
                    continue
                yield from self._splitter.feed(data)
                end = data.rfind(b"\n")
                if end >= 0:
                    self._whole = self._read - (len(data) - end - 1)
                continue
            if self._truncated():
                self._start_over()
                continue
            if not self._replaced():
                return
            yield from self._splitter.end()
            self._close()
            self.restarts += 1

    @property
    def read_bytes(self) -> int:
        """Bytes of the file that were read."""
        return self._read

    @property
    def head(self) -> bytes:
        """First bytes of the file that is read, at most `HEAD`."""
        return self._head

    def behind(self) -> int:
        """Bytes of the file that are there and were not read yet."""
        if self._file is None:
            return 0
        try:
            return max(0, os.fstat(self._file.fileno()).st_size - self._read)
        except OSError:
            return 0

    def skip(self, size: int) -> int:
        """Goes over about `size` bytes to the start of a line without giving any; returns how many lines were left out,
        the one that was begun included. Numbers of lines stay right: line ends are counted."""
        if self._decoder is not None:
            return 0
        lines, left = 0, size
        while left > 0 and (data := self._more(min(READ, left))):
            left -= len(data)
            lines += data.count(b"\n")
            last = data.endswith(b"\n")
            while left <= 0 and not last and (data := self._more(4096)):
                end = data.find(b"\n") + 1
                if end:
                    lines += 1
                    self._back(len(data) - end)
                    last = True
        self._splitter = Splitter(self._splitter.line + lines)
        self._whole = self._read
        return lines

    def _back(self, size: int) -> None:
        if self._file is not None:
            self._file.seek(-size, os.SEEK_CUR)
            self._read -= size

    def close(self) -> None:
        """Closes the file; `poll` would open it again from the start."""
        self._close()

    def _open(self) -> bool:
        try:
            file = self._path.open("rb", buffering=0)
        except OSError:
            return False
        self._take(file)
        return True

    def _take(self, file: BinaryIO) -> None:
        info = os.fstat(file.fileno())
        self._file, self._identity = file, (info.st_dev, info.st_ino)
        self._read = self._whole = 0
        self._head = b""
        self._decoder = None
        self._splitter = Splitter()

    def _more(self, size: int) -> bytes:
        if self._file is None:
            return b""
        try:
            data = self._file.read(size) or b""
        except OSError:
            return b""
        first = self._read == 0
        if len(self._head) < HEAD and self._read == len(self._head):
            self._head += data[: HEAD - len(self._head)]
        self._read += len(data)
        if first and data:
            encoding, mark = encoding_of(data)
            if encoding not in ("", "utf-8"):  # `_whole` stays 0: such a file is not gone on with in its middle
                self._decoder = codecs.getincrementaldecoder(encoding)("replace")
            return data[mark:]
        return data

    def _truncated(self) -> bool:
        if self._file is None:
            return False
        try:
            return os.fstat(self._file.fileno()).st_size < self._read
        except OSError:
            return False

    def _start_over(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._take(self._file)
            self.restarts += 1

    def _replaced(self) -> bool:
        """Another file has the path now. While the path is empty (between rename and create) the old one is kept."""
        try:
            info = self._path.stat()
        except OSError:
            return False
        return (info.st_dev, info.st_ino) != self._identity

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _resume(self, position: Position) -> None:
        """Go on in the file of `position`, wherever it is called by now; from the start of the path if it is gone."""
        for path in (self._path, *self._siblings()):
            try:
                file = path.open("rb", buffering=0)
            except OSError:
                continue
            info = os.fstat(file.fileno())
            same = (info.st_dev, info.st_ino) == (position.device, position.inode)
            if same and info.st_size >= position.offset and file.read(len(position.head)) == position.head:
                self._take(file)
                file.seek(position.offset)
                self._read = self._whole = position.offset
                self._head = position.head
                self._splitter = Splitter(position.line)
                return
            file.close()

    def _siblings(self) -> list[Path]:
        """Files that rotation may have made of the path: `train.log.1`, `train.log-20260301`."""
        try:
            with os.scandir(self._path.parent) as entries:
                names = [entry.name for _, entry in zip(range(10_000), entries, strict=False)]
        except OSError:
            return []
        return [
            self._path.parent / name for name in names if name.startswith(self._path.name) and name != self._path.name
        ]
