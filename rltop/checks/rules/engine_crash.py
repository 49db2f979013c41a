"""Crashes of the engines that rltop started itself, for `engine.died`: the fleet saw them, nothing is guessed.

A log can not tell them all (a SIGKILL leaves no line), and tells of ends that were asked for as if they were deaths.
"""

from __future__ import annotations

from rltop.checks.events import engine_life, of_kind
from rltop.checks.found import LogEvent
from rltop.checks.observe import EngineCrash, EngineFact, Observations
from rltop.checks.phrase import brief, clock, count, of_event
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

_SERVING = frozenset({"HEALTHY", "SUSPECT"})
_AWAY = frozenset({"STALE", "OFFLOADED", "LOST"})
_ON_TRIAL = "RESERVED"
_ENDED = frozenset({"STOPPED", "DRAINING", "STOPPING", "RECLAIMING"})


def own_crashes(obs: Observations, t: Thresholds, check: str) -> list[Verdict]:
    """One verdict (of the check `check`) for each engine that ever crashed, the newest crash first."""
    crashed = [fact for fact in obs.engines if fact.owned and fact.crashes]
    crashed.sort(key=lambda fact: -(fact.crashes[-1].time or 0.0))
    return [_crashed(obs, t, check, fact) for fact in crashed]


def _crashed(obs: Observations, t: Thresholds, check: str, fact: EngineFact) -> Verdict:
    """What the fleet saw of one of its engines. It is a fault until the engine serves again, a warning until it has
    lasted for some rollouts (without any: for some time), and afterwards a fact."""
    last = fact.crashes[-1]
    status: Status = "fail"
    later = fact.generation - last.generation
    serves = later > 0 and (fact.state in _SERVING or (fact.state in _AWAY and fact.survived > 0))
    lasted = obs.now - fact.since if serves and obs.now is not None and fact.since is not None else 0.0
    if serves:
        proven = fact.survived >= t.died_clear_rollouts or lasted >= t.died_clear_s
        status = "info" if proven else "warn"
    if fact.state == _ON_TRIAL:
        status = "warn"  # somebody is looking for its cause
    if later > 1 or (later > 0 and fact.state in _ENDED):
        status = "info"  # a later process did not crash, or it would be the newest one: it was ended on purpose
    at = f" at {clock(last.time)}" if last.time is not None else ""
    place = f", in rollout {last.rollout}" if last.rollout is not None else ""
    cause = f"Engine {fact.id} died{at}{place} (generation {last.generation}): {brief(last.cause, 300)}"
    cause += f" [{last.fingerprint}]"
    if last.number > 1:
        alike = sum(one.fingerprint == last.fingerprint for one in fact.crashes)
        cause += f"; crash number {last.number} of this engine"
        cause += f", {alike} of the last {len(fact.crashes)} with this fingerprint" if alike > 1 else ""
    cause += f"; {_now(fact, last, serves)}"
    evidence = [of_event(one) for one in _lines_of(obs, fact.id, last.generation)]
    told = Evidence(f"engine {fact.id}", None, f"generation {last.generation}: {last.fingerprint}: {last.cause}"[:200])
    return Verdict(
        check,
        status,
        engine=int(fact.id) if fact.id.isdigit() else fact.id,
        value={
            "how": "crash",
            "reason": last.cause,
            "fingerprint": last.fingerprint,
            "generation": last.generation,
            "crashes": last.number,
            "rollout": last.rollout,
            "recovered": serves,
            "state": fact.state,
        },
        threshold="alive",
        evidence=(told, *evidence),
        cause=cause + ".",
        advice=() if status == "info" else _own_advice(fact, last, serves),
    )


def _now(fact: EngineFact, last: EngineCrash, serves: bool) -> str:
    if serves:
        lasted = f" and has lasted for {count(fact.survived, 'rollout')}" if fact.survived else ""
        return f"generation {fact.generation} serves since{lasted}"
    if fact.state == "QUARANTINED":
        return "rltop does not start it again (QUARANTINED)"
    if fact.state == "BACKOFF":
        return "rltop starts it again after a pause (BACKOFF)"
    if fact.state == _ON_TRIAL:
        return "it is on trial for a bisection (RESERVED)"
    if fact.generation > last.generation:
        return f"generation {fact.generation} is {fact.state}"
    return f"it is {fact.state}"


def _own_advice(fact: EngineFact, last: EngineCrash, serves: bool) -> tuple[str, ...]:
    logs = f"rltop engine logs --engine {fact.id}"
    again = f"rltop engine start --engine {fact.id}"
    if fact.state == "QUARANTINED" or (fact.state == "CRASHED" and not serves):
        return (logs, f"rltop engine set TOGGLE=VALUE --engine {fact.id} (changes what crashes)", f"{again} (as it is)")
    if last.number > 1:
        return (logs, f"rltop engine set TOGGLE=VALUE --engine {fact.id}, or it may go on like this")
    return (f"{logs} (rltop itself starts it again)",)


def _lines_of(obs: Observations, engine: str, generation: int) -> list[LogEvent]:
    """The line that says why and the one that says that it is gone, of the log of that process."""
    mine = [
        event
        for event in of_kind(obs, "ima", "oom", "port_in_use", "traceback", "death")
        if engine_life(event.where.source) == (engine, generation)
    ]
    why = next((event for event in mine if event.kind != "death" and not event.data.get("benign")), None)
    gone = next((event for event in mine if event.kind == "death"), None)
    return [event for event in (why, gone) if event is not None]
