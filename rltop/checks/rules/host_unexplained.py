"""`host.unexplained`: an error that no rule owns.

The last word: whatever breaks and is claimed by no firing check is shown, so that nothing is lost. Most of it is
outside training: a full disk, a flag that is misspelt, a host without memory, a job that reached its time limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.catalogue import CATALOGUE
from rltop.checks.events import frames, goes_on, number, of_kind, own_frame, side, who, whole, whole_text, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event
from rltop.checks.remedies import Told, remedy
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import FIRING, Evidence, Verdict

ID = "host.unexplained"
STAGE = 3
_KINDS = (
    *("traceback", "ima", "oom", "memory_saver", "fatal", "death", "job_end", "port_in_use", "no_attention"),
    *("ended", "oom_killer"),
)
_BENIGN = re.compile(
    r"may not be an issue|connected to 0 peer ranks|Grad overflow|OVERFLOW!|freeze_gc|"
    r"RPC error: CANCELLED|Force kill actor request|owner has died|INTENDED_(?:USER|SYSTEM)_EXIT|"
    r"destroy_process_group\(\) was not called|Ignore import error|KeyboardInterrupt|SystemExit: 0\b|"
    r"retrying|will retry|Retry(?:ing)? \d|DeprecationWarning|FutureWarning|UserWarning",
    re.I,
)
_AFTER_A_STOP = ("job_end", "death", "ended", "fatal")
"""What the processes of a job say when somebody stops it."""
_LAST_LINES = 20
"""A script goes on after most commands that fail: only at the end of a log is one its end."""
_DAY_S = 86_400.0
"""Clocks of two logs may be of two time zones."""
_RUN_S = re.compile(r"^ray::|python|sglang|torchrun|train|raylet", re.I)
"""Names of processes that a run has, as the kernel cuts them."""
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
    if event.kind in _AFTER_A_STOP and _stopped(obs, event):
        return True
    if event.kind == "oom_killer":
        return not _of_this_run(obs, event)
    if event.kind == "ended" and word(event, "how") == "shell":
        lines = next((log.lines for log in obs.logs if log.source == event.where.source), 0)
        if lines - (event.where.line or 0) > _LAST_LINES:
            return True
    # What the run survives without a mark is a retry that succeeded or a warning with a traceback.
    return event.kind in ("traceback", "oom", "memory_saver", "death", "ended") and goes_on(obs, event)


def _stopped(obs: Observations, event: LogEvent) -> bool:
    """The event is a person's `scancel`, or comes after one."""
    for stop in of_kind(obs, "ended"):
        if word(stop, "how") == "cancelled" and not word(stop, "why"):
            same = stop.where.source == event.where.source
            if (same and (stop.where.line or 0) <= (event.where.line or 0)) or (not same and stop.order <= event.order):
                return True
    return False


def _of_this_run(obs: Observations, event: LogEvent) -> bool:
    """The victim of a killer is a process of the run, and the run did not outlive it."""
    victim = whole(event, "victim")
    gone = {one.pid for one in of_kind(obs, "traceback", "death") if one.pid is not None}
    gone |= {pid for one in of_kind(obs, "death") if (pid := whole(one, "victim")) is not None}
    if victim is not None and victim in gone:
        return True
    if goes_on(obs, event):
        return False
    if word(event, "by") != "kernel":
        return True
    if victim is not None and any(one.pid == victim for one in obs.events if one.kind != "oom_killer"):
        return True
    times = [time for log in obs.logs for time in (log.first_time, log.last_time) if time is not None]
    others = [log for log in obs.logs if log.source != event.where.source]
    near = not others or event.time is None or min(times) - _DAY_S <= event.time <= max(times) + _DAY_S
    return near and bool(_RUN_S.search(word(event, "name")))


def _verdict(obs: Observations, free: Sequence[LogEvent], errors: Sequence[LogEvent]) -> Verdict:
    first = min(free, key=lambda event: (event.order, event.kind not in ("traceback", "ima")))
    whole_one = next((e for e in free if e.kind == "traceback" and _same_place(e, first)), first)
    killers = [event for event in free if event.kind == "oom_killer"]
    if killers and (first.kind in ("death", "job_end", "ended", "oom_killer") or _of_a_death(whole_one)):
        return _killed(obs, killers, free, errors)
    if first.kind == "ended":
        return _ended(obs, first, errors)
    ended = not goes_on(obs, first)
    owner = side(obs, whole_one) or whole_one.owner
    what = word(whole_one, "exception") or first.text[:160]
    message = word(whole_one, "message")[:160]
    frame = own_frame(whole_one) or (frames(whole_one)[-1] if frames(whole_one) else "")
    told = remedy(whole_one)
    cause = f"{who(whole_one)} broke with {what}"
    cause += f": {message}" if message and message not in what else ""
    cause += f" ({detail})" if (detail := word(whole_one, "detail")[:160]) else ""
    cause += f", at {frame}" if frame else ""
    cause += "; the log ends with it" if ended else "; the run went on"
    cause += _meaning(told)
    return Verdict(
        ID,
        "fail" if ended else "warn",
        rank=first.rank,
        value={"owner": owner or None, "exception": what, "frame": frame or None, "errors": len(errors)},
        threshold="explained",
        evidence=_evidence(first, errors),
        cause=cause,
        advice=told.advice,
        confidence="high" if told.says and told.sure else "low",
    )


def _meaning(told: Told) -> str:
    """What the error means, as a sentence of its own; a flag or a name stays as it is written."""
    return f". {told.says[0].upper()}{told.says[1:]}." if told.says else ". No check owns this error."


def _evidence(first: LogEvent, errors: Sequence[LogEvent]) -> tuple[Evidence, ...]:
    return (of_event(first), *(of_event(event) for event in [one for one in errors if one is not first][:2]))


def _of_a_death(event: LogEvent) -> bool:
    """Ray's word that a process is gone, which tells nothing of why."""
    return bool(_GONE.search(word(event, "exception")))


_GONE = re.compile(r"ActorDied|ActorUnavailable|RayActorError|OutOfMemoryError|WorkerCrashed|OwnerDied|NodeDied")


def _killed(
    obs: Observations, killers: Sequence[LogEvent], free: Sequence[LogEvent], errors: Sequence[LogEvent]
) -> Verdict:
    """Host memory ran out."""
    best = max(killers, key=lambda e: sum(name in e.data for name in ("rss_gb", "total_gb", "victim", "name")))
    victim, held = whole(best, "victim"), number(best, "rss_gb")
    lost = next((e for e in free if e.pid == victim and e.actor and e.kind != "oom_killer"), None) or next(
        (e for e in obs.events if victim is not None and e.pid == victim and e.actor), None
    )
    name = lost.actor if lost else word(best, "name").split(".")[0]
    subject = f"{name or 'a process of the run'}{f' (pid {victim})' if victim is not None else ''}"
    by = {"kernel": "the kernel", "ray": "Ray's memory monitor", "slurm": "Slurm", "kubernetes": "Kubernetes"}
    cause = (
        f"The host ran out of memory{f' ({best.node})' if best.node else ''}: {by[word(best, 'by')]} killed {subject}"
    )
    cause += f", which held {held:,.0f} GB" if held else ""
    used, total = number(best, "used_gb"), number(best, "total_gb")
    cause += f", when {used:,.0f} of {total:,.0f} GB were in use" if used and total else ""
    shown = [best, *([lost] if lost and lost in free else []), *(e for e in errors if e is not best and e is not lost)]
    return Verdict(
        ID,
        "fail",
        value={"owner": side(obs, lost) if lost else "host", "victim": victim, "name": name or None}
        | {"rss_gb": held, "used_gb": used, "total_gb": total, "by": word(best, "by"), "errors": len(errors)},
        threshold="explained",
        evidence=tuple(of_event(event) for event in shown[:3]),
        cause=cause + ". It is memory of the host, not of a GPU.",
        advice=(
            "who holds it: free -g and ps -eo pid,rss,args --sort=-rss on that node, while it grows",
            "what keeps host copies: optimizer CPU offload, --offload-train, checkpoints that are saved, a large "
            "--rollout-batch-size with images or routing indices in its samples",
            "a larger memory limit of the job (Slurm --mem, the container's limit), fewer jobs on the node",
        ),
    )


def _ended(obs: Observations, first: LogEvent, errors: Sequence[LogEvent]) -> Verdict:
    """The launcher or the scheduler says that it is over."""
    told, how, what = remedy(first), word(first, "how"), word(first, "what")
    if how == "usage":
        cause = f"The launch stopped at its arguments: {word(first, 'program')}: {what}"
    elif how == "shell":
        cause = f"The launch script {word(first, 'program')} stopped: {what}: {word(first, 'why')}"
    elif how == "cancelled":
        cause = f"The scheduler ended job {word(first, 'job')} ({word(first, 'why')})"
    else:
        cause = f"`{word(first, 'command')[:80]}` (pid {whole(first, 'victim')}) ended with {what}"
    advice = told.advice
    if how == "signal" and what == "Killed":
        told = Told(
            "a SIGKILL: the host's memory ran out, a limit of the job was reached, or a person did it", (), False
        )
        advice = (
            "dmesg -T | grep -i -E 'killed process|oom', on that node",
            "the job's memory limit (Slurm --mem, the container's limit)",
        )
    cause += _meaning(told)
    return Verdict(
        ID,
        "fail",
        value={"owner": first.owner or None, "exception": how, "frame": None, "errors": len(errors)},
        threshold="explained",
        evidence=_evidence(first, errors),
        cause=cause,
        advice=advice,
        confidence="high" if told.says and told.sure else "low",
    )


def _same_place(left: LogEvent, right: LogEvent) -> bool:
    return left.where.source == right.where.source and abs((left.where.line or 0) - (right.where.line or 0)) <= 2
