"""The cell `engine/<id>` as the fleet knows it: what viewers see of one engine (docs/protocol.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rltop.engines.states import ANSWERING, DEAD, LIVE, SERVING, State

if TYPE_CHECKING:
    from rltop.engines.supervisor import Engine

SEEN_S = 5.0
"""`seen` moves in such steps: an engine that idles is not told anew at every question."""
RESERVED = "RESERVED"
"""Shown in place of the state of an engine on trial, whatever it is: nobody but whoever tries may use it."""
_ASKED = ("probe", "progress", "trainer")
"""Signals that come of being asked: nobody asks an engine that does not answer."""


def engine_cell(engine: Engine) -> dict[str, Any]:
    """Plain data. Times are on the wall clock; what is unknown is null."""
    slot, record, watch = engine.slot, engine.record, engine.watch
    offset = engine.wall_offset()
    declared, process = record.declared, engine.process
    found = watch.verified
    # Only an engine in the rotation is asked how it does: what another one said last is no number of now.
    stats = watch.stats if slot.state in SERVING else None
    problem = watch.stats.problem if watch.stats and not watch.stats.reachable and slot.state in LIVE else ""
    hung = slot.state is State.SUSPECT and slot.escalated
    pause = record.paused
    return {
        "id": engine.id,
        "owner": "rltop",
        "kind": declared.kind,
        "url": engine.url or None,
        "state": RESERVED if slot.reserved and slot.state is not State.LOST else slot.state.value,
        "reserved": record.trial.name if record.trial is not None else "",
        "since": slot.since + offset,
        "deadline": None if slot.deadline is None else slot.deadline + offset,
        # Why an engine is well is no news after a while, and names the weights of then.
        "cause": "" if slot.state is State.HEALTHY else slot.cause,
        "fingerprint": slot.fingerprint or None,
        "generation": slot.generation,
        "previous_generation": record.before_generation,
        "restarts": slot.restarts,
        "survived": slot.rollouts,
        "backoff_until": slot.deadline + offset if slot.state is State.BACKOFF and slot.deadline else None,
        "stage": engine.stage,
        "pending": engine.pending or engine.waits,
        "launcher": record.launcher,
        "host": process.node if process else None,
        "pid": process.pid if process and slot.state in LIVE else None,
        "log": process.log if process else None,
        "version": record.version or None,
        "model_path": (watch.stats.model_path if watch.stats else None) or declared.model_path,
        "weight_version": watch.weight_version or None,
        "weight_digest": watch.weight_digest,
        "arm": record.arm,
        "hung": hung,
        "paused": {"by": pause.who, "since": pause.since} if pause and slot.state in ANSWERING else None,
        "signals": _signals(engine, offset),
        "toggles": {name: one.value for name, one in found.toggles.items()} if found else {},
        "wanted": engine.wanted(),
        "ignored": found.ignored if found else [],
        "verified": {name: one.source for name, one in found.toggles.items()} if found else {},
        "running": stats.running if stats else None,
        "queued": stats.queued if stats else None,
        # The gauge keeps its last value in a hang, and in a pause.
        "tokens_per_s": (0.0 if hung or pause else stats.tokens_per_s) if stats else None,
        "token_usage": stats.token_usage if stats else None,
        "cuda_graph": stats.cuda_graph if stats else None,
        "spec_accept_length": stats.spec_accept_length if stats else None,
        "seen": None if watch.seen is None else (watch.seen + offset) // SEEN_S * SEEN_S,
        "error": problem,
    }


def _signals(engine: Engine, offset: float) -> dict[str, dict[str, Any]]:
    """The five, with times that do not move while they say the same."""
    now = engine.house.clock()
    found = engine.watch.health.signals(now, now + offset)
    state, told = engine.slot.state, {}
    for name, one in found.items():
        # What ended keeps what was wrong with it; that it was well once says nothing now.
        past = state in DEAD and (one["ok"] or state is State.STOPPED)
        if past or (name in _ASKED and one["ok"] is not None and state not in ANSWERING):
            one = {"ok": None, "text": f"says nothing of an engine that is {state}", "t": engine.slot.since + offset}
        told[name] = {**one, "t": round(one["t"], 2)}
    return told
