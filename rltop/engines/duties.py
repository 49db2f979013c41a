"""What each state of an engine has its supervisor do, and what comes of it.

Which chore begins when, and which event its end is. `chores.py` has the chores, `machine.py` the events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from rltop.engines import chores
from rltop.engines.client import AsyncEngineClient
from rltop.engines.crash_phase import Stage
from rltop.engines.launcher import STAND_INS, Launcher, LaunchSpec, LostNode, Remains
from rltop.engines.requests import Required
from rltop.engines.scrape import EngineStats
from rltop.engines.states import (
    ANSWERING,
    DEAD,
    SERVING,
    Awaits,
    Held,
    Ready,
    Reclaimed,
    Released,
    Spawned,
    SpawnFailed,
    State,
    Synced,
)
from rltop.engines.verify import scrub
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.engines.supervisor import Engine

AGAIN_S = 0.25
"""Between two questions whose answer is waited for by a state."""
LEAVE_S = 10.0
"""For those who send an engine requests, to hear that it drains."""
PROBE_S = 1.0
DIGEST_S = 5.0
"""Between two questions for the digest of the weights, of an idle engine."""
MOST_UNPROVEN, UNPROVEN_S = 16, 5.0
"""Generations that were lost with their node, and how often they are looked for while nothing runs."""


def begin(engine: Engine, launcher: Launcher) -> None:
    """What its state is there for, unless it is under way."""
    slot, client = engine.slot, engine.client
    state, here = slot.state, frozenset({slot.state})
    match state:
        case State.WARMING if client and engine.process and engine.spec and engine.watch.log.stage is Stage.READY:
            version = engine.record.version
            work = chores.inspect(client, launcher, engine.spec, engine.process, engine.watch.log_head, version)
            engine.board.begin("inspect", here, work)
        case State.STALE if client:
            _probe(engine, client)  # a weight update may wait for this one too
            if not engine.weights_move() and engine.is_due("sync"):
                engine.board.begin("sync", here, _sync(engine, client))
        case State.HEALTHY | State.SUSPECT if client:
            _probe(engine, client)
            _ask_digest(engine, client)
        case State.DRAINING:
            engine.board.begin("drain", here, _drain(engine, client))
        case State.RECLAIMING | State.CRASHED if not (slot.clean or slot.dying) and engine.is_due("reclaim"):
            engine.board.begin("reclaim", here, chores.reclaim(launcher, engine.process, _older(engine)))
        case _ if state in DEAD and engine.slot.clean and engine.record.unproven and engine.is_due("unproven"):
            engine.not_before["unproven"] = engine.house.clock() + UNPROVEN_S
            specs = [engine.spec_of(number) for number in engine.record.unproven]
            engine.board.begin("unproven", here, chores.reclaim(launcher, None, specs))
        case _:
            pass


def _sync(engine: Engine, client: AsyncEngineClient) -> Coroutine[Any, Any, Any]:
    declared = engine.record.declared
    return chores.sync(
        client,
        engine.required,
        declared.model_path,
        emptied=engine.record.emptied,
        # Asked of an engine that serves real traffic only where there is something to compare it with: 4.6 s.
        always_digest=declared.kind in STAND_INS,
    )


async def _drain(engine: Engine, client: AsyncEngineClient | None) -> Any:
    if engine.house.leaving is not None and engine.url:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await engine.house.leaving(engine.url)
    return await chores.drain(client)


def _probe(engine: Engine, client: AsyncEngineClient) -> None:
    if engine.is_due("probe"):
        engine.not_before["probe"] = engine.house.clock() + PROBE_S
        engine.board.begin("probe", ANSWERING, _look(client, _to_hold(engine), engine.house.clock()))


async def _look(
    client: AsyncEngineClient, asked_for: Required | None, began: float
) -> tuple[EngineStats, Required | None, float]:
    """What its routes say, what was required when they were asked, and when that was."""
    return await client.scrape(), asked_for, began


def _to_hold(engine: Engine) -> Required | None:
    """The weights that its label is judged by now; None: it does not serve, or weights are moving."""
    return engine.house.required() if engine.slot.serves() and not engine.weights_move() else None


def _ask_digest(engine: Engine, client: AsyncEngineClient) -> None:
    """Once per version from the stand-in; once per generation from SGLang, which takes seconds for the first."""
    watch, stats = engine.watch, engine.watch.stats
    due = not watch.weight_digest and (engine.record.declared.kind in STAND_INS or not watch.asked_digest)
    idle = stats is not None and not (stats.paused or stats.running or stats.queued)
    if due and idle and not engine.weights_move() and engine.is_due("digest"):
        engine.not_before["digest"] = engine.house.clock() + DIGEST_S
        watch.asked_digest = True
        engine.board.begin("digest", SERVING, chores.digest(client))


def _older(engine: Engine) -> list[LaunchSpec]:
    """Of the generations that may still be there beside the process that is known."""
    newest = engine.slot.generation
    # Without a process: a launch failed, maybe because of what a killed supervisor had begun.
    recent = range(max(1, newest - chores.OLDER + 1), newest + 1) if engine.process is None else ()
    return [engine.spec_of(number) for number in sorted({*recent, *engine.record.unproven}, reverse=True)]


def take_finished(engine: Engine) -> None:
    """Hand what has ended to the machine, as far as the engine is still where it was begun for."""
    for name, states, task in engine.board.finished():
        error = task.exception()
        if error is not None:
            _failed(engine, name, error)
        elif engine.slot.state in states:
            _finished(engine, name, task.result())


def _finished(engine: Engine, name: str, result: Any) -> None:
    now = engine.house.clock()
    match name:
        case "spawn":
            engine.process = result
            engine.write(engine.record.changed(process=result))
            engine.fire(Spawned())
        case "inspect":
            _inspected(engine, result)
        case "sync":
            event, held, digest = result
            engine.watch.holds(held, digest)
            refused = isinstance(event, Awaits) and event.refused
            engine.watch.not_loaded = engine.watch.not_loaded + 1 if refused else 0
            engine.not_before["sync"] = now + (0.0 if isinstance(event, Synced) else AGAIN_S)
            if isinstance(event, Synced) and engine.weights_move():
                return
            if isinstance(event, Synced) and engine.record.emptied:
                engine.record = engine.record.changed(emptied=False)
            engine.fire(event)
        case "probe":
            stats, asked_for, began = result
            _probed(engine, stats, asked_for, began=began, now=now)
        case "digest":
            engine.watch.holds(*result)
        case "drain":
            if engine.updating():
                return  # asked again: nothing is ended in a weight update
            engine.fire(result)
        case "reclaim":
            event, remains = result
            _reclaimed(engine, event, remains, now)
        case "unproven" if isinstance(result[0], Reclaimed):
            engine.write(engine.record.changed(unproven=()))
        case _:
            pass


def _failed(engine: Engine, name: str, error: BaseException) -> None:
    now = engine.house.clock()
    words = " ".join(str(error).split()) or type(error).__name__
    if name == "spawn" and engine.slot.state is State.LAUNCHING:
        what = error.what if isinstance(error, RltopError) else type(error).__name__
        return engine.fire(SpawnFailed(f"launch/{what}", words))
    engine.not_before[name] = now + 1.0
    if not isinstance(error, RltopError | TimeoutError):
        engine.tell_once("error", f"{name.split()[0]}: {type(error).__name__}: {words}")
    elif name == "reclaim" and engine.slot.state in (State.RECLAIMING, State.CRASHED) and not engine.slot.clean:
        if not isinstance(error, LostNode):
            return engine.fire(Held(f"cannot be looked at: {words}"))
        unproven = tuple(sorted({*engine.record.unproven, engine.slot.generation}))[-MOST_UNPROVEN:]
        engine.record = engine.record.changed(unproven=unproven)
        engine.fire(Reclaimed())
    return None


def _inspected(engine: Engine, found: chores.Verified) -> None:
    engine.watch.verified = found
    engine.watch.log.flags = scrub(found.info)
    engine.watch.log.blocking = found.blocking
    engine.watch.log.dumping = found.dumping
    engine.watch.health.speculative = found.wanted.get("speculative", "")
    if found.version != engine.record.version:
        engine.write(engine.record.changed(version=found.version))
    for name in found.ignored:
        seen = found.toggles[name]
        text = f"{name}={found.wanted[name]} had no effect: it runs with {seen.value} ({seen.source})"
        engine.tell_once("warn", text)
    released = engine.released
    engine.fire(Ready("ignored: " + ", ".join(found.ignored) if found.ignored else "it answers"))
    if released:
        engine.fire(Released())


def _probed(engine: Engine, stats: EngineStats, asked_for: Required | None, *, began: float, now: float) -> None:
    required = _to_hold(engine)
    # An answer to a question from before a push says nothing of what was pushed.
    known = required if required and asked_for and asked_for.version == required.version else None
    event = engine.watch.scraped(stats, known, now, began)
    if engine.slot.serves():
        engine.house.looked(engine.id, stats, now)
    if event is not None:
        engine.fire(event)
    engine.moved()


def _reclaimed(engine: Engine, event: Reclaimed | Held, remains: Remains, now: float) -> None:
    if isinstance(event, Held):
        engine.not_before["reclaim"] = now + AGAIN_S
    elif others := chores.strangers(remains):
        engine.tell_once("warn", others)
    if isinstance(event, Reclaimed):
        engine.record = engine.record.changed(unproven=())
    engine.fire(event)
