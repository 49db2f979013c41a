"""`engine.resume-order` and `engine.stale-kv`: what has to lie between two rollouts of a colocated engine.

After a release the legal order is resume(weights), update, resume(kv_cache), generate. A release drops the weights, so
an update is required; the prefix cache of the old policy has to be flushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rltop.checks.events import engine_life
from rltop.checks.facts import owned
from rltop.checks.found import HttpCall, LogEvent
from rltop.checks.observe import Observations, Where
from rltop.checks.phrase import missing, of_event, of_place
from rltop.checks.syncs import is_update, message, success
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ORDER = "engine.resume-order"
STALE = "engine.stale-kv"
TAGS = ("weights", "kv_cache")
"""What a release without tags gives away for certain. SGLang knows a third type, `cuda_graph`, which is only released
where its memory saver holds graphs; it must come back where a release names it."""
OWN_FLUSH_S = 2.0
"""A flush so shortly before the access line of an update is the update's own (the lines have whole seconds)."""
_GENERATE = ("/generate", "/v1/completions", "/v1/chat/completions", "/health_generate", "/encode")
_RELEASED = "cannot be accessed from Triton"
"""What a real engine raises when a health check or a request touches memory that was released."""

Engine = int | str | None


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one engine, from a capture or from an access line."""

    path: str
    engine: Engine
    tags: tuple[str, ...] | None = None
    """None: not said, which means all."""
    ok: bool = True
    status: int | None = None
    message: str = ""
    step: int | None = None
    where: Where | None = None
    answer: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """What one engine has given away, and whether its weights were pushed since."""

    gone: list[str] = field(default_factory=list)
    update: bool = False
    released: Call | None = None
    releases: int = 0
    faults: list[tuple[str, Call, str, Call | None]] = field(default_factory=list)
    """Kind, the wrong call, what it concerns, and the release before it."""


# -- engine.resume-order


def check_order(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per engine that was used in a wrong order."""
    calls = _captured(obs) or _logged(obs)
    backup = any(
        obs.args.on(name) for name in ("sglang_enable_weights_cpu_backup", "enable_weights_cpu_backup")
    ) or any(one.kind == "server_info" and one.fields.get("enable_weights_cpu_backup") for one in obs.documents)
    states: dict[Engine, _State] = {}
    for call in calls:
        _step(states.setdefault(call.engine, _State()), call, backup)
    if not any(state.releases for state in states.values()):
        return [Verdict(ORDER, "skip", cause=missing(obs, "a release of the engine's memory and what came after it"))]
    unnamed = {event.pid for event in obs.events if event.engine is None and event.pid is not None}
    named = {event.engine for event in obs.events if event.engine is not None} | {call.engine for call in obs.http}
    processes = unnamed - named
    found = [
        _wrong(obs, engine, state, process=engine in processes) for engine, state in states.items() if state.faults
    ]
    if found:
        return found[:32]
    releases = sum(state.releases for state in states.values())
    cause = f"After each release ({releases}) the tags came back and the weights were pushed before a request."
    return [Verdict(ORDER, "pass", value={"releases": releases}, cause=cause)]


def _captured(obs: Observations) -> list[Call]:
    if not any("memory_occupation" in call.path for call in obs.http):
        return []
    return [_of_http(call) for call in sorted(obs.http, key=lambda call: call.order)]


def _of_http(call: HttpCall) -> Call:
    tags = call.body.get("tags")
    listed = tuple(str(tag) for tag in tags) if isinstance(tags, list | tuple) and tags else None
    if isinstance(tags, str):
        listed = (tags,)
    engine = call.engine if call.engine is not None else (call.url.split("/")[2] if call.url.count("/") >= 3 else None)
    return Call(
        call.path, engine, listed, success(call), call.status, message(call), call.step, call.where, call.answer
    )


def _logged(obs: Observations) -> list[Call]:
    """Access lines; a memory line with tags stands for the request that it belongs to."""
    found = []
    with_tags = {event.kind for event in obs.events if event.kind in ("release", "resume") and event.data.get("tags")}
    for event in obs.events:
        engine: Engine = event.engine if event.engine is not None else event.pid
        if event.kind == "http":
            path, status = str(event.data.get("path") or ""), event.data.get("status")
            if any(f"/{kind}_memory_occupation" == path for kind in with_tags):
                continue
            number = status if isinstance(status, int) else None
            found.append(Call(path, engine, None, number is None or number < 400, number, where=event.where))
        elif event.kind in with_tags:
            tags = event.data.get("tags")
            listed = tuple(str(tag) for tag in tags) if isinstance(tags, list | tuple) and tags else None
            found.append(Call(f"/{event.kind}_memory_occupation", engine, listed, where=event.where))
        elif event.kind == "traceback" and _RELEASED in str(event.data.get("message")):
            # The request that met the released memory killed the engine, so it has no access line.
            found.append(Call("/health", engine, None, ok=False, message=event.text, where=event.where))
    return found


def _step(state: _State, call: Call, backup: bool) -> None:
    if call.path.endswith("/release_memory_occupation"):
        if not call.ok and ("idle" in call.message or "running" in call.message or (call.status or 0) >= 500):
            state.faults.append(("busy", call, "idle", state.released))
            return
        state.releases += 1
        state.released = call
        state.gone = list(dict.fromkeys((*state.gone, *(call.tags or TAGS))))
        state.update = state.update or ("weights" in state.gone and not backup)
    elif state.released is None:
        return
    elif call.path.endswith("/resume_memory_occupation"):
        if call.ok:
            state.gone = [tag for tag in state.gone if call.tags and tag not in call.tags]
    elif is_update(call.path):
        if "weights" in state.gone:
            state.faults.append(("early-update", call, "weights", state.released))
        elif call.ok:
            state.update = False
    elif call.path.startswith(_GENERATE) or (call.path == "/health" and state.gone and not call.ok):
        if needed := [tag for tag in ("weights", "kv_cache") if tag in state.gone] or state.gone:
            kind = "health" if call.path == "/health" else "missing-tag"
            state.faults.append((kind, call, ", ".join(needed), state.released))
        elif state.update:
            state.faults.append(("no-update", call, "update", state.released))
        state.gone, state.update = [], False  # told once; the rest of the run is a consequence


def _wrong(obs: Observations, engine: Engine, state: _State, *, process: bool) -> Verdict:
    """process: the engine is only known by the pid in its lines, which is no engine id that could differ from one."""
    kind, call, what, release = state.faults[0]
    who = "the engine" if engine is None else f"engine process {engine}" if process else f"engine {engine}"
    answered = f" (answered {call.status})" if call.status is not None else ""
    causes = {
        "missing-tag": f"{call.path}{answered} reached {who} before {what} was resumed after the release: the request "
        "works on memory that is not mapped.",
        "health": f"{call.path}{answered} reached {who} while {what} was released: a health check of a released engine "
        "touches memory that is not mapped and kills it.",
        "no-update": f"{call.path}{answered} reached {who} after a release and a resume without a weight update: "
        "a release drops the weights, so the engine samples from memory of no content.",
        "early-update": f"{call.path} reached {who} before its weights were resumed: the update goes to memory that is "
        "not mapped.",
        "busy": f"{call.path}{answered} was sent to {who} while requests were running: a release asserts an "
        "idle engine.",
    }
    ima = next((event for event in obs.events if event.kind == "ima"), None)
    cause = causes[kind]
    if ima is not None and kind in ("missing-tag", "no-update", "health"):
        cause += " The illegal memory access is its consequence, and one clean step before proves nothing: the first "
        cause += "wake-up is in step 2."
    advice = {
        "no-update": ("update the weights between resume(weights) and resume(kv_cache)",),
        "busy": ("/pause_generation, or wait until the engine is idle, before /release_memory_occupation",),
        "early-update": ('/resume_memory_occupation {"tags": ["weights"]} before the update',),
        "health": ("pause the health checks from release to resume",),
    }.get(kind, (f'/resume_memory_occupation {{"tags": ["{what.split(", ")[0]}"]}} before the first request',))
    return Verdict(
        ORDER,
        "fail",
        step=call.step,
        engine=None if process else engine,
        threshold={"order": ["release", "resume weights", "update", "resume kv_cache", "generate"]},
        value={"kind": kind, "tag": what, "request": call.path, "status": call.status},
        evidence=tuple(_at(one) for one in (release, call) if one is not None and one.where is not None)
        + ((of_event(ima),) if ima else ())
        or (Evidence("http", None, call.path),),
        cause=cause[0].upper() + cause[1:],
        advice=(*advice, "order: release, resume weights, update, resume kv_cache, generate"),
    )


def _at(call: Call) -> Evidence:
    assert call.where is not None
    return of_place(call.where, call.where.text or call.path)


# -- engine.stale-kv


@dataclass(slots=True)
class _Cache:
    update: LogEvent | None = None
    flushed: bool = False
    emptied: float | None = None
    """When it was last flushed."""
    failed: LogEvent | None = None
    waiting: bool = False
    clean: int = 0
    stale: list[tuple[LogEvent, LogEvent, LogEvent | None]] = field(default_factory=list)


def check_cache(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict per engine whose first prefill after an update took tokens of the old cache."""
    caches: dict[tuple[Engine, int], _Cache] = {}
    for event in sorted(obs.events, key=lambda event: event.order):
        engine = event.engine if event.engine is not None else event.pid
        life = engine_life(event.where.source)  # a new process has a cache of its own
        _watch(caches.setdefault((engine, life[1] if life else 0), _Cache()), event)
    flushes = [
        call for call in obs.http if is_update(call.path) and call.body.get("flush_cache") is True and success(call)
    ]
    found = []
    for (engine, _), cache in caches.items():
        if cache.stale and not (flushes and cache.stale[0][2] is None):
            found.append(_stale(obs, engine, cache))
    if found:
        return found[:32]
    clean = sum(cache.clean for cache in caches.values())
    if not clean and not any(cache.stale for cache in caches.values()):
        return [Verdict(STALE, "skip", cause=missing(obs, "an engine's prefill lines after a weight update"))]
    cause = f"After {clean} updates the first prefill reused no token, or the cache was flushed."
    return [Verdict(STALE, "pass", value={"updates": clean}, cause=cause, confidence="medium")]


def _watch(cache: _Cache, event: LogEvent) -> None:
    path, status = str(event.data.get("path") or ""), event.data.get("status")
    if event.kind == "http" and path.endswith("/flush_cache"):
        cache.flushed = cache.flushed or status == 200
        cache.emptied = event.time if status == 200 else cache.emptied
    elif event.kind in ("release", "flushed") or (event.kind == "http" and path.endswith("/release_memory_occupation")):
        cache.flushed, cache.emptied = True, event.time
    elif event.kind == "flush_failed":
        cache.failed, cache.flushed, cache.emptied = event, False, None
    elif event.kind == "http" and is_update(path) and status == 200:
        if not cache.waiting:
            cache.update = event
        cache.waiting = True
        # An update flushes before it answers: a request that waited for it may be served before its access line.
        own = event.time is not None and cache.emptied is not None and 0 <= event.time - cache.emptied <= OWN_FLUSH_S
        cache.flushed = cache.flushed or own
    elif event.kind == "prefill":
        reused = event.data.get("cached_token")
        if cache.waiting and cache.update is not None and isinstance(reused, int):
            if reused > 0 and not cache.flushed:
                cache.stale.append((cache.update, event, cache.failed))
            else:
                cache.clean += 1
            cache.waiting, cache.failed = False, None
        cache.flushed = False


def _stale(obs: Observations, engine: Engine, cache: _Cache) -> Verdict:
    update, prefill, failed = cache.stale[0]
    reused = prefill.data.get("cached_token")
    who = "the engine" if engine is None else f"engine {engine}"
    confidence: Confidence = "high" if failed else "medium"
    cause = (
        f"The first prefill of {who} after the update {update.data.get('path')} reused {reused} cached tokens: their "
    )
    cause += "keys and values were computed with the old policy, and no flush succeeded between"
    cause += f" (it failed: {str(failed.data.get('message') or failed.text)[:160]})." if failed else "."
    return Verdict(
        STALE,
        "warn",
        engine=engine,
        value={"cached_tokens": reused, "update": update.data.get("path"), "times": len(cache.stale)},
        threshold={"cached_tokens": 0},
        evidence=tuple(of_event(one) for one in (update, failed, prefill) if one is not None),
        cause=cause,
        advice=(
            *(f"rltop engine http flush --engine {one}" for one in owned(obs, engine) if engine is not None),
            "/pause_generation, or drain the requests, before the update",
            "/flush_cache after it, and check that it answers 200",
        ),
        confidence=confidence,
    )
