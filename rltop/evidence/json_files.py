"""Small JSON documents, as a whole (`jsonl.py` reads files of one map per line).

Python's spelling of numbers (`NaN`, `Infinity`) is accepted. A document that can not be read is a `Problem`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rltop.evidence.sink import Sink, Source

MOST_DOCUMENT = 64 << 20
"""Bytes; read, it takes several times as much."""
_KEY = re.compile(r'^[ \t]{0,4}"(?P<key>(?:[^"\\]|\\.)*)"\s*:')
_SECRET = re.compile(r"api_?key|secret|password|credential|(?:^|_)token$|auth", re.IGNORECASE)


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
