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

from rltop.checks.events import frames, of_kind, whole, whole_text, word
from rltop.checks.found import LogEvent
from rltop.checks.known import KnownCrash, fingerprint, match
from rltop.checks.observe import Args, Observations
from rltop.checks.phrase import brief
from rltop.engines.crash_kind import GPU_KINDS, PLACED, noticed, told_by, what_of
from rltop.engines.crash_phase import START, WORDS, Stage, phase_of
from rltop.engines.last_words import LastWords
from rltop.evidence.collect import in_order

MOST_EVIDENCE = 12
"""Lines of evidence that a crash carries."""
HASH = 6
"""Hex digits: the class and the phase stand beside it, and a fleet has a handful of different crashes."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """What is known of an engine's end besides the faults in its log."""

    exit_code: int | None
    asked: bool
    """rltop ended it."""
    stage: Stage
    """How far the start is by now."""
    flags: Mapping[str, object]
    """Settings in effect."""
    known: tuple[KnownCrash, ...]
    """Crashes that it may look like."""
    blocking: bool = False
    """Launches block, and no graph hides one."""
    dumping: bool = False
    """CUDA core dumps are on."""
    injected: str = ""
    """A fault that the stand-in was told to have."""
    words: LastWords | None = None
    """With which the log of a start ends."""
    last_line: str = ""
    """Of the log, whatever it says."""


def explain(suspects: Sequence[Suspect], events: Sequence[LogEvent], end: End) -> Crash:
    """The crash of an engine whose log had these faults and, around them, these events. Never raises."""
    first = first_of(suspects)
    if end.words is not None and not end.asked and end.stage is not Stage.READY and _are_last(end.words, suspects):
        found = _of_words(end.words, end.stage)
    elif first is None or (end.asked and strength(first) < ROOT):
        found = _without_fault(end)
    else:
        found = _of_fault(first, suspects, events, end)
    if not end.injected or found.kind == "stopped":
        return found
    cause = f"{found.cause} A rehearsal: the fault {end.injected} was injected."
    return replace(found, injected=end.injected, cause=cause)


def _of_fault(first: Suspect, suspects: Sequence[Suspect], events: Sequence[LogEvent], end: End) -> Crash:
    everything = in_order([*events, first.event])
    obs = Observations(events=tuple(everything), args=Args(end.flags), known_crashes=end.known)
    placed = next(event for event in everything if _place(event) == _place(first.event))
    event = _with_stack(obs, placed)
    phase, name = phase_of(obs, event, first.stage)
    kind, what, do = what_of(event, phase)
    on_gpu = kind in GPU_KINDS
    kernel = _kernel(obs, event) if on_gpu else ""
    cause = what if kind in PLACED else f"{what} {WORDS[phase]}"
    if event.rank is not None:
        cause += f", rank {event.rank} first"
    cause += f", in kernel {kernel}" if kernel else _at(event, on_gpu=on_gpu, blocking=end.blocking)
    cause += told_by(event, kind)
    alike = match(obs, event, kernel=kernel, phase=name, message_only=not on_gpu)
    if on_gpu and not kernel:
        do = "with core_dump=on the log names the kernel at the next crash"
        do = "core dumps are on, and this crash left none: the next one may name the kernel" if end.dumping else do
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


def _at(event: LogEvent, *, on_gpu: bool, blocking: bool) -> str:
    """Where in the code it was seen; a fault on the GPU is seen later than it happens, unless launches block."""
    if not (place := noticed(event)):
        return ""
    if not on_gpu:
        return f", at {place}"
    return f", launched at {place} (CUDA_LAUNCH_BLOCKING, graphs off)" if blocking else f", noticed at {place}"


def _are_last(words: LastWords, suspects: Sequence[Suspect]) -> bool:
    """Nothing else ended it, and they come after every error that it survived."""
    return all(strength(one) == PERHAPS and words.line > (one.event.where.line or 0) for one in suspects)


def _of_words(words: LastWords, stage: Stage) -> Crash:
    phase = START[stage][0]
    when = "" if words.kind in PLACED else f" {WORDS[phase]}"
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


def _without_fault(end: End) -> Crash:
    exit_code, stage, last_line = end.exit_code, end.stage, end.last_line
    phase = START[stage][0] if stage is not Stage.READY else "serve"
    if end.asked:
        return Crash(fingerprint=f"stopped/{phase}", kind="stopped", phase=phase, cause="It was stopped, as asked.")
    if exit_code is None:
        how = "The process is gone and nobody saw how it ended"
    elif exit_code < 0:
        how = f"The process was ended by signal {-exit_code}"
    else:
        how = f"The process ended with status {exit_code}"
    cause = f"{how} {WORDS[phase]}; its log tells of no error."
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
