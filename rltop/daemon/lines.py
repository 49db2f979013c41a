"""Lines of a log around one line, or its last ones: what a viewer opens from evidence or an engine (query `lines?`).

Read-only and bounded. Opened are only the logs that the daemon follows and regular files inside the run directory,
after all symbolic links; keys and sockets of the run never. What cannot be shown is an answer that says why.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from rltop.protocol.messages import LinesAnswer, LinesQuery

MOST_AROUND = 500
"""Lines before, and lines after."""
MOST_LINE = 4_000
"""Bytes of one line; the rest of it is left out."""
MOST_BYTES = 1 << 20
"""Of all lines of one answer."""
MOST_SCAN = 8 << 30
"""Bytes of a log that are gone through for one answer."""
_CHUNK = 1 << 20
_PRIVATE = ("keys", "sock")
"""Directories of a run that are nobody's evidence."""


class SourceLines:
    """Answers `lines?` for one run. `logs`: the logs that are followed now, by the name that evidence has for them."""

    def __init__(
        self,
        run_dir: Path,
        logs: Callable[[], Mapping[str, Path]],
        before: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """before: log -> lines that it had before it was replaced or cut; numbers of lines go on from there."""
        self._run_dir = run_dir
        self._logs = logs
        self._before = before

    def find(self, source: str) -> Path | None:
        """The file behind a name; None where there is none, or none that may be shown."""
        try:
            root = self._run_dir.resolve()
            inside = (root / source).resolve()
            if inside.is_relative_to(root) and inside.is_file():
                private = inside.relative_to(root).parts[0] in _PRIVATE
                return None if private else inside
            followed = self._logs().get(source)
            return followed.resolve() if followed is not None else None
        except (OSError, ValueError, RuntimeError):  # too long a name, a zero byte, a loop of links
            return None

    def answer(self, query: LinesQuery, path: Path | None) -> LinesAnswer:
        """The lines; `path` is what `find` gave. Reads the log up to them: call it in a thread."""
        if path is None:
            why = "it is neither a log that this run's daemon follows nor a file in the run directory"
            return LinesAnswer(query.source, why=why)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return LinesAnswer(query.source, why="it is no regular file")
                if query.line:
                    return _counted(file, query, self._before().get(query.source, 0))
                return _last(file, query) if query.start is None else _behind(file, query, max(query.start, 0))
        except OSError as error:
            return LinesAnswer(query.source, why=error.strerror or str(error))


def _counted(file: BinaryIO, query: LinesQuery, before: int) -> LinesAnswer:
    """The lines around one whose number counts on from the `before` lines of the files before this one."""
    if 0 < query.line <= before:
        why = f"line {query.line} was in the file before it was replaced or cut: this one begins with line {before + 1}"
        return LinesAnswer(query.source, why=why)
    answer = _around(file, msgspec.structs.replace(query, line=query.line - before))
    if not answer.lines and before:
        return msgspec.structs.replace(answer, why=f"{answer.why} (its line 1 is counted as {before + 1})")
    return msgspec.structs.replace(answer, first=answer.first + before) if before else answer


def _around(file: BinaryIO, query: LinesQuery) -> LinesAnswer:
    before, after = (min(max(count, 0), MOST_AROUND) for count in (query.before, query.after))
    line = max(query.line, 1)
    first = max(1, line - before)
    passed = _skip(file, first - 1)
    if passed < first - 1:
        if file.tell() >= MOST_SCAN:
            return LinesAnswer(query.source, why=f"line {line} lies behind the first {MOST_SCAN >> 30} GiB")
        return LinesAnswer(query.source, why=_shorter(passed + bool(_last_byte(file) not in (b"", b"\n")), line))
    lines: list[str] = []
    left = MOST_BYTES
    while first + len(lines) <= line + after and (piece := file.readline(MOST_LINE)):
        if b"\0" in piece:
            return LinesAnswer(query.source, why="it is no text")
        left -= len(piece)
        if left < 0:
            break
        if len(piece) == MOST_LINE and not piece.endswith(b"\n"):
            _skip(file, 1)
        lines.append(piece.rstrip(b"\r\n").decode("utf-8", "replace"))
    if first + len(lines) <= line and left >= 0:
        return LinesAnswer(query.source, why=_shorter(first + len(lines) - 1, line))
    return LinesAnswer(query.source, first, lines)


def _last(file: BinaryIO, query: LinesQuery) -> LinesAnswer:
    """The last lines, read from the end: what a log of any size says now costs the same. Their numbers stay unknown."""
    end = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, end - MOST_BYTES))
    data = file.read(end - start)
    if b"\0" in data:
        return LinesAnswer(query.source, why="it is no text")
    pieces = data.removesuffix(b"\n").split(b"\n") if data else []
    if start:
        del pieces[0]  # cut
    count = min(max(query.before, 1), MOST_AROUND)
    lines = [piece[:MOST_LINE].rstrip(b"\r").decode("utf-8", "replace") for piece in pieces[-count:]]
    return LinesAnswer(query.source, 0, lines, "" if lines else "it is empty", start + len(data))


def _behind(file: BinaryIO, query: LinesQuery, start: int) -> LinesAnswer:
    """What was written from byte `start` on: whole lines, a bounded piece of it."""
    size = file.seek(0, os.SEEK_END)
    if size < start:
        return LinesAnswer(query.source, why="the log was replaced or cut since", end=0)
    file.seek(start)
    data = file.read(MOST_BYTES)
    if b"\0" in data:
        return LinesAnswer(query.source, why="it is no text")
    pieces = data.split(b"\n")[:-1][:MOST_AROUND]
    if not pieces and len(data) == MOST_BYTES:  # one line as long as that
        return LinesAnswer(query.source, 0, [data[:MOST_LINE].decode("utf-8", "replace")], "", start + len(data))
    behind = start + sum(len(piece) + 1 for piece in pieces)
    lines = [piece[:MOST_LINE].rstrip(b"\r").decode("utf-8", "replace") for piece in pieces]
    return LinesAnswer(query.source, 0, lines, "" if lines else "nothing new", behind)


def _shorter(has: int, line: int) -> str:
    return f"it has {has} lines, so line {line} was in a log that was replaced or cut since"


def _skip(file: BinaryIO, count: int) -> int:
    """Goes behind the next `count` line ends; returns how many there were before the end or the bound."""
    passed = 0
    while passed < count and file.tell() < MOST_SCAN and (chunk := file.read(_CHUNK)):
        found = chunk.count(b"\n")
        if passed + found < count:
            passed += found
            continue
        at = 0
        for _ in range(count - passed):
            at = chunk.index(b"\n", at) + 1
        file.seek(at - len(chunk), os.SEEK_CUR)
        return count
    return passed


def _last_byte(file: BinaryIO) -> bytes:
    if file.tell() == 0:
        return b""
    file.seek(-1, os.SEEK_CUR)
    return file.read(1)
