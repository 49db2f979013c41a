"""Numbers and evidence in the words that every verdict uses, live and offline alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rltop.checks.found import LogEvent
from rltop.checks.observe import Args, EngineSync, Observations, Sample, SyncEvent, TextLine, Where
from rltop.checks.series import Point
from rltop.checks.verdict import Evidence

EVIDENCE_CHARS = 200
MOST_EVIDENCE = 6
_LOGGER = re.compile(r"^(?:[A-Z]+ )?[\w./-]+\.py:\d+(?:[: ]\w+)? ?[-|\]:] ")
"""`narrator.py:137 - `, as loggers put it before their messages."""


def num(value: float) -> str:
    """A number for a sentence: whole numbers whole, others with four significant digits, `NaN` and `Inf` in words."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.4g}"


def brief(text: str, most: int = 240) -> str:
    """The beginning of what somebody else wrote, for the middle of a sentence: whole sentences if one fits, else
    whole words and an ellipsis; no full stop at the end, and not the place of the code that logged it."""
    plain = unlogged(" ".join(text.split()))
    if len(plain) <= most:
        return plain.rstrip(".")
    head = plain[:most]
    if ". " in head:
        return head.rpartition(". ")[0]
    return (head.rpartition(" ")[0] or head) + "…"


def unlogged(text: str) -> str:
    """A message without the place of the code that logged it (`narrator.py:137 - `)."""
    return _LOGGER.sub("", text)


def count(number: int, what: str) -> str:
    """`1 check`, `3 checks`; `what` takes an s."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def named(what: str, names: Sequence[str]) -> str:
    """`engine 0`, `engines 0, 1`."""
    return f"{what}{'' if len(names) == 1 else 's'} {', '.join(names)}"


def jnum(value: float | None) -> float | str | None:
    """A number for `Verdict.value`: NaN and Inf become the strings that JSON output uses."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def of_points(series: Iterable[Point]) -> tuple[Evidence, ...]:
    """Evidence for metric values: the file and line, or `metric@step` of a live run."""
    return tuple(_of_point(point) for point in list(series)[:MOST_EVIDENCE])


def _of_point(point: Point) -> Evidence:
    text = f"{point.name} = {num(point.value)} at {point.axis} step {point.step}"
    if point.axis == "rollout":
        text = f"{point.name} = {num(point.value)} in rollout {point.step}"
    elif point.rollout is not None:
        text += f" (rollout {point.rollout})"
    if point.where is None:
        return Evidence(f"{point.name}@{point.step}", None, text[:EVIDENCE_CHARS])
    # Not the line itself: it holds dozens of other metrics.
    return Evidence(point.where.source, point.where.line, text[:EVIDENCE_CHARS])


def of_samples(samples: Sequence[Sample], *, most: int = 3) -> tuple[Evidence, ...]:
    """Evidence for responses: where each is and how it begins."""
    return tuple(
        _place(sample.where, f"samples@{sample.rollout_id}", f"response {sample.index}: {sample.excerpt!r}")
        for sample in samples[:most]
    )


def of_sync(sync: SyncEvent) -> Evidence:
    """Evidence for a weight sync; a digest that an engine does not share is named."""
    text = f"weights version {sync.version}"
    if sync.rollout_id is not None:
        text += f", first sampled by rollout {sync.rollout_id}"
    if sync.transport:
        text += f", transport {sync.transport}"
    spoiled = mismatches(sync)
    if refused := [engine for engine in sync.engines if not engine.ok and engine not in spoiled]:
        text += "; refused by " + ", ".join(f"engine {e.engine} ({e.message or 'no reason given'})" for e in refused)
    elif not sync.ok and not spoiled:
        text += "; reported as failed"
    for engine in spoiled[:2]:
        text += f"; digest of engine {engine.engine} is {engine.digest[:12]}, the trainer's {sync.digest[:12]}"
    return _place(sync.where, f"weights@{sync.version}", text)


def mismatches(sync: SyncEvent) -> tuple[EngineSync, ...]:
    """Engines that are known to hold something else than the trainer pushed."""
    return tuple(
        e
        for e in sync.engines
        if e.same is False or (e.same is None and e.digest and sync.digest and e.digest != sync.digest)
    )


def of_line(line: TextLine) -> Evidence:
    return _place(line.where, f"log of {line.owner or 'the run'}", line.text)


def of_event(event: LogEvent, text: str = "") -> Evidence:
    """Evidence for a log event: its line, or `text` instead of it."""
    return Evidence(event.where.source, event.where.line, (text or event.text)[:EVIDENCE_CHARS])


def of_flags(args: Args, *names: str) -> tuple[Evidence, ...]:
    """Evidence for the flags among `names` that were given."""
    return tuple(Evidence(at.source, at.line, at.text[:EVIDENCE_CHARS]) for at in args.at(*names))


def of_place(where: Where, text: str = "") -> Evidence:
    """Evidence for any place."""
    return Evidence(where.source, where.line, (text or where.text)[:EVIDENCE_CHARS])


def span(seconds: float) -> str:
    """A duration for a sentence: `45 s`, `12 min`, `3 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def clock(seconds: float | None) -> str:
    """A time of day for a sentence, UTC; empty where there is none."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")


def _place(where: Where | None, live: str, text: str) -> Evidence:
    if where is None:
        return Evidence(live, None, text[:EVIDENCE_CHARS])
    return Evidence(where.source, where.line, (where.text or text)[:EVIDENCE_CHARS])


def missing(obs: Observations, what: str) -> str:
    """Cause of a skip: what is not there, and whether it may still come."""
    return f"{'not seen yet' if obs.live else 'not in the evidence'}: {what}"
