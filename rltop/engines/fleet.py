"""The engines of a run: what should run is written down, then done, and done again by the next daemon if this one dies.

`Fleet` is the daemon's face of it: it plans requests (`planning.py`), carries plans out (`rolling.py`), and keeps one
supervisor per slot (`supervisor.py`). Requests and plans are in `requests.py`, states and settings in `states.py`.

Failure policy: engines survive this process. Whatever is cancelled or killed here, the slot files say how to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rltop.engines import rolling
from rltop.engines.arms import Arms, arm_fields
from rltop.engines.client import AsyncEngineClient
from rltop.engines.house import House
from rltop.engines.launcher import Launcher
from rltop.engines.planning import make_plan
from rltop.engines.requests import (
    VERSION,
    Ab,
    AbEnd,
    Config,
    EngineSlot,
    FleetPlan,
    Http,
    Refused,
    Request,
    Required,
    Restart,
    Revert,
    SetToggles,
    Start,
    StartEngines,
    Stop,
    Synced,
)
from rltop.engines.rolling import Next, Stage
from rltop.engines.slots import SlotStore, declared_config, new_record
from rltop.engines.states import LIVE, SERVING, FleetPolicy, State
from rltop.engines.supervisor import Engine
from rltop.engines.trials import Trials
from rltop.errors import RltopError
from rltop.evidence.known import shipped

__all__ = [
    "Ab",
    "AbEnd",
    "Config",
    "EngineSlot",
    "Fleet",
    "FleetPlan",
    "FleetPolicy",
    "Http",
    "Publish",
    "Refused",
    "Request",
    "Required",
    "Restart",
    "Revert",
    "SetToggles",
    "Start",
    "StartEngines",
    "State",
    "Stop",
    "Synced",
    "Tell",
]

Publish = Callable[[str, dict[str, Any] | None], None]
"""Engine id and the fleet's part of its cell; None: the engine is gone."""
Tell = Callable[[str, str, str, str, str], None]
"""Level, text, engine id, state before, state after."""
SYNC_S = 20.0
"""How long the trainer's word that it pushed may take to show in the engine."""


class Fleet:
    """Supervises the engines of one run."""

    def __init__(
        self,
        *,
        run: str,
        run_dir: Path,
        launchers: Mapping[str, Launcher],
        http: Callable[[str], AsyncEngineClient],
        policy: FleetPolicy,
        clock: Callable[[], float],
        wall: Callable[[], float],
        publish: Publish,
        event: Tell,
        required: Callable[[], Required],
        updating: Callable[[], bool],
        safe_point: Callable[[], bool] | None = None,
        lent: Callable[[], bool] = lambda: False,
        leaving: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """launchers: may be added to later (a mutable mapping): a request names one. clock: monotonic seconds.

        required: the weights that an engine must hold now. updating: a weight update is going on. safe_point: between
        two rollouts; without it, whenever no engine has work. lent: a colocated trainer has the devices' memory, so
        nothing is started. leaving: told the URL of an engine before it drains.
        """
        self._launchers = launchers
        self._tell = event
        self._store = SlotStore(run_dir)
        self._safe_point = safe_point
        self._engines: dict[str, Engine] = {}
        self._arms = Arms(self._engines, clock, wall)
        self._house = House(
            run=run,
            run_dir=run_dir,
            launchers=launchers,
            http=http,
            policy=policy,
            clock=clock,
            wall=wall,
            publish=publish,
            tell=event,
            required=required,
            updating=updating,
            lent=lent,
            store=self._store,
            known=shipped(),
            looked=self._arms.looked,
            left=self._arms.left,
            leaving=leaving,
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._operations: dict[asyncio.Task[Any], tuple[str, ...]] = {}
        self.trials = Trials(self._engines, self._operations)
        """Engines out of the rotation, for whoever tries something on them."""
        self._stopping: asyncio.Task[str] | None = None
        self._running = False
        records, self._problems = self._store.read_all()
        self._engines.update({record.declared.id: Engine(record, self._house) for record in records})
        self._arms.settle()

    # ---------------------------------------------------------------- the loop

    async def run(self) -> None:
        """The control loop, until cancelled. Adopts first what the slot files say. The engines go on afterwards."""
        for problem in self._problems:
            self._tell("error", problem, "", "", "")
        self._running = True
        for engine in self._engines.values():
            self._supervise(engine)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._running = False
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks.clear()

    def _supervise(self, engine: Engine) -> None:
        if self._running and engine.id not in self._tasks:
            self._tasks[engine.id] = asyncio.get_running_loop().create_task(engine.run(), name=f"engine {engine.id}")

    # ---------------------------------------------------------------- requests

    def plan(self, request: Request) -> FleetPlan | Refused:
        """What the request would do; nothing happens."""
        return make_plan(request, self._engines, self._launchers)

    async def carry_out(self, plan: FleetPlan, stage: Stage) -> str:
        """Do it. Raises `RltopError`. Cancelling leaves each engine on its old or its new generation, whole."""
        for name, generation in plan.generations.items():
            now = self._engines[name].slot.generation if name in self._engines else 0
            if now != generation:
                why = f"engine {name} is at generation {now}, the plan was made for {generation}"
                raise RltopError("the engines changed since the plan", why=why, do="plan again", exit_code=1)
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._operations[task] = plan.targets
        try:
            return await self._do(plan, stage)
        except asyncio.CancelledError:
            # Whoever cancels a roll in its middle has to know which engines have what.
            raise asyncio.CancelledError(self._where_they_stand(plan)) from None
        finally:
            del self._operations[task]

    def _where_they_stand(self, plan: FleetPlan) -> str:
        def standing(name: str) -> str:
            config, changes = plan.configs.get(name), bool(plan.diff.get(name))
            return rolling.standing(self._engines[name], plan.generations[name], config, changes=changes)

        return "; ".join(standing(name) for name in plan.targets if name in self._engines and name in plan.generations)

    async def _do(self, plan: FleetPlan, stage: Stage) -> str:
        request = plan.request
        match request:
            case Synced():
                return await self._synced(request)
            case Http():
                return await self._http(request)
            case StartEngines():
                return await self._start_engines(request, stage)
            case _:
                chosen = [self._engines[name] for name in plan.targets]
                with rolling.holding(chosen, _name(request)):
                    match request:
                        case Start():
                            return await self._each(
                                rolling.start(one, _cause("started", request), stage) for one in chosen
                            )
                        case Stop():
                            await rolling.safe_point(chosen, request.when, self._safe, stage)
                            return await self._each(
                                rolling.stop(one, _cause("stopped", request), stage) for one in chosen
                            )
                        case _:
                            await rolling.safe_point(chosen, request.when, self._safe, stage)
                            return await self._restart(request, plan, chosen, stage)

    async def resume(self, request: Request, before: Mapping[str, int], stage: Stage) -> str:
        """Finish a request that an earlier daemon began: engines already past `before[id]` are only waited for."""
        if isinstance(request, (Synced, Http)):
            return "not done again: its moment has passed"
        if isinstance(request, (Start, StartEngines, Stop)):
            plan = self.plan(request)
            return plan.why if isinstance(plan, Refused) else await self.carry_out(plan, stage)
        names = [name for name in before if name in self._engines]
        moved = [name for name in names if self._engines[name].record.goal.generation > before[name]]
        engines = [self._engines[name] for name in moved]
        with rolling.holding(engines, _name(request)):
            await self._each(rolling.arrived(engine, stage) for engine in engines)
        rest = tuple(name for name in names if name not in moved)
        if isinstance(request, Revert):  # one that is stopped was put back at once, or may be put back by hand
            rest = tuple(name for name in rest if self._engines[name].record.goal.run)
        if not rest or isinstance(request, (Ab, AbEnd)):
            self._arms.settle()
            return f"engines {', '.join(moved) or 'none'} were brought to their new generation"
        plan = self.plan(replace(request, targets=rest))
        return plan.why if isinstance(plan, Refused) else await self.carry_out(plan, stage)

    async def stop_all(self, stage: Stage) -> str:
        """End every engine now, without a drain. Never refused: what runs on a slot is cancelled.

        Asked again meanwhile, both wait for the one that runs.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop_all(stage))
            self._stopping.add_done_callback(self._stopped)
        return await asyncio.shield(self._stopping)

    def _stopped(self, task: asyncio.Task[str]) -> None:
        self._stopping = None
        if not task.cancelled():
            task.exception()  # whoever asked has it; nobody may be left to

    async def _stop_all(self, stage: Stage) -> str:
        others = list(self._operations)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        engines = list(self._engines.values())
        for engine in engines:
            engine.force = True
        try:
            with rolling.holding(engines, "stop of every engine"):
                await self._each(
                    rolling.stop(engine, "the run ended", stage, drain=False)
                    for engine in engines
                    if engine.record.goal.run or engine.slot.state is not State.STOPPED or not engine.adopted
                )
        finally:
            for engine in engines:
                engine.force = False
        return f"{len(engines)} engines are stopped" if engines else "there were no engines"

    # ---------------------------------------------------------------- what others tell

    def trainer_saw(self, engine_id: str, generation: int, ok: bool, text: str) -> None:
        """The trainer's requests to this engine fail (or succeed again). Of an old generation: no effect."""
        if engine := self._engines.get(engine_id):
            engine.trainer_saw(generation, ok, text)

    def not_synced(self, engine_id: str, why: str) -> None:
        """A weight update ended, and this engine refused it or did not answer."""
        if engine := self._engines.get(engine_id):
            engine.not_synced(why)

    def rollout_done(self) -> None:
        """A rollout ended: the engines have survived one more."""
        for engine in self._engines.values():
            engine.rollout_done()

    def sampled(self, engine_id: str, rollout_id: int, gap: float, tokens: int) -> None:
        """Mean |rollout - train| log-prob of `tokens` tokens that this engine made (the A/B comparison)."""
        self._arms.sampled(engine_id, rollout_id, gap, tokens)

    def released(self, engine_id: str) -> None:
        """The trainer released this engine's memory: probes pause."""
        if engine := self._engines.get(engine_id):
            engine.memory(released=True)

    def resumed(self, engine_id: str) -> None:
        """The trainer resumed it: it is STALE until it holds the required weights."""
        if engine := self._engines.get(engine_id):
            engine.memory(released=False)

    # ---------------------------------------------------------------- what can be asked

    def ids(self) -> list[str]:
        """The engines that the fleet knows."""
        return list(self._engines)

    def owns(self, engine_id: str) -> bool:
        """Whether the fleet knows this engine."""
        return engine_id in self._engines

    def launch(self, engine_id: str) -> tuple[tuple[str, ...], dict[str, str], str]:
        """argv, environment and SGLang version of the generation that should run."""
        record = self._engines[engine_id].record
        return record.config.args, dict(record.config.env), record.version or VERSION

    def state(self, engine_id: str) -> State:
        """Where its slot is now."""
        return self._engines[engine_id].slot.state

    def ab(self) -> dict[str, Any] | None:
        """The running A/B comparison for the `fleet` cell."""
        return self._arms.cell()

    # ---------------------------------------------------------------- doing

    async def _each(self, works: Iterable[Coroutine[Any, Any, str]]) -> str:
        return "; ".join(await rolling.together(works))

    async def _start_engines(self, request: StartEngines, stage: Stage) -> str:
        engines = []
        for slot in request.slots:
            engine = self._engines.get(slot.id)
            if engine is None:
                record = new_record(slot, request.launcher, self._store.newest(slot.id))
                self._store.write(record)
                engine = self._engines[slot.id] = Engine(record, self._house)
                engine.adopted = True
                self._supervise(engine)
                engine.publish()
            engines.append(engine)
        with rolling.holding(engines, _name(request)):
            return await self._each(
                self._have(engine, slot, request, stage) for engine, slot in zip(engines, request.slots, strict=True)
            )

    async def _have(self, engine: Engine, slot: EngineSlot, request: StartEngines, stage: Stage) -> str:
        """One engine as declared: kept, started, or started anew."""
        await engine.until(lambda: engine.adopted)
        record, cause = engine.record, _cause("started", request)
        if record.declared == slot and record.launcher == request.launcher:
            if record.goal.run and engine.slot.state in LIVE | {State.LAUNCHING}:
                return await rolling.answers(engine, stage)
            return await rolling.start(engine, cause, stage, answering=True)
        if engine.slot.state is not State.STOPPED:
            await rolling.stop(engine, "it is declared otherwise", stage, drain=False)
        config = declared_config(slot)
        fresh: dict[str, Any] = {"arm": "", "ab_base": None, "ab_changes": {}, "version": ""}
        engine.note(declared=slot, config=config, launcher=request.launcher, **fresh)
        return await rolling.start(engine, cause, stage, answering=True)

    async def _restart(self, request: Request, plan: FleetPlan, chosen: list[Engine], stage: Stage) -> str:
        if not isinstance(request, (SetToggles, Restart, Revert, Ab, AbEnd)):
            raise TypeError(f"not a restart: {request}")
        cause, told = _cause(_verb(request), request), []
        for one in chosen:
            if one.id in plan.stays:
                one.note(config=plan.configs[one.id], **arm_fields(request, one))
                told.append(f"engine {one.id}: stays stopped, with other arguments for its next start")
        steps = [
            Next(engine=one, config=plan.configs[one.id], fields=arm_fields(request, one))
            for one in chosen
            if one.id not in plan.stays
        ]
        try:
            if isinstance(request, (Ab, AbEnd)) or request.mode == "rolling":
                done = await rolling.roll(steps, self._engines, keep=request.keep, cause=cause, stage=stage)
            else:
                done = await rolling.together(rolling.restart(step, cause, stage) for step in steps)
        finally:
            if isinstance(request, (Ab, AbEnd)):
                self._arms.settle(request)
        return "; ".join([*done, *told])

    async def _synced(self, request: Synced) -> str:
        """The trainer pushed; the engine is asked."""
        engine = self._engines[request.target]
        engine.expect(request.version, request.digest)
        try:
            async with asyncio.timeout(SYNC_S):
                await engine.until(lambda: engine.slot.state in SERVING or engine.slot.generation != request.generation)
        except TimeoutError:
            why = f"it is {engine.slot.state}: {engine.slot.cause}"
            raise RltopError(f"engine {request.target} does not serve yet", why=why, exit_code=1) from None
        if engine.slot.generation != request.generation:
            raise RltopError(f"engine {request.target} was restarted meanwhile", do="push to the new one", exit_code=1)
        return f"engine {request.target} holds weight version {engine.watch.weight_version}"

    async def _http(self, request: Http) -> str:
        engine = self._engines[request.target]
        if engine.client is None:
            raise RltopError(f"engine {request.target} has no address now", why=engine.slot.cause, exit_code=1)
        match request.action:
            case "flush":
                await engine.client.flush_cache()
            case "pause":
                await engine.client.pause("in_place")
                engine.hold(request.who or "somebody")
            case "continue":
                await engine.client.resume_generation()
                engine.hold("")
            case "profile":
                await engine.client.profile()
        return f"engine {request.target}: {request.action} done"

    def _safe(self) -> bool:
        if self._house.updating():
            return False
        if self._safe_point is not None:
            return self._safe_point()
        return not any(one.watch.stats and one.watch.stats.running for one in self._engines.values())


def _verb(request: SetToggles | Restart | Revert | Ab | AbEnd) -> str:
    match request:
        case SetToggles() | Ab():
            return "change of " + ", ".join(f"{name}={value}" for name, value in request.changes.items())
        case Restart():
            return "restart"
        case Revert():
            return "revert"
        case AbEnd():
            return "end of the A/B comparison"


def _cause(verb: str, request: Request) -> str:
    who = f" by {request.who}" if request.who else ""
    reason = getattr(request, "reason", "")
    return f"{verb}{who}" + (f": {reason}" if reason else "")


def _name(request: Request) -> str:
    """What an operation is called when it stands in another's way."""
    verb = _verb(request) if isinstance(request, (SetToggles, Restart, Revert, Ab, AbEnd)) else type(request).__name__
    return _cause(verb.lower() if verb[0].isupper() else verb, request)
