"""What the first fault of an engine was, by its exception, its message and the frames below it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rltop.checks.events import whole, whole_text, word
from rltop.checks.found import LogEvent
from rltop.checks.phrase import brief
from rltop.engines.crash_phase import STARTS
from rltop.engines.last_words import class_of

_GPU = {
    "illegal memory access": ("ima", "Illegal memory access on the GPU"),
    "misaligned address": ("misaligned", "Misaligned address on the GPU"),
    "launch failure": ("launch-failure", "Unspecified launch failure on the GPU"),
    "illegal instruction": ("illegal-instruction", "Illegal instruction on the GPU"),
}
GPU_KINDS = frozenset(kind for kind, _ in _GPU.values())
_LOWER = "lower mem_fraction_static, or max_running_requests, or a smaller CUDA graph batch size"


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of error by what its exception, message and frames hold."""

    kind: str
    pattern: re.Pattern[str]
    cause: str
    do: str = ""


_CLASSES: tuple[_Class, ...] = (
    _Class("nccl", re.compile(r"NCCL error|DistBackendError|ncclUnhandled|ncclSystem|ncclInternal"), "NCCL failed"),
    _Class(
        "oom",
        re.compile(r"out of memory|OutOfMemoryError|Not enough memory", re.I),
        "Out of GPU memory",
        _LOWER,
    ),
    _Class("assert", re.compile(r"device-side assert"), "An assertion in a GPU kernel failed"),
    _Class("cublas", re.compile(r"CUBLAS_STATUS_"), "cuBLAS failed"),
    _Class(
        "leak",
        re.compile(r"pool memory leak detected"),
        "SGLang's own check of its KV pool failed; it is a check, not a crash of the GPU",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0 turns the check off",
    ),
    _Class(
        "jit",
        re.compile(r"Ninja build failed|run_ninja|nvcc (?:fatal|error)"),
        "A kernel could not be compiled when it was first needed",
        "read the compiler's lines; flashinfer needs its sources (data/csrc), ninja and nvcc on the engine's host",
    ),
    _Class(
        "released",
        re.compile(r"cannot be accessed from Triton \(cpu tensor"),
        "A request (a /health probe is one) reached the engine while its memory was released",
        "ask a released engine for nothing but /v1/loads and /model_info until it was resumed",
    ),
    _Class(
        "update",
        re.compile(r"Cache flush failed after updating weights"),
        "Weights were updated with a flush while paused requests held the cache",
        "pause with mode abort, or update with flush_cache false",
    ),
    _Class(
        "update",
        re.compile(r"has no attribute 'update_weights"),
        "This speculative worker cannot take weights that way",
        "update from tensors, or turn speculative decoding off",
    ),
    _Class("update", re.compile(r"weight_updater|:update_weights_from_"), "A weight update failed inside the engine"),
    _Class("usage", re.compile(r"server_args\.py|arg_groups/"), "SGLang refuses its arguments"),
    _Class("capture", re.compile(r"Captur\w* .*graph\w* failed", re.I), "A CUDA graph could not be captured"),
)
"""In this order: what made a capture fail counts more than that it failed."""

PLACED = frozenset({"released", "update", "usage", "checkpoint", "port", "capture"})
"""Classes that say themselves when it was."""


def what_of(event: LogEvent, phase: str) -> tuple[str, str, str]:
    """(class, what happened, what to do)."""
    if event.kind == "ima":
        kind, what = _GPU[word(event, "fault") or "illegal memory access"]
        return kind, what, ""
    match event.kind:
        case "ended":
            return "usage", "SGLang refuses its arguments", "rltop engine set --dry-run shows the argv"
        case "port_in_use":
            port = whole(event, "port")
            text = f"Port {port} was already in use" if port else "A port was already in use"
            return "port", text, "ss -tlnp shows who listens; port 0 lets the engine find a free one"
        case "oom_killer":
            return "host-oom", "Killed because the host ran out of memory", ""
        case "sigterm":
            return "terminated", "Somebody else sent it SIGTERM", ""
        case "collective":
            return "nccl", "A collective did not end", "look at the peer that is behind: it hangs or died"
        case "death" if word(event, "how") == "watchdog":
            limit = whole(event, "limit")
            text = f"Hung: SGLang's watchdog saw no progress for {limit} s" if limit else "Hung, says SGLang's watchdog"
            return "hang", text, "the py-spy dump above that line shows where"
        case "death":
            return "child", _child(event), ""
    text = whole_text(event)
    for one in _CLASSES:
        if one.pattern.search(text):
            return one.kind, one.cause, one.do
    if phase == "released":
        released = next(one for one in _CLASSES if one.kind == "released")
        return released.kind, released.cause, released.do
    if phase in STARTS and (known := class_of(event.text)) is not None:
        return known
    name = word(event, "exception").rsplit(".", 1)[-1] or "An error"
    return "error", f"{name} ended it", ""


_SIGNALS = {-9: "killed (SIGKILL)", -11: "ended by a segmentation fault", -6: "aborted", -15: "terminated (SIGTERM)"}


def _child(event: LogEvent) -> str:
    code = whole(event, "code")
    if code is None:
        return "A process of the engine died"
    how = _SIGNALS.get(code, f"ended with status {code}")
    return f"A process of the engine was {how}" if code in _SIGNALS else f"A process of the engine {how}"


_NAME = re.compile(r"^[\w.]+(?:Error|Exception): ")


def told_by(event: LogEvent, kind: str) -> str:
    """The end of the sentence: the error's own words where the class does not say it all."""
    if event.kind in ("traceback", "oom", "ended") and kind not in ("released",):
        own = word(event, "message") or word(event, "what") or _NAME.sub("", event.text)
        text = brief(own, 160).rstrip(". ")
        return f": {text}" if text.endswith(("?", "!", "…")) else f": {text}."
    return ", and left no error." if kind == "child" else "."


_PLUMBING = re.compile(
    r"/torch/|/triton/|/lib/python\d[\d.]*/(?!(?:site|dist)-packages)|/ray/|<frozen|<string>|contextlib"
)
"""Frames below the code that called them. SGLang itself lies in site-packages like any library."""


def noticed(event: LogEvent) -> str:
    """`file.py:12 in function` of the innermost frame that is SGLang's, a kernel library's or the user's."""
    value = event.data.get("frames")
    inner = [frame for frame in value if len(frame) == 3] if isinstance(value, tuple | list) else []
    frame = next((one for one in reversed(inner) if not _PLUMBING.search(str(one[0]))), inner[-1] if inner else None)
    if frame is None:
        return ""
    path, line, function = frame
    place = f"{str(path).rsplit('/', 1)[-1]}:{line}" if line else str(path).rsplit("/", 1)[-1]
    return f"{place} in {function}" if function else place
