"""Engines on trial: out of the rotation, with arguments and weights of somebody's choice, until they are given back.

Whoever tries (a bisection) holds the engines, starts generations of its own on them, watches these live and die, and
gives each engine back with what it had before. While an engine is on trial it is `RESERVED` for everybody else: the
trainer neither asks it nor pushes to it, its crashes are no alarms, and nobody restarts it.

What is wanted is written into the slot's file before it is done, with what the engine goes back to: a daemon that is
killed leaves engines that the next one finds on trial, and that can be given back even if nobody remembers why.

Failure policy: an engine that cannot be brought up is a fact about the trial (`Sight`), not an exception. `RltopError`
means that nothing could be written down, or that an engine did not come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from rltop.engines import rolling
from rltop.engines.cautions import nobody_serves
from rltop.engines.chores import Verified, model_config
from rltop.engines.client import AsyncEngineClient
from rltop.engines.log import EngineLog
from rltop.engines.requests import VERSION, Config
from rltop.engines.slots import OnTrial
from rltop.engines.states import ANSWERING, LIVE, SERVING, Goal, State
from rltop.engines.supervisor import Engine
from rltop.engines.verify import scrub

T = TypeVar("T")
SAVER_FIELD = "enable_memory_saver"
"""Of ServerArgs."""
UNUSED_LINES = 3
"""Decode lines (one in 40 steps each) without a replay, and none with, after which graphs are not in use."""
MOST_LOADS = 3
"""Refused loads of the weights in a row, after which an engine on trial is not waited for any more."""
BACK_S = 60.0
"""After its memory came back: until it is seen to serve."""
Where = Literal["coming", "ready", "hung", "crashed", "lost", "gone"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """An engine as it is before a trial: what trials start from, and what it goes back to."""

    id: str
    kind: str
    model_path: str
    launcher: str
    config: Config
    version: str
    """SGLang's."""
    generation: int
    state: str
    runs: bool
    """It is meant to run."""
    busy: str
    """Who holds it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """`/server_info` of a living generation with these arguments, without secrets; empty: it was not seen."""
    toggles: Mapping[str, str | None] = field(default_factory=dict)
    """In effect there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What is seen of the generation on trial."""

    where: Where
    """coming: not there yet. ready: it answers and holds the weights. hung: it stands still. crashed: it ended by
    itself. lost: it never became a process, or its node is gone. gone: somebody else ended or replaced it."""
    generation: int
    url: str = ""
    since: float = 0.0
    """When it got there, on the caller's clock."""
    fingerprint: str = ""
    kind: str = ""
    """Class of the crash."""
    phase: str = ""
    kernel: str = ""
    cause: str = ""
    log: str = ""
    started: bool = False
    """It had answered before it ended."""
    toggles: Mapping[str, str | None] = field(default_factory=dict)
    """In effect, once it answered."""
    ignored: tuple[str, ...] = ()
    node_lost: bool = False
    doubted: bool = False
    """It is ready, and a signal is bad: it may be about to hang."""


class Trials:
    """What a fleet offers to whoever tries."""

    def __init__(self, engines: Mapping[str, Engine], operations: dict[asyncio.Task[Any], tuple[str, ...]]) -> None:
        """operations: those of the fleet that the end of every engine cancels."""
        self._engines = engines
        self._operations = operations

    def subject(self, engine_id: str) -> Subject:
        """Raises KeyError: there is no such engine."""
        engine = self._engines[engine_id]
        record, found = engine.record, engine.watch.verified
        config = record.trial.base if record.trial is not None else record.config
        same = found is not None and record.running == config
        return Subject(
            id=engine.id,
            kind=record.declared.kind,
            model_path=record.declared.model_path,
            launcher=record.launcher,
            config=config,
            version=record.version or VERSION,
            generation=engine.slot.generation,
            state=engine.slot.state.value,
            runs=record.goal.run,
            busy=engine.busy,
            info=scrub(found.info) if found is not None and same else {},
            toggles=effective_toggles(found, engine.watch.log) if found is not None and same else {},
        )

    @contextmanager
    def held(self, ids: Sequence[str], name: str) -> Iterator[None]:
        """Nobody else operates on these engines. The end of every engine cancels the caller's task.

        Raises `RltopError` when one is held by somebody.
        """
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        with rolling.holding([self._engines[name] for name in ids], name):
            self._operations[task] = tuple(ids)
            try:
                yield
            finally:
                del self._operations[task]

    def ids(self) -> list[str]:
        """Every engine of the fleet."""
        return list(self._engines)

    def client(self, url: str) -> AsyncEngineClient:
        """A client of its own for an engine on trial."""
        return next(iter(self._engines.values())).house.http(url)

    def nobody_serves(self, ids: Sequence[str]) -> str:
        """A warning where no other engine serves now; "" where some do."""
        return nobody_serves(self._engines, ids, "until the bisection ends")

    def unserved(self, ids: Sequence[str]) -> str:
        """Why no engine serves the run now, these being on trial; "": another one does."""
        others = [one for one in self._engines.values() if one.id not in ids]
        if any(one.slot.serves() for one in others):
            return ""
        told = [
            *(f"engine {one.id} is {one.slot.state}" for one in others),
            *(f"engine {one} is on trial" for one in ids),
        ]
        return f"no engine serves the run: {', '.join(told)}"

    def where(self, engine_id: str) -> str:
        """Its state, and what it waits for or why it is in it."""
        engine = self._engines[engine_id]
        cause = engine.waits or engine.slot.cause
        return f"{engine.slot.state}: {cause}" if cause else str(engine.slot.state)

    def next_generation(self, engine_id: str) -> int:
        """The number that `put_on` will give."""
        return self._engines[engine_id].slot.generation + 1

    def put_on(self, engine_id: str, trial: OnTrial, config: Config, why: str) -> int:
        """Begin the next generation, on trial; returns its number. Raises `RltopError` when that cannot be written."""
        engine = self._engines[engine_id]
        number = self.next_generation(engine_id)
        engine.marks.clear()
        goal = Goal(run=True, generation=number, cause=why, reserved=True)
        engine.aim(goal, config=config, trial=trial, arm="", ab_base=None, ab_changes={})
        return number

    def sight(self, engine_id: str, generation: int) -> Sight:
        """What is seen of this generation."""
        engine = self._engines[engine_id]
        slot, crash, process = engine.slot, engine.watch.crash, engine.process
        found = engine.watch.verified if slot.generation == generation else None
        told: dict[str, Any] = {
            "generation": generation,
            "since": slot.since,
            "cause": slot.cause,
            "log": process.log if process is not None else "",
            "started": found is not None,
            "toggles": effective_toggles(found, engine.watch.log) if found is not None else {},
            "ignored": tuple(found.ignored) if found is not None else (),
            "node_lost": slot.state is State.LOST,
        }
        if not engine.adopted:
            return Sight(where="coming", **told)
        if engine.record.goal.generation < generation:
            return Sight(where="gone", **told)  # it was written down, and never begun
        if slot.generation < generation:
            stuck = slot.state is State.LOST or not engine.record.goal.run
            return Sight(where="lost" if stuck else "coming", **told)
        if slot.generation > generation or not slot.reserved or not engine.record.goal.run:
            return Sight(where="gone", **told)
        match slot.state:
            case State.LOST | State.STOPPED | State.RECLAIMING | State.STOPPING:
                failed = slot.failing is not None
                return Sight(where="lost" if failed or slot.state is State.LOST else "gone", **told)
            case State.CRASHED | State.BACKOFF | State.QUARANTINED:
                if slot.dying or process is None or crash is None:
                    # Its last words are still being read, or it never was a process.
                    never = slot.state is not State.CRASHED or (slot.clean and crash is None)
                    where: Where = "lost" if never else "coming" if crash is None else "crashed"
                    if slot.dying:
                        where = "coming"
                    return Sight(where=where, fingerprint=slot.fingerprint, **told)
                return Sight(
                    where="crashed",
                    fingerprint=crash.fingerprint,
                    kind=crash.kind,
                    phase=crash.phase,
                    kernel=crash.kernel,
                    **{**told, "cause": crash.cause},
                )
            case state if state in SERVING:
                hung = state is State.SUSPECT and slot.escalated
                doubted = state is State.SUSPECT
                return Sight(where="hung" if hung else "ready", url=engine.url, doubted=doubted, **told)
            case State.STALE if engine.watch.not_loaded >= MOST_LOADS:
                return Sight(where="lost", **told)
            case _:
                return Sight(where="coming", **told)

    async def until(self, engine_id: str, generation: int, reached: Callable[[Sight], T | None]) -> T:
        """The first value that is not None, asked after every move of the engine."""
        engine = self._engines[engine_id]
        found: list[T] = []

        def there() -> bool:
            value = reached(self.sight(engine_id, generation))
            if value is not None:
                found.append(value)
            return bool(found)

        await engine.until(there)
        return found[0]

    def patience_s(self, engine_id: str) -> float:
        """Seconds after which a start has failed: its drain, its end, its launch, its load and its weights."""
        return rolling.patience(self._engines[engine_id].house.policy)

    def lend(self, engine_id: str) -> None:
        """Its memory is about to be released: nobody asks it anything until `back`."""
        self._engines[engine_id].memory(released=True)

    async def back(self, engine_id: str, generation: int, version: str) -> None:
        """It has its memory and these weights again; returns when it may be asked, is over, or does not come back."""
        engine = self._engines[engine_id]
        engine.expect(version, "")
        engine.memory(released=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(BACK_S):
                await self.until(engine_id, generation, lambda seen: None if seen.where == "coming" else seen)

    def on_trial(self) -> dict[str, OnTrial]:
        """Engines that are on trial by their files, whoever put them there."""
        return {name: one.record.trial for name, one in self._engines.items() if one.record.trial is not None}

    async def give_back(self, engine_id: str, why: str) -> str:
        """Start it with what it had before, in the rotation; "" when it answers so, else why it does not.

        One that is not meant to run gets its arguments for its next start. Weights come as they do after any start.
        Raises `RltopError` when it cannot be written down.
        """
        engine = self._engines[engine_id]
        trial = engine.record.trial
        if trial is None:
            return ""
        base = trial.base
        fields: dict[str, Any] = {"config": base, "trial": None}
        if not engine.record.goal.run:
            engine.note(**fields)
            return ""
        if not engine.slot.reserved and engine.record.running == base and engine.slot.state in LIVE:
            # It was never put on trial: what was written down is called off.
            engine.aim(Goal(run=True, generation=engine.slot.generation, cause=why), **fields)
            return ""
        engine.marks.clear()
        engine.aim(Goal(run=True, generation=engine.slot.generation + 1, cause=why), **fields)
        return await self._back(engine, base)

    async def _back(self, engine: Engine, base: Config) -> str:
        number = engine.record.goal.generation

        def there() -> str | None:
            slot = engine.slot
            if not engine.record.goal.run:
                return "it was stopped meanwhile; its next start has its own arguments"
            if slot.generation < number:
                return f"its node is lost: {slot.cause}" if slot.state is State.LOST else None
            if slot.state in ANSWERING:
                return "answers"
            failed = slot.failing is not None or slot.state in (State.CRASHED, State.BACKOFF, State.QUARANTINED)
            return f"it is {slot.state}: {slot.fingerprint}: {slot.cause}" if failed else None

        try:
            async with asyncio.timeout(rolling.patience(engine.house.policy)):
                found = str(await engine.until(there))
        except TimeoutError:
            return f"it is still {engine.slot.state}: {engine.waits or engine.slot.cause}"
        if found != "answers":
            return found
        verified = engine.watch.verified
        ignored = [f"{name}={verified.wanted[name]}" for name in verified.ignored] if verified is not None else []
        if engine.record.running != base:
            return "somebody gave it other arguments meanwhile"
        return f"without effect: {', '.join(ignored)}" if ignored else ""

    def put_back(self, engine_id: str) -> None:
        """Only write down that its next start is as before. Raises `RltopError`."""
        engine = self._engines[engine_id]
        if engine.record.trial is not None:
            engine.note(config=engine.record.trial.base, trial=None)


def model_of(subject: Subject) -> dict[str, Any] | None:
    """config.json of its model, where this machine can read it."""
    return model_config(subject.model_path)


def effective_toggles(found: Verified, log: EngineLog) -> dict[str, str | None]:
    """Toggle -> value in effect; padding without a decode graph is none. With `memory_saver`, a bisection's own.

    Graphs that were captured and that no decode step replays are none: what the log says of the steps counts more than
    what the engine says of itself.
    """
    seen = {name: one.value for name, one in found.toggles.items()}
    if log.eager >= UNUSED_LINES and not log.replayed:
        seen["cuda_graph"] = "off"
    if seen.get("cuda_graph") == "off":
        seen["cuda_graph_padding"] = "off"
    if SAVER_FIELD in found.info:
        seen["memory_saver"] = "on" if found.info[SAVER_FIELD] else "off"
    return seen
