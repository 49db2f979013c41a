"""Why an engine died, in one sentence and one short fingerprint, from the events of its log.

SGLang's exit code says nothing (it kills its own tree with SIGKILL for every cause), so a crash is classified by the
first fault in the log: the earliest over all ranks, for peers report false illegal accesses when a collective breaks.
The fingerprint is `class/phase/hash`: class of error, phase of work, and six hex digits over the kernel's name where a
core dump gave it, else over the error and its innermost frames, without line numbers, addresses, pids, ranks and
sizes. The same fault therefore has the same fingerprint on another rank, host and day: flapping is judged by it.

Pure. Text that is not understood ends as class `error` with the exception's own words. A process that dies at its start
without a fault that is recognised dies of its last words (`last_words.py`); a log without any error is `silent`, with
what the exit code leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rltop.checks.events import frames, of_kind, whole, whole_text, word
from rltop.checks.faults import EITHER, engine_phase
from rltop.checks.found import LogEvent
from rltop.checks.known import KnownCrash, fingerprint, match
from rltop.checks.observe import Args, Observations
from rltop.checks.phrase import brief
from rltop.engines.last_words import LastWords, class_of
from rltop.evidence.collect import in_order

MOST_EVIDENCE = 12
"""Lines of evidence that a crash carries."""
HASH = 6
"""Hex digits: the class and the phase stand beside it, and a fleet has a handful of different crashes."""


class Stage(StrEnum):
    """How far an engine's start is, by its log. In this order; a stage may be skipped, never gone back to."""

    LAUNCHING = "launching"
    """The process exists: imports, arguments. Refused connections mean nothing here."""
    LOADING = "loading"
    CAPTURING = "capturing"
    WARMING = "warming"
    """The port answers, `/health` says 503."""
    READY = "ready"

    @property
    def rank(self) -> int:
        """Place in the order."""
        return list(Stage).index(self)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A fault, and how far the start was when it was written."""

    event: LogEvent
    stage: Stage

    @property
    def ends_the_engine(self) -> bool:
        """No engine lives on after this line."""
        return strength(self) >= CONSEQUENCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """Why an engine died."""

    fingerprint: str
    """`ima/decode-graph/3fa2c1`; stable across runs."""
    kind: str
    """Class of error: `ima`, `misaligned`, `launch-failure`, `illegal-instruction`, `oom`, `nccl`, `hang`, `port`,
    `usage`, `import`, `checkpoint`, `capture`, `jit`, `update`, `released`, `leak`, `assert`, `cublas`, `host-oom`,
    `child`, `terminated`, `stopped`, `silent`, `error`."""
    phase: str
    """`launch`, `load`, `capture`, `warm-up`, `prefill`, `prefill-graph`, `decode`, `decode-graph`, `update`, `wake`,
    `released` or `serve`."""
    cause: str
    """A sentence or two for people, with what it looks like among known crashes."""
    do: str = ""
    """What to do next, where something is known to help."""
    kernel: str = ""
    """The GPU kernel, from a core dump or a library that names it; empty where nothing does."""
    rank: int | None = None
    """Tensor-parallel rank that faulted first, where the log has ranks."""
    line: int = 0
    """Of the first fault; 0 without one."""
    evidence: tuple[str, ...] = ()
    """`stdout.log:123: text`, at most 12."""
    known: tuple[str, ...] = ()
    """Issues that it looks like, the likeliest first."""
    injected: str = ""
    """Name of the fault that rltop's CPU engine was told to have; empty for a crash of its own."""


# -- which line is the first fault

ROOT = 2
"""The fault itself."""
CONSEQUENCE = 1
"""Something died of a fault that is told elsewhere, or nowhere."""
PERHAPS = 0
"""An error that an engine may survive (a bad request, a client that went away)."""
_MAINS = ("run_scheduler_process", "run_detokenizer_process", "run_data_parallel_controller_process", "launch_server")
"""Outermost functions of SGLang's processes: an exception that passes them ends the process."""
_DEATHS = ("init", "subprocess", "watchdog", "sigquit", "server")
_FAULTS = ("ima", "oom", "traceback", "collective", "port_in_use", "oom_killer", "sigterm")
_BENIGN = re.compile(r"freeze_gc|KeyboardInterrupt|CancelledError")


def is_fault(event: LogEvent) -> bool:
    """The event may be why an engine dies."""
    match event.kind:
        case "ima":
            return word(event, "from") != "terminate"  # a dying process repeats its error
        case "traceback":
            return not _BENIGN.search(whole_text(event))
        case "death":
            return word(event, "how") in _DEATHS
        case "ended":
            return word(event, "how") == "usage"
        case kind:
            return kind in _FAULTS


def strength(suspect: Suspect) -> int:
    """How surely this fault is the end of the engine: `ROOT`, `CONSEQUENCE` or `PERHAPS`."""
    event = suspect.event
    match event.kind:
        case "ima" | "ended" | "oom_killer":
            return ROOT
        case "traceback" | "oom":
            known = any(frame.rsplit(":", 1)[-1] in _MAINS for frame in frames(event))
            fatal = word(event, "pool") or re.search(r"(?:Prefill|Decode) out of memory", event.text)
            return ROOT if known or fatal else PERHAPS
        case "collective":
            return ROOT if whole(event, "timeout_ms") is not None or word(event, "stuck") else PERHAPS
        case "port_in_use":
            return ROOT if suspect.stage is not Stage.READY else PERHAPS
        case "death":
            return ROOT if word(event, "how") == "watchdog" else CONSEQUENCE
        case "sigterm":
            return CONSEQUENCE
    return PERHAPS


def first_of(suspects: Sequence[Suspect]) -> Suspect | None:
    """The fault that counts: the earliest of the strongest sort there is; of errors that may be survived the newest."""
    ordered = in_order([suspect.event for suspect in suspects])
    stages = {_place(suspect.event): suspect.stage for suspect in suspects}
    sorted_ = [Suspect(event, stages[_place(event)]) for event in ordered]
    for level in (ROOT, CONSEQUENCE):
        for suspect in sorted_:
            if strength(suspect) == level:
                return suspect
    return sorted_[-1] if sorted_ else None


def _place(event: LogEvent) -> tuple[str, int, str]:
    return (event.kind, event.where.line or 0, event.text)


# -- what it is

_GPU = {
    "illegal memory access": ("ima", "Illegal memory access on the GPU"),
    "misaligned address": ("misaligned", "Misaligned address on the GPU"),
    "launch failure": ("launch-failure", "Unspecified launch failure on the GPU"),
    "illegal instruction": ("illegal-instruction", "Illegal instruction on the GPU"),
}
_GPU_KINDS = frozenset(kind for kind, _ in _GPU.values())
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

_START = {
    Stage.LAUNCHING: ("launch", "start-up"),
    Stage.LOADING: ("load", "load"),
    Stage.CAPTURING: ("capture", "capture"),
    Stage.WARMING: ("warm-up", "start-up"),
}
"""Phase before an engine is ready: here, and in the words of the table of known crashes."""
_STARTS = frozenset(phase for phase, _ in _START.values())
_WORDS = {
    "launch": "at the start",
    "load": "while weights were loaded",
    "capture": "while CUDA graphs were captured",
    "warm-up": "in the warm-up",
    "prefill": "in prefill",
    "prefill-graph": "in prefill in a CUDA graph",
    "decode": "in decode",
    "decode-graph": "in decode with CUDA graphs",
    "update": "in a weight update",
    "wake": "in the first request after its memory came back",
    "released": "while its memory was released",
    "serve": "while it served",
}


_PLACED = frozenset({"released", "update", "usage", "checkpoint", "port", "capture"})
"""Classes that say themselves when it was."""


def explain(
    suspects: Sequence[Suspect],
    events: Sequence[LogEvent],
    *,
    exit_code: int | None,
    asked: bool,
    stage: Stage,
    flags: Mapping[str, object],
    known: tuple[KnownCrash, ...],
    blocking: bool = False,
    dumping: bool = False,
    injected: str = "",
    words: LastWords | None = None,
    last_line: str = "",
) -> Crash:
    """The crash of an engine whose log had these faults and, around them, these events. Never raises.

    asked: rltop ended it; flags: settings in effect; blocking: launches block and no graph hides one; dumping: CUDA
    core dumps are on; stage: how far the start is by now; injected: a fault that the stand-in was told to have; words:
    with which the log of a start ends; last_line: of the log, whatever it says.
    """
    if words is not None and not asked and stage is not Stage.READY and _are_last(words, suspects):
        found = _of_words(words, stage)
    else:
        found = _explain(suspects, events, exit_code, asked, stage, flags, known, blocking, dumping, last_line)
    if not injected or found.kind == "stopped":
        return found
    return replace(found, injected=injected, cause=f"{found.cause} A rehearsal: the fault {injected} was injected.")


def _explain(
    suspects: Sequence[Suspect],
    events: Sequence[LogEvent],
    exit_code: int | None,
    asked: bool,
    stage: Stage,
    flags: Mapping[str, object],
    known: tuple[KnownCrash, ...],
    blocking: bool,
    dumping: bool,
    last_line: str,
) -> Crash:
    first = first_of(suspects)
    if first is None or (asked and strength(first) < ROOT):
        return _without_fault(exit_code, asked, stage, last_line)
    everything = in_order([*events, first.event])
    obs = Observations(events=tuple(everything), args=Args(flags), known_crashes=known)
    placed = next(event for event in everything if _place(event) == _place(first.event))
    event = _with_stack(obs, placed)
    phase, name = _phase(obs, event, first.stage)
    kind, what, do = _what(event, phase)
    kernel = _kernel(obs, event) if kind in _GPU_KINDS else ""
    cause = what if kind in _PLACED else f"{what} {_WORDS[phase]}"
    if event.rank is not None:
        cause += f", rank {event.rank} first"
    if kernel:
        cause += f", in kernel {kernel}"
    elif place := _noticed(event):
        noticed = "launched at" if blocking else "noticed at"
        cause += f", {noticed} {place}" if kind in _GPU_KINDS else f", at {place}"
        cause += " (CUDA_LAUNCH_BLOCKING, graphs off)" if kind in _GPU_KINDS and blocking else ""
    cause += _told(event, kind)
    alike = match(obs, event, kernel=kernel, phase=name, message_only=kind not in _GPU_KINDS)
    if kind in _GPU_KINDS and not kernel:
        do = "with core_dump=on the log names the kernel at the next crash"
        do = "core dumps are on, and this crash left none: the next one may name the kernel" if dumping else do
    if alike:
        cause, do = f"{cause} It {alike[0].sentence()}.", alike[0].advice()
    return Crash(
        fingerprint=f"{kind}/{phase}/{_digest(event, kind, kernel)}",
        kind=kind,
        phase=phase,
        cause=cause,
        do=do,
        kernel=kernel,
        rank=event.rank,
        line=event.where.line or 0,
        evidence=_evidence(obs, event, suspects),
        known=tuple(crash.issue for crash in alike),
    )


def _are_last(words: LastWords, suspects: Sequence[Suspect]) -> bool:
    """Nothing else ended it, and they come after every error that it survived."""
    return all(strength(one) == PERHAPS and words.line > (one.event.where.line or 0) for one in suspects)


def _of_words(words: LastWords, stage: Stage) -> Crash:
    phase = _START[stage][0]
    when = "" if words.kind in _PLACED else f" {_WORDS[phase]}"
    text = brief(words.text, 200).rstrip(". ")
    return Crash(
        fingerprint=f"{words.kind}/{phase}/{fingerprint(words.text)[:HASH]}",
        kind=words.kind,
        phase=phase,
        cause=f"{words.cause}{when}: {text}" + ("" if text.endswith(("?", "!", "…")) else "."),
        do=words.do,
        line=words.line,
        evidence=(f"{words.source}:{words.line}: {brief(words.raw, 200)}",),
    )


def _without_fault(exit_code: int | None, asked: bool, stage: Stage, last_line: str) -> Crash:
    phase = _START[stage][0] if stage is not Stage.READY else "serve"
    if asked:
        return Crash(fingerprint=f"stopped/{phase}", kind="stopped", phase=phase, cause="It was stopped, as asked.")
    if exit_code is None:
        how = "The process is gone and nobody saw how it ended"
    elif exit_code < 0:
        how = f"The process was ended by signal {-exit_code}"
    else:
        how = f"The process ended with status {exit_code}"
    cause = f"{how} {_WORDS[phase]}; its log tells of no error."
    if stage is Stage.LAUNCHING and exit_code:
        cause = cause[:-1] + (f" and ends with “{brief(last_line, 160)}”." if last_line else ": it is empty.")
    if exit_code in (-9, 137, None):
        cause += " The host's out-of-memory killer and a person's kill -9 look like this (see dmesg)."
    code = "gone" if exit_code is None else f"exit{exit_code}"
    return Crash(fingerprint=f"silent/{phase}/{code}", kind="silent", phase=phase, cause=cause)


def _with_stack(obs: Observations, event: LogEvent) -> LogEvent:
    """A fault without frames (a core dump's line) with those of the stack that the dying scheduler printed after it."""
    if frames(event) or event.kind != "ima":
        return event
    for other in of_kind(obs, "stack"):
        inner = other.data.get("frames")
        if other.order > event.order and isinstance(inner, tuple | list):
            outer = tuple(reversed(inner))  # Python's fault handler prints the newest call first
            if any(len(frame) == 3 and frame[2] in _MAINS for frame in outer) and len(outer) > _BARE:
                return replace(event, data={**event.data, "frames": outer})
    return event


_BARE = 8
"""Frames of a scheduler's main thread that does nothing: multiprocessing's spawn and its own main."""


def _what(event: LogEvent, phase: str) -> tuple[str, str, str]:
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
    if phase in _STARTS and (known := class_of(event.text)) is not None:
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


def _told(event: LogEvent, kind: str) -> str:
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


def _noticed(event: LogEvent) -> str:
    """`file.py:12 in function` of the innermost frame that is SGLang's, a kernel library's or the user's."""
    value = event.data.get("frames")
    inner = [frame for frame in value if len(frame) == 3] if isinstance(value, tuple | list) else []
    frame = next((one for one in reversed(inner) if not _PLUMBING.search(str(one[0]))), inner[-1] if inner else None)
    if frame is None:
        return ""
    path, line, function = frame
    place = f"{str(path).rsplit('/', 1)[-1]}:{line}" if line else str(path).rsplit("/", 1)[-1]
    return f"{place} in {function}" if function else place


def _phase(obs: Observations, event: LogEvent, stage: Stage) -> tuple[str, str]:
    """Phase as here, and in the words of the table of known crashes."""
    if stage is not Stage.READY:
        return _START[stage]
    if re.search(r"weight_updater|update_weights", "\n".join(frames(event))):
        return "update", "weight sync"
    if _released(obs, event):
        return "released", "serving"
    name = engine_phase(obs, event)
    if name == "first request after wake-up":
        return "wake", name
    # By the newest batch line the phase would be a guess, and another one at the next crash: the fingerprint must stay.
    path = "\n".join(frames(event))
    for pattern, short in _PATHS:
        if pattern.search(path):
            return ("decode-graph" if short == "decode" and _decodes_in_graphs(obs, event) else short), name
    return "serve", name


_PATHS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"prefill_cuda_graph_runner|piecewise_cuda_graph_runner"), "prefill-graph"),
    (re.compile(r"init_\w*cuda_graph|capture_one_batch|_graph_runner\.py:capture"), "capture"),
    (re.compile(r"replay"), "decode-graph"),
    (re.compile(r"process_batch_result_decode|forward_decode|execute_decode|verify"), "decode"),
    (EITHER, "serve"),
    (re.compile(r"process_batch_result_prefill|extend|prefill"), "prefill"),
)
"""Phase by the frames of a fault in an engine that serves."""


def _released(obs: Observations, event: LogEvent) -> bool:
    """Its memory was released and not brought back."""
    state = False
    for other in of_kind(obs, "http", "release", "resume"):
        if other.order > event.order:
            break
        path = word(other, "path")
        if other.kind == "release" or path.startswith("/release_memory"):
            state = True
        elif other.kind == "resume" or path.startswith("/resume_memory"):
            state = False
    return state


_CAPTURED = re.compile(r"Captur\w+ (?:target )?(?:decode|verify|cuda)", re.I)


def _decodes_in_graphs(obs: Observations, event: LogEvent) -> bool:
    """Because such a graph was captured, else by the newest decode line."""
    if any(_CAPTURED.search(one.text) for one in of_kind(obs, "engine_stage") if one.order < event.order):
        return True
    batches = [one for one in of_kind(obs, "decode") if one.order < event.order]
    return bool(batches) and "cuda graph: True" in batches[-1].text


def _kernel(obs: Observations, event: LogEvent) -> str:
    if name := word(event, "kernel"):
        return name
    named = of_kind(obs, "kernel")
    return word(named[0], "kernel") if named else ""


def _digest(event: LogEvent, kind: str, kernel: str) -> str:
    """Of the kernel alone where it is known: where an asynchronous error is noticed changes from crash to crash."""
    if kernel:
        return fingerprint("", (), kernel)[:HASH]
    if kind == "child":
        return fingerprint(f"{word(event, 'how')} exit {word(event, 'code')}")[:HASH]
    error = word(event, "fault") if event.kind == "ima" else event.text
    return fingerprint(error, frames(event))[:HASH]


def _evidence(obs: Observations, event: LogEvent, suspects: Sequence[Suspect]) -> tuple[str, ...]:
    """The fault, the kernel, the newest batch and stage before it, and what died after it, in order of the log."""
    before = [e for e in of_kind(obs, "prefill", "decode", "engine_stage") if e.order < event.order][-2:]
    about = [e for e in of_kind(obs, "kernel") if abs((e.where.line or 0) - (event.where.line or 0)) < _NEAR][:2]
    after = [s.event for s in suspects if (s.event.where.line or 0) > (event.where.line or 0)]
    lines: dict[int, str] = {}
    for one in [*before, event, *about, *after][:MOST_EVIDENCE]:
        number = one.where.line or 0
        lines.setdefault(number, f"{one.where.source}:{number}: {brief(one.where.text or one.text, 200)}")
    return tuple(lines[number] for number in sorted(lines))


_NEAR = 400
"""Lines between a core dump's exception and its stack trace: one per SM of the GPU."""
