"""`host.inductor-cache` and `host.hf-cache-race`: processes trip over a cache that they share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.events import DEDUP, distinct, frames, hidden, of_kind, side, who, whole_text
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event, of_place, span
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Verdict

INDUCTOR = "host.inductor-cache"
HF = "host.hf-cache-race"
_DECODE = re.compile(r"JSONDecodeError")
_COMPILER = re.compile(r"torch/_inductor|torch\._inductor|autotune_cache|autotune cache|backend='inductor'")
_HF_ERROR = re.compile(r"FileNotFoundError|ModuleNotFoundError|JSONDecodeError|EOFError|ImportError|OSError")
_HF_PATH = re.compile(
    r"transformers_modules|huggingface/(?:hub|modules)|HF_MODULES_CACHE|HF_HOME|models--|"
    r"dynamic_module_utils|get_class_in_module"
)
_PERMANENT = re.compile(
    r"\b404\b|Entry Not Found|EntryNotFound|Repository Not Found|Repo id must|PermissionError|Permission denied|"
    r"\b40[13]\b|gated repo|No space left",
    re.I,
)
_WORKS = ("loaded", "ckpt_loaded", "engine_stage", "timer", "iteration", "prefill", "decode")


def _no_log(obs: Observations, id: str) -> list[Verdict] | None:  # noqa: A002
    return None if obs.logs or obs.events else [Verdict(id, "skip", cause=missing(obs, "a log"))]


def _env(obs: Observations, *names: str) -> tuple[dict[str, str], tuple[Evidence, ...]]:
    found: dict[str, str] = {}
    evidence: list[Evidence] = []
    for document in obs.documents:
        if document.kind == "env":
            for name in names:
                if name in document.fields:
                    found[name] = str(document.fields[name])
                    evidence.append(of_place(document.at(name, f"{name}={document.fields[name]}")))
    return found, tuple(evidence)


def check_inductor(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all processes that failed to decode an entry of the compile cache."""
    if skipped := _no_log(obs, INDUCTOR):
        return skipped
    broken = [
        event
        for event in of_kind(obs, "traceback")
        if _DECODE.search(text := whole_text(event)) and _COMPILER.search(text)
    ]
    if not broken:
        cause = "No process failed to read an entry of torch's compile cache."
        return [Verdict(INDUCTOR, "pass", cause=cause)]
    ranks = [event.rank for event in broken if event.rank is not None]
    settings, places = _env(obs, "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_FORCE_DISABLE_CACHES")
    folder = settings.get("TORCHINDUCTOR_CACHE_DIR", "")
    shown = f"the compile cache {folder}" if folder else "torch's compile cache (/tmp/torchinductor_<user>)"
    names = [f"rank {rank}" for rank in sorted(set(ranks))] or [str(name) for name in distinct(map(who, broken))]
    return [
        Verdict(
            INDUCTOR,
            "fail",
            rank=ranks[0] if len(set(ranks)) == 1 else None,
            value={"ranks": sorted(set(ranks)), "cache_dir": folder or None, "processes": len(names)},
            threshold="readable entries",
            evidence=tuple(of_event(event) for event in broken[:4]) + places,
            cause=f"{', '.join(names)} read a broken entry of {shown}: {_how(broken, t)}.",
            advice=(
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the env_vars of Ray's runtime environment",
                "or one TORCHINDUCTOR_CACHE_DIR per rank on a local disk",
                f"delete {folder or '/tmp/torchinductor_<user>'} before the next launch",
                *((DEDUP,) if hidden(broken) else ()),
            ),
        )
    ]


def _how(broken: Sequence[LogEvent], t: Thresholds) -> str:
    times = [event.time for event in broken if event.time is not None]
    several = len({(event.pid, event.rank, event.node) for event in broken}) > 1 or any(e.repeated for e in broken)
    far = bool(times) and max(times) - min(times) > t.inductor_race_s
    if far or len({event.segment for event in broken}) > 1:
        return "it comes back at a later launch, so the entry itself is corrupt"
    if several:
        return "several ranks within seconds, so one reads what another is still writing (a race on a shared cache)"
    return "the entry is corrupt, or another process was writing it"


def check_hf(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: several processes fail on the model-code cache within seconds while a sibling gets through."""
    if skipped := _no_log(obs, HF):
        return skipped
    broken = [event for event in of_kind(obs, "traceback") if _of_cache(event)]
    burst = _burst(broken, t)
    processes = {_process(event) for event in burst}
    count = len(processes) + sum(event.repeated for event in burst)
    if count < 2:
        cause = "No two processes failed on the model-code cache within seconds."
        if broken:
            cause = "One process alone failed on the model-code cache: that is permanent, not a race."
        return [Verdict(HF, "pass", cause=cause, evidence=tuple(of_event(event) for event in broken[:2]))]
    sibling = _sibling(obs, burst, processes)
    if sibling is None:
        cause = f"All {count} processes fail alike on the model-code cache: that is permanent, not a race."
        return [Verdict(HF, "pass", cause=cause, evidence=tuple(of_event(event) for event in burst[:2]))]
    settings, places = _env(obs, "HF_MODULES_CACHE", "HF_HOME", "TRANSFORMERS_CACHE")
    shared = next(iter(settings.values()), "")
    times = [event.time for event in burst if event.time is not None]
    within = f" within {span(max(times) - min(times))}" if times else ""
    ranks = sorted({event.rank for event in burst if event.rank is not None})
    return [
        Verdict(
            HF,
            "fail",
            value={"processes": count, "ranks": ranks, "cache": shared or None},
            threshold={"processes": 2, "seconds": t.hf_race_s},
            evidence=(*(of_event(event) for event in burst[:4]), of_event(sibling), *places),
            cause=(
                f"{count} processes fail{within} on the Hugging Face model-code cache{f' {shared}' if shared else ''} "
                f"while {who(sibling)} gets through: they race to write and read the same files."
            ),
            advice=(
                "load the tokenizer and configuration once on every node before the launch (warms the cache)",
                "HF_MODULES_CACHE=/tmp/hf_modules (one per node)",
                "start again: a retry is safe",
                "--model-name spares one AutoConfig call only",
                *((DEDUP,) if hidden(burst) else ()),
            ),
            confidence="medium",
        )
    ]


def _of_cache(event: LogEvent) -> bool:
    text = whole_text(event)
    error = _HF_ERROR.search(
        "\n".join((event.text, str(event.data.get("exception", "")), str(event.data.get("chain", ""))))
    )
    return bool(error and _HF_PATH.search(text) and not _PERMANENT.search(text) and not _COMPILER.search(text))


def _process(event: LogEvent) -> tuple[object, ...]:
    return (event.actor, event.pid, event.node, event.rank)


def _burst(broken: Sequence[LogEvent], t: Thresholds) -> list[LogEvent]:
    """The largest group of failures that lie within seconds; without times, all of them."""
    if any(event.time is None for event in broken):
        return list(broken)
    best: list[LogEvent] = []
    for first in broken:
        group = [e for e in broken if 0 <= (e.time or 0.0) - (first.time or 0.0) <= t.hf_race_s]
        if len({_process(e) for e in group}) > len({_process(e) for e in best}):
            best = group
    return best


def _sibling(obs: Observations, burst: Sequence[LogEvent], failing: set[tuple[object, ...]]) -> LogEvent | None:
    """A line of another process of the same sort that got past its load."""
    sides = {side(obs, event) for event in burst}
    actors = {event.actor for event in burst}
    for event in of_kind(obs, *_WORKS):
        if _process(event) in failing or frames(event):
            continue
        if event.actor in actors if event.actor else side(obs, event) in sides:
            return event
    return None
