"""The first illegal memory access of a run: whose it is, in which phase, with how much free memory.

Torch, flashinfer, Triton, FlashAttention and NCCL's watchdog thread all spell it their own way, and after the first one
every peer reports something; so the earliest by time over all ranks is the fault and the rest are cascades.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rltop.checks.events import engine_life, frames, newest, number, of_kind, of_life, side, word
from rltop.checks.found import LogEvent, Owner
from rltop.checks.observe import Observations

HARDWARE_XIDS = {
    48: "double-bit ECC error",
    63: "ECC page retirement or row remapping",
    64: "ECC page retirement or row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
}
"""Xids of NVIDIA's driver that mean hardware; 13 and 31 are software faults."""
_CAPTURE = re.compile(r"(?<!re)capture(?!_hidden)|capture_one_batch|CudaGraphRunner:__init__|init_\w*cuda_graph", re.I)
_REPLAY = re.compile(r"replay", re.I)
EITHER = re.compile(r"ngram_worker\.py:forward_batch_generation\n(?:.*\n)*.*(?:execute_extend|forward_extend)")
"""NGRAM's worker runs the prefill and the verification of drafts alike, without a graph both as an extend: the frames
of the two differ in nothing but line numbers (seen in SGLang 0.5.14)."""
_WAKE_PATHS = ("/resume_memory_occupation", "/release_memory_occupation")


@dataclass(frozen=True, slots=True)
class Fault:
    """The first illegal memory access."""

    event: LogEvent
    owner: Owner
    phase: str
    free_gb: float | None
    free_at: LogEvent | None
    kernel: str
    xids: tuple[LogEvent, ...]
    cascades: tuple[LogEvent, ...]
    since_start_s: float | None
    generation: int | None = None
    """Of the engine's process, where each has a log of its own."""
    rehearsal: str = ""
    """Name of the injected fault that it is."""
    again: tuple[LogEvent, ...] = ()
    """First lines of later faults of the same engine, one for each of its processes that had one."""


def first_fault(obs: Observations) -> Fault | None:
    """The earliest illegal access over all logs and ranks; None without any."""
    key = ("first-fault", "", "")
    if key not in obs.memo:
        obs.memo[key] = _first_fault(obs)
    found: Fault | None = obs.memo[key]
    return found


def engine_faults(obs: Observations) -> tuple[Fault, ...]:
    """The first fault, and where every process of an engine has a log of its own, the first one of each other engine.

    A process that crashes minutes after another one is no cascade of it.
    """
    first = first_fault(obs)
    if first is None:
        return ()
    found, told = [first], {_engine(first.event)}
    for lines in _lives(obs):
        if (engine := _engine(lines[0])) is not None and engine not in told and side(obs, lines[0]) == "engine":
            told.add(engine)
            found.append(_fault(obs, lines))
    return tuple(found)


def _engine(event: LogEvent) -> str | None:
    life = engine_life(event.where.source)
    return life[0] if life else None


def _lives(obs: Observations) -> list[list[LogEvent]]:
    """Reports of illegal accesses by the process of an engine that made them; those of all others are one group. In
    order of their first one. What a dying process repeats (`what(): ...`) is the same fault once more, so it is not
    first where there is another line."""
    groups: dict[tuple[str, int] | None, list[LogEvent]] = {}
    for event in of_kind(obs, "ima"):
        groups.setdefault(engine_life(event.where.source), []).append(event)
    for life, events in groups.items():
        own = [event for event in events if word(event, "from") != "terminate"] or events
        groups[life] = [own[0], *(event for event in events if event is not own[0])]
    return sorted(groups.values(), key=lambda events: (word(events[0], "from") == "terminate", events[0].order))


def _first_fault(obs: Observations) -> Fault | None:
    lives = _lives(obs)
    return _fault(obs, lives[0]) if lives else None


def _fault(obs: Observations, lines: Sequence[LogEvent]) -> Fault:
    """lines: all reports of one process (or of all that have no log of their own), the fault first."""
    first = lines[0]
    owner, engine, life = side(obs, first), _engine(first), engine_life(first.where.source)
    memory = [
        e
        for e in of_life(of_kind(obs, "prefill", "decode", "engine_stage"), first)
        if number(e, "avail_gb") is not None
    ]
    free_at = newest(memory, first)
    strikes = [
        e
        for e in of_kind(obs, "injected")
        if e.where.source == first.where.source and word(e, "what") == "strikes" and e.order <= first.order
    ]
    later = [one[0] for one in _lives(obs) if one[0].order > first.order]
    again = tuple(one for one in later if engine is not None and _engine(one) == engine)
    # Without a log for each process nothing tells another process's fault from this one's consequences.
    peers = [] if life is not None else [e for one in _lives(obs) if one[0] is not first for e in one]
    return Fault(
        event=first,
        owner=owner,
        phase=_trainer_phase(obs, first) if owner == "trainer" else engine_phase(obs, first),
        free_gb=number(free_at, "avail_gb") if free_at else None,
        free_at=free_at,
        kernel=_kernel(obs, first),
        xids=of_kind(obs, "xid"),
        cascades=(*lines[1:], *peers),
        since_start_s=_since_start(obs, first),
        generation=life[1] if life else None,
        rehearsal=word(strikes[-1], "fault") if strikes else "",
        again=again,
    )


def _kernel(obs: Observations, first: LogEvent) -> str:
    if name := word(first, "kernel"):
        return name
    near = [e for e in of_kind(obs, "kernel") if e.where.source == first.where.source]
    return word(near[0], "kernel") if near else ""


def _since_start(obs: Observations, first: LogEvent) -> float | None:
    lines = of_kind(obs, "engine_stage", "startup")
    if engine_life(first.where.source) is not None:  # another engine, or an earlier process of it, started otherwise
        lines = tuple(e for e in lines if e.where.source == first.where.source)
    starts = [e.time for e in lines if e.time is not None and e.order < first.order]
    starts += [log.first_time for log in obs.logs if log.source == first.where.source and log.first_time is not None]
    if first.time is None or not starts:
        return None
    return max(0.0, first.time - min(starts))


def engine_phase(obs: Observations, first: LogEvent) -> str:
    """capture, replay, load, first request after wake-up, prefill, decode, either, start-up or serving."""
    path = "\n".join(frames(first))
    if word(first, "phase") == "capture" or _CAPTURE.search(path):
        return "capture"
    if _REPLAY.search(path):
        return "replay"
    told = of_life(of_kind(obs, "engine_stage"), first)
    stages = [e for e in told if e.order < first.order and side(obs, e) in ("engine", "")]
    batches = [e for e in of_life(of_kind(obs, "prefill", "decode"), first) if e.order < first.order]
    last_stage = stages[-1] if stages else None
    last_batch = batches[-1] if batches else None
    if last_stage and (last_batch is None or last_batch.order < last_stage.order):
        stage, edge = word(last_stage, "stage"), word(last_stage, "edge")
        if stage in ("capture", "load") and edge != "end":
            return stage
        if stage in ("start", "load", "kv", "capture"):
            return "start-up"
    if _woken(obs, first, last_batch):
        return "first request after wake-up"
    if "process_batch_result_decode" in path or "forward_decode" in path:
        return "decode"
    if EITHER.search(path):
        return "prefill or verify"
    if "process_batch_result_prefill" in path or "extend" in path:
        return "prefill"
    if last_batch is None:
        return "serving"
    return last_batch.kind + (" (CUDA graph)" if "cuda graph: True" in last_batch.text else "")


def _woken(obs: Observations, first: LogEvent, last_batch: LogEvent | None) -> bool:
    wakes = [
        e
        for e in of_life(of_kind(obs, "resume", "release", "http"), first)
        if e.order < first.order and (e.kind != "http" or word(e, "path").startswith(_WAKE_PATHS))
    ]
    return bool(wakes) and (last_batch is None or last_batch.order < wakes[-1].order)


def _trainer_phase(obs: Observations, first: LogEvent) -> str:
    """log-prob, train step, weight sync, load or unknown."""
    path = "\n".join(frames(first)) + word(first, "method")
    for name, pattern in (
        ("log-prob", r"compute_log_prob|forward_only|ref_log_prob"),
        ("weight sync", r"update_weight|weight_update"),
        (
            "train step",
            r"train_one_step|backward|optimizer|forward_backward|:train\b|train_actor|update_(?:policy|actor)",
        ),
        ("checkpoint load", r"load_checkpoint|checkpointing"),
    ):
        if re.search(pattern, path):
            return name
    timers = [e for e in of_kind(obs, "timer") if e.order < first.order and side(obs, e) in ("trainer", "")]
    is_open = {word(e, "name"): word(e, "edge") == "start" for e in timers}
    names = {"log_probs": "log-prob", "ref_log_probs": "log-prob", "actor_train": "train step"}
    names |= {"update_weights": "weight sync", "train": "train step"}
    return next((label for timer, label in names.items() if is_open.get(timer)), "unknown")
