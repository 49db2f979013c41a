"""`engine.died` and `engine.health-timeout`: an engine that worked is gone, or only slow.

SGLang ends every crash with a SIGKILL of itself, so a killed server alone says nothing about the host; the kernel's
killer has a line of its own. A failed health check is no death while batches of the engine advance.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from rltop.checks.events import (
    DEDUP,
    engine_life,
    of_kind,
    own_frame,
    same_process,
    side,
    who,
    whole,
    word,
)
from rltop.checks.facts import fires, owned
from rltop.checks.found import LogEvent
from rltop.checks.known import match
from rltop.checks.observe import Observations
from rltop.checks.phrase import clock, count, missing, of_event, of_flags, span
from rltop.checks.rules.engine_crash import own_crashes
from rltop.checks.rules.engine_start import not_answered, served
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Status, Verdict

DIED = "engine.died"
SLOW = "engine.health-timeout"
DIED_STAGE = 1
"""It asks engine.not-ready and engine.health-timeout."""
_REASON_S = 120.0
"""Seconds before a death line in which its reason stands: SGLang waits up to 65 s for its own diagnostics."""
_BOOT_S = 10 * 365 * 86_400.0
"""No machine is up for ten years: a smaller time in a kernel's log counts from its boot."""
_SOME = 500
"""Batch lines that are looked at for one check."""
_ENGINE_NAMES = ("SGLangEngine", "sglang", "scheduler", "Engine", "VllmEngine")


# -- engine.health-timeout


def check_slow(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all failed health checks."""
    failed = of_kind(obs, "health")
    if not failed:
        if not obs.logs and not obs.events:
            return [Verdict(SLOW, "skip", cause=missing(obs, "a log of an engine or of the health monitor"))]
        return [Verdict(SLOW, "pass", cause="No health check failed.")]
    slow = [(event, alive) for event in failed if (alive := _advancing(obs, t, event))]
    paused = [] if slow else [event for event in failed if _paused(obs, t, event)]
    if slow:
        return [_slow(obs, t, slow)]
    if paused:
        cause = "A health check failed while generation was paused for a weight sync: a paused engine does not answer."
        evidence = tuple(of_event(event) for event in paused[:2])
        advice = ("pause the health monitor during a weight sync",)
        return [Verdict(SLOW, "info", value={"checks": len(paused)}, evidence=evidence, cause=cause, advice=advice)]
    cause = "No batch of the engine advanced while its health check failed, so slowness is not shown (see engine.died)."
    return [Verdict(SLOW, "pass", cause=cause, evidence=tuple(of_event(event) for event in failed[:2]))]


def _window(obs: Observations, t: Thresholds, event: LogEvent) -> float:
    """Seconds that the check waited."""
    told = whole(event, "window_s")
    if told:
        return float(told)
    return obs.args.number("rollout_health_check_timeout") or t.health_window_s


def _advancing(obs: Observations, t: Thresholds, event: LogEvent) -> list[LogEvent]:
    """Batches of the same engine within the window of the check."""
    if event.time is None:
        return []
    window = _window(obs, t, event)
    batches = _timed(obs, "prefill", "decode")
    several = len({(b.engine if b.engine is not None else b.pid) for b in batches[:_SOME]}) > 1
    found = []
    for batch in _within(batches, event.time - window, event.time + window)[:_SOME]:
        other = batch.engine is not None and event.engine is not None and batch.engine != event.engine
        if other or (word(event, "by") == "server" and not same_process(batch, event)):
            continue
        if several and batch.engine is None and event.engine is not None and word(event, "by") == "monitor":
            continue  # several engines, and nothing says which of them this batch is of
        found.append(batch)
    return found


def _timed(obs: Observations, first: str, second: str) -> list[LogEvent]:
    """Events of two kinds that have a time, in order of it."""
    key = ("timed", first, second)
    if key not in obs.memo:
        obs.memo[key] = sorted((e for e in of_kind(obs, first, second) if e.time is not None), key=_time)
    found: list[LogEvent] = obs.memo[key]
    return found


def _time(event: LogEvent) -> float:
    return event.time or 0.0


def _within(events: list[LogEvent], start: float, end: float) -> list[LogEvent]:
    return events[bisect.bisect_left(events, start, key=_time) : bisect.bisect_right(events, end, key=_time)]


def _paused(obs: Observations, t: Thresholds, event: LogEvent) -> bool:
    """A pause or a weight update was under way."""
    if event.time is None:
        return False
    window = _window(obs, t, event)
    for other in _within(_timed(obs, "http", "timer"), event.time - window - 1, event.time + window):
        path = word(other, "path")
        if path.startswith(("/pause_generation", "/update_weights", "/init_weights_update", "/begin_weight_update")):
            return True
        if other.kind == "timer" and word(other, "name") == "update_weights":
            return True
    return False


def _slow(obs: Observations, t: Thresholds, slow: Sequence[tuple[LogEvent, list[LogEvent]]]) -> Verdict:
    event, alive = next((one for one in slow if one[0].data.get("kills")), slow[0])
    killed = any(one.data.get("kills") for one, _ in slow)
    window = _window(obs, t, event)
    kind = "prefill" if all(batch.kind == "prefill" for batch in alive) else "batch"
    cause = (
        f"The health check of {_name(event)} failed after {span(window)} while {len(alive)} {kind} of its lines "
        "advanced: it is slow, not dead (chunked prefill of long prompts gives no output meanwhile)"
    )
    cause += ", and killing it was wrong." if killed else "."
    return Verdict(
        SLOW,
        "warn",
        engine=event.engine,
        value={"window_s": window, "batches": len(alive), "killed": killed},
        threshold={"window_s": window},
        evidence=(
            *(of_event(one) for one, _ in slow[:2]),
            *(of_event(batch) for batch in alive[:3]),
            *of_flags(obs.args, "rollout_health_check_timeout", "rollout_health_check_interval"),
        ),
        cause=cause,
        advice=(
            f"--rollout-health-check-timeout {max(60, int(4 * window))} (above the longest prefill)",
            "--rollout-health-check-first-wait 300",
        ),
    )


def _name(event: LogEvent) -> str:
    if event.engine is not None:
        return f"engine {event.engine}"
    return who(event) if event.owner == "engine" else "an engine"


# -- engine.died


def check_died(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict on each engine of rltop's own that crashed; else one on the first death of an engine that a log
    tells of, or on answers that stopped."""
    crashed = own_crashes(obs, t, DIED)
    if not obs.logs and not obs.events:
        return crashed or [_nothing(obs)]
    if crashed:
        return [*crashed, *_unowned(obs)]
    deaths = _deaths(obs)
    ready = [event for event in of_kind(obs, "engine_stage") if word(event, "stage") == "ready"]
    answer = served(obs, ready)
    unanswered = [event for event in not_answered(obs) if answer is not None and event.order > answer.order]
    if deaths:
        if fires(obs, SLOW) and all(event.kind == "health" for event in deaths):
            return [_other(deaths, "the health monitor killed an engine that was slow (see engine.health-timeout)")]
        return [_died(obs, deaths, unanswered)]
    if unanswered and not fires(obs, "engine.not-ready", SLOW, "host.proxy"):
        return [_silent(unanswered, answer)]
    return [Verdict(DIED, "pass", cause="No engine that worked is gone.")]


def _nothing(obs: Observations) -> Verdict:
    if owned(obs):
        return Verdict(DIED, "pass", cause="No engine that worked is gone.")
    return Verdict(DIED, "skip", cause=missing(obs, "a log of an engine"))


def _unowned(obs: Observations) -> list[Verdict]:
    """The first death of an engine that is somebody else's, beside crashes of rltop's own."""
    others = _deaths(obs)
    return [_died(obs, others, [])] if others else []


def _other(deaths: Sequence[LogEvent], why: str) -> Verdict:
    return Verdict(DIED, "pass", cause=why[0].upper() + why[1:] + ".", evidence=tuple(map(of_event, deaths[:2])))


def _deaths(obs: Observations) -> list[LogEvent]:
    """Lines that say that an engine is gone, in order of time."""
    found = []
    own = owned(obs)
    victims = {e.pid for e in obs.events if e.owner == "engine" and e.pid is not None}
    for event in of_kind(obs, "death", "oom_killer", "health"):
        life = engine_life(event.where.source)
        if life is not None and life[0] in own:
            continue  # the fleet knows better: an end that was asked for is no death
        if event.kind == "health":
            if event.data.get("kills"):
                found.append(event)
            continue
        victim, name = whole(event, "victim"), word(event, "name")
        its_own = event.kind == "death" and (_engine_s(event) or (side(obs, event) == "engine" and not name))
        if its_own or victim in victims or _is_engine(event):
            found.append(event)
    return found


def _is_engine(event: LogEvent) -> bool:
    """The line names an engine's process."""
    return any(part in word(event, "name") for part in _ENGINE_NAMES)


def _engine_s(event: LogEvent) -> bool:
    """Only SGLang writes this line."""
    return word(event, "how") in ("server", "init", "subprocess", "sigquit", "watchdog")


def _died(obs: Observations, deaths: Sequence[LogEvent], unanswered: Sequence[LogEvent]) -> Verdict:
    # One that nobody made good is worse than one that was there before it.
    still = [event for event in deaths if not _started_since(obs, event)]
    made_good = [event for event in deaths if still and event.order < still[0].order]
    deaths = still or deaths
    # A kernel's log counts seconds since the boot: it says why, and the run's own log says when.
    first = next((event for event in deaths if _on_the_clock(event)), deaths[0])
    reason, place, sure = _reason(obs, first)
    recovered = _started_since(obs, first)
    status: Status = "warn" if recovered else "fail"
    gap = next((e.time - first.time for e in unanswered if e.time and first.time and e.order > first.order), None)
    rollouts, newest = _rollouts(obs, first)
    at = f" at {clock(first.time)}" if first.time is not None else ""
    victim = whole(first, "victim")
    name = _name(first) if victim is None or first.pid == victim else f"the engine process {victim}"
    early = not any(word(e, "stage") == "ready" and e.order < first.order for e in of_kind(obs, "engine_stage"))
    early = early and not (rollouts or newest is not None or of_kind(obs, "prefill", "decode"))
    cause = f"{name} died{at}{' before it was ready' if early else ''}: {reason}"
    cause += f"; the first request without an answer came {span(gap)} later" if gap is not None else ""
    cause += f"; by then {count(rollouts, 'rollout')} had been made" if rollouts else ""
    cause += f"; the newest rollout by then was {newest}" if newest is not None else ""
    cause += "; an engine was started again since" if recovered else ""
    cause += f"; {_name(made_good[0])} had died before and was started again" if made_good else ""
    known = match(obs, place, message_only=place.kind != "ima") if place else ()
    evidence: list[Evidence] = [of_event(first)]
    evidence += [of_event(place)] if place else []
    evidence += [of_event(e) for e in (*unanswered[:1], *recovered[:1], *made_good[:1])]
    return Verdict(
        DIED,
        status,
        engine=_engine_of(obs, first, victim),
        value={
            "how": word(first, "how") or first.kind,
            "pid": victim or first.pid,
            "reason": reason,
            "seconds_to_first_503": gap,
            "rollouts": rollouts,
            "rollout": newest,
            "recovered": bool(recovered),
        }
        | ({"known": [crash.issue for crash in known]} if known else {}),
        threshold="alive",
        evidence=tuple(evidence),
        cause=cause + ".",
        advice=(*_died_advice(reason), *(crash.advice() for crash in known), *((DEDUP,) if first.repeated else ())),
        confidence=sure,
    )


def _started_since(obs: Observations, death: LogEvent) -> list[LogEvent]:
    """Lines after a death which say that dead engines, or an engine that may be this one, were started."""

    def may_be(event: LogEvent) -> bool:
        if event.kind == "recovered":
            return (whole(event, "count") or 0) > 0
        other = event.engine is not None and death.engine is not None and event.engine != death.engine
        return word(event, "stage") == "ready" and not other

    return [e for e in of_kind(obs, "recovered", "engine_stage") if e.order > death.order and may_be(e)]


def _rollouts(obs: Observations, death: LogEvent) -> tuple[int, int | None]:
    """(rollouts made before a death, 0 if not known; of a live run, whose metrics are thinned, the newest one)."""
    if obs.live or obs.rollouts_by:
        newest = obs.rollouts_by.get((death.where.source, death.where.line), -1)
        return 0, newest if newest >= 0 else None
    done = {
        row.rollout_id
        for row in obs.metrics
        if row.axis == "rollout" and (row.time is None or death.time is None or row.time <= death.time)
    }
    return len(done - {None}), None


def _engine_of(obs: Observations, death: LogEvent, victim: int | None) -> int | str | None:
    """The engine that a death line is about: its writer's, or where another process writes, the victim's."""
    if victim is not None and victim != death.pid:
        own = next((e for e in obs.events if e.pid == victim and e.owner == "engine"), None)
        if own is not None:
            return own.engine if own.engine is not None else own.actor or None
    if death.engine is not None:
        return death.engine
    return death.actor if death.actor and death.owner == "engine" else None


def _on_the_clock(event: LogEvent) -> bool:
    """The event has a time of day, not one since the machine's boot."""
    return event.time is not None and (event.owner != "host" or event.time > _BOOT_S)


def _reason(obs: Observations, death: LogEvent) -> tuple[str, LogEvent | None, Confidence]:
    """Why it died, the line that says so, and how sure that is."""
    if death.kind == "oom_killer":
        by = "Ray's memory monitor" if word(death, "by") == "ray" else "the kernel"
        return f"{by} killed it because host memory ran out", None, "high"
    if death.kind == "health":
        return "the health monitor killed it after a failed health check", None, "high"
    for kind in ("oom_killer", "ima", "oom", "port_in_use", "traceback"):
        for event in of_kind(obs, kind):
            timed = event.time is not None and death.time is not None and _on_the_clock(event) == _on_the_clock(death)
            near = not timed or abs((event.time or 0.0) - (death.time or 0.0)) <= _REASON_S
            later = event.order > death.order and kind != "oom_killer"
            if near and not later and not event.data.get("benign") and (told := _told(obs, event, death)):
                return told, event, "high"
    if word(death, "how") == "watchdog":
        return "its watchdog saw no progress", None, "high"
    if word(death, "how") == "killed":
        return "killed from outside (SIGKILL; SGLang also ends its own crashes that way)", None, "low"
    code = whole(death, "code")
    tail = f" (exit code {code})" if code is not None else ""
    return f"no line before it says why{tail}", None, "low"


def _told(obs: Observations, event: LogEvent, death: LogEvent) -> str:
    """What a line before the death says about it; empty when it is about another process."""
    if event.kind == "oom_killer":
        victim = whole(event, "victim")
        mine = victim is None or victim in (death.pid, whole(death, "victim")) or _is_engine(event)
        return "the host ran out of memory and the killer took it" if mine else ""
    if side(obs, event) not in ("engine", "") or not _same_engine(event, death):
        return ""
    if event.kind == "ima":
        return f"CUDA error, {word(event, 'fault') or 'illegal memory access'}"
    if event.kind == "oom":
        return "it ran out of GPU memory"
    if event.kind == "port_in_use":
        return "it could not bind a port"
    frame = own_frame(event)
    message = word(event, "message")[:120]
    raised = f"{word(event, 'exception') or event.text}{f' ({message})' if message else ''}"
    return f"its scheduler raised {raised}{f' at {frame}' if frame else ''}"


def _same_engine(left: LogEvent, right: LogEvent) -> bool:
    """Lines of one engine: its ranks share a log and a Ray actor, though not a process."""
    if left.engine is not None and right.engine is not None:
        return left.engine == right.engine
    if left.pid is not None and right.pid is not None:
        return left.pid == right.pid
    return left.where.source == right.where.source or not (left.pid or right.pid)


def _died_advice(reason: str) -> tuple[str, ...]:
    if "host" in reason or "SIGKILL" in reason or "memory monitor" in reason:
        return ("dmesg -T | grep -i -E 'killed process|oom'", "free -g on that node", "--use-fault-tolerance")
    if "no line before it" in reason:
        return (
            "the log of that engine before the line, and dmesg of its node",
            "the router's reachability and SLIME_HOST_IP",
            "--use-fault-tolerance",
        )
    return ("the engine's log before this line", "--use-fault-tolerance (restarts it at the next weight sync)")


def _silent(unanswered: Sequence[LogEvent], answer: LogEvent | None) -> Verdict:
    first = unanswered[0]
    at = f" from {clock(first.time)} on" if first.time is not None else ""
    return Verdict(
        DIED,
        "fail",
        value={"requests": len(unanswered), "url": word(first, "url")},
        threshold="answers",
        evidence=(of_event(first), *((of_event(answer),) if answer else ())),
        cause=f"Requests that were answered before find no engine{at}; no line says that one died.",
        advice=(
            "dmesg and the engines' own logs at that time",
            "curl the router's /workers: are the engines listed?",
            "SLIME_HOST_IP, if the router's address is not reachable from the rollout node",
        ),
        confidence="low",
    )
