"""`cluster.stall`: one side stopped moving.

A phase that is open much longer than it used to take, or an engine with queued requests and no batch. Polls of
`/metrics` and `/health` are no progress. Which side stands still is sure; why it does is not.

Offline the time is that of the evidence. Of a live run it is the time in which the daemon saw nothing move at all: its
own clock goes on when records stop, and no two clocks are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rltop.checks.events import ERRORS, last_time, number, of_kind, side, who, whole, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import EngineFact, Observations
from rltop.checks.phrase import brief, clock, missing, of_event, of_place, span
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

ID = "cluster.stall"
_WAITING = ("train_wait", "rollout", "generate", "eval")
"""Phases in which the trainer waits for the rollout side."""


@dataclass(slots=True)
class _Phase:
    """One phase of one process: how long it took so far, and since when it is open."""

    name: str
    took: list[float] = field(default_factory=list)
    since: float | None = None
    place: Evidence | None = None
    event: LogEvent | None = None


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict for each engine of rltop's own that hangs; else one: the phase that has been open for too long, an
    engine without batches, or none."""
    if hung := [fact for fact in obs.engines if fact.owned and fact.hung]:
        return [_hung(obs, fact) for fact in hung]
    watched = obs.now is not None and obs.moved is not None
    if obs.live and not watched:
        return [Verdict(ID, "skip", cause="how long nothing has moved is not known yet")]
    now = obs.now if watched else last_time(obs)
    phases = _phases(obs)
    batches = of_kind(obs, "prefill", "decode")
    waits = of_kind(obs, "placement_wait")
    if now is None or not (phases or batches or waits):
        return [Verdict(ID, "skip", cause=missing(obs, "timed lines of phases or batches"))]
    found = [one for phase in phases if (one := _open_too_long(obs, t, phase, now))]
    # An outer phase is open because the inner one is: the one that was entered last says where it stands.
    found.sort(key=lambda one: (one[0] != "fail", -(one[1].since or 0.0)))
    if found:
        return [_verdict(obs, t, *found[0], now)]
    if waits and (waiting := _placement(obs, t, waits)):
        return [waiting]
    if stuck := _no_batches(obs, t, batches, phases, now):
        return [stuck]
    opened = [phase for phase in phases if phase.since is not None]
    cause = "No phase is open for long, and every engine with queued requests makes batches."
    if watched:  # a number that grows by itself would make news of every evaluation
        return [Verdict(ID, "pass", value={"open": [phase.name for phase in opened[-4:]]}, cause=cause)]
    value = {"open": {phase.name: round(_open_s(obs, phase, now), 1) for phase in opened[-4:]}}
    return [Verdict(ID, "pass", value=value, cause=cause)]


def _hung(obs: Observations, fact: EngineFact) -> Verdict:
    """An engine of rltop's own whose signals say so: nobody has to wait until the trainer's phase is overdue."""
    why = brief(fact.cause) or "it holds work and makes no token"
    at = f" since {clock(fact.since)}" if fact.since is not None else ""
    return Verdict(
        ID,
        "fail",
        engine=int(fact.id) if fact.id.isdigit() else fact.id,
        value={"phase": "serving", "side": "engine", "state": fact.state},
        threshold={"hung": False},
        evidence=(Evidence(f"engine {fact.id}", None, f"{fact.state}: {fact.cause}"[:200]),),
        cause=f"Engine {fact.id} stands still{at}: {why}.",
        advice=(
            f"rltop engine restart --engine {fact.id}",
            f"py-spy dump --pid <scheduler pid of engine {fact.id}>, before the restart: it says where it stands",
            'on_hang = "restart" in [engines] (then rltop does it by itself)',
        ),
    )


def _phases(obs: Observations) -> list[_Phase]:
    """Phases of each process from timer lines; of a live run from its own phases."""
    table: dict[tuple[object, ...], _Phase] = {}
    timers = of_kind(obs, "timer")
    for event in timers:
        name = word(event, "name")
        one = table.setdefault((event.actor, event.pid, event.node, name), _Phase(name))
        if word(event, "edge") == "start":
            one.since, one.event, one.place = event.time, event, of_event(event)
        else:
            took = number(event, "elapsed_s")
            if took is None and one.since is not None and event.time is not None:
                took = event.time - one.since
            if took is not None:
                one.took.append(took)
            one.since = None
    if not timers:
        for phase in sorted(obs.phases, key=lambda phase: phase.time or 0.0):
            one = table.setdefault((phase.name,), _Phase(phase.name))
            if phase.edge == "enter":
                one.since = phase.time
                one.place = of_place(phase.where) if phase.where else Evidence(f"phase {phase.name}", None, "entered")
            else:
                if phase.elapsed_s is not None:
                    one.took.append(phase.elapsed_s)
                elif one.since is not None and phase.time is not None:
                    one.took.append(phase.time - one.since)
                one.since = None
    return list(table.values())


def _open_too_long(obs: Observations, t: Thresholds, phase: _Phase, now: float) -> tuple[Status, _Phase] | None:
    if phase.since is None or _ended_badly(obs, phase):
        return None
    open_s = _open_s(obs, phase, now)
    if len(phase.took) >= t.stall_history:
        limit = max(t.stall_factor * statistics.median(phase.took), t.stall_floor_s)
        return ("fail", phase) if open_s > limit else None
    return ("warn", phase) if open_s > t.stall_alone_s else None


def _open_s(obs: Observations, phase: _Phase, now: float) -> float:
    """Seconds for which the phase is open and nothing in it moves."""
    if obs.now is not None and obs.moved is not None:
        return max(obs.now - obs.moved, 0.0)
    begun = now if phase.since is None else phase.since
    return now - max([begun, *_progress(obs, phase)])


def _ended_badly(obs: Observations, phase: _Phase) -> bool:
    """The process of the phase broke afterwards: it does not stand still, it is gone."""
    if phase.event is None:
        return False
    mine = phase.event
    for event in of_kind(obs, *ERRORS, "nan_abort"):
        if event.order <= mine.order or event.data.get("benign"):
            continue
        same = event.pid == mine.pid if event.pid is not None and mine.pid is not None else False
        if same or (side(obs, event) == side(obs, mine) == "trainer"):
            return True
    return False


def _progress(obs: Observations, phase: _Phase) -> list[float]:
    """Finished train steps inside a trainer phase: it moves, however long it is open."""
    if phase.name in _WAITING or phase.since is None:
        return []
    return [row.time for row in obs.metrics if row.axis == "train" and row.time is not None and row.time > phase.since]


def _answers(obs: Observations, since: float) -> list[LogEvent]:
    """Requests that engines answered meanwhile."""
    return [
        event
        for event in of_kind(obs, "http", "prefill", "decode")
        if event.time is not None and event.time > since and (event.kind != "http" or whole(event, "status") == 200)
    ]


def _verdict(obs: Observations, t: Thresholds, status: Status, phase: _Phase, now: float) -> Verdict:
    since = now if phase.since is None else phase.since
    open_s = _open_s(obs, phase, now)
    history = len(phase.took)
    usual = statistics.median(phase.took) if phase.took else None
    stands = "the rollout side" if phase.name in _WAITING else "the trainer"
    answers = _answers(obs, since)
    watched = obs.moved is not None
    cause = f"{phase.name} has been open for {span(open_s)}" + (" in which nothing moved" if watched else "")
    cause += f"; {history} earlier ones took {span(usual)} (median)" if usual is not None else "; no earlier one ended"
    cause += f": {stands} stands still"
    if answers and stands == "the trainer":
        cause += ", while the engines answer (the engines are not the problem)"
    batches = [event for event in answers if event.kind != "http"]
    if stands == "the rollout side" and batches:
        cause += ", though engines still make batches: long responses, or one that does not end"
    actor = who(phase.event) if phase.event else ""
    evidence = [place for place in (phase.place,) if place]
    evidence += [of_event(event) for event in answers[-1:]]
    limit = max(t.stall_factor * usual, t.stall_floor_s) if usual is not None else t.stall_alone_s
    advice = (
        f"py-spy dump --pid <pid> on all ranks of {stands}",
        "TORCH_NCCL_TRACE_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 (flight recorder, at the next start)",
    )
    return Verdict(
        ID,
        status,
        value={
            "phase": phase.name,
            "open_s": round(open_s, 1),
            "median_s": usual,
            "count": history,
            "side": stands.removeprefix("the "),
            "process": actor or None,
        },
        threshold={"open_s": limit},
        evidence=tuple(evidence),
        cause=cause + ".",
        advice=advice,
        confidence="high" if status == "fail" else "medium",
    )


def _placement(obs: Observations, t: Thresholds, waits: Sequence[LogEvent]) -> Verdict | None:
    last = waits[-1]
    placed = any(event.order > last.order for event in of_kind(obs, "placement_bundle", "timer", "prefill", "decode"))
    waited = number(last, "elapsed_s") or 0.0
    if placed or waited <= t.stall_alone_s:
        return None
    cause = (
        f"The job has waited for its placement group for {span(waited)}: {whole(last, 'gpus')} GPUs are needed, "
        f"{whole(last, 'available')} of {whole(last, 'registered')} registered ones are free."
    )
    return Verdict(
        ID,
        "warn",
        value={"phase": "placement", "open_s": waited, "side": "Ray"},
        threshold={"open_s": t.stall_alone_s},
        evidence=(of_event(last),),
        cause=cause,
        advice=("ray status",),
        confidence="medium",
    )


def _no_batches(
    obs: Observations, t: Thresholds, batches: Sequence[LogEvent], phases: Sequence[_Phase], now: float
) -> Verdict | None:
    """An engine whose last batch line shows queued requests, and then none for long."""
    newest: dict[tuple[object, ...], LogEvent] = {}
    still = obs.now - obs.moved if obs.now is not None and obs.moved is not None else None
    if still is not None and any(phase.since is not None and phase.name not in _WAITING for phase in phases):
        return None  # the trainer's turn: it is quiet because nobody asks it anything
    for event in batches:
        newest[event.engine, event.pid, event.node, event.where.source] = event
    segment = max((row.segment for row in obs.metrics), default=0)
    for event in newest.values():
        if still is None and event.segment < segment:
            continue  # the job was started again since: that engine is gone, it does not stand still
        queue, quiet = whole(event, "queue_req") or 0, now - event.time if event.time is not None else 0.0
        quiet = still if still is not None else quiet
        if queue <= 0 or quiet <= t.stall_batch_s or _released(obs, event):
            continue
        cause = (
            f"{who(event)} had {queue} queued requests and has made no batch for {span(quiet)}: the engine stands "
            "still (answers to /metrics and /health are no progress)."
        )
        return Verdict(
            ID,
            "fail",
            engine=event.engine if event.engine is not None else event.actor or None,
            value={"phase": event.kind, "open_s": round(quiet, 1), "queued": queue, "side": "engine"},
            threshold={"open_s": t.stall_batch_s},
            evidence=(of_event(event),),
            cause=cause,
            advice=(
                "py-spy dump --pid <scheduler pid> on all ranks of that engine",
                "GET /server_info with a time limit of 5 s",
            ),
        )
    return None


def _released(obs: Observations, event: LogEvent) -> bool:
    """The engine was paused, released or broken after its last batch: it has a reason to make none."""
    for other in of_kind(obs, "http", "release", *ERRORS):
        if other.order <= event.order:
            continue
        if other.kind != "http":
            return True
        if word(other, "path").startswith(("/pause", "/release", "/abort_request", "/update_weights", "/flush")):
            return True
    return False
