"""`host.unexplained`: an error that no rule owns.

The last word: whatever breaks and is claimed by no firing check is shown, so that nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.catalogue import CATALOGUE
from rltop.checks.events import frames, goes_on, of_kind, own_frame, side, who, whole, whole_text, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import FIRING, Evidence, Verdict

ID = "host.unexplained"
STAGE = 3
_KINDS = ("traceback", "ima", "oom", "memory_saver", "fatal", "death", "job_end", "port_in_use", "no_attention")
_BENIGN = re.compile(
    r"may not be an issue|connected to 0 peer ranks|Grad overflow|OVERFLOW!|freeze_gc|"
    r"RPC error: CANCELLED|Force kill actor request|owner has died|INTENDED_(?:USER|SYSTEM)_EXIT|"
    r"destroy_process_group\(\) was not called|Ignore import error|KeyboardInterrupt|SystemExit: 0\b|"
    r"retrying|will retry|Retry(?:ing)? \d|DeprecationWarning|FutureWarning|UserWarning",
    re.I,
)
_NEAR = 200
"""Lines from a claimed error within which another one is its cascade."""


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on the earliest error that no firing check claims."""
    if not obs.logs and not obs.events:
        return [Verdict(ID, "skip", cause=missing(obs, "a log"))]
    errors = [event for event in of_kind(obs, *_KINDS) if not _benign(obs, event)]
    if not errors:
        return [Verdict(ID, "pass", cause="No log shows an error that would need an explanation.")]
    logs = {event.where.source for event in errors}
    owners = [
        v
        for v in obs.verdicts
        if v.status in FIRING
        and _takes(v.id)
        and (v.status == "fail" or any(e.line and e.source in logs for e in v.evidence))
    ]
    if owners:
        first = owners[0]
        cause = f"The errors in the logs are owned by {', '.join(dict.fromkeys(v.id for v in owners[:4]))}."
        return [Verdict(ID, "pass", evidence=first.evidence[:1], cause=cause)]
    claimed = {(e.source, e.line) for v in obs.verdicts if v.status in FIRING for e in v.evidence if e.line}
    free = [event for event in errors if not _claimed(event, claimed)]
    if not free:
        return [Verdict(ID, "pass", cause="Every error in the logs is part of another verdict.")]
    return [_verdict(obs, free, errors)]


def _takes(id: str) -> bool:  # noqa: A002
    """The check explains host.unexplained when it fires."""
    entry = next((entry for entry in CATALOGUE if entry.id == id), None)
    return entry is not None and any(one.target == ID for one in entry.explains)


def _claimed(event: LogEvent, claimed: set[tuple[str, int]]) -> bool:
    """A firing verdict shows this line, or one just before it in the same log."""
    line = event.where.line or 0
    return any(source == event.where.source and 0 <= line - at <= _NEAR for source, at in claimed)


def _benign(obs: Observations, event: LogEvent) -> bool:
    if event.data.get("benign") or _BENIGN.search(event.text):
        return True
    if event.kind == "job_end":
        return word(event, "state") in ("succeeded", "stopped") or whole(event, "code") == 0
    first = whole(event, "first_line") or event.where.line or 0
    for note in of_kind(obs, "harmless"):
        if note.where.source == event.where.source and 0 < first - (note.where.line or 0) <= 3:
            return True
    text = whole_text(event)
    if _BENIGN.search(text) and event.kind == "traceback":
        return True
    # What the run survives without a mark is a retry that succeeded or a warning with a traceback.
    return event.kind in ("traceback", "oom", "memory_saver", "death") and goes_on(obs, event)


def _verdict(obs: Observations, free: Sequence[LogEvent], errors: Sequence[LogEvent]) -> Verdict:
    first = min(free, key=lambda event: (event.order, event.kind not in ("traceback", "ima")))
    whole_one = next((e for e in free if e.kind == "traceback" and _same_place(e, first)), first)
    ended = not goes_on(obs, first)
    owner = side(obs, first) or first.owner
    what = word(whole_one, "exception") or first.text[:160]
    message = word(whole_one, "message")[:160]
    frame = own_frame(whole_one) or (frames(whole_one)[-1] if frames(whole_one) else "")
    cause = f"{who(first)} broke with {what}"
    cause += f": {message}" if message and message not in what else ""
    cause += f", at {frame}" if frame else ""
    cause += "; the log ends with it" if ended else "; the run went on"
    evidence: list[Evidence] = [of_event(first)]
    evidence += [of_event(event) for event in errors if event is not first][:2]
    return Verdict(
        ID,
        "fail" if ended else "warn",
        rank=first.rank,
        value={"owner": owner or None, "exception": what, "frame": frame or None, "errors": len(errors)},
        threshold="explained",
        evidence=tuple(evidence),
        cause=cause + ". No check owns this error.",
        advice=(
            f"the lines before {first.where.source}:{first.where.line}",
            "--dump-details DIR (a full capture at the next run)",
        ),
        confidence="low",
    )


def _same_place(left: LogEvent, right: LogEvent) -> bool:
    return left.where.source == right.where.source and abs((left.where.line or 0) - (right.where.line or 0)) <= 2
