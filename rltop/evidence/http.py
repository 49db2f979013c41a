"""Captures of HTTP: requests to engines and routers, and what they answered.

`http*.jsonl` and `probe*.jsonl` hold one request per line; `weights_checker.json` is one answer of that endpoint (or
one per engine). Bodies are kept without their large parts (tensors, prompts).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rltop.checks.found import HttpCall
from rltop.checks.observe import Where
from rltop.evidence import json_files, jsonl
from rltop.evidence.bounded import FirstAndNewest
from rltop.evidence.sink import Reader, Sink, Source

MOST_CALLS = (20_000, 20_000)
"""First and newest requests of one file."""
MOST_CHARS = 64 << 20
"""Characters of bodies and answers of one file; of what comes after, a body keeps `LEAST` of them."""
MOST_BODY = 64 << 10
"""Characters of the bodies and answers of one request."""
LEAST = 512
MOST_ITEMS = 200
"""Entries of one list or map that are kept."""
_VALUE = 16
"""What a value costs beside its text."""
MOST_TEXT = 2_000
_ANSWERS = ("response", "answer", "result", "response_body")
_OWN = frozenset(
    {"path", "url", "status", "status_code", "code", "engine", "method", "body", "request", "json", "server", "headers"}
    | {"step", "t", "time", "timestamp", *_ANSWERS}
)


@dataclass(slots=True)
class _Budget:
    """Characters that may still be kept; a value costs its text and `_VALUE` beside it."""

    left: int

    def part(self) -> _Budget:
        """What one request may use."""
        return _Budget(min(MOST_BODY, max(self.left, LEAST)))

    def small(self, value: Any, depth: int = 0) -> Any:
        """The value without its large parts: long texts and lists are cut, what is deep or over budget is empty."""
        cut = value[:MOST_TEXT] if isinstance(value, str) else value
        self.left -= _VALUE + (len(cut) if isinstance(cut, str) else 0)
        if isinstance(cut, str):
            return cut if self.left > 0 else ""
        if isinstance(cut, list):
            return [self.small(one, depth + 1) for one in cut[:MOST_ITEMS] if self.left > 0] if depth < 4 else []
        if isinstance(cut, dict):
            items = list(cut.items())[:MOST_ITEMS] if depth < 4 else []
            return {key: self.small(one, depth + 1) for key, one in items if self.left > 0}
        return cut


def read_calls(source: Source, sink: Sink) -> None:
    """One request per line."""
    found: FirstAndNewest[HttpCall] = FirstAndNewest(*MOST_CALLS)
    spent = _Budget(MOST_CHARS)
    for where, row, _ in jsonl.maps(source, sink, "http", listed=True):
        part = spent.part()
        given = part.left
        found.append(_call(row, where, len(sink.http) + found.seen, part))
        spent.left -= given - max(part.left, 0)
    if found.seen:
        sink.http += found
        sink.files.append(source.name)


def read_checker(source: Source, sink: Sink) -> None:
    """Answer of `/weights_checker`: `{status, response}`, the bare answer, or a list or map of them per engine."""
    loaded = json_files.document(source, sink, "weights_checker")
    if loaded is None:
        return
    value, lines = loaded
    where = Where(source.name, lines.get("message") or lines.get("success") or lines.get("response") or 1)
    for engine, one in _per_engine(value):
        row: dict[str, Any] = dict(one) if _has_answer(one) else {"response": one}
        row.setdefault("path", "/weights_checker")
        row.setdefault("engine", engine)
        sink.http.append(_call(row, where, len(sink.http), _Budget(MOST_BODY)))
    sink.files.append(source.name)


def _has_answer(row: dict[str, Any]) -> bool:
    return any(isinstance(row.get(name), dict) for name in _ANSWERS)


def _per_engine(value: Any) -> list[tuple[int | str | None, dict[str, Any]]]:
    if isinstance(value, list):
        return [(one.get("engine", at), one) for at, one in enumerate(value) if isinstance(one, dict)]
    if not isinstance(value, dict):
        return []
    if "success" in value or _has_answer(value) or not all(isinstance(one, dict) for one in value.values()):
        return [(value.get("engine"), value)]
    return [(int(name) if name.isdigit() else name, one) for name, one in value.items()]


def _call(row: dict[str, Any], where: Where, order: int, room: _Budget) -> HttpCall:
    url = str(row.get("url") or "")
    path = str(row.get("path") or row.get("endpoint") or urlsplit(url).path or "")
    path = urlsplit(path).path if "?" in path or "://" in path else path
    answer: Any = next((row[name] for name in _ANSWERS if name in row), {})
    body: Any = next((row[name] for name in ("body", "request", "json") if isinstance(row.get(name), dict)), {})
    headers = row.get("headers") if isinstance(row.get("headers"), dict) else {}
    low = {str(key).lower(): str(value) for key, value in (headers or {}).items()}
    status = next((row[n] for n in ("status", "status_code", "code") if isinstance(row.get(n), int)), None)
    engine = row.get("engine")
    step = row.get("step")
    time = next((row[n] for n in ("t", "time", "timestamp") if isinstance(row.get(n), int | float)), None)
    return HttpCall(
        path=path,
        status=status,
        engine=engine if isinstance(engine, int | str) and not isinstance(engine, bool) else None,
        method=str(row.get("method") or ""),
        body=_slim(body, room),
        answer=_slim(answer, room) if isinstance(answer, dict) else {"text": str(answer)[:MOST_TEXT]},
        server=str(row.get("server") or ", ".join(filter(None, (low.get("server"), low.get("via"))))),
        url=url,
        step=step if isinstance(step, int) and not isinstance(step, bool) else None,
        time=float(time) if time is not None else None,
        order=order,
        where=Where(where.source, where.line, _line(path, status, body, answer)),
        extra={key: room.small(value) for key, value in row.items() if key not in _OWN},
    )


def _line(path: str, status: int | None, body: Any, answer: Any) -> str:
    """A request in one line, for evidence."""
    text = f"{path} {'' if status is None else status}".strip()
    if isinstance(body, dict) and body.get("tags") is not None:
        text += f" tags={body['tags']}"
    if isinstance(answer, dict) and ("success" in answer or "message" in answer):
        text += f" success={answer.get('success')} message={str(answer.get('message', ''))[:120]!r}"
    return text


def _slim(value: dict[str, Any], room: _Budget) -> dict[str, object]:
    masked: dict[str, object] = json_files.masked(value)
    return {key: room.small(inner) for key, inner in list(masked.items())[:MOST_ITEMS]}


_PATH = re.compile(
    rb'"(?:path|url)"\s*:\s*"[^"]*/(?:generate|update_weights|release_memory|resume_memory|health|model_info)'
)


def _sniff(_source: Source, head: bytes) -> bool:
    return head.lstrip().startswith(b"{") and b'"status' in head and bool(_PATH.search(head))


READERS: tuple[Reader, ...] = (
    Reader("http", ("http*.jsonl", "probe*.jsonl"), read_calls, _sniff),
    Reader("http", ("weights_checker*.json", "*weights_checker.json"), read_checker),
)
