"""Weight updates as files and the live stream show them: calls of update endpoints, refusals, syncs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rltop.checks.found import HttpCall
from rltop.checks.observe import Observations, SyncEvent, TensorFinding, Where
from rltop.checks.phrase import mismatches

UPDATE = re.compile(r"/(?:update_weights?\w*|pull_weights?\w*|reload_weights?|load_weights?\w*|sync_weights?)\b")
"""Endpoints that change an engine's weights."""
COMPARE = (
    "--check-weight-update-equal at the next launch: the engine's weights after the first sync are compared with its "
    "checkpoint, and weights.compare names the tensors that differ (not for delta updates)"
)
"""Advice, where it is open whether an engine holds what it should."""
_ENGINE = re.compile(r"\bengine (?P<id>\d{1,5}|'[^']{1,80}')(?![\w.])", re.IGNORECASE)
_NOT = ("/update_weight_version", "/update_weights_group", "/init_weights")


@dataclass(frozen=True, slots=True)
class Update:
    """One attempt to change one engine's weights."""

    engine: int | str | None
    ok: bool
    message: str = ""
    endpoint: str = ""
    step: int | None = None
    rollout: int | None = None
    version: str = ""
    where: Where | None = None
    order: int = 0
    time: float | None = None


def _named(text: str, otherwise: int | None) -> int | str | None:
    """The engine that a line of somebody else (the trainer, a router) speaks of."""
    found = _ENGINE.search(text)
    if found is None:
        return otherwise
    return int(found["id"]) if found["id"].isdigit() else found["id"]


def is_update(path: str) -> bool:
    return bool(UPDATE.search(path)) and not path.startswith(_NOT)


def success(call: HttpCall) -> bool:
    """The answer's own word counts as much as the status: `success: false` comes with 200."""
    return (call.status is None or call.status < 400) and call.answer.get("success") is not False


def message(call: HttpCall) -> str:
    """What the engine said."""
    for key in ("message", "error", "detail", "text", "msg"):
        value = call.answer.get(key)
        if isinstance(value, Mapping):
            value = value.get("message")
        if value:
            return str(value)[:400]
    return "" if call.status is None or call.status < 400 else f"HTTP {call.status}"


def ordered(syncs: Iterable[SyncEvent]) -> list[SyncEvent]:
    """Syncs in the order of the run, whatever the order in which they were told."""
    return sorted(syncs, key=_place)


def _place(sync: SyncEvent) -> tuple[int, int, float, str, bool]:
    rollout = -1 if sync.rollout_id is None else sync.rollout_id
    return (sync.segment, rollout, sync.time or 0.0, sync.version, sync.ok)


def updates(obs: Observations) -> tuple[Update, ...]:
    """All of them: from captures, from access lines and refusals in logs, from the live stream's syncs."""
    found = [
        Update(
            call.engine,
            success(call),
            message(call),
            call.path,
            call.step,
            None,
            str(call.body.get("weight_version") or call.body.get("version") or ""),
            call.where,
            call.order,
        )
        for call in obs.http
        if is_update(call.path)
    ]
    for event in obs.events:
        path, status = str(event.data.get("path") or ""), event.data.get("status")
        if event.kind == "http" and is_update(path) and isinstance(status, int):
            engine = event.engine if event.engine is not None else event.pid
            text = "" if status < 400 else f"HTTP {status}"
            found.append(Update(engine, status < 400, text, path, where=event.where, order=event.order))
        elif event.kind == "update_refused":
            text = str(event.data.get("message") or event.text)
            engine = event.engine if event.engine is not None else _named(text, event.pid)
            found.append(Update(engine, False, text, path, where=event.where, order=event.order, time=event.time))
    for at, sync in enumerate(ordered(obs.syncs)):
        spoiled = {engine.engine for engine in mismatches(sync)}
        for engine_sync in sync.engines:
            if engine_sync.engine in spoiled:
                continue  # it took the update; that its weights differ is another matter
            found.append(
                Update(
                    int(engine_sync.engine) if engine_sync.engine.isdigit() else engine_sync.engine,
                    engine_sync.ok,
                    engine_sync.message,
                    sync.transport,
                    rollout=sync.rollout_id,
                    version=sync.version,
                    where=sync.where,
                    order=at,
                    time=sync.time,
                )
            )
        if not sync.engines:
            found.append(
                Update(None, sync.ok, rollout=sync.rollout_id, version=sync.version, where=sync.where, order=at)
            )
    return tuple(found)


MOST_FINDINGS = 50


def findings_of(value: object) -> tuple[TensorFinding, ...]:
    """The findings of a `weights` record; whatever is none is left out."""
    found: list[TensorFinding] = []
    for one in value if isinstance(value, list) else ():
        if not isinstance(one, Mapping) or not one.get("name") or len(found) >= MOST_FINDINGS:
            continue
        gap = one.get("max_abs_err")
        found.append(
            TensorFinding(
                name=str(one["name"]),
                kind=str(one.get("kind") or "different"),
                detail=str(one.get("detail") or ""),
                max_abs_err=float(gap) if isinstance(gap, int | float) and not isinstance(gap, bool) else None,
                parameter=str(one.get("parameter") or ""),
            )
        )
    return tuple(found)
