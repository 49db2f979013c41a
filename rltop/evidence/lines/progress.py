"""Lines that show progress, or the wish for it: timers, health checks, retries, iterations of Megatron."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser, number

_TIMER = re.compile(r"Timer (?P<name>[\w.-]+) (?P<edge>start|end)(?: \(elapsed: (?P<elapsed>[\d.]+)s\))?")


def timer(line: Line) -> Mapping[str, object] | None:
    """slime's `Timer NAME start` and `Timer NAME end (elapsed: 1.0s)`: name, edge, elapsed_s."""
    found = _TIMER.search(line.text)
    if found is None:
        return None
    elapsed = number(found["elapsed"])
    return {"name": found["name"], "edge": found["edge"], "elapsed_s": elapsed}


_MONITOR = re.compile(r"Health check failed for rollout engine (?P<engine>\d+)")
_SERVER = re.compile(r"Health check failed\. Server couldn't get a response .*? for last (?P<window>\d+) seconds")


def health(line: Line) -> Mapping[str, object] | None:
    """A failed health check: by (monitor, server), window_s, kills, engine."""
    if found := _MONITOR.search(line.text):
        return {"by": "monitor", "engine": int(found["engine"]), "kills": "illing" in line.text}
    if found := _SERVER.search(line.text):
        return {"by": "server", "window_s": int(found["window"])}
    if "Health check failed" in line.text:
        return {"by": "other", "kills": "illing" in line.text}
    return None


_STATUS = re.compile(
    r"\b(?P<status>[45]\d\d) (?:Service Unavailable|Server Error|Client Error|Forbidden|Bad Gateway|"
    r"Gateway Time-?out|Internal Server Error|Proxy Authentication Required|Not Found|Bad Request)|"
    r"status(?:[_ ]code)?[ =:]+(?P<status2>[45]\d\d)\b",
    re.I,
)
_URL = re.compile(r"https?://[^\s'\",)]+")
_PATH = re.compile(r"with url: (?P<path>/[\w/]*)")
_HOST = re.compile(r"host='(?P<host>[^']+)', port=(?P<port>\d+)")
_ATTEMPT = re.compile(r"attempt (?P<attempt>\d+)/(?P<most>\d+)")
_REFUSED = re.compile(
    r"Connection refused|NewConnectionError|ConnectError|Cannot connect to host|Max retries exceeded|"
    r"All connection attempts failed|ECONNREFUSED|Errno 111",
    re.I,
)
_NO_WORKERS = re.compile(r"No available workers|no healthy workers|circuits? open", re.I)


def retry(line: Line) -> Mapping[str, object] | None:
    """A request to an engine or router that was not answered well: status, refused, no_workers, url, path, attempt,
    most."""
    text = line.text
    status, refused = _STATUS.search(text), _REFUSED.search(text)
    if "HTTP/1" in text and '"' in text and not _URL.search(text):
        return None  # an access line
    if not (status or refused or _NO_WORKERS.search(text)):
        return None
    url, path, host = _URL.search(text), _PATH.search(text), _HOST.search(text)
    attempt = _ATTEMPT.search(text)
    address = url[0] if url else f"http://{host['host']}:{host['port']}" if host else ""
    if not address and not _NO_WORKERS.search(text):
        return None
    data: dict[str, object] = {
        "status": int(status["status"] or status["status2"]) if status else None,
        "refused": bool(refused),
        "no_workers": bool(_NO_WORKERS.search(text)),
        "url": address,
        "path": path["path"] if path else "/" + address.partition("://")[2].partition("/")[2].partition("?")[0],
    }
    return data | ({"attempt": int(attempt["attempt"]), "most": int(attempt["most"])} if attempt else {})


_ITERATION = re.compile(r"\biteration\s+(?P<step>\d+)/\s*(?P<total>\d+) \|")
_SCALE = re.compile(r"loss scale: (?P<scale>[\d.eE+-]+)")
_SKIPPED = re.compile(r"number of skipped iterations:\s+(?P<skipped>\d+)")
_NANS = re.compile(r"number of nan iterations:\s+(?P<nans>\d+)")


def iteration(line: Line) -> Mapping[str, object] | None:
    """Megatron's line of one iteration: step, scale (fp16 loss scale), skipped, nans (iterations since the last)."""
    found = _ITERATION.search(line.text)
    if found is None:
        return None
    data: dict[str, object] = {"step": int(found["step"])}
    if scale := _SCALE.search(line.text):
        data["scale"] = number(scale["scale"])
    if skipped := _SKIPPED.search(line.text):
        data["skipped"] = int(skipped["skipped"])
    if nans := _NANS.search(line.text):
        data["nans"] = int(nans["nans"])
    return data


_OVERFLOW = re.compile(
    r"(?:OVERFLOW!|overflow detected|Grad overflow|found inf).*?(?:scale[^\d]*(?P<scale>[\d.eE+]+))?", re.I
)


def overflow(line: Line) -> Mapping[str, object] | None:
    """An fp16 overflow note of the optimizer: scale, where it says to which."""
    found = _OVERFLOW.search(line.text)
    if found is None:
        return None
    scale = re.search(r"(?:reducing to|to|scale:?)\s+(?P<scale>\d[\d.eE+]*)\s*$", line.text)
    return {"scale": number(scale["scale"])} if scale else {}


_HF_OK = re.compile(
    r"(?:loaded|loading) .*(?:config|tokenizer|checkpoint shards|model)|(?:config|tokenizer|model)\b.{0,40}? loaded\b|"
    r"> (?:building|built) .*(?:tokenizer|model)|number of parameters on ",
    re.I,
)


def loaded(line: Line) -> Mapping[str, object] | None:
    """A process has read configuration, tokenizer or weights: what hf-cache-race compares the failing ones with."""
    return {} if _HF_OK.search(line.text) and "rror" not in line.text and "fail" not in line.text.lower() else None


def _harmless(line: Line) -> Mapping[str, object] | None:
    """The traceback that follows this line is known to mean nothing."""
    return {} if "freeze_gc failed" in line.text else None


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser("timer", ("Timer ",), timer, bulk=True),
    Recogniser("health", ("Health check failed",), health),
    Recogniser(
        "retry",
        (
            "http://",
            "https://",
            "Max retries exceeded",
            "No available workers",
            "host=",
        ),
        retry,
    ),
    Recogniser("iteration", (" iteration ",), iteration, bulk=True),
    Recogniser("overflow", ("OVERFLOW", "overflow", "found inf"), overflow, bulk=True),
    Recogniser("harmless", ("freeze_gc failed",), _harmless),
    Recogniser("loaded", ("oaded", "oading ", "> buil", "number of parameters on "), loaded, bulk=True),
)
