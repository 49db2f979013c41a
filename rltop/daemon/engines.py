"""The engines of a run that are the daemon's: a fleet, what it must know of the run, and what viewers see of it.

The fleet (`rltop.engines.fleet`) launches, watches and restarts; nothing of it, nor of httpx or Ray, is imported before
the run has an engine of its own. Here stands what only the daemon knows: which weights an engine must hold, whether a
weight update or a rollout is going on, what the trainer's requests meet. And here the fleet's words become state cells
(`engine/<id>`, `toggles/<id>`, `fleet`) and events.

Failure policy: a fault of the fleet's control loop is an event and the loop begins anew after a moment, adopting what
runs; it never takes the daemon down, and never an engine. The engines outlive a daemon that is killed, and are adopted
by the next one from what their slot files say. They end with the run's trainer, however that ended, and with the run;
engines that were left by a trainer that is gone are ended by the next daemon.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rltop.checks.phrase import brief
from rltop.daemon.core import Core, trim
from rltop.daemon.engine_view import Offers, carried, crashes, fleet_cell, toggle_cells, trainer_sides
from rltop.daemon.slime_trainer import SlimeOptions, SlimeTrainer
from rltop.engines.processes import locked
from rltop.engines.requests import FleetPlan, Refused, Request, Required, StartEngines
from rltop.errors import RltopError

if TYPE_CHECKING:
    from rltop.engines.launcher import Launcher
    from rltop.engines.trials import Trials

Stage = Callable[[str], None]
AGAIN_S = 1.0
"""After a fault of the control loop."""
TOLD_S = 5.0
"""After the phase `update_weights` its `weights` record comes within this time; until then the update is going on."""
CLUSTER = "cluster.json"
"""In the run's folder of engines: the Ray cluster that they run on."""
_RAY = ("address", "namespace", "token_file")
STOP_S = 90.0
"""For ending all engines of a trainer that is gone: term_s, kill_s and reclaim_s of the fleet's policy, and some."""
_BUSY_PHASES = frozenset({"rollout", "eval", "update_weights", "offload", "wake_up", "sleep", "onload"})
"""Phases in which engines are asked, or their weights or memory moved: no safe point."""


class Fleet(Protocol):
    """What is used of `rltop.engines.fleet.Fleet`."""

    @property
    def trials(self) -> Trials: ...
    async def run(self) -> None: ...
    def plan(self, request: Request) -> FleetPlan | Refused: ...
    async def carry_out(self, plan: FleetPlan, stage: Stage) -> str: ...
    async def resume(self, request: Request, before: Mapping[str, int], stage: Stage) -> str: ...
    async def stop_all(self, stage: Stage) -> str: ...
    def trainer_saw(self, engine_id: str, generation: int, ok: bool, text: str) -> None: ...
    def not_synced(self, engine_id: str, why: str) -> None: ...
    def rollout_done(self) -> None: ...
    def sampled(self, engine_id: str, rollout_id: int, gap: float, tokens: int) -> None: ...
    def released(self, engine_id: str) -> None: ...
    def resumed(self, engine_id: str) -> None: ...
    def ids(self) -> list[str]: ...
    def owns(self, engine_id: str) -> bool: ...
    def launch(self, engine_id: str) -> tuple[tuple[str, ...], dict[str, str], str]: ...
    def ab(self) -> dict[str, Any] | None: ...


class MakeFleet(Protocol):
    """Makes the fleet of a run; tests pass a fake."""

    def __call__(self, engines: Engines, launchers: MutableMapping[str, Launcher]) -> Fleet: ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the daemon keeps the run's engines: `[engines]` of the configuration."""

    keep: Mapping[str, Any]
    """keep_serving, restart, on_hang, drain_s, start_s, as far as given: fields of `FleetPolicy`."""
    launcher: str = ""
    """`local`, `ray`, or "": as the trainer says."""
    ray_address: str = ""
    slots: tuple[Mapping[str, Any], ...] = ()
    """Engines that the daemon starts by itself: fields of `EngineSlot`."""
    slime: SlimeOptions | None = None
    """The slime run that trains against them from outside."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EngineOptions | None:
        """From a daemon's configuration (validated in `rltop.config`); None: the engines are not the daemon's."""
        found = config.get("engines")
        if not isinstance(found, dict):
            return None
        keep = {key: found[key] for key in ("keep_serving", "restart", "on_hang", "drain_s", "start_s") if key in found}
        slots: list[dict[str, Any]] = []
        if found.get("model_path"):
            fields = ("kind", "model_path", "args", "env", "python", "host")
            shared = {key: found[key] for key in fields if key in found}
            shared.setdefault("kind", "sglang")
            for at in range(int(found.get("count", 1))):
                port = int(found.get("port", 0))
                slots.append({**shared, "id": str(at), "port": port + at if port else 0})
        launcher, ray = str(found.get("launcher", "")), str(found.get("ray_address", ""))
        return cls(keep, launcher, ray, tuple(slots), SlimeOptions.of(found))


class Engines:
    """The fleet of one run, or none.

    options: None: the engines of this run are somebody else's. trainer_lives: whether the run's trainer is there.
    """

    def __init__(
        self,
        core: Core,
        options: EngineOptions | None,
        *,
        run_dir: Path,
        trainer_lives: Callable[[], bool],
        make: MakeFleet,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._core = core
        self.options = options
        self.run_dir = run_dir
        self._trainer_lives = trainer_lives
        self._make = make
        self._sleep = sleep
        self._launchers: dict[str, Launcher] = {}
        self._ray: Mapping[str, str] | None = None
        self._fleet: Fleet | None = None
        self._made = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[str] | None = None
        self._stages: list[Stage] = []
        """Who is told how the stopping goes."""
        self._offers = Offers()
        self._phases: tuple[str, ...] = ()
        self._updated = 0.0
        """When the phase update_weights was last left without its `weights` record; 0: it was told."""
        self._lent = False
        """The trainer took the engines' memory and has not begun to give it back."""
        self.slime: SlimeTrainer | None = None
        """What is known of a slime run that trains against these engines from outside."""
        if options is not None and options.slime is not None:
            self.slime = SlimeTrainer(options.slime, run_dir / "engines", wall=core.now, tell=self._tell, sleep=sleep)

    @property
    def enabled(self) -> bool:
        """Whether engines of this run may be the daemon's."""
        return self.options is not None

    @property
    def fleet(self) -> Fleet:
        """The fleet, made when first asked for. Raises RltopError where the engines are somebody else's."""
        if self.options is None:
            raise RltopError(
                "the engines of this run are not rltop's", why="it was started without a fleet", exit_code=1
            )
        if self._fleet is None:
            if (ray := _cluster(self.run_dir / "engines" / CLUSTER)) is not None:
                self._know_ray(ray)
            self._fleet = self._make(self, self._launchers)
            self._made.set()
        return self._fleet

    def owns(self, engine_id: str) -> bool:
        """Whether the daemon started this engine, or an earlier one did and it is not adopted yet."""
        if self._fleet is not None and self._fleet.owns(engine_id):
            return True
        return self.enabled and (self._core.table.get(f"engine/{engine_id}") or {}).get("owner") == "rltop"

    # ---------------------------------------------------------------- life

    async def begin(self, *, stale: bool) -> None:
        """Make the fleet if an earlier daemon left engines. stale: they were for a trainer that is gone; end them."""
        if self.enabled and present(self.run_dir) and self.fleet and stale:
            await self.stop_left()

    async def stop_left(self) -> None:
        """End the engines of a trainer that ended while no daemon was there."""
        if self._fleet is not None and self._fleet.ids():
            self._core.event("engine", "warn", "the trainer of these engines is gone: they are stopped", "daemon")
            await self._say_stopped()

    def trainer_ended(self, why: str) -> None:
        """The run's trainer ended, however: its engines end too, unless the daemon has more to tell us first."""
        if self._fleet is not None and self._fleet.ids():
            self._core.event("engine", "info", f"the trainer ended ({why}): its engines are stopped", "daemon")
            self._ending = asyncio.get_running_loop().create_task(self._say_stopped())

    async def end(self) -> None:
        """The run ends."""
        if self._fleet is not None and self._fleet.ids():
            await self._say_stopped()

    async def _say_stopped(self) -> None:
        """End them; its stages and its end are events."""
        try:
            text = await self.stop_all(lambda stage: self.event("debug", stage, "", "", ""))
        except RltopError as error:
            self.event("error", str(error), "", "", "")
        else:
            self.event("info", text, "", "", "")

    async def run(self) -> None:
        """The control loop of the fleet, once there is one, until cancelled."""
        await self._made.wait()
        beside = asyncio.get_running_loop().create_task(self._see_slime(self.slime)) if self.slime else None
        try:
            await self._run_fleet()
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    async def _see_slime(self, slime: SlimeTrainer) -> None:
        while True:
            try:
                await slime.run()
            except Exception as error:
                self._tell("error", f"fault in what keeps watch of slime: {type(error).__name__}: {error}; again")
            await self._sleep(AGAIN_S)

    async def _run_fleet(self) -> None:
        while True:
            try:
                await self.fleet.run()
            except Exception as error:
                text = f"fault in the engines' control loop: {type(error).__name__}: {error}; it begins anew"
                self._core.event("log", "error", text, "daemon")
            await self._sleep(AGAIN_S)

    @property
    def own_slots(self) -> tuple[Mapping[str, Any], ...]:
        """Engines that the daemon starts by itself, as the configuration declares them."""
        return () if self.options is None else self.options.slots

    async def stop_all(self, stage: Stage) -> str:
        """End every engine: the run's trainer is gone, or the run ends. Whoever comes second waits for the first.

        Raises RltopError: not done within `STOP_S`, or what the fleet says.
        """
        if self._fleet is None or not self._fleet.ids():
            return "there were no engines"
        self._stages.append(stage)
        try:
            if self._stopping is None or self._stopping.done():
                self._stopping = asyncio.get_running_loop().create_task(self._stop_all(self._fleet))
            return await asyncio.shield(self._stopping)
        finally:
            self._stages.remove(stage)

    async def _stop_all(self, fleet: Fleet) -> str:
        def stage(text: str) -> None:
            for told in self._stages:
                told(text)

        try:
            async with asyncio.timeout(STOP_S):
                return await fleet.stop_all(stage)
        except TimeoutError:
            why = f"not done within {STOP_S:.0f} s"
            raise RltopError("the engines could not be stopped", why=why, exit_code=1) from None

    async def close(self) -> None:
        """The daemon ends; the engines, if any are left, go on."""
        tasks = [task for task in (self._ending, self._stopping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for launcher in self._launchers.values():
            await launcher.close()

    def ensure_launcher(self, request: StartEngines) -> None:
        """Have the launcher that the request names, and remember its cluster for the next daemon. Nobody is asked yet.

        Raises RltopError when that can not be written.
        """
        if request.launcher != "ray":
            return
        ray = {key: str(value) for key, value in (request.ray or {}).items() if key in _RAY}
        file = self.run_dir / "engines" / CLUSTER
        try:
            file.parent.mkdir(exist_ok=True)
            with open(file, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as written:
                json.dump(ray, written)
        except OSError as error:
            raise RltopError("can not write where the engines' cluster is", where=str(file), why=str(error)) from error
        self._know_ray(ray)

    def _know_ray(self, ray: Mapping[str, str]) -> None:
        if ray != self._ray:
            self._ray = dict(ray)
            self._launchers["ray"] = _ray_launcher(ray)

    # ---------------------------------------------------------------- what the fleet asks

    def required(self) -> Required:
        """The weights that an engine must hold before it serves."""
        if self.slime is not None:
            return self.slime.required()
        table = self._core.table
        if self._trainer_lives():
            weights = table.get("weights") or {}
            if not weights.get("version"):
                return Required(version="default", source="trainer")
            return Required(version=str(weights["version"]), source="trainer", digest=_comparable_digest(weights))
        if (newest := newest_published(self.run_dir)) is not None:
            version = str(int(newest.name.removeprefix("weight_v")))
            return Required(version=version, source="disk", path=str(newest))
        return Required(version="default", source="base")

    def updating(self) -> bool:
        """Whether a weight update is going on: from entering the phase to the `weights` record about it."""
        waits = bool(self._updated) and self._core.now() - self._updated < TOLD_S
        return "update_weights" in self._phases or waits or (self.slime is not None and self.slime.updating())

    def safe_point(self) -> bool:
        """Whether no rollout is going on and nothing moves weights or memory."""
        if self.slime is not None and self._core.table.get("phase") is None:
            return self.slime.safe_point()  # it reports no phases
        return not self.updating() and not _BUSY_PHASES.intersection(self._phases)

    async def leaving(self, url: str) -> None:
        """An engine drains next: who sends it requests by himself is told."""
        if self.slime is not None:
            await self.slime.leaving(url)

    def lent(self) -> bool:
        """Whether a colocated trainer has the devices' memory: an engine that starts now would take it away."""
        return self._lent and self._trainer_lives()

    # ---------------------------------------------------------------- what the run says

    def see_phase(self) -> None:
        """The cell `phase` has changed."""
        before, self._phases = self._phases, tuple((self._core.table.get("phase") or {}).get("open") or ())
        if {"onload", "rollout"}.intersection(self._phases):
            self._lent = False
        if "update_weights" in before and "update_weights" not in self._phases:
            self._updated = self._core.now()
        if self._fleet is not None:
            if "rollout" in before and "rollout" not in self._phases:
                self._fleet.rollout_done()
            self.refresh()

    def see_weights(self) -> None:
        """The cell `weights` has changed. An engine that did not take them serves no longer, from now on."""
        self._updated = 0.0
        if self._fleet is not None:
            for name, why in not_taken(self._core.table.get("weights") or {}).items():
                if self._fleet.owns(name):
                    self._fleet.not_synced(name, why)
        self.refresh()

    def see_trouble(self, engine_id: str, generation: int, trouble: str) -> None:
        """The trainer's requests to this engine fail (`trouble` says how), or succeed again ("")."""
        if self._fleet is not None and self._fleet.owns(engine_id):
            self._fleet.trainer_saw(engine_id, generation, not trouble, trouble)

    def see_state(self, engine_id: str, state: str) -> None:
        """The trainer says that it released (OFFLOADED) or resumed an engine's memory; it may be said twice."""
        if self._fleet is None or not self._fleet.owns(engine_id):
            return
        now = (self._core.table.get(f"engine/{engine_id}") or {}).get("state")
        self._lent = self._lent or state == "OFFLOADED"
        if state == "OFFLOADED" and now != "OFFLOADED":
            self._fleet.released(engine_id)
        elif state != "OFFLOADED" and now == "OFFLOADED":
            self._fleet.resumed(engine_id)

    def see_samples(self, rollout_id: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Samples with both log-probs: how far rollout and training are apart, per engine (for a comparison)."""
        if self._fleet is None:
            return
        for engine_id, (gap, tokens) in gaps(samples).items():
            if self._fleet.owns(engine_id):
                self._fleet.sampled(engine_id, rollout_id, gap, tokens)

    # ---------------------------------------------------------------- what viewers see

    def publish(self, engine_id: str, cell: dict[str, Any] | None) -> None:
        """The fleet's words about one engine; None: it is gone."""
        key = f"engine/{engine_id}"
        if self.slime is not None:
            self.slime.see(engine_id, cell)
        if cell is None:
            self._core.set(key, None)
            self._core.set(f"toggles/{engine_id}", None)
        else:
            before = self._core.table.get(key) or {}
            told = {**trim(cell), "error": cell.get("error") or None}
            if told.get("seen") is None:  # an adopted one that was not asked yet: as the daemon before saw it
                told.pop("seen", None)
            rollout = (self._core.table.get("phase") or {}).get("rollout_id")
            told["crashes"] = crashes(before, cell, self._core.now(), rollout)
            self._core.set(key, {**carried(before, cell), **told, "id": engine_id, "owner": "rltop"})
            args = (self._core.table.get("run") or {}).get("args") or {}
            # Nobody switches what is on trial, and to try all switches of every new command line takes long.
            offered = {} if cell.get("reserved") else self._offered(engine_id)
            self._core.set(f"toggles/{engine_id}", toggle_cells(cell, offered, trainer_sides(args)))
        self.refresh()

    def event(self, level: str, text: str, engine_id: str, before: str, after: str) -> None:
        """Something happened to an engine."""
        more = {"from": before or None, "to": after or None}
        self._core.event("engine", level, text, "daemon", id=engine_id, **more)

    def _tell(self, level: str, text: str) -> None:
        self._core.event("engine", level, text, "daemon")

    def refresh(self) -> None:
        """Bring the cell `fleet` up to date."""
        if self._fleet is None:
            return
        ids = self._fleet.ids()
        cells = {name: self._core.table.get(f"engine/{name}") or {} for name in ids}
        keep = int((self.options.keep if self.options else {}).get("keep_serving", 1))
        found = fleet_cell(cells, keep, self.required(), safe_point=self.safe_point(), ab=self._fleet.ab())
        self._core.set("fleet", found if ids else None)

    def _offered(self, engine_id: str) -> Mapping[str, Mapping[str, str]]:
        assert self._fleet is not None, "the fleet speaks, so it is there"
        try:
            return self._offers.of(self._fleet.launch(engine_id))
        except (KeyError, RltopError):  # it is only being declared, or its arguments can not be read
            return {}


def present(run_dir: Path) -> bool:
    """Whether the run has slots of engines, or an engine that runs though its slot file is lost."""
    engines = run_dir / "engines"
    return any(engines.glob("*/slot.json")) or any(locked(lock) for lock in engines.glob("*/lock"))


def refuse_newer_slots(run_dir: Path) -> None:
    """Raise RltopError when the run's engines are those of a newer rltop. Nothing is touched."""
    if any((run_dir / "engines").glob("*/slot.json")):
        from rltop.engines.slots import refuse_newer  # not at the top: see the module's docstring

        refuse_newer(run_dir / "engines")


def not_taken(weights: Mapping[str, Any]) -> dict[str, str]:
    """Engine -> why, for those that refused the version of a `weights` record, did not answer, or hold another one."""
    found, version = {}, str(weights.get("version") or "")
    for name, said in (weights.get("engines") or {}).items():
        if not isinstance(said, dict):
            continue
        held, message = str(said.get("version") or ""), brief(str(said.get("message") or ""), 160)
        if said.get("ok") is False:
            verb = "did not answer to" if said.get("gone") else "did not take"
            found[name] = f"it {verb} weight version {version!r}" + (f": {message}" if message else "")
        elif held and held != version:
            found[name] = f"it holds {held!r} after the update to {version!r}"
    return found


def gaps(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Engine -> mean of |rollout - train| over the log-probs of its tokens, and how many. NaN and Inf are left out."""
    sums: dict[str, tuple[float, int]] = {}
    for sample in samples:
        ours, theirs = sample.get("rollout_log_probs"), sample.get("log_probs")
        if not isinstance(ours, list) or not isinstance(theirs, list) or sample.get("engine") is None:
            continue
        apart = [abs(a - b) for a, b in zip(ours, theirs, strict=False) if _finite(a) and _finite(b)]
        total, count = sums.get(str(sample["engine"]), (0.0, 0))
        sums[str(sample["engine"])] = (total + sum(apart), count + len(apart))
    return {engine: (total / count, count) for engine, (total, count) in sums.items() if count}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def newest_published(run_dir: Path) -> Path | None:
    """The newest `weight_vNNNNNN` directory that the run's trainer published under the run directory."""
    return max(published(run_dir), key=lambda path: int(path.name.removeprefix("weight_v")), default=None)


def published(run_dir: Path) -> list[Path]:
    """Every `weight_vNNNNNN` directory that the run's trainer published under the run directory."""
    return [
        path
        for pattern in ("weights/weight_v*", "*/weights/weight_v*")
        for path in run_dir.glob(pattern)
        if path.name.removeprefix("weight_v").isdigit() and path.is_dir()
    ]


def _comparable_digest(weights: Mapping[str, Any]) -> str:
    """The trainer's digest where an engine of this run has answered the very same: engines that name their tensors
    otherwise (SGLang stacks q, k and v) can never answer it, and for them the label decides."""
    digest = str(weights.get("digest") or "")
    replies = [said for said in (weights.get("engines") or {}).values() if isinstance(said, dict)]
    return digest if digest and any(said.get("digest") == digest for said in replies) else ""


def _ray_launcher(ray: Mapping[str, str]) -> Launcher:
    from rltop.engines.ray_launcher import NAMESPACE, RayLauncher

    given = {key: value for key, value in ray.items() if value}
    return RayLauncher(
        address=given.get("address", ""),
        namespace=given.get("namespace", NAMESPACE),
        token_file=given.get("token_file", ""),
    )


def _cluster(file: Path) -> dict[str, str] | None:
    """Where the cluster of an earlier daemon's engines is; None: nowhere, or it can not be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {key: str(value) for key, value in found.items() if key in _RAY} if isinstance(found, dict) else None


def make_fleet(engines: Engines, launchers: MutableMapping[str, Launcher]) -> Fleet:
    """The real fleet, with the local launcher."""
    from rltop.engines.client import AsyncEngineClient
    from rltop.engines.fleet import Fleet as RealFleet
    from rltop.engines.local import LocalLauncher
    from rltop.engines.states import FleetPolicy

    assert engines.options is not None, "a fleet is only made for a run that has options for one"
    launchers["local"] = LocalLauncher()
    try:
        policy = FleetPolicy(**engines.options.keep)
    except (TypeError, ValueError) as error:
        raise RltopError("[engines] can not be used", why=str(error)) from error
    return RealFleet(
        run=engines.run_dir.name,
        run_dir=engines.run_dir,
        launchers=launchers,
        http=AsyncEngineClient,
        policy=policy,
        clock=time.monotonic,
        wall=time.time,
        publish=engines.publish,
        event=engines.event,
        required=engines.required,
        updating=engines.updating,
        safe_point=engines.safe_point,
        lent=engines.lent,
        leaving=engines.leaving if engines.slime is not None else None,
    )
