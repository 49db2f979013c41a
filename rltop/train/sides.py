"""The two ports of the loop over Ray actors, and the placement of everything that the run starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltop.engines.launch import FROM_ITS_FIRST_ERROR, EngineSpec, last_words
from rltop.engines.traffic_ring import FOLDER as TRAFFIC
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.cluster import Actor, Cluster
from rltop.train.dump import Dumped
from rltop.train.engine_actor import EngineActor, EngineLook
from rltop.train.engine_memory import EngineMemory
from rltop.train.fleet_link import FleetLink
from rltop.train.fleet_rollouts import FleetRollouts, Order
from rltop.train.group import Group
from rltop.train.narrator import Narrator
from rltop.train.ports import (
    BaseFacts,
    EngineFacts,
    Example,
    Holding,
    MemoryLook,
    Resync,
    RolloutBatch,
    StepSample,
    SyncReport,
    TrainerFacts,
)
from rltop.train.rollout_manager import RolloutManager
from rltop.train.sample import Sample
from rltop.train.trainer_actor import TrainActor

LOOK_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 8.0


def bundles(config: TrainConfig, *, engines: bool = True) -> tuple[dict[str, float], ...]:
    """One bundle per trainer rank, then one per engine, where these are placed by Ray. The first also holds, at no
    cost, the rollout manager, so there is at least one."""
    count = config.trainer_ranks + (config.engine_count if engines else 0)
    return tuple({"CPU": 1.0} for _ in range(max(count, 1)))


@dataclass(frozen=True, slots=True)
class RayTrainer:
    """`ports.Trainer` over one actor per rank."""

    ranks: Group

    @classmethod
    def place(cls, cluster: Cluster, config: TrainConfig, work_dir: Path) -> RayTrainer:
        """Start every rank's actor in its bundle."""
        world = config.layout.world
        names = ["trainer"] if world == 1 else [f"trainer rank {rank}" for rank in range(world)]
        actors = [
            cluster.actor(TrainActor, config, str(work_dir), rank, name=name, bundle=rank, cpus=1)
            for rank, name in enumerate(names)
        ]
        return cls(Group(actors))

    def load(self) -> TrainerFacts:
        self.ranks.ready()
        alone = len(self.ranks.actors) == 1
        facts: TrainerFacts = self.ranks.call("load", "" if alone else self.ranks.actors[0].call("rendezvous"))
        return facts

    def cold_start(self, examples: Sequence[Example]) -> list[float]:
        losses: list[float] = self.ranks.call("cold_start", examples)
        return losses

    def freeze_base(self, directory: str) -> BaseFacts:
        facts: BaseFacts = self.ranks.call("freeze_base", directory)
        return facts

    def log_probs(
        self, tokens: Sequence[tuple[int, ...]], response_lengths: Sequence[int], which: Literal["actor", "ref"]
    ) -> list[tuple[float, ...]]:
        values: list[tuple[float, ...]] = self.ranks.call("log_probs", tokens, response_lengths, which)
        return values

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        values: list[float] = self.ranks.call("advantages", rewards)
        return values

    def train_step(self, samples: Sequence[StepSample], rollout_id: int) -> dict[str, float]:
        values: dict[str, float] = self.ranks.call("train_step", samples, rollout_id)
        return values

    def save_train_data(self, rollout_id: int, samples: Sequence[Sample]) -> Dumped:
        dumped: Dumped = self.ranks.call("save_train_data", rollout_id, samples)
        return dumped

    def grad_norm_file(self, rollout_id: int, step_id: int, grad_norm: float) -> Dumped | None:
        dumped: Dumped | None = self.ranks.call("grad_norm_file", rollout_id, step_id, grad_norm)
        return dumped

    def verify(self, engines: Sequence[EngineFacts]) -> SyncReport:
        report: SyncReport = self.ranks.call("verify", engines)
        return report

    def prove(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        report: SyncReport = self.ranks.call("prove", version, rollout_id, engines)
        return report

    def publish(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        report: SyncReport = self.ranks.call("publish", version, rollout_id, engines)
        return report

    def save_checkpoint(self, rollout_id: int) -> None:
        self.ranks.call("save_checkpoint", rollout_id)

    def save(self, directory: str) -> None:
        self.ranks.call("save", directory)

    def sleep(self, *, weights: bool) -> Sequence[MemoryLook]:
        looks: list[MemoryLook] = self.ranks.call("sleep", weights)
        return looks

    def wake_up(self, *, weights_only: bool = False) -> Sequence[MemoryLook]:
        looks: list[MemoryLook] = self.ranks.call("wake_up", weights_only)
        return looks


@dataclass(slots=True)
class RayRollouts:
    """`ports.Rollouts` over the manager's actor and one actor per engine."""

    manager: Actor
    engines: list[Actor]
    narrator: Narrator
    work_dir: Path
    facts: list[EngineFacts] = field(default_factory=list)
    memory: EngineMemory = field(default_factory=EngineMemory)

    @classmethod
    def place(cls, cluster: Cluster, config: TrainConfig, work_dir: Path, run: str, narrator: Narrator) -> RayRollouts:
        """Start the actors in their bundles; the engines themselves start in `start`."""
        manager = cluster.actor(RolloutManager, config, name="rollout manager", bundle=0, cpus=0)
        engines = [
            cluster.actor(EngineActor, spec, name=f"engine {at}", bundle=config.trainer_ranks + at, cpus=1)
            for at, spec in enumerate(engine_specs(config, work_dir, run))
        ]
        return cls(manager, engines, narrator, work_dir)

    def load(self, checkpoint: str) -> None:
        self.manager.ready()
        self.manager.call("load", checkpoint)

    def checkpoint(self) -> str:
        self.manager.ready()
        return str(self.manager.call("checkpoint", str(self.work_dir)))

    def demonstrations(self) -> list[Example]:
        examples: list[Example] = self.manager.call("demonstrations")
        return examples

    def start(self, base: BaseFacts) -> Sequence[EngineFacts]:
        for actor in self.engines:
            actor.ready()
        started = [engine.begin("start", base.checkpoint) for engine in self.engines]
        self.facts = [engine.result(ref) for engine, ref in zip(self.engines, started, strict=True)]
        self.manager.call("connect", self.facts)
        for engine in self.facts:
            self.narrator.engine(engine, "HEALTHY")
        return self.facts

    @property
    def supervised(self) -> bool:
        return False

    def loaded(self) -> Sequence[EngineFacts]:
        return self.facts

    def took(self, report: SyncReport, engines: Sequence[EngineFacts], seconds: float) -> None:
        """Nothing to remember: who did not take the weights has ended the run."""

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        batch: RolloutBatch = self.manager.call("generate", rollout_id, version, watch=[self.look])
        return batch

    def offload(self, *, late: bool = False) -> None:
        lent_out(self.memory, self.facts, late=late)
        for engine in self.facts:
            self.narrator.engine(engine, "OFFLOADED")

    def holdings(self) -> Sequence[Holding]:
        return self.memory.holdings()

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        for engine in taken_back(self.memory, tags, no_update=no_update):
            self.narrator.engine(engine, "HEALTHY")

    def evaluate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        batch: RolloutBatch = self.manager.call("evaluate", rollout_id, version, watch=[self.look])
        return batch

    def look(self, wait_s: float = 0.0) -> None:
        """Raise RltopError if an engine process is gone, or goes within `wait_s`."""
        for at, actor in enumerate(self.engines[: len(self.facts)]):
            try:
                look: EngineLook = actor.ask("look", wait_s, timeout_s=LOOK_TIMEOUT_S + wait_s)
            except TimeoutError:
                continue
            if not look.alive:
                self.narrator.engine(self.facts[at], "CRASHED")
                raise RltopError(
                    f"engine {self.facts[at].id} died (pid {self.facts[at].pid}, exit status {look.exit_code})",
                    where=self.facts[at].log,
                    why=last_words(look.tail, "       | "),
                    do=FROM_ITS_FIRST_ERROR,
                    exit_code=1,
                )

    def stop(self) -> None:
        """Stop the engines in good order; what does not answer is left to the caller."""
        refs = [engine.begin("stop") for engine in self.engines]
        for at, (engine, ref) in enumerate(zip(self.engines, refs, strict=True)):
            if engine.settled(ref, timeout_s=STOP_TIMEOUT_S) and at < len(self.facts):
                self.narrator.engine(self.facts[at], "STOPPED")


def lent_out(memory: EngineMemory, engines: Sequence[EngineFacts], *, late: bool) -> None:
    """Release them all. Raises RltopError for one that does not: nobody would bring it back."""
    failed = memory.release(engines, late=engines[-1].id if late and engines else "")
    if failed:
        name, why = next(iter(failed.items()))
        raise RltopError(f"engine {name} did not release its memory", where="--offload-rollout", why=why, exit_code=1)


def taken_back(memory: EngineMemory, tags: Sequence[str], *, no_update: bool) -> list[EngineFacts]:
    """Resume them; returns the engines that now have everything again. Raises RltopError for one that does not."""
    failed = memory.resume(tags)
    if failed:
        name, why = next(iter(failed.items()))
        raise RltopError(
            f"engine {name} did not take its memory again", where="--offload-rollout", why=why, exit_code=1
        )
    if "weights" in tags:
        return []
    back = memory.back()
    if no_update and back:
        memory.lose_weights(back[-1])
    return back


def with_memory_saver(config: TrainConfig) -> tuple[str, ...]:
    """The engines' arguments. slime's rule: SGLang's memory saver is on if and only if engines are offloaded."""
    saver = "--enable-memory-saver"
    wanted = config.offloads_rollout and saver not in config.sglang_args
    return (*config.sglang_args, saver) if wanted else config.sglang_args


def engine_specs(config: TrainConfig, work_dir: Path, run: str) -> list[EngineSpec]:
    """What each engine is started with. The checkpoint is filled in when it is known."""
    variables = [text.partition("=") for text in config.engine_env]
    return [
        EngineSpec(
            kind=config.engine,
            model_path=work_dir,
            directory=work_dir / "engines" / str(at) / "1",
            run=run,
            engine_id=str(at),
            args=with_memory_saver(config),
            python=config.engine_python or Path(sys.executable),
            env={"OMP_NUM_THREADS": "1"} | {name: value for name, _, value in variables},
            start_timeout_s=120.0 if config.engine == "cpu" else 600.0,
        )
        for at in range(config.rollout_num_engines)
    ]


NAMESPACE = "rltop"
"""Ray namespace of a run in a cluster that was joined: the daemon finds the run's placement group in it."""


@dataclass(frozen=True, slots=True)
class Joined:
    """How the daemon finds the run in the cluster that it joined."""

    group: str
    """Name of the placement group."""
    ray: Mapping[str, str]
    """`address`, `namespace`, `token_file` (empty: none is needed)."""


def place_fleet(
    cluster: Cluster,
    config: TrainConfig,
    work_dir: Path,
    run: str,
    narrator: Narrator,
    link: FleetLink,
    clock: Callable[[], float],
    joined: Joined | None,
) -> FleetRollouts:
    """The rollout side over engines of rltop's daemon: only the manager is an actor here.

    joined: Ray starts the engines, in the run's bundles; None: the daemon does, on its own machine.
    """
    traffic = str(link.run_dir / TRAFFIC) if link.run_dir is not None else ""
    manager = cluster.actor(RolloutManager, config, traffic, name="rollout manager", bundle=0, cpus=0, lanes=2)
    slots: list[dict[str, Any]] = []
    for at, spec in enumerate(engine_specs(config, work_dir, run)):
        slot = {"id": spec.engine_id, "kind": spec.kind, "python": str(spec.python)}
        slots.append(slot | {"args": list(spec.args), "env": dict(spec.env)})
        if joined is not None:
            bundle = config.trainer_ranks + at
            resources = bundles(config)[bundle]
            slots[-1]["place"] = {"placement_group": joined.group, "bundle": bundle, "resources": resources}
    launcher, ray = ("local", None) if joined is None else ("ray", joined.ray)

    def pause(seconds: float) -> None:
        cluster.signals.check()
        time.sleep(seconds)

    order = Order(slots=slots, launcher=launcher, ray=ray)
    return FleetRollouts(config, manager, link, order, narrator, clock, pause, work_dir)
