"""`ports.Rollouts` over engines that rltop's daemon owns: it starts, restarts and toggles them while the run goes on.

The daemon says in `engine/<id>` how each engine is; the trainer says which version of the weights each one holds, and
asks only those in rotation (`membership`). Failure policy: an engine that fails, is drained or comes back without the
current weights costs requests that are asked again, never a sample and never the run. What is missing is waited for:
at the start until every engine is up or has failed, in a rollout as `--rollout-engine-wait-s` says. When the daemon is
gone the run goes on with the engines that it knew last. Nothing is stopped here: the daemon does that at the run's end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rltop.errors import RltopError
from rltop.protocol.messages import Accepted
from rltop.train.arguments import TrainConfig
from rltop.train.dispatch import Key, News
from rltop.train.engine_memory import EngineMemory
from rltop.train.membership import FAILED, GONE, LOADED, SERVING, STARTING, Membership, facts
from rltop.train.narrator import Narrator
from rltop.train.ports import (
    BASE_VERSION,
    BaseFacts,
    EngineFacts,
    Example,
    Holding,
    Resync,
    RolloutBatch,
    SyncReport,
)

TEND_EVERY_S = 0.1
"""How often a rollout's driver looks after the engines meanwhile."""
NEWS_EVERY_S = 0.5
"""How often it asks what became of the requests, when no engine changed."""
PROMOTE_EVERY_S = 3.0
"""An engine that holds its weights and is still STALE is told of again: the daemon may have been away."""
COMMAND_S = 60.0
"""Longest wait for the daemon's answer at the start."""
TOLD_S = 5.0
"""Longest wait until the daemon shows that an engine's memory is lent, or back."""
ASK_S = 5.0
"""Longest wait for the manager's news."""


class Manager(Protocol):
    """The rollout manager, in whatever process it is."""

    def call(self, method: str, *args: Any, watch: Sequence[Callable[[], None]] = (), every_s: float = 1.0) -> Any:
        """A method's result; `watch` is called meanwhile and may raise."""
        ...

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """The result of a quick method while another one runs. Raises TimeoutError."""
        ...

    def ready(self) -> None:
        """Wait until it is there."""
        ...


class Link(Protocol):
    """The part of `FleetLink` that is used here."""

    changed: int

    @property
    def problem(self) -> str:
        """See `FleetLink`."""
        ...

    def engines(self) -> dict[str, Mapping[str, Any]]:
        """See `FleetLink`."""
        ...

    def operation(self, op: str) -> Mapping[str, Any]:
        """See `FleetLink`."""
        ...

    def command(self, name: str, target: str = "", *, wait_s: float, **kw: Any) -> Accepted:
        """See `FleetLink`."""
        ...

    def send(self, name: str, target: str = "", *, wait_s: float, **kw: Any) -> None:
        """See `FleetLink`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What is asked of the daemon at the start."""

    slots: Sequence[Mapping[str, Any]]
    """One per engine, without the checkpoint."""
    launcher: str
    """`local` or `ray`."""
    ray: Mapping[str, str] | None = None
    """`address`, `namespace`, `token_file` of the cluster, for launcher `ray`."""

    def args(self, checkpoint: str) -> dict[str, Any]:
        """Of the command `engines-start`."""
        slots = [dict(slot) | {"model_path": checkpoint} for slot in self.slots]
        return {"slots": slots, "launcher": self.launcher} | ({"ray": dict(self.ray)} if self.ray else {})


@dataclass(slots=True)
class FleetRollouts:
    """See the module and `ports.Rollouts`."""

    config: TrainConfig
    manager: Manager
    link: Link
    order: Order
    narrator: Narrator
    clock: Callable[[], float]
    pause: Callable[[float], None]
    """Sleep so many seconds; raises when the run is to end."""
    work_dir: Path
    """Of the run, for a model that is made for it."""
    memory: EngineMemory = field(default_factory=EngineMemory)
    members: Membership = field(init=False)
    _version: str = field(init=False, default=BASE_VERSION)
    _seen: int = field(init=False, default=-1)
    _asked: float = field(init=False, default=float("-inf"))
    _waits: float | None = field(init=False, default=None)
    _digests: dict[Key, str] = field(init=False, default_factory=dict)
    """Of the weights that each engine took last, as far as it can tell."""
    _promoted: dict[Key, float] = field(init=False, default_factory=dict)
    """When the daemon was told of an engine last."""
    _lost: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.members = Membership([str(slot["id"]) for slot in self.order.slots])

    @property
    def supervised(self) -> bool:
        return True

    def load(self, checkpoint: str) -> None:
        self.manager.ready()
        self.manager.call("load", checkpoint)

    def demonstrations(self) -> list[Example]:
        examples: list[Example] = self.manager.call("demonstrations")
        return examples

    def checkpoint(self) -> str:
        self.manager.ready()
        return str(self.manager.call("checkpoint", str(self.work_dir)))

    def start(self, base: BaseFacts) -> Sequence[EngineFacts]:
        """Ask for the engines and wait until each is up or has failed. One is enough; none is an error."""
        op = self.link.command("engines-start", args=self.order.args(base.checkpoint), wait_s=COMMAND_S).op
        failed: set[str] = set()
        deadline = self.clock() + self.config.rollout_engine_wait_s
        while True:
            self.members.take(self.link.engines())
            states = {name: self.members.state(name) for name in self.members.ids}
            up = [name for name, state in states.items() if state in LOADED]
            failed = {name for name in failed | {n for n, s in states.items() if s in FAILED} if name not in up}
            if len(up) + len(failed) == len(states):
                break
            operation = self.link.operation(op)
            if operation.get("state") in ("failed", "cancelled"):
                if up:
                    failed = states.keys() - set(up)
                    break
                raise self._no_start(str(operation.get("text") or operation.get("state")))
            if self.clock() >= deadline:
                raise self._no_start(f"not up after {self.config.rollout_engine_wait_s:g} s")
            self.pause(TEND_EVERY_S)
        if not up:
            raise self._no_start("")
        if failed:
            self.narrator.log("warn", f"The run starts without engine {', '.join(sorted(failed))}: {self._told()}")
        return self.members.loaded(self.clock())

    def loaded(self) -> Sequence[EngineFacts]:
        """Those that the daemon calls loaded, and those whose memory was lent and is back far enough for weights."""
        self.members.take(self.link.engines())
        return [*self.members.loaded(self.clock()), *self._still_lent()]

    def offload(self, *, late: bool = False) -> None:
        """Release every engine that is up, once those that are starting are up or have failed: one that came up later
        would take the memory that the trainer has by then. The daemon is told first, so that it asks them nothing."""
        deadline = self.clock() + self.config.rollout_engine_wait_s
        while self._states(STARTING) and self.clock() < deadline:
            self.pause(TEND_EVERY_S)
        engines = [facts(self.members.cells[name]) for name in self._states(LOADED)]
        for engine in engines:
            self.narrator.engine(engine, "OFFLOADED")
        ids = {one.id for one in engines}
        self._until(lambda: not ids & set(self._states(LOADED)))  # away: nobody watches them, so nobody asks anything
        failed = self.memory.release(engines, late=engines[-1].id if late and engines else "")
        self._say_failed("release its memory", failed)

    def holdings(self) -> Sequence[Holding]:
        return self.memory.holdings()

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        """Who does not take its memory again is left to the daemon: it has died, or stays out of the rotation."""
        self.members.take(self.link.engines())
        lent = self._still_lent()
        self.memory.forget([one for one in self.memory.lent if one not in lent])
        self._say_failed("take its memory again", self.memory.resume(tags))
        if "weights" in tags:
            return
        back = self.memory.back()
        for engine in back:
            self.narrator.engine(engine, "STALE")
        self._until(lambda: not self._states({"OFFLOADED"}))
        self._promote()
        if no_update and back:
            # Once the daemon has seen that it holds its weights: else it would keep it out of the rotation for that.
            self._until(lambda: back[-1].id in self._states(SERVING))
            self.memory.lose_weights(back[-1])

    def _until(self, reached: Callable[[], bool]) -> None:
        """Wait a little for what the daemon shows; not at all while it is away."""
        end = self.clock() + TOLD_S
        while not self.link.problem and not reached() and self.clock() < end:
            self.pause(TEND_EVERY_S)

    def _still_lent(self) -> list[EngineFacts]:
        """Lent engines of the generation that was lent, as far as they live."""
        cells = self.members.cells
        return [
            one
            for one in self.memory.lent
            if int(cells[one.id].get("generation") or 0) == one.generation
            and self.members.state(one.id) not in GONE
            # What the daemon calls loaded already comes from there.
            and self.members.state(one.id) not in LOADED
        ]

    def _states(self, states: Collection[str]) -> list[str]:
        self.members.take(self.link.engines())
        return [name for name in self.members.ids if self.members.state(name) in states]

    def _say_failed(self, what: str, failed: Mapping[str, str]) -> None:
        for name, why in failed.items():
            self.narrator.log("warn", f"Engine {name} did not {what}: {why}")

    def took(self, report: SyncReport, engines: Sequence[EngineFacts], seconds: float) -> None:
        self._version = report.version
        for engine in self.members.took(report, engines, now=self.clock(), seconds=seconds):
            self._digests[engine.id, engine.generation] = report.engines[engine.id].digest
            self._promoted.pop((engine.id, engine.generation), None)
        self._promote()

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        """One rollout, over whoever is there while it lasts."""
        return self._sampled("generate", rollout_id, version, resync)

    def evaluate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        return self._sampled("evaluate", rollout_id, version, resync)

    def _sampled(self, method: str, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        def tend() -> None:
            self._tend(rollout_id, resync)

        self._version, self._seen = version, -1
        tend()
        batch: RolloutBatch = self.manager.call(method, rollout_id, version, watch=[tend], every_s=TEND_EVERY_S)
        self._exchange(rollout_id)
        return batch

    def _tend(self, rollout_id: int, resync: Resync) -> None:
        """Who may be asked, what became of it, and weights for those that came back."""
        self._connection()
        changed, now = self.link.changed, self.clock()
        if changed != self._seen:
            self._seen = changed
            self.members.take(self.link.engines())
            self._exchange(rollout_id)
        elif now - self._asked >= NEWS_EVERY_S:
            self._exchange(rollout_id)
        if behind := self.members.behind(self._version, now):
            resync(behind)
            self._exchange(rollout_id)
        self._promote()

    def _exchange(self, rollout_id: int) -> None:
        self._asked = self.clock()
        rotation = self.members.rotation(self._version)
        try:
            reserved = not self.link.problem and self.members.reserved()
            dead, told = self.members.dead(), self._told()
            news: News = self.manager.ask("exchange", rotation, dead, told, reserved, timeout_s=ASK_S)
        except TimeoutError:
            return  # a busy machine; the next look is not far
        for failure in news.failures:
            self.narrator.trouble(failure.engine, failure.generation, f"{failure.kind}: {failure.why}")
            self.narrator.log("info", f"Engine {failure.engine}, {failure.kind}: {failure.why}; asked again elsewhere")
            if failure.kind == "version":
                self.members.distrust((failure.engine, failure.generation))
        for name, generation in news.recovered:
            self.narrator.trouble(name, generation, "")
        self._say_waiting(rollout_id, news.waiting)

    def _say_waiting(self, rollout_id: int, waiting: bool) -> None:
        """Once when it begins, once when it ends."""
        if waiting and self._waits is None:
            self._waits = self.clock()
            self.narrator.log("warn", f"Rollout {rollout_id} waits for an engine: {self._told()}")
        elif not waiting and self._waits is not None:
            seconds, self._waits = self.clock() - self._waits, None
            self.narrator.log("info", f"Rollout {rollout_id} goes on after {seconds:.1f} s without an engine")

    def _promote(self) -> None:
        """Tell the daemon which STALE engines hold their weights, and again from time to time until it agrees."""
        now = self.clock()
        for engine in self.members.unpromoted(self._version):
            key = (engine.id, engine.generation)
            if now - self._promoted.get(key, float("-inf")) >= PROMOTE_EVERY_S:
                self._promoted[key] = now
                args = {"version": self._version, "digest": self._digests.get(key, "")}
                self.link.send("engine-synced", engine.id, args=args, if_gen=engine.generation, wait_s=PROMOTE_EVERY_S)

    def _connection(self) -> None:
        problem = self.link.problem
        if problem and not self._lost:
            self.narrator.log(
                "warn", f"rltop's daemon is away ({problem}): the run goes on with the engines as they were"
            )
        elif self._lost and not problem:
            self.narrator.log("info", "rltop's daemon is back")
        self._lost = bool(problem)

    def _told(self) -> str:
        return self.members.told(self._version)

    def _no_start(self, why: str) -> RltopError:
        logs = [str(cell.get("log")) for cell in self.members.cells.values() if cell.get("log")]
        return RltopError(
            "no engine came up",
            where=logs[0] if logs else "engines-start",
            why="; ".join(part for part in (why, self._told()) if part),
            do="read the log from its first error on; `rltop engine list` shows the engines",
            exit_code=1,
        )
