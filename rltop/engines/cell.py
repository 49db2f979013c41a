"""The cell `engine/<id>` as the fleet knows it: what viewers see of one engine (docs/protocol.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rltop.engines.states import LIVE, State

if TYPE_CHECKING:
    from rltop.engines.supervisor import Engine


def engine_cell(engine: Engine) -> dict[str, Any]:
    """Plain data. Times are on the wall clock; what is unknown is null."""
    slot, record, watch = engine.slot, engine.record, engine.watch
    offset = engine.wall_offset()
    declared, process = record.declared, engine.process
    found, stats = watch.verified, watch.stats
    return {
        "id": engine.id,
        "owner": "rltop",
        "kind": declared.kind,
        "url": engine.url or None,
        "state": slot.state.value,
        "since": slot.since + offset,
        "deadline": None if slot.deadline is None else slot.deadline + offset,
        "cause": slot.cause,
        "fingerprint": slot.fingerprint or None,
        "generation": slot.generation,
        "previous_generation": record.before_generation,
        "restarts": slot.restarts,
        "backoff_until": slot.deadline + offset if slot.state is State.BACKOFF and slot.deadline else None,
        "stage": engine.stage,
        "pending": engine.pending or engine.waits,
        "launcher": record.launcher,
        "host": process.node if process else None,
        "pid": process.pid if process and slot.state in LIVE else None,
        "log": process.log if process else None,
        "version": record.version or None,
        "model_path": (stats.model_path if stats else None) or declared.model_path,
        "weight_version": watch.weight_version or None,
        "weight_digest": watch.weight_digest,
        "arm": record.arm,
        "signals": _signals(engine, offset),
        "toggles": {name: one.value for name, one in found.toggles.items()} if found else {},
        "wanted": engine.wanted(),
        "ignored": found.ignored if found else [],
        "verified": {name: one.source for name, one in found.toggles.items()} if found else {},
        "running": stats.running if stats else None,
        "queued": stats.queued if stats else None,
        "tokens_per_s": stats.tokens_per_s if stats else None,
        "token_usage": stats.token_usage if stats else None,
        "cuda_graph": stats.cuda_graph if stats else None,
        "spec_accept_length": stats.spec_accept_length if stats else None,
        "error": stats.problem if stats and not stats.reachable else "",
    }


def _signals(engine: Engine, offset: float) -> dict[str, dict[str, Any]]:
    """The five, with times that do not move while they say the same."""
    now = engine.house.clock()
    found = engine.watch.health.signals(now, now + offset)
    return {name: {**one, "t": round(one["t"], 2)} for name, one in found.items()}
