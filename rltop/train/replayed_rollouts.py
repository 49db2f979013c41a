"""The rollout side of a train-only run: the manager reads dumps, and there is no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rltop.train.arguments import TrainConfig
from rltop.train.cluster import Actor, Cluster
from rltop.train.load_dump import Expected, expected_of
from rltop.train.ports import BaseFacts, EngineFacts, Example, Holding, Resync, RolloutBatch, SyncReport
from rltop.train.rollout_manager import RolloutManager


@dataclass(slots=True)
class ReplayedRollouts:
    """`ports.Rollouts` over dumps; what needs engines does nothing, for there are none."""

    manager: Actor
    config: TrainConfig
    expected: Expected | None = None

    @classmethod
    def place(cls, cluster: Cluster, config: TrainConfig) -> ReplayedRollouts:
        """Start the manager's actor."""
        return cls(cluster.actor(RolloutManager, config, name="rollout manager", bundle=0, cpus=0), config)

    def load(self, checkpoint: str) -> None:
        self.manager.ready()
        self.manager.call("load", checkpoint)
        self.expected = expected_of(self.config, Path(checkpoint))

    def demonstrations(self) -> list[Example]:
        examples: list[Example] = self.manager.call("demonstrations")
        return examples

    def checkpoint(self) -> str:
        raise AssertionError("the trainer says it")

    def start(self, base: BaseFacts) -> Sequence[EngineFacts]:
        return []

    @property
    def supervised(self) -> bool:
        return False

    def loaded(self) -> Sequence[EngineFacts]:
        return []

    def took(self, report: SyncReport, engines: Sequence[EngineFacts], seconds: float) -> None:
        """Nobody takes any."""

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        batch: RolloutBatch = self.manager.call("replay", rollout_id, self.expected)
        return batch

    def evaluate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        raise AssertionError("without engines nothing is evaluated")

    def offload(self, *, late: bool = False) -> None:
        """Nobody holds memory."""

    def holdings(self) -> Sequence[Holding]:
        return []

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        """Nobody takes any."""
