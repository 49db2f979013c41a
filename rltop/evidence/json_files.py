"""Small files of JSON: one document, or one object per line.

A cut last line is a file that still grows. A broken line elsewhere is a `Problem` with its number, and the rest is
read. Python's spelling of numbers (`NaN`, `Infinity`) is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from rltop.checks.found import Problem
from rltop.checks.observe import Where
from rltop.evidence.sink import Sink, Source

MOST_LINE = 256 << 20
"""Bytes of one line; a longer one is left out."""
MOST_DOCUMENT = 256 << 20
MOST_PROBLEMS = 20
"""Broken lines of one file that are named; the rest is only counted."""
_KEY = re.compile(r'^[ \t]{0,4}"(?P<key>(?:[^"\\]|\\.)*)"\s*:')
_SECRET = re.compile(r"api_?key|secret|password|credential|(?:^|_)token$|auth", re.IGNORECASE)


def rows(source: Source, sink: Sink, kind: str) -> Iterator[tuple[int, dict[str, Any], int]]:
    """(line, object, bytes) of a file of objects, or of one list of objects; `sink` gets its problems."""
    used = broken = 0
    with source.path.open("rb") as stream:
        number = 0
        while raw := stream.readline(MOST_LINE):
            number += 1
            whole = raw.endswith(b"\n")
            text = raw.strip()
            if number == 1 and text.startswith(b"["):
                yield from _listed(source, sink, kind, stream.read(MOST_DOCUMENT), raw)
                return
            if not text:
                continue
            row = _object(text)
            if row is not None:
                used += 1
                yield number, row, len(raw)
                continue
            broken += 1
            if not whole and len(raw) < MOST_LINE:
                sink.problems.append(
                    Problem(Where(source.name, number), kind, "its last line is cut off", cut_end=True, whole=not used)
                )
            elif broken <= MOST_PROBLEMS:
                sink.problem(source, kind, "no JSON object", line=number)
    if broken and not used and not any(p.whole for p in sink.problems if p.where.source == source.name):
        sink.problem(source, kind, f"none of its {broken} lines is a JSON object", line=1, whole=True)


def _listed(
    source: Source, sink: Sink, kind: str, rest: bytes, first: bytes
) -> Iterator[tuple[int, dict[str, Any], int]]:
    try:
        value = json.loads(first + rest)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        sink.problem(source, kind, f"no JSON ({error})"[:200], line=line, whole=True)
        return
    for row in value if isinstance(value, list) else ():
        if isinstance(row, dict):
            yield 1, row, len(json.dumps(row))


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def document(source: Source, sink: Sink, kind: str) -> tuple[Any, dict[str, int]] | None:
    """(value, line of each top-level key) of a JSON file; None, and a problem, when it can not be read."""
    try:
        if source.path.stat().st_size > MOST_DOCUMENT:
            sink.problem(source, kind, "it is larger than any such document", whole=True)
            return None
        text = source.path.read_text(encoding="utf-8", errors="replace")
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        sink.problem(source, kind, f"no JSON ({error})"[:200], line=getattr(error, "lineno", None), whole=True)
        return None
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = _KEY.match(line)
        if found:
            lines.setdefault(found["key"], number)
    return value, lines


def masked(value: Any, depth: int = 0) -> Any:
    """The value with keys and tokens of servers replaced by `***`."""
    if depth > 20:
        return None
    if isinstance(value, dict):
        return {
            key: "***" if _SECRET.search(str(key)) and isinstance(inner, str) and inner else masked(inner, depth + 1)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [masked(inner, depth + 1) for inner in value]
    return value
