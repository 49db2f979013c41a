"""Lines of SGLang servers and the router: requests, batches, start-up, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser, number

_ACCESS = re.compile(r'"(?P<method>[A-Z]+) (?P<path>/[^ "?]*)[^"]*" (?P<status>\d{3})')
_BATCH = re.compile(r"(?P<kind>Prefill|Decode) batch[.,\[ ]")
_FIELD = re.compile(r"#?(?P<name>[A-Za-z][\w ()/-]*?)[:=] ?(?P<value>-?[\d.]+)(?: GB)?(?=,|$|\s)")
_NAMES = {
    "new-seq": "new_seq",
    "new-token": "new_token",
    "cached-token": "cached_token",
    "token usage": "token_usage",
    "full token usage": "token_usage",
    "running-req": "running_req",
    "queue-req": "queue_req",
    "token": "token",
    "gen throughput (token/s)": "gen_throughput",
    "avail mem": "avail_gb",
    "accept len": "accept_len",
    "accept rate": "accept_rate",
    "input throughput (token/s)": "input_throughput",
    "retracted-reqs": "retracted_reqs",
}
_QUIET_PATHS = (
    "/generate",
    "/health",
    "/health_generate",
    "/metrics",
    "/v1/loads",
    "/v1/completions",
    "/v1/chat/completions",
    "/get_model_info",
    "/get_server_info",
    "/server_info",
    "/model_info",
    "/get_load",
)
QUIET = tuple(f'{path} HTTP/1.1" 200 OK' for path in _QUIET_PATHS)
"""Requests that come by the thousand and, answered well, say only that the server is alive."""


def of_engine(line: Line) -> dict[str, object]:
    """Only an engine writes such a line, whatever the file is called."""
    return {} if line.certain_owner else {"owner": "engine"}


def access(line: Line) -> Mapping[str, object] | None:
    """`10.0.0.2:4411 - "POST /path HTTP/1.1" 200 OK` of uvicorn: method, path, status."""
    found = _ACCESS.search(line.text)
    if found is None:
        return None
    return {"method": found["method"], "path": found["path"], "status": int(found["status"])}


def batch_fields(text: str) -> dict[str, object]:
    """`name: number` pairs of a batch line under rltop's names; GB and tokens as printed."""
    found: dict[str, object] = {}
    for match in _FIELD.finditer(text):
        name = _NAMES.get(match["name"].strip())
        if name:
            value = _number(match["value"])
            if value is not None:
                found[name] = value
    return found


def _number(text: str) -> int | float | None:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return None


def _batch(kind: str) -> Recogniser:
    def parse(line: Line) -> Mapping[str, object] | None:
        found = _BATCH.search(line.text)
        if found is None or found["kind"].lower() != kind:
            return None
        return batch_fields(line.text[found.end() :]) | of_engine(line)

    return Recogniser(kind, (f"{kind.capitalize()} batch",), parse, bulk=True)


def _flushed(line: Line) -> Mapping[str, object] | None:
    return {} if "cache flushed successfully" in line.text.lower() else None


def _flush_failed(line: Line) -> Mapping[str, object] | None:
    low = line.text.lower()
    if "error flushing cache" in low or "flush cache failed" in low or "cache not flushed" in low:
        return {"message": line.text[:400]}
    return None


_REFUSED = re.compile(r"failed to update|partially updated|update_weights?\w* failed|error updating weights", re.I)


def _update_refused(line: Line) -> Mapping[str, object] | None:
    return {"message": line.text[:400]} if _REFUSED.search(line.text) else None


_OVER_LENGTH = re.compile(
    r"Requested token count exceeds the model's maximum context length(?: of (?P<limit>\d{1,12}) tokens)?"
    r"(?:.{0,80}?total of (?P<asked>\d{1,12}) tokens)?"
)


def _over_length(line: Line) -> Mapping[str, object] | None:
    """An engine refused a request for prompt and budget together: message, limit, requested (tokens)."""
    found = _OVER_LENGTH.search(line.text)
    if found is None:
        return None
    told = {"limit": number(found["limit"] or ""), "requested": number(found["asked"] or "")}
    return {"message": line.text[:400]} | {name: int(value) for name, value in told.items() if value is not None}


_UNEQUAL = re.compile(r"check tensor equality failed|^\s*name=\S+ max_abs_err=|/weights_checker HTTP/[\d.]+\" [45]\d\d")


def _weights_check(line: Line) -> Mapping[str, object] | None:
    """SGLang's weights checker (`--check-weight-update-equal`) found tensors that differ. Success leaves no such line:
    all its actions answer 200."""
    return {"ok": False, "message": line.text[:4000]} if _UNEQUAL.search(line.text) else None


_PAIR = re.compile(r"(?P<key>[A-Za-z_]\w*)=(?P<value>\S+)")


def _update_summary(line: Line) -> Mapping[str, object] | None:
    _, found, rest = line.text.partition("update summary:")
    if not found:
        return None
    pairs: dict[str, object] = {}
    for match in _PAIR.finditer(rest):
        number = _number(match["value"].rstrip(",;"))
        pairs[match["key"]] = match["value"].rstrip(",;") if number is None else number
    return pairs


_MEMORY = re.compile(r"avail(?:able)?[ _]mem(?:ory)?\s*[=:]\s*(?P<gb>\d+(?:\.\d+)?)\s*GB")
_STAGES = (
    ("capture", re.compile(r"captur\w+ .*(?:cuda )?graph|cuda graph.*\b(?:begin|end)|Capturing batches", re.I)),
    ("load", re.compile(r"Load weight (?P<edge>begin|end)", re.I)),
    ("kv", re.compile(r"KV Cache is allocated|Memory pool end", re.I)),
    ("ready", re.compile(r"The server is fired up|Application startup complete|Uvicorn running on", re.I)),
    ("start", re.compile(r"server_args=|Init torch distributed begin|Started server process", re.I)),
)


_SWITCH = re.compile(
    r"\b(speculative_algorithm|disable_cuda_graph|disable_overlap_schedule|moe_a2a_backend|enable_deepep_moe|"
    r"enable_dp_attention|enable_hierarchical_cache)=('[^']*'|\"[^\"]*\"|\w+)"
)
"""Settings in the server's own print of its arguments that a bisection switches off."""


def _stage(line: Line) -> Mapping[str, object] | None:
    for name, pattern in _STAGES:
        if pattern.search(line.text):
            low = line.text.lower()
            edge = "begin" if " begin" in low else "end" if " end" in low else ""
            memory = _MEMORY.search(line.text)
            data: dict[str, object] = {"stage": name, "edge": edge}
            if switches := dict(_SWITCH.findall(line.text) if name == "start" else ()):
                data["switches"] = {key: value.strip("'\"") for key, value in switches.items()}
            return data | ({"avail_gb": number(memory["gb"])} if memory else {}) | of_engine(line)
    return None


def _sigterm(line: Line) -> Mapping[str, object] | None:
    """SGLang was told to end; it drains first."""
    return of_engine(line) if "SIGTERM received" in line.text else None


_INJECTED = re.compile(r"INJECTED FAULT .{0,60}?: (?P<what>armed|disarmed|strikes): (?P<fault>[\w-]+)")


def _injected(line: Line) -> Mapping[str, object] | None:
    """rltop's CPU engine was told to have a fault: what (armed, disarmed, strikes), fault."""
    found = _INJECTED.search(line.text)
    return {"what": found["what"], "fault": found["fault"]} if found else None


_TAGS = re.compile(r"tags?\s*[=:]\s*\[?(?P<tags>[^\]\n]*)\]?")


def _memory_call(word: str) -> Recogniser:
    pattern = re.compile(rf"\b{word}_memory_occupation\b(?!\s+HTTP)", re.I)

    def parse(line: Line) -> Mapping[str, object] | None:
        if not pattern.search(line.text) or _ACCESS.search(line.text):
            return None
        tags = _TAGS.search(line.text)
        return {"tags": re.findall(r"\w+", tags["tags"]) if tags else []}

    return Recogniser(word, (f"{word}_memory_occupation",), parse)


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser("http", ("HTTP/",), access, unless=QUIET),
    Recogniser("http", QUIET, access, bulk=True),
    _batch("prefill"),
    _batch("decode"),
    Recogniser("flushed", ("flushed successfully",), _flushed),
    Recogniser("flush_failed", ("lush",), _flush_failed),
    Recogniser("update_refused", ("updat",), _update_refused),
    Recogniser("update_summary", ("update summary:",), _update_summary),
    Recogniser("over_length", ("token count exceeds",), _over_length),
    Recogniser("weights_check", ("tensor equality", "max_abs_err=", "/weights_checker"), _weights_check),
    Recogniser(
        "engine_stage",
        (
            "aptur",
            "Load weight",
            "KV Cache is allocated",
            "Memory pool end",
            "fired up",
            "Application startup complete",
            "Uvicorn running",
            "server_args=",
            "Init torch distributed begin",
            "Started server process",
        ),
        _stage,
    ),
    Recogniser("injected", ("INJECTED FAULT",), _injected),
    Recogniser("sigterm", ("SIGTERM received",), _sigterm),
    _memory_call("release"),
    _memory_call("resume"),
)
