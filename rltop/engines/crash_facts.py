"""What a crash's evidence says before any restart, for `rltop.bisect.facts`: kernel, phase, padding, what came before.

Read from `crash.json` (the crash as it was understood), the end of the log (`crash.log`) and the core dump's folder.
Only what is written there is a fact: a batch size is known where a batch line stands next to the fault or the crash
dump says how many requests were in flight, and nothing is guessed from the settings.

Pure but for the look into the folder. Odd text has no facts; nothing raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.bisect.facts import CrashFacts
from rltop.checks.events import whole, word
from rltop.checks.found import LogEvent
from rltop.evidence.logs import LogScan

FEW_BATCHES = 8
"""Prefills after a resume or an update within which a crash is called just after it: a first round of requests."""
CRASH_LOG = "crash.log"
_SIZES = re.compile(r"Capture (?:target )?(?:decode |cuda |verify )?(?:CUDA )?graph.*\bbs[ =]\[([\d, ]+)", re.I)
_CORE = re.compile(r"coredump: Writing ELF file to (\S+)")
_RESUME, _UPDATE = re.compile(r"/resume_memory_occupation"), re.compile(r"/update_weights_from_")
_MOST_SIZES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """The facts, and where each is written."""

    facts: CrashFacts
    sources: Mapping[str, str] = field(default_factory=dict)
    """`kernel`, `phase`, `padded`, `after_resume`, `after_sync`, `xids` -> file and line, or file alone."""
    core: Path | None = None
    """The core dump, where one lies here."""
    batch: int | None = None
    """Requests in the batch that died, as far as it is known."""


def crash_facts(
    crash: Mapping[str, Any],
    log_tail: Sequence[str],
    coredump_dir: Path,
    *,
    owner: str = "engine",
    in_flight: int | None = None,
    xids: Sequence[int] = (),
) -> Told:
    """crash: what `crash.json` has. log_tail: `crash.log`. in_flight: requests open at the end (crash dump).

    owner: whose fault came first; xids: that the driver reported then, beside those in the log.
    """
    told = crash.get("crash")
    story: Mapping[str, Any] = told if isinstance(told, dict) else {}
    events = _events(log_tail)
    end = next((at for at, one in enumerate(events) if one.kind == "ima"), len(events))
    sources: dict[str, str] = {}

    def found(name: str, where: str, seen: object) -> None:
        if seen not in (None, "", False, ()):
            sources[name] = where

    kernel, phase = str(story.get("kernel") or ""), str(story.get("phase") or "")
    found("kernel", "crash.json, from the log's coredump: lines", kernel)
    found("phase", "crash.json", phase)
    info = crash.get("server_info")
    sizes = next((seen for line in log_tail if (seen := _captured(line))), None) or _listed(info)
    batch, padded, where = _padding(sizes, events[:end], phase, in_flight)
    found("padded", where, padded is not None)
    resumed = _just_after(events[:end], _RESUME)
    synced = _just_after(events[:end], _UPDATE)
    found("after_resume", resumed or "crash.json", resumed or phase == "wake")
    found("after_sync", synced or "crash.json", synced or phase == "update")
    reported = {number for one in events if one.kind == "xid" and (number := whole(one, "xid")) is not None}
    every = tuple(sorted({*reported, *xids}))
    found("xids", CRASH_LOG if reported else "the driver's reports", every)
    rank = story.get("rank")
    facts = CrashFacts(
        owner=owner,
        kernel=kernel,
        phase=phase,
        padded=padded,
        after_resume=bool(resumed) or phase == "wake",
        # Weights that came back after a sleep are an update too: the sleep is the rarer fact.
        after_sync=(bool(synced) and not resumed) or phase == "update",
        xids=every,
        rank=rank if isinstance(rank, int) and not isinstance(rank, bool) else None,
    )
    return Told(facts=facts, sources=sources, core=core_of(log_tail, coredump_dir), batch=batch)


def core_of(log_tail: Sequence[str], coredump_dir: Path) -> Path | None:
    """The core dump that a crash left: as its log names it, else the newest in the folder. None: there is none here."""
    for line in reversed(log_tail):
        if (match := _CORE.search(line)) is not None:
            named = Path(match[1])
            return named if named.is_file() else _newest(coredump_dir)
    return _newest(coredump_dir)


def _newest(folder: Path) -> Path | None:
    files: list[tuple[float, Path]] = []
    try:
        for path in folder.rglob("*"):
            if path.is_file() and "core" in path.name:
                files.append((path.stat().st_mtime, path))
    except OSError:
        pass
    return max(files)[1] if files else None


def tail_of(folder: Path) -> list[str]:
    """The lines of `crash.log` in a generation's folder; none where it can not be read."""
    try:
        return (folder / CRASH_LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _events(lines: Sequence[str]) -> list[LogEvent]:
    scan = LogScan(CRASH_LOG)
    if lines:
        scan.feed(1, [line.encode() for line in lines])
        scan.settle()
    return sorted(scan.so_far()[0], key=lambda one: one.where.line or 0)


def _just_after(before: Sequence[LogEvent], path: re.Pattern[str]) -> str:
    """Where the newest such call is answered, if only a few batches followed it; "": it is not."""
    batches = 0
    for event in reversed(before):
        if event.kind == "prefill":
            batches += 1
            if batches > FEW_BATCHES:
                return ""
        elif event.kind in ("http", "resume", "release") and path.search(word(event, "path") or event.text):
            return f"{CRASH_LOG}:{event.where.line}"
    return ""


def _padding(
    sizes: Sequence[int], before: Sequence[LogEvent], phase: str, in_flight: int | None
) -> tuple[int | None, bool | None, str]:
    """(requests in the batch, whether its graph was larger, where that is written). sizes: captured. Decode only."""
    if phase not in ("decode-graph", "verify"):
        return None, None, ""
    newest = next((one for one in reversed(before) if one.kind in ("decode", "prefill")), None)
    batch, where = in_flight, "the crash dump's requests in flight"
    waiting = newest is not None and bool(whole(newest, "queue_req"))  # in flight, and in no batch
    if waiting or batch is None:
        batch = None
        if newest is not None and newest.kind == "decode":
            batch, where = whole(newest, "running_req"), f"{CRASH_LOG}:{newest.where.line}"
    if not sizes or not batch or batch > max(sizes):
        return batch, None, ""
    return batch, batch not in sizes, f"{where}: {batch} requests"


def _captured(line: str) -> tuple[int, ...]:
    match = _SIZES.search(line)
    return tuple(int(one) for one in match[1].split(",") if one.strip())[:_MOST_SIZES] if match else ()


def _listed(info: object) -> tuple[int, ...]:
    """The captured decode sizes of `/server_info`: 0.5.14 has them by themselves, 0.5.23 in a map."""
    if not isinstance(info, dict):
        return ()
    config = info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    nested = decode.get("bs") if isinstance(decode, dict) else None
    for value in (info.get("cuda_graph_bs_decode"), info.get("cuda_graph_bs"), nested):
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            return tuple(value[:_MOST_SIZES])
    return ()
