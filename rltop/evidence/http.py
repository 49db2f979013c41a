"""Captures of HTTP: requests to engines and routers, and what they answered.

`http*.jsonl` and `probe*.jsonl` hold one request per line; `weights_checker.json` is one answer of that endpoint (or
one per engine). Bodies are kept without their large parts (tensors, prompts).
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from rltop.checks.found import HttpCall
from rltop.checks.observe import Where
from rltop.evidence import json_files
from rltop.evidence.sink import Reader, Sink, Source

MOST_CALLS = 200_000
MOST_TEXT = 2_000
_ANSWERS = ("response", "answer", "result", "response_body")
_OWN = frozenset(
    {"path", "url", "status", "status_code", "code", "engine", "method", "body", "request", "json", "server", "headers"}
    | {"step", "t", "time", "timestamp", *_ANSWERS}
)


def read_calls(source: Source, sink: Sink) -> None:
    """One request per line."""
    found: list[HttpCall] = []
    for number, row, _ in json_files.rows(source, sink, "http"):
        if len(found) < MOST_CALLS:
            found.append(_call(row, Where(source.name, number), len(sink.http) + len(found)))
    if found:
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
        sink.http.append(_call(row, where, len(sink.http)))
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


def _call(row: dict[str, Any], where: Where, order: int) -> HttpCall:
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
        body=_slim(body),
        answer=_slim(answer) if isinstance(answer, dict) else {"text": str(answer)[:MOST_TEXT]},
        server=str(row.get("server") or ", ".join(filter(None, (low.get("server"), low.get("via"))))),
        url=url,
        step=step if isinstance(step, int) and not isinstance(step, bool) else None,
        time=float(time) if time is not None else None,
        order=order,
        where=Where(where.source, where.line, _line(path, status, body, answer)),
        extra={key: _small(value) for key, value in row.items() if key not in _OWN},
    )


def _line(path: str, status: int | None, body: Any, answer: Any) -> str:
    """A request in one line, for evidence."""
    text = f"{path} {'' if status is None else status}".strip()
    if isinstance(body, dict) and body.get("tags") is not None:
        text += f" tags={body['tags']}"
    if isinstance(answer, dict) and ("success" in answer or "message" in answer):
        text += f" success={answer.get('success')} message={str(answer.get('message', ''))[:120]!r}"
    return text


def _slim(value: dict[str, Any]) -> dict[str, object]:
    masked = json_files.masked(value)
    return {key: _small(inner) for key, inner in masked.items()}


def _small(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if isinstance(value, list):
        return [_small(one, depth + 1) for one in value[:200]] if depth < 4 else []
    if isinstance(value, dict):
        return {key: _small(one, depth + 1) for key, one in list(value.items())[:200]} if depth < 4 else {}
    return value


_PATH = re.compile(
    rb'"(?:path|url)"\s*:\s*"[^"]*/(?:generate|update_weights|release_memory|resume_memory|health|model_info)'
)


def _sniff(_source: Source, head: bytes) -> bool:
    return head.lstrip().startswith(b"{") and b'"status' in head and bool(_PATH.search(head))


READERS: tuple[Reader, ...] = (
    Reader("http", ("http*.jsonl", "probe*.jsonl"), read_calls, _sniff),
    Reader("http", ("weights_checker*.json", "*weights_checker.json"), read_checker),
)
