"""Lines that only Relax writes: restarts of its services, its autoscaler, its fall-back from `--load`, its rollouts.

Relax logs its timers at DEBUG, which is off by default, so a rollout's begin and end are taken from the lines that
announce them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rltop.evidence.lines.line import Line, Recogniser

_SERVICE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("fatal", re.compile(r"Service (?P<role>[\w-]+) reported FATAL error: (?P<why>.*?)\. Skipping restart")),
    ("unhealthy", re.compile(r"Service (?P<role>[\w-]+) is unhealthy: (?P<why>.*), triggering restart")),
    ("stale", re.compile(r"Service (?P<role>[\w-]+) heartbeat stale \(timeout\), triggering restart")),
    ("restart", re.compile(r"Restarting (?P<role>[\w-]+), restart count: (?P<count>\d{1,9})")),
    ("global", re.compile(r"Triggering global restart due to: (?P<why>.*)")),
    ("restarted", re.compile(r"Service '(?P<role>[\w-]+)' restarted successfully")),
    ("resumed", re.compile(r"Global restart completed, re-running training loop")),
    ("failed", re.compile(r"Global restart failed, cannot recover: (?P<why>.*)")),
    ("started", re.compile(r"Started (?P<count>\d{1,9}) services in parallel: ")),
)


def service(line: Line) -> Mapping[str, object] | None:
    """What happened to a service of the framework: what (fatal, unhealthy, stale, restart, global, restarted, resumed,
    failed, started), role, why, count (its restarts so far; with `started` the services)."""
    for what, pattern in _SERVICE:
        if found := pattern.search(line.text):
            told = found.groupdict()
            data: dict[str, object] = {"what": what, "role": told.get("role") or "", "why": told.get("why") or ""}
            if told.get("count"):
                data["count"] = int(told["count"])
            return data | {"owner": "launcher"}
    return None


_SCALE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("out", re.compile(r"\[Autoscaler\] SCALE-OUT triggered: (?P<why>.*?), delta=\+(?P<count>\d{1,6})")),
    ("in", re.compile(r"\[Autoscaler\] SCALE-IN triggered: (?P<why>.*?), delta=-(?P<count>\d{1,6})")),
    ("removed", re.compile(r"\[ScaleIn\] Removed engine (?P<engine>[\w-]+)(?! from router)$")),
    ("evicted", re.compile(r"\[Eviction\] Engine (?P<engine>[\w-]+) removed from engine group")),
)


def scale(line: Line) -> Mapping[str, object] | None:
    """The fleet of engines grew or shrank: what (out, in: decided; removed, evicted: done), why, count, engine_id."""
    for what, pattern in _SCALE:
        if found := pattern.search(line.text):
            told = found.groupdict()
            data: dict[str, object] = {"what": what, "why": told.get("why") or ""}
            if told.get("count"):
                data["count"] = int(told["count"])
            return data | ({"engine_id": told["engine"]} if told.get("engine") else {})
    return None


_FALLBACK = re.compile(
    r"args\.load=(?P<load>'[^']*'|\"[^\"]*\"|\S+) (?:does not exist or is an empty directory\. use|"
    r"exists but is not a valid HF checkpoint \(no config\.json\)\. Falling back to) args\.(?P<instead>\w+)"
)


def fallback(line: Line) -> Mapping[str, object] | None:
    """`--load` holds no checkpoint, another one is taken: asked, instead (the flag whose value is taken)."""
    found = _FALLBACK.search(line.text)
    return {"asked": found["load"].strip("'\""), "instead": found["instead"], "owner": "trainer"} if found else None


ROLLOUT = re.compile(
    r"(?P<start>Starting (?:final )?rollout (?:backfill )?step) (?P<begun>\d{1,15}): target\(|"
    r"Rollout (?:fully|not) completed for rollout_id: (?P<ended>\d{1,15})[.,]"
)
"""Begin and end of a rollout."""


def rollout(line: Line) -> Mapping[str, object] | None:
    """A rollout begins or ends, as a timer of that name would say it."""
    found = ROLLOUT.search(line.text)
    return {"name": "rollout", "edge": "start" if found["start"] else "end", "elapsed_s": None} if found else None


_VALIDATED = re.compile(r"Resource validation: required GPUs=(?P<gpus>\d{1,9}), cluster GPUs=(?P<there>\d{1,9})")


def validated(line: Line) -> Mapping[str, object] | None:
    """GPUs that the job asks for, and that Ray has: gpus, registered."""
    found = _VALIDATED.search(line.text)
    if found is None:
        return None
    return {"gpus": int(found["gpus"]), "registered": int(found["there"]), "owner": "launcher"}


RECOGNISERS: tuple[Recogniser, ...] = (
    Recogniser(
        "service",
        ("reported FATAL", "triggering restart", "restart count", "lobal restart", "restarted success", "services in"),
        service,
    ),
    Recogniser("scale", ("[Autoscaler] SCALE", "[ScaleIn] Removed", "[Eviction] Engine"), scale),
    Recogniser("placement_create", ("Resource validation",), validated),
    Recogniser("ckpt_fallback", ("args.load=",), fallback),
    Recogniser("timer", ("ollout step ", "ollout backfill step ", "completed for rollout_id"), rollout),
)
