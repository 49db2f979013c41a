"""`engine.port` and `engine.not-ready`: what goes wrong before an engine serves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rltop.checks.events import of_kind, side, who, whole, word
from rltop.checks.facts import fires
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import clock, missing, of_event, of_place, span
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Evidence, Status, Verdict

PORT = "engine.port"
NOT_READY = "engine.not-ready"
PORT_STAGE = 2
"""A refused connection is only worth a verdict when no other check says why the engine is not up."""
_LINUX_RANGE = (32768, 60999)
"""Ephemeral ports of Linux by default."""
_INFO = re.compile(r"/(?:get_)?(?:model|server)_info|/health")


def check_port(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per port that could not be bound; else one on refused connections."""
    if not obs.logs and not obs.events:
        return [Verdict(PORT, "skip", cause=missing(obs, "a log of an engine"))]
    taken = [
        event for event in of_kind(obs, "port_in_use") if side(obs, event) != "trainer" or _in_engine_s(obs, event)
    ]
    if taken:
        firsts = {(event.node, whole(event, "port")): event for event in reversed(taken)}
        known = {key: event for key, event in firsts.items() if key[1] is not None} or firsts
        return [_taken(obs, event) for event in sorted(known.values(), key=lambda event: event.order)[:8]]
    refused = [
        e
        for e in of_kind(obs, "retry")
        if e.data.get("refused") and _INFO.search(_target(e)) and "ProxyError" not in e.text
    ]
    ready = [event for event in of_kind(obs, "engine_stage") if word(event, "stage") == "ready"]
    others = fires(obs, "engine.*", "host.proxy", "train.colocate-swap", "cluster.*")
    if refused and not others and not any(event.order > refused[-1].order for event in ready):
        return [_refused(refused)]
    return [Verdict(PORT, "pass", cause="No engine failed to bind a port.")]


def _in_engine_s(obs: Observations, event: LogEvent) -> bool:
    """A line that names no process, in a log in which a server of SGLang says that it ended."""
    ended = (e for e in of_kind(obs, "death") if word(e, "how") in ("server", "init"))
    unnamed = not event.actor and event.rank is None
    return unnamed and any(e.where.source == event.where.source and not e.actor for e in ended)


def _target(event: LogEvent) -> str:
    return f"{word(event, 'url')} {word(event, 'path')} {event.text}"


def ephemeral(obs: Observations) -> tuple[int, int, Evidence | None]:
    """(first, last, where it is from) of the ports that the kernel hands out to anybody."""
    for document in obs.documents:
        if document.kind == "ip_local_port_range":
            text = document.text or " ".join(str(value) for value in document.fields.values())
            numbers = [int(found) for found in re.findall(r"\d{2,5}", text)]
            if len(numbers) >= 2:
                return numbers[0], numbers[1], of_place(document.at(text=text.strip()))
    return (*_LINUX_RANGE, None)


def _taken(obs: Observations, event: LogEvent) -> Verdict:
    port = whole(event, "port")
    first, last, place = ephemeral(obs)
    inside = port is not None and first <= port <= last
    shown = f"port {port}" if port is not None else "its port"
    where = ""
    if port is not None:
        kind = "inside" if inside else "outside"
        why = ", where the kernel hands ports to any client" if inside else ""
        where = f"; it lies {kind} the ephemeral range {first}-{last}{why}"
    node = f" on {event.node}" if event.node else ""
    advice = [f"ss -ltnp | grep {port if port is not None else '<port>'}"]
    if inside or port is None:
        advice.append(f"ports below {first}: --sglang-server-port or the launcher's base port")
    advice.append("fewer servers per node: a larger --rollout-num-gpus-per-engine")
    return Verdict(
        PORT,
        "fail",
        engine=event.engine,
        value={"port": port, "node": event.node or None, "ephemeral": inside, "owner": who(event)},
        threshold={"ephemeral_range": [first, last]},
        evidence=(of_event(event), *((place,) if place else ())),
        cause=f"{who(event)} could not bind {shown}{node} (address already in use){where}.",
        advice=tuple(advice),
        confidence="high" if port is not None else "medium",
    )


def _refused(refused: Sequence[LogEvent]) -> Verdict:
    first = refused[0]
    url = word(first, "url")
    return Verdict(
        PORT,
        "warn",
        value={"attempts": len(refused), "url": url},
        threshold="an engine answers",
        evidence=tuple(of_event(event) for event in refused[:2]),
        cause=(
            f"Nothing listens at {url or 'the address of an engine'}: the engine is not up. That alone is no port "
            "conflict; its own log has the reason."
        ),
        advice=("the log of that engine, from its start on", "ss -ltnp on its node"),
        confidence="low",
    )


def not_answered(obs: Observations) -> tuple[LogEvent, ...]:
    """Requests for answers that found no engine: 503, no workers, refused."""
    found = []
    for event in of_kind(obs, "retry", "http"):
        if event.kind == "http":
            if whole(event, "status") == 503 and word(event, "path").startswith(("/generate", "/v1/")):
                found.append(event)
        elif _INFO.search(word(event, "path")):
            continue
        elif event.data.get("no_workers") or whole(event, "status") == 503 or event.data.get("refused"):
            found.append(event)
    return tuple(found)


def served(obs: Observations, ready: Sequence[LogEvent]) -> LogEvent | None:
    """The first sign that an engine has answered a request of the run; an engine's own warm-up is none."""
    for event in of_kind(obs, "http", "decode"):
        if event.kind == "http" and not (
            whole(event, "status") == 200 and word(event, "path").startswith(("/generate", "/v1/"))
        ):
            continue
        local = event.kind == "http" and "127.0.0.1" in event.text
        if local and not any(one.order < event.order for one in ready):
            continue
        return event
    return None


def _rollout_done(obs: Observations, event: LogEvent) -> bool:
    """A rollout was finished before the event."""
    for row in obs.metrics:
        if row.axis != "rollout":
            continue
        if row.time is not None and event.time is not None:
            if row.time < event.time:
                return True
        elif row.where is not None and row.where.source == event.where.source:
            return (row.where.line or 0) < (event.where.line or 0)
    return False


def check_not_ready(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict: requests that came before any engine had answered one."""
    if not obs.logs and not obs.events:
        return [Verdict(NOT_READY, "skip", cause=missing(obs, "a log of the rollout or an engine"))]
    failed = not_answered(obs)
    stages = of_kind(obs, "engine_stage")
    ready = [event for event in stages if word(event, "stage") == "ready"]
    first_answer = served(obs, ready)
    early = [e for e in failed if (first_answer is None or e.order < first_answer.order) and not _rollout_done(obs, e)]
    workers, place = _workers(obs)
    starting = [e for e in stages if word(e, "stage") in ("load", "capture", "kv", "start")]
    if not early:
        return [Verdict(NOT_READY, "pass", cause="No request came before the engines could answer.")]
    late = [e for e in early if ready and _long_after(e, ready[-1], t.not_ready_s)]
    waiting = starting or workers == 0 or any(e.order > early[0].order for e in ready)
    if (late and workers) or not (late or waiting):
        cause = "Requests found no engine, but nothing shows that one was still starting (see engine.died)."
        return [Verdict(NOT_READY, "pass", cause=cause, evidence=tuple(of_event(e) for e in early[:2]))]
    status: Status = "fail" if late and (workers in (0, None)) else "warn"
    phase = _phase(starting, early)
    return [_verdict(obs, t, status, early, phase, workers, place, ready[-1:])]


def _workers(obs: Observations) -> tuple[int | None, Evidence | None]:
    for document in obs.documents:
        if document.kind == "router_workers":
            listed = document.fields.get("workers", document.fields.get("urls"))
            count = len(listed) if isinstance(listed, list | tuple) else document.fields.get("total")
            if isinstance(count, int):
                return count, of_place(document.at("workers", f"router lists {count} workers"))
    return None, None


def _phase(starting: Sequence[LogEvent], early: Sequence[LogEvent]) -> str:
    last = starting[-1] if starting else None
    if last is None:
        return "unknown"
    names = {"load": "loading weights", "capture": "capturing CUDA graphs", "kv": "allocating the KV cache"}
    return names.get(word(last, "stage"), "starting")


def _long_after(event: LogEvent, ready: LogEvent, seconds: float) -> bool:
    return event.time is not None and ready.time is not None and event.time - ready.time > seconds


def _verdict(
    obs: Observations,
    t: Thresholds,
    status: Status,
    early: Sequence[LogEvent],
    phase: str,
    workers: int | None,
    place: Evidence | None,
    more: Sequence[LogEvent],
) -> Verdict:
    first, last = early[0], early[-1]
    since = f" from {clock(first.time)} on" if first.time is not None else ""
    listed = f", the router lists {workers} workers" if workers is not None else ""
    count = len(early) + sum(event.repeated for event in early)
    if status == "fail":
        over = span((last.time or 0.0) - (more[0].time or 0.0)) if more and more[0].order < last.order else ""
        cause = (
            f"Requests still find no worker {over or span(t.not_ready_s)} after the engines were ready{listed}: the "
            "workers never register, so router and engine do not fit (versions)."
        )
        advice: tuple[str, ...] = (
            "pin the router (sglang-router) and SGLang to versions of one release",
            "curl <router>/workers",
        )
    else:
        cause = (
            f"{count} requests{since} found no engine before any had answered: the engines are still {phase}{listed}. "
            "They are not dead; the retries go on until one answers."
        )
        if phase == "unknown":
            cause = cause.replace("the engines are still unknown", "no engine has registered yet")
        advice = (
            "wait until the engines are ready",
            "a longer start-up wait before the first rollout",
            "router and SGLang of one release, if it goes on after the engines are ready",
        )
    shown = [of_event(first), *([of_event(last)] if last is not first else [])]
    starting = of_kind(obs, "engine_stage")[-1:]
    return Verdict(
        NOT_READY,
        status,
        value={"requests": count, "engine_phase": phase, "workers": workers},
        threshold={"seconds_after_ready": t.not_ready_s},
        evidence=(*shown, *(of_event(event) for event in starting), *((place,) if place else ())),
        cause=cause,
        advice=advice,
    )
