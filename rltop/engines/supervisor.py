"""Supervises one engine slot: looks, tells the state machine what it saw, and does what the machine says.

One task per slot. A turn takes a glance at the process and its log (so that a dead engine is known within a second),
hands finished chores to the machine, lets deadlines pass, and takes the next step towards the slot's goal. Whatever may
take long is a chore beside it: a hung engine never delays the glance.

Failure policy: what an engine, a launcher or a disk does wrong becomes an event, a cause or another try; an exception
of the supervisor itself is told as an error and the next turn goes on. Nothing is stopped or started in a weight
update, but an engine whose routes are silent: the update waits for it, and its end lets the update go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rltop.engines import chores, duties
from rltop.engines.adoption import adopt
from rltop.engines.cell import RESERVED, engine_cell
from rltop.engines.client import AsyncEngineClient
from rltop.engines.house import House
from rltop.engines.launcher import Launched, Launcher, LaunchSpec
from rltop.engines.machine import step, toward
from rltop.engines.requests import VERSION, Config, Required
from rltop.engines.slots import Pause, SlotRecord, remembered
from rltop.engines.states import (
    ANSWERING,
    LIVE,
    SERVING,
    Action,
    Event,
    Goal,
    Hang,
    Outdated,
    Ready,
    Reclaimed,
    Released,
    Resumed,
    RolloutDone,
    SpawnFailed,
    Start,
    State,
    Tick,
)
from rltop.engines.toggles import read_argv
from rltop.engines.verify import scrub
from rltop.engines.watch import Watch
from rltop.errors import RltopError

LOOK_S = 0.25
"""Between two glances at an engine that stands where it should."""
FAST_S = 0.05
"""While something is under way: it is waited for by people."""
WRITE_S = 1.0
"""Between two tries to write down what could not be written."""
MOVING_S = 10.0
"""A state that lasts longer is not waited for by the moment."""
AFTER_PAUSE_S = 3.0
"""Tokens that come later end a pause that somebody asked for: a weight update lets its engines go on. Until then the
counters may still tell of what was made before it."""
_STEADY = frozenset(
    {State.STOPPED, State.HEALTHY, State.SUSPECT, State.OFFLOADED, State.BACKOFF, State.QUARANTINED, State.LOST}
)
_LEVEL = {
    State.CRASHED: "error",
    State.QUARANTINED: "error",
    State.LOST: "error",
    State.SUSPECT: "warn",
    State.BACKOFF: "warn",
}


class Engine:
    """One slot under supervision."""

    def __init__(self, record: SlotRecord, house: House) -> None:
        self.record = record
        self.house = house
        self.slot = remembered(record, house.policy, house.clock())
        self.process: Launched | None = None
        self.spec: LaunchSpec | None = None
        self.client: AsyncEngineClient | None = None
        self.watch = Watch(record.declared.kind, house.known)
        self.busy = ""
        """Name of the operation that holds this slot, and who asked for it."""
        self.stage = ""
        self.pending = ""
        """What its operation waits for."""
        self.waits = ""
        """What its supervisor waits for."""
        self.force = False
        """Do not wait for the end of a weight update: the trainer is gone."""
        self.marks: list[tuple[State, float]] = []
        """States and when they were entered, since an operation emptied the list."""
        self.adopted = False
        self.released = record.state is State.OFFLOADED
        """Found with its memory released: nobody may ask it for a token until the trainer has resumed it."""
        self._wake = asyncio.Event()
        self._moved = asyncio.Event()
        self.board = chores.Board(self._wake.set)
        self.not_before: dict[str, float] = {}
        self._shown: dict[str, Any] | None = None
        self._told: set[str] = set()
        self._pushed = ("", "")
        self._offset = 0.0
        self._unwritten = False
        """What is known is not on disk."""
        self._read: tuple[Config, str, dict[str, str]] | None = None

    # ---------------------------------------------------------------- for operations

    @property
    def id(self) -> str:
        """Of the slot."""
        return self.record.declared.id

    @property
    def url(self) -> str:
        """Base of its HTTP API; empty while its port is not known."""
        look = self.watch.look
        if self.process is None or look is None or not look.port or self.slot.state not in LIVE:
            return ""
        host = f"[{self.process.host}]" if ":" in self.process.host else self.process.host
        return f"http://{host}:{look.port}"

    def wall_offset(self) -> float:
        """Wall clock minus monotonic clock, kept as long as it is about right: what does not change must not move."""
        offset = self.house.wall() - self.house.clock()
        if abs(offset - self._offset) > 1.0:
            self._offset = round(offset, 2)
        return self._offset

    def wanted(self) -> dict[str, str]:
        """What the running generation's arguments ask for, toggle by toggle; of a stopped engine those of the next."""
        stopped = self.slot.state is State.STOPPED and not self.record.goal.run
        if (found := self.watch.verified) is not None and not stopped:
            return dict(found.wanted)
        config = self.record.config if stopped else self.record.running
        version = self.record.version or VERSION
        if self._read is None or self._read[:2] != (config, version):
            model = chores.model_config(self.record.declared.model_path)
            self._read = (config, version, read_argv(config.args, config.env, version=version, model=model))
        return self._read[2]

    def aim(self, goal: Goal, **fields: Any) -> None:
        """Write down what the slot should come to, then begin. Raises `RltopError` when it cannot be written.

        A stop is never withheld: it begins all the same, that is told, and it is written down as soon as that can be.
        """
        record = self.record.changed(goal=goal, **fields)
        try:
            self.house.store.write(record)
            self._unwritten = False
        except RltopError as error:
            if goal.run:
                raise
            self._unwritten, self.not_before["write"] = True, self.house.clock() + WRITE_S
            text = f"it is stopped, though that cannot be written down now: {error.where}: {error.why}"
            self.tell_once("error", text)
        self.record = record
        self.wake()

    def note(self, **fields: Any) -> None:
        """Write down something beside the goal. Raises `RltopError`."""
        self.aim(self.record.goal, **fields)

    async def until(self, reached: Callable[[], Any]) -> Any:
        """Wait for the first true value of `reached`, asked after every move of the slot."""
        while not (found := reached()):
            await self._moved.wait()
        return found

    def wake(self) -> None:
        """Take the next turn now."""
        self._wake.set()

    def moved(self) -> None:
        """Something that is waited for, or shown, may have changed."""
        self._moved.set()
        self._moved = asyncio.Event()
        self.publish()

    def trainer_saw(self, generation: int, ok: bool, text: str) -> None:
        """Of an older generation: no news. Nor is a failure while it was not in the rotation (it was being found again,
        or drained), or that it is gone while we see that it lives."""
        alive = self.watch.look is not None and self.watch.look.alive
        beside = not ok and (self.slot.state not in SERVING or (alive and text.startswith("gone:")))
        if generation == self.slot.generation and not beside:
            self.watch.health.trainer_saw(ok, text, self.house.clock())
            self.wake()

    def updating(self) -> bool:
        """A weight update is going on that the end of this engine would disturb: not one that hangs on it."""
        if self.force or not self.weights_move():
            return False
        return not (self.slot.state in LIVE and self.watch.health.mute(self.house.clock()))

    def weights_move(self) -> bool:
        """A weight update is going on; one that is on trial has no part in it."""
        return self.house.updating() and not self.slot.reserved

    def not_synced(self, why: str) -> None:
        """The trainer says that it did not take the newest weights."""
        if self.slot.serves():
            self.fire(Outdated(why))
            self.wake()

    def expect(self, version: str, digest: str) -> None:
        """The trainer says that it pushed these weights: ask the engine now."""
        self._pushed = (version, digest)
        if self.record.emptied:
            self.write(self.record.changed(emptied=False))
        self.not_before.pop("sync", None)
        self.wake()

    def required(self) -> Required:
        """The weights it must hold, with the trainer's digest where it gave one."""
        if self.slot.reserved and self.record.trial is not None:
            return self.record.trial.weights
        wanted = self.house.required()
        version, digest = self._pushed
        return replace(wanted, digest=digest) if digest and not wanted.digest and version == wanted.version else wanted

    def hold(self, who: str) -> None:
        """It was paused, by whom; "": it goes on."""
        pause = Pause(who, round(self.house.wall(), 2)) if who else None
        self.write(self.record.changed(paused=pause))
        self.wake()

    def rollout_done(self) -> None:
        """It survived one more."""
        self.fire(RolloutDone())

    def memory(self, *, released: bool) -> None:
        """The trainer took its memory, or gave it back. Its label outlives a release, its weights do not."""
        if released and self.slot.state in ANSWERING:
            self.write(self.record.changed(emptied=True))
            self.fire(Released())
        self.released = released
        if not released and self.slot.state is State.OFFLOADED:
            self.fire(Resumed())

    # ---------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Supervise until cancelled. The process goes on."""
        try:
            while True:
                try:
                    await self._turn()
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except Exception as error:
                    self.tell_once("error", f"fault in the supervision: {type(error).__name__}: {error}")
                moving = self.slot.state not in _STEADY and self.house.clock() - self.slot.since < MOVING_S
                pause = FAST_S if moving or not self.adopted else LOOK_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            await self.board.close()
            if self.client is not None:
                await self.client.close()

    async def _turn(self) -> None:
        if self._unwritten and self.is_due("write"):
            self.write(self.record)
        launcher = self.house.launchers.get(self.record.launcher)
        if launcher is None:
            self.waits = f"the launcher {self.record.launcher!r} is not there yet"
            return self.publish()
        if not self.adopted:
            if not await adopt(self, launcher):
                return self.publish()
            self.moved()
        duties.take_finished(self)
        if self.process is not None and (self.slot.state in LIVE | {State.LOST} or self.slot.dying):
            await self._glance(launcher, self.process)
        duties.begin(self, launcher)
        self._judge()
        now, updating = self.house.clock(), self.updating()
        self.fire(Tick(updating))
        event = toward(self.slot, self.record.goal, now, updating=updating)
        lent = isinstance(event, Start) and self.house.lent() and not self.force
        if event is not None and not lent:
            self.fire(event)
        self._say_pending(updating, lent=lent)
        return self.publish()

    def fire(self, event: Event) -> None:
        """One step of the machine, written down, shown, and acted on."""
        before = self.slot
        slot, actions = step(before, event, self.house.clock())
        if slot == before and not actions:
            return None
        self.slot = slot
        record = self.record.launched(slot.generation) if Action.SPAWN in actions else self.record
        if isinstance(event, Ready):
            record = record.answered()
        if isinstance(event, Reclaimed):
            record = record.changed(process=None)
        record = record.noted(slot)
        if record.paused is not None and slot.state not in LIVE:
            record = record.changed(paused=None)
        if record.changed(cause=self.record.cause) == self.record:
            self.record = record  # a cause that counts seconds is not worth a write
        elif not self.write(record) and Action.SPAWN in actions:
            return self.fire(SpawnFailed("slot-file", "what it should be cannot be written down"))
        if slot.state is not before.state:
            self._entered(before.state, alarm=Action.ALARM in actions, again=before.reserved)
        elif Action.ALARM in actions:
            waited = f"{slot.state} since {self.house.clock() - slot.since:.0f} s"
            self.house.tell("error", f"engine {self.id}: {waited}: {slot.cause}", self.id, slot.state, slot.state)
        for action in actions:
            self._act(action)
        self.moved()
        return None

    def write(self, record: SlotRecord) -> bool:
        """Put it on disk; False, and told once, when that cannot be done."""
        self.record = record
        try:
            self.house.store.write(record)
        except RltopError as error:
            text = f"{error.what}: {error.where}: {error.why}; it is written down as soon as that can be"
            self.tell_once("error", text)
            self._unwritten, self.not_before["write"] = True, self.house.clock() + WRITE_S
            return False
        self._unwritten = False
        return True

    def _entered(self, before: State, *, alarm: bool, again: bool) -> None:
        """again: it was on trial before."""
        slot = self.slot
        self.marks.append((slot.state, slot.since))
        self.marks = self.marks[-64:]
        if slot.reserved and (again or slot.state is not State.LAUNCHING):
            # A crash of a trial is no alarm: whoever tries waits for it, and tells of it.
            self.house.tell("debug", f"engine {self.id}: on trial: {slot.state}: {slot.cause}", self.id, "", "")
        else:
            shown = RESERVED if slot.reserved else slot.state.value
            text = f"engine {self.id}: {before} -> {shown}" + (f": {slot.cause}" if slot.cause else "")
            level = "error" if alarm else _LEVEL.get(slot.state, "info")
            if level == "info" and State.OFFLOADED in (before, slot.state):
                level = "debug"  # the turns of a colocated run: twice in every rollout
            self.house.tell(level, text, self.id, before.value, shown)
        if before in SERVING and slot.state not in SERVING and not slot.reserved:
            self.house.left(self.id, slot.state is State.CRASHED or slot.failing is not None)
        if slot.state is State.HEALTHY and before not in SERVING:
            self.watch.health.proved()
            if self.watch.served_since is None:
                self.watch.served_since = slot.since
        if slot.state is State.LAUNCHING:
            self.process, self.watch = None, Watch(self.record.declared.kind, self.house.known)
            self._told.clear()
            self._pushed, self.released = ("", ""), False
        if slot.state not in LIVE and self.client is not None:
            self.board.always("close", self.client.close())
            self.client = None
        self.board.left_for(slot.state)
        self.not_before.clear()

    def _act(self, action: Action) -> None:
        launcher = self.house.launchers[self.record.launcher]
        process, here = self.process, frozenset({self.slot.state})
        match action:
            case Action.SPAWN:
                self.spec = self.spec_of(self.slot.generation)
                self.board.begin("spawn", here, launcher.start(self.spec))
            case Action.ABORT if self.client is not None:
                self.board.begin("abort", here, self.client.abort())
            case Action.TERMINATE if process is not None:
                self.board.begin("terminate", here, launcher.terminate(process))
            case Action.KILL if process is not None:
                self.board.begin("kill", here, launcher.kill(process))
            case Action.EVIDENCE if process is not None:
                self.board.always("evidence", self._evidence(launcher, process))
            case _:
                pass  # DRAIN, RECLAIM: what their states do; ABANDON_SPAWN: the chore left its state; ALARM: told

    # ---------------------------------------------------------------- looking

    async def _glance(self, launcher: Launcher, process: Launched) -> None:
        """The process and its log; everything after it knows of a dead engine."""
        event = await self.watch.glance(launcher, process, self.slot.state, self.house.clock())
        if self.client is None and self.url and self.slot.state in LIVE:
            self.client = self.house.http(self.url)
        if event is not None:
            self.fire(event)

    def _judge(self) -> None:
        now, state, pause = self.house.clock(), self.slot.state, self.record.paused
        if pause is not None and self.watch.health.flowed_since(pause.since - self.wall_offset() + AFTER_PAUSE_S):
            self.write(self.record.changed(paused=None))
            pause = None
        self.watch.health.held = f"paused by {pause.who}" if pause else ""
        event = self.watch.judge(state, updating=self.weights_move(), now=now)
        if isinstance(event, Hang) and self.slot.policy.on_hang == "alarm":
            event = Hang(f"{event.cause}; rltop engine restart --engine {self.id} ends it and starts it anew")
        if event is not None:
            self.fire(event)

    def _say_pending(self, updating: bool, *, lent: bool) -> None:
        waits = updating and toward(self.slot, self.record.goal, self.house.clock(), updating=False) is not None
        self.waits = "the end of the weight update" if waits else ""
        if self.slot.state is State.OFFLOADED and self.record.goal.run and self._outdated():
            self.waits = "its memory, which the trainer has"
        if lent:
            self.waits = "the device's memory, which the trainer has"

    def _outdated(self) -> bool:
        return self.slot.generation < self.record.goal.generation

    # ---------------------------------------------------------------- chores

    def spec_of(self, generation: int) -> LaunchSpec:
        """What the launcher was, or is, asked for."""
        return self.record.spec(self.house.run, self.house.run_dir, generation)

    def is_due(self, name: str) -> bool:
        """A chore may begin again."""
        return self.house.clock() >= self.not_before.get(name, 0.0)

    async def _evidence(self, launcher: Launcher, process: Launched) -> None:
        crash = self.watch.crash or self.watch.log.crash(asked=False)
        folder = self.house.store.folder(self.id) / str(self.slot.generation)
        spec = self.spec or self.spec_of(self.slot.generation)
        versions = {"sglang": self.record.version}
        if spec.python == sys.executable:  # of another interpreter it is not known here
            versions["python"] = sys.version.split()[0]
        await chores.keep_evidence(
            launcher,
            process,
            folder,
            crash=crash,
            look=self.watch.look,
            spec=spec,
            versions=versions,
            weights=self.watch.weight_version,
            served_s=self._served_s(),
            busy_s=self._busy_s(),
            info=scrub(self.watch.verified.info) if self.watch.verified is not None else None,
        )

    def _served_s(self) -> float | None:
        """For how long it has been ready to serve, up to its crash; None: it never was."""
        since = self.watch.served_since
        return None if since is None else round(max(0.0, self.slot.since - since), 3)

    def _busy_s(self) -> float | None:
        """How much of that it had requests; None: it never was ready."""
        up = self._served_s()
        if up is None:
            return None
        if self.process is not None:  # one that was found again has worked before
            up = max(up, self.house.wall() - self.process.started)
        return round(self.watch.exposure.seconds(self.slot.since, up), 3)

    # ---------------------------------------------------------------- showing

    def publish(self) -> None:
        """Show what changed."""
        cell = engine_cell(self)
        if cell != self._shown:
            self._shown = cell
            self.house.publish(self.id, cell)

    def tell_once(self, level: str, text: str) -> None:
        """Tell people, once per generation."""
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            self.house.tell(level, f"engine {self.id}: {text}", self.id, self.slot.state, self.slot.state)
