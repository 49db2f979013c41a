"""`cluster.restarts`: the framework restarted a service, or everything, by itself.

Relax watches its services (actor, rollout, reference, ...) and restarts one that reports an error or whose heartbeat is
older than two minutes: in place, or, for the actor, the rollout and after the third time, all of them from the newest
checkpoint. The run goes on, so the metrics look whole, but steps since that checkpoint are trained again, and engines
that recovered are not what they were. An error that it takes for permanent ends it at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rltop.checks.events import of_kind, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import clock, count, missing, of_event
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Status, Verdict

ID = "cluster.restarts"
_REASONS = ("unhealthy", "stale", "fatal")


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all restarts of all services."""
    events = of_kind(obs, "service")
    if not events:
        return [Verdict(ID, "skip", cause=missing(obs, "lines of a framework that restarts its own services (Relax)"))]
    ends = [event for event in events if word(event, "what") in ("fatal", "failed")]
    restarts = [event for event in events if word(event, "what") == "restart"]
    everything = [event for event in events if word(event, "what") == "global"]
    reasons = [event for event in events if word(event, "what") in _REASONS]
    if not (ends or restarts or everything or reasons):
        return [Verdict(ID, "pass", value={"restarts": {}, "global": 0}, cause="No service was restarted.")]
    return [_verdict(ends, restarts, everything, reasons)]


def _verdict(
    ends: Sequence[LogEvent], restarts: Sequence[LogEvent], everything: Sequence[LogEvent], reasons: Sequence[LogEvent]
) -> Verdict:
    roles = Counter(word(event, "role") for event in restarts or reasons)
    status: Status = "fail" if ends else "warn"
    first = reasons[0] if reasons else (restarts or everything or ends)[0]
    if ends:
        cause = f"The framework ended itself{_at(ends[0])}: {_why(ends[0])}"
    else:
        told = ", ".join(f"{role} {count(times, 'time')}" for role, times in roles.items())
        cause = f"The framework restarted services by itself ({told}); first{_at(first)}: {_why(first)}"
        if everything:
            cause += (
                f". {count(len(everything), 'restart')} of everything from the newest checkpoint: steps after it were "
                "lost and are trained again"
            )
    shown = {event.order: event for event in (*ends[:1], first, *everything[:1], *restarts[-1:])}
    return Verdict(
        ID,
        status,
        value={"restarts": dict(roles), "global": len(everything), "ended": bool(ends)},
        threshold={"restarts": 0},
        evidence=tuple(of_event(shown[at]) for at in sorted(shown)),
        cause=cause + ".",
        advice=(
            "the traceback of that service's process, before this line",
            *(("--save-interval: less is lost", "--max-global-restart") if everything else ()),
        ),
        confidence="high",
    )


def _at(event: LogEvent) -> str:
    return f" at {clock(event.time)}" if event.time is not None else ""


def _why(event: LogEvent) -> str:
    role = f"service {word(event, 'role')}" if word(event, "role") else "the restart"
    match word(event, "what"):
        case "stale":
            return f"{role} sent no heartbeat for two minutes"
        case "fatal":
            return f"{role} reported a permanent error: {word(event, 'why')}"
        case _:
            why = word(event, "why")
            return f"{role}: {why}" if why else f"{role} was not healthy"
