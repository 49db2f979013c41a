"""The real trainer, rollout manager and CPU engine in this process, without Ray, for tests that need many runs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from rltop.protocol.codec import decode
from rltop.protocol.messages import Record
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.engine_actor import EngineActor
from rltop.train.engine_memory import EngineMemory
from rltop.train.load_dump import expected_of
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator
from rltop.train.ports import BaseFacts, EngineFacts, Example, Holding, Resync, RolloutBatch, SyncReport
from rltop.train.rollout_manager import RolloutManager
from rltop.train.rollout_only import RolloutLoop
from rltop.train.sides import engine_specs, lent_out, taken_back
from rltop.train.trainer_actor import TrainActor


@dataclass
class LocalRollouts:
    """`ports.Rollouts` over plain objects."""

    config: TrainConfig
    work_dir: Path
    manager: RolloutManager
    actors: list[EngineActor] = field(default_factory=list)
    facts: list[EngineFacts] = field(default_factory=list)
    memory: EngineMemory = field(default_factory=EngineMemory)
    tokenizer: Path = Path()

    def load(self, checkpoint: str) -> None:
        self.manager.load(checkpoint)
        self.tokenizer = Path(checkpoint)

    def checkpoint(self) -> str:
        return self.manager.checkpoint(str(self.work_dir))

    def demonstrations(self) -> list[Example]:
        return self.manager.demonstrations()

    def start(self, base: BaseFacts) -> Sequence[EngineFacts]:
        self.actors = [EngineActor(spec) for spec in engine_specs(self.config, self.work_dir, "test")]
        self.facts = [actor.start(base.checkpoint) for actor in self.actors]
        self.manager.connect(self.facts)
        return self.facts

    @property
    def supervised(self) -> bool:
        return False

    def loaded(self) -> Sequence[EngineFacts]:
        return self.facts

    def took(self, report: SyncReport, engines: Sequence[EngineFacts], seconds: float) -> None:
        """Nobody brings an engine back."""

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        if self.config.mode == "train-only":
            return self.manager.replay(rollout_id, expected_of(self.config, self.tokenizer))
        return self.manager.generate(rollout_id, version)

    def offload(self, *, late: bool = False) -> None:
        lent_out(self.memory, self.facts, late=late)

    def holdings(self) -> Sequence[Holding]:
        return self.memory.holdings()

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        taken_back(self.memory, tags, no_update=no_update)

    def evaluate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        return self.manager.evaluate(rollout_id, version)

    def stop(self) -> None:
        self.manager.connect([])
        for actor in self.actors:
            actor.stop()


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    history: History
    records: list[Record]

    def payloads(self, kind: str) -> list[dict[str, Any]]:
        return [record.payload for record in self.records if record.kind == kind]


def run_locally(config: TrainConfig, work_dir: Path) -> Outcome:
    """One run of the real loop; its records go over a real socket."""
    history = History()
    with ingest() as (address, socket), Reporter(address=address, run="test") as reporter:
        trainer = TrainActor(config, str(work_dir)) if config.trainer_ranks else None
        rollouts = LocalRollouts(config, work_dir, RolloutManager(config))
        narrator = Narrator(reporter, time.monotonic)
        loop: Loop | RolloutLoop = RolloutLoop(config, rollouts, narrator, history)
        if trainer is not None:
            loop = Loop(
                config=config,
                trainer=trainer,
                rollouts=rollouts,
                narrator=narrator,
                clock=time.monotonic,
                base_directory=work_dir / "initial",
                history=history,
            )
        try:
            loop.run()
        finally:
            rollouts.stop()
            if trainer is not None:
                trainer.disconnect()
        narrator.bye("done")
        return Outcome(history, records_until_bye(socket))


@contextlib.contextmanager
def ingest() -> Iterator[tuple[str, Any]]:
    """A PULL socket in the place of the daemon's."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = 0
    try:
        with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as folder:  # TCP would need a CURVE key
            socket.bind(f"ipc://{folder}/ingest")
            yield f"ipc://{folder}/ingest", socket
    finally:
        socket.close(0)
        context.term()


def records_until_bye(socket: Any, *, timeout_s: float = 60) -> list[Record]:
    """All records up to the first `bye`."""
    records: list[Record] = []
    while not records or records[-1].kind != "bye":
        assert socket.poll(int(timeout_s * 1000)), f"no record for {timeout_s} s after {len(records)} records"
        body = decode(socket.recv_multipart()).body
        assert isinstance(body, Record)
        records.append(body)
    return records
