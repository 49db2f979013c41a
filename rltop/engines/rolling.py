"""Carries out a plan over several engines: safe points, order, progress, failure and cancellation.

What an engine should come to is written into its slot's file first; its supervisor does the rest. So an operation that
is cancelled, or whose daemon is killed, leaves every engine on its old generation (not yet touched, or still draining:
called off) or on its way to the new one, never half-done.

Failure policy: the first engine that does not come up with its change ends the roll; it goes back to the arguments of
its last good generation, the others keep theirs. Every operation ends: what takes longer than all deadlines together
fails and says where it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rltop.engines.planning import keep_serving
from rltop.engines.requests import Config, When
from rltop.engines.slots import SlotRecord
from rltop.engines.states import ANSWERING, LIVE, SERVING, STARTING, FleetPolicy, Goal, State
from rltop.engines.supervisor import Engine
from rltop.errors import RltopError

Stage = Callable[[str], None]
SETTLE_S = 10.0
"""An engine on its way into the rotation counts as serving for so long: after an adoption all are on their way."""
POLL_S = 0.1
"""Between two looks at what no engine tells of: safe points, how many serve."""
_DOING = {
    State.DRAINING: "draining",
    State.STOPPING: "stopping",
    State.RECLAIMING: "reclaiming",
    State.LAUNCHING: "launching",
    State.LOADING: "loading",
    State.CAPTURING: "capturing graphs",
    State.WARMING: "warming up",
    State.STALE: "getting weights",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Next:
    """What one engine of an operation should come to."""

    engine: Engine
    config: Config | None = None
    """None: as it is."""
    fields: Mapping[str, Any] | None = None
    """Further fields of its record, written with the goal."""


@contextmanager
def holding(engines: Sequence[Engine], name: str) -> Iterator[None]:
    """Nobody else operates on these engines meanwhile. Raises `RltopError` when somebody does."""
    for engine in engines:
        if engine.busy:
            raise RltopError(f"engine {engine.id} is held by another operation", why=engine.busy, exit_code=1)
    for engine in engines:
        engine.busy = name
    try:
        yield
    finally:
        for engine in engines:
            engine.busy = engine.stage = engine.pending = ""
            engine.moved()


async def safe_point(engines: Sequence[Engine], when: When, reached: Callable[[], bool], stage: Stage) -> None:
    """Wait between rollouts, if that was asked for."""
    if when == "now" or reached():
        return
    stage("waits for the next safe point")
    for engine in engines:
        engine.pending = "the next safe point (the end of the rollout)"
        engine.publish()
    while not reached():  # noqa: ASYNC110 - whoever knows of rollouts is only asked
        await asyncio.sleep(POLL_S)
    for engine in engines:
        engine.pending = ""


async def roll(
    steps: Sequence[Next], engines: Mapping[str, Engine], *, keep: int | None, cause: str, stage: Stage
) -> list[str]:
    """Restart one after the other, as many at a time as leave `keep` serving; the first one alone. What was done."""
    waiting = list(steps)
    done: list[str] = []
    running: dict[asyncio.Task[str], Engine] = {}
    try:
        while waiting or running:
            while waiting and (not running or done) and _may_leave(waiting[0].engine, engines, keep, running.values()):
                step = waiting.pop(0)
                running[asyncio.ensure_future(restart(step, cause, stage))] = step.engine
            if not running:
                await _wait_for_room(waiting[0].engine, engines, keep, stage)
                continue
            ended, _ = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                running.pop(task)
                done.append(task.result())
    except asyncio.CancelledError:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
    except RltopError:
        await asyncio.gather(*running, return_exceptions=True)  # those beside the one that failed come to their end
        raise
    return done


async def together(works: Iterable[Coroutine[Any, Any, str]]) -> list[str]:
    """All of them at once; the first failure is raised when all have come to their end."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    failed = [result for result in results if isinstance(result, BaseException)]
    if failed:
        raise failed[0]
    return [result for result in results if isinstance(result, str)]


def _may_leave(
    engine: Engine, engines: Mapping[str, Engine], keep: int | None, leaving: Collection[Engine] = ()
) -> bool:
    """Enough others serve, those on their way out left out. An engine that does not serve, nor will in a moment, may
    always be restarted."""
    slot = engine.slot
    coming = slot.state in STARTING | {State.STALE} and engine.house.clock() - slot.since < SETTLE_S
    if not (slot.serves() or coming or not engine.adopted):
        return True
    others = [one for one in engines.values() if one is not engine and one not in leaving]
    return sum(one.slot.serves() for one in others) >= keep_serving(keep, engines)


async def _wait_for_room(engine: Engine, engines: Mapping[str, Engine], keep: int | None, stage: Stage) -> None:
    """Until enough engines serve. Raises `RltopError` when that never happens."""
    engine.pending = f"{keep_serving(keep, engines)} other engines that serve"
    engine.publish()
    stage(f"engine {engine.id}: waits until {keep_serving(keep, engines)} others serve")
    deadline = engine.house.clock() + patience(engine.house.policy)
    try:
        while not _may_leave(engine, engines, keep):
            hopeless = sum(_may_come(one) for one in engines.values() if one is not engine) < keep_serving(
                keep, engines
            )
            if hopeless or engine.house.clock() > deadline:
                states = ", ".join(f"{one.id} {one.slot.state}" for one in engines.values())
                raise RltopError(
                    f"engine {engine.id} was not restarted",
                    why=f"fewer than {keep_serving(keep, engines)} others serve: {states}",
                    do="give a smaller keep, or bring the others back first",
                    exit_code=1,
                )
            await asyncio.sleep(POLL_S)
    finally:
        engine.pending = ""


def _may_come(engine: Engine) -> bool:
    """It serves, or may come to that without a person."""
    waits_for_a_person = engine.slot.state is State.QUARANTINED or (
        engine.slot.state is State.CRASHED and engine.slot.clean
    )
    return engine.record.goal.run and not waits_for_a_person and engine.record.trial is None


async def restart(step: Next, cause: str, stage: Stage) -> str:
    """Bring one engine to its next generation, HEALTHY. Raises `RltopError`; cancelled: old or new, never between."""
    engine, before = step.engine, step.engine.record
    number = engine.slot.generation + 1
    goal = Goal(run=True, generation=number, cause=cause)
    engine.marks.clear()
    engine.aim(goal, **{"config": step.config or before.config, **(step.fields or {})})
    try:
        why = await _arrival(engine, number, stage)
    except asyncio.CancelledError:
        call_off(engine, before)
        raise
    if not why:
        return _came(engine)
    back = await _go_back(engine, stage)
    raise RltopError(f"engine {engine.id} did not come up as generation {number}", why=why, do=back, exit_code=1)


async def arrived(engine: Engine, stage: Stage) -> str:
    """Wait for the generation that its goal asks for, whoever asked. Raises `RltopError`."""
    why = await _arrival(engine, engine.record.goal.generation, stage)
    if why:
        raise RltopError(f"engine {engine.id} did not come up", why=why, do=_log(engine), exit_code=1)
    return _came(engine)


async def _arrival(engine: Engine, number: int, stage: Stage) -> str:
    """Wait until the generation serves: ""; or until it has failed: why."""
    tell = _teller(engine, stage)

    def outcome() -> str | None:
        slot = engine.slot
        tell()
        if slot.generation < number:
            return f"its node is lost: {slot.cause}" if slot.state is State.LOST else None
        if slot.state in SERVING:
            return "serves"
        failed = slot.failing is not None or slot.state in (State.CRASHED, State.BACKOFF, State.QUARANTINED, State.LOST)
        return f"{slot.fingerprint}: {slot.cause}" if failed else None

    try:
        async with asyncio.timeout(patience(engine.house.policy)):
            found = str(await engine.until(outcome))
    except TimeoutError:
        return f"it is still {engine.slot.state}: {engine.slot.cause}"
    return "" if found == "serves" else found


def patience(policy: FleetPolicy) -> float:
    """Seconds after which an operation on one engine has failed: all deadlines together, and as long for weights."""
    return ending(policy) + policy.drain_s + policy.launch_s + 2 * policy.start_s


def ending(policy: FleetPolicy) -> float:
    """Seconds that the end of one engine may take, without its drain; it may have to be launched first."""
    return policy.abort_s + policy.term_s + policy.kill_s + policy.reclaim_s + policy.launch_s


async def _go_back(engine: Engine, stage: Stage) -> str:
    """After a change that did not start: the arguments of the last good generation. What became of it, in words."""
    good = engine.record.good
    if good is None or good == engine.record.running or engine.slot.state in ANSWERING:
        return f"read its log: {engine.process.log}" if engine.process else ""
    number = engine.slot.generation + 1
    log = engine.process.log if engine.process else "its log"
    cause = f"back to the arguments of generation {engine.record.good_generation}"
    stage(f"engine {engine.id}: {cause}")
    engine.aim(Goal(run=True, generation=number, cause=cause), config=good, arm="", ab_base=None, ab_changes={})
    why = await _arrival(engine, number, stage)
    if why:
        return f"{cause}: that did not help either ({why}); read {log}"
    return f"it is {cause} and serves again; what went wrong is in {log}"


def call_off(engine: Engine, before: SlotRecord) -> None:
    """Take back what was written down, where the old process has not been ended yet. Otherwise the new one comes."""
    slot, goal = engine.slot, engine.record.goal
    old = slot.generation < goal.generation or not goal.run
    if old and slot.state in LIVE - {State.STOPPING} and slot.failing is None:
        arms = {"arm": before.arm, "ab_base": before.ab_base, "ab_changes": before.ab_changes}
        engine.aim(before.goal, config=before.config, **arms)


async def start(engine: Engine, cause: str, stage: Stage, *, answering: bool = False) -> str:
    """Start one engine and wait until it serves (answering: until it could, if only it had the weights)."""
    number = engine.slot.generation + 1
    engine.marks.clear()
    engine.aim(Goal(run=True, generation=number, cause=cause))
    if answering:
        return await answers(engine, stage)
    why = await _arrival(engine, number, stage)
    if why:
        raise RltopError(f"engine {engine.id} did not start", why=why, do=_log(engine), exit_code=1)
    return _came(engine)


async def answers(engine: Engine, stage: Stage) -> str:
    """Wait until it answers. Raises `RltopError` when it fails first."""
    tell = _teller(engine, stage)

    def there() -> str | None:
        slot = engine.slot
        tell()
        if slot.state in ANSWERING:
            return "answers"
        failed = slot.failing is not None or slot.state in (State.CRASHED, State.BACKOFF, State.QUARANTINED)
        return f"{slot.fingerprint}: {slot.cause}" if failed else None

    try:
        async with asyncio.timeout(patience(engine.house.policy)):
            found = str(await engine.until(there))
    except TimeoutError:
        found = f"it is still {engine.slot.state}: {engine.slot.cause}"
    if found != "answers":
        raise RltopError(f"engine {engine.id} did not start", why=found, do=_log(engine), exit_code=1)
    return f"engine {engine.id} answers{_ignored(engine)}"


async def stop(engine: Engine, cause: str, stage: Stage, *, drain: bool = True) -> str:
    """Stop one engine. Cancelled while it drains, it goes on serving; later, it is stopped all the same."""
    before = engine.record
    engine.marks.clear()
    engine.aim(Goal(run=False, generation=engine.slot.generation, drain=drain, cause=cause))
    tell, limit = _teller(engine, stage), ending(engine.house.policy) + (engine.house.policy.drain_s if drain else 0)

    def stopped() -> bool:
        tell()
        return engine.adopted and engine.slot.state is State.STOPPED

    try:
        async with asyncio.timeout(limit):
            await engine.until(stopped)
    except TimeoutError as error:
        why = f"it is still {engine.slot.state}: {engine.waits or engine.slot.cause}"
        raise RltopError(f"engine {engine.id} was not stopped", why=why, do=_log(engine), exit_code=1) from error
    except asyncio.CancelledError:
        call_off(engine, before)
        raise
    return f"engine {engine.id}: {times(engine.marks)}"


def _came(engine: Engine) -> str:
    """How long it took, and what it was asked for without effect: it serves, but not as it was meant to."""
    return f"engine {engine.id}: {times(engine.marks)}{_ignored(engine)}"


def _ignored(engine: Engine) -> str:
    found = engine.watch.verified
    if found is None or not found.ignored:
        return ""
    words = [f"{name}={found.wanted[name]} (it runs with {found.toggles[name].value})" for name in found.ignored]
    return f", but without effect: {', '.join(words)}"


def standing(engine: Engine, before: int, config: Config | None, *, changes: bool) -> str:
    """Where an engine stands after its operation was cancelled. before, config: its generation when that was planned,
    and the arguments that it was to get; changes: they are other ones."""
    slot, goal = engine.slot, engine.record.goal
    which = ", with the change" if engine.record.config == config else ", with its old arguments"
    which = which if changes else ""
    if not goal.run:
        return f"engine {engine.id} {'is' if slot.state is State.STOPPED else 'will be'} stopped{which}"
    if slot.generation < goal.generation:
        return f"engine {engine.id} goes on to generation {goal.generation}{which}"
    if slot.generation == before:
        return f"engine {engine.id} stays generation {before}{which}"
    coming = "" if slot.serves() else f" ({slot.state})"
    return f"engine {engine.id} is generation {slot.generation}{coming}{which}"


def _log(engine: Engine) -> str:
    return f"read its log: {engine.process.log}" if engine.process else ""


def _teller(engine: Engine, stage: Stage) -> Callable[[], None]:
    """Tells the engine's progress whenever it is another than before."""
    shown = ""

    def tell() -> None:
        nonlocal shown
        text = _progress(engine)
        if text and text != shown:
            shown = engine.stage = text
            stage(f"engine {engine.id}: {text}")

    return tell


def _progress(engine: Engine) -> str:
    """`drained 0.4 s, stopping`."""
    done, doing = times(engine.marks), _DOING.get(engine.slot.state, "")
    if waits := engine.pending or engine.waits:
        doing = f"waits for {waits}"
    return ", ".join(part for part in (done, doing) if part)


def times(marks: Sequence[tuple[State, float]]) -> str:
    """`drained 0.4 s, stopped 0.2 s, reclaimed 0.0 s, ready 2.9 s, healthy 3.1 s`; the last two count from the launch.

    marks: the states in order, with the moments they were entered. Only what has ended is told.
    """
    at: dict[State, float] = {}
    for state, moment in marks:
        if state is State.LAUNCHING:  # a start that was tried again counts from its last try
            at = {key: value for key, value in at.items() if key in (State.DRAINING, State.STOPPING, State.RECLAIMING)}
        at[state] = moment
    launch, parts = at.get(State.LAUNCHING), []
    down = [(State.DRAINING, "drained"), (State.STOPPING, "stopped"), (State.RECLAIMING, "reclaimed")]
    ends = [moment for _, moment in marks]
    for state, word in down:
        later = [moment for other, moment in marks if state in at and moment >= at[state] and other is not state]
        if later and ends:
            parts.append(f"{word} {min(later) - at[state]:.1f} s")
    if launch is not None:
        for state, word in ((State.STALE, "ready"), (State.HEALTHY, "healthy")):
            if state in at:
                parts.append(f"{word} {at[state] - launch:.1f} s")
    return ", ".join(parts)
