"""Maps of a JSON, JSON-lines or Python-dict file, one by one, with their lines.

A row that is no map, and a line that can not be read, become a `Problem` of the sink; the last line of a file without a
line end may be cut, which is how a growing file looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rltop.checks.found import Problem
from rltop.checks.observe import Where
from rltop.evidence import literal
from rltop.evidence.pieces import chunks
from rltop.evidence.sink import Sink, Source

MOST_LINE = 8 * 1024 * 1024
"""A longer row is not read."""
MOST_WHOLE = 32 * 1024 * 1024
"""Bytes of a JSON document that is no JSON lines."""
MOST_PROBLEMS = 8
"""Broken lines of one file that are named; the rest is counted."""
TEXT = 200


def first_map(head: bytes) -> dict[str, Any] | None:
    """The map that the first line of a file begins with, also if the line is longer than `head`."""
    line = head.lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0]
    if not line.startswith(b"{"):
        return None
    found = read_map(line)
    if found is not None:
        return found
    # The line is cut: what stands before the last comma is a map of its own.
    cut = line
    for _ in range(64):
        cut = cut[: max(cut.rfind(b", "), 0)]
        if not cut:
            return None
        found = read_map(cut + b"}")
        if found is not None:
            return found
    return None


def read_map(line: bytes) -> dict[str, Any] | None:
    """A line as a map; None when it is none."""
    text = line.decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if "'" not in text and "nan" not in text and "inf" not in text:
            return None
        try:
            value = literal.parse(text)
        except literal.Unreadable:
            return None
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else None


def maps(
    source: Source, sink: Sink, kind: str, *, most: int = MOST_LINE, listed: bool = False
) -> Iterator[tuple[Where, dict[str, Any], int]]:
    """(place, map, bytes) of every row. Rows that can not be read are told to the sink.

    most: bytes of the longest row. listed: a file that is one document must be a list of maps; one map over several
    lines is no row then.
    """
    broken = good = 0
    first_broken: tuple[int, str] | None = None
    for number, line, ended in _lines(source, sink, kind, most):
        if not line.strip():
            continue
        if good == 0 and broken == 0 and line.lstrip()[:1] in (b"[", b"{") and read_map(line) is None:
            whole = _document(source, listed)
            if whole is not None:
                yield from whole
                return
        found = read_map(line) if len(line) <= most else None
        if found is not None:
            good += 1
            yield Where(source.name, number, line[:TEXT].decode("utf-8", "replace")), found, len(line) + ended
            continue
        broken += 1
        why = f"the line is longer than {most >> 20} MiB" if len(line) > most else "the line is no JSON map"
        if line.lstrip()[:1] == b"[" and number == 1:
            why = f"a list that can not be read, or of more than {MOST_WHOLE >> 20} MiB: give one map per line"
        first_broken = first_broken or (number, why)
        if not ended and good:
            where = Where(source.name, number, line[:TEXT].decode("utf-8", "replace"))
            sink.problems.append(Problem(where, kind, "the last line is cut", cut_end=True))
            continue
        if broken <= MOST_PROBLEMS:
            where = Where(source.name, number, line[:TEXT].decode("utf-8", "replace"))
            sink.problems.append(Problem(where, kind, why, whole=False))
    if broken and not good and first_broken:
        sink.problem(source, kind, f"none of its {broken} lines can be read: {first_broken[1]}", line=1, whole=True)


def _lines(source: Source, sink: Sink, kind: str, most: int) -> Iterator[tuple[int, bytes, bool]]:
    """(number, line, has a line end); a line is never longer than `most` + 1."""
    try:
        with source.path.open("rb") as file:
            number, rest, size = 1, [b""], 0
            for data in chunks(file):
                *ended, tail = data.split(b"\n")
                for part in ended:
                    line = b"".join([*rest, part[: most + 1 - min(size, most)]]) if size else part
                    yield number, line[: most + 1], True
                    number, rest, size = number + 1, [b""], 0
                if tail and size <= most:
                    rest.append(tail)
                    size += len(tail)
            if size:
                yield number, b"".join(rest)[: most + 1], False
    except OSError as error:
        sink.problem(source, kind, f"can not be read: {error.strerror or error}", whole=True)


def _document(source: Source, listed: bool) -> list[tuple[Where, dict[str, Any], int]] | None:
    """A file that is one JSON document: a map (unless `listed`), or a list of maps. None if it is not."""
    try:
        if source.path.stat().st_size > MOST_WHOLE:
            return None
        value = json.loads(source.path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError):
        return None
    items = value if isinstance(value, list) else [] if listed else [value]
    found = [item for item in items if isinstance(item, dict)]
    if not found:
        return None
    texts = [json.dumps(item) for item in found]
    return [(Where(source.name, None, text[:TEXT]), item, len(text)) for text, item in zip(texts, found, strict=True)]
