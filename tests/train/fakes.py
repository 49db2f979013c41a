"""A trainer and a rollout side without torch, Ray or HTTP, for tests of the loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltop.train.dump import Dumped
from rltop.train.ports import (
    BASE_VERSION,
    BaseFacts,
    EngineFacts,
    EngineReply,
    Example,
    Holding,
    MemoryLook,
    Resync,
    RolloutBatch,
    StepSample,
    SyncReport,
    TrainerFacts,
)
from rltop.train.sample import Sample

ENGINE = EngineFacts(
    id="0",
    url="http://127.0.0.1:1",
    kind="cpu",
    pid=1,
    host="h",
    version="0",
    weight_version=BASE_VERSION,
    model_path="/base",
    log="/log",
)


@dataclass
class FakeTrainer:
    """Notes what it is asked in `calls`; `reply` is what its engine says after every push."""

    calls: list[Any]
    reply: EngineReply | None = None
    base_reply: EngineReply | None = None
    planted: bool = False
    loaded_iteration: int | None = None
    disk: str = ""
    """Why it takes nothing."""

    def load(self) -> TrainerFacts:
        self.calls.append("load")
        return TrainerFacts("fake backend", 260, "/model", self.loaded_iteration)

    def cold_start(self, examples: Sequence[Example]) -> list[float]:
        self.calls.append(("cold_start", len(examples)))
        return [3.0, 1.0]

    def freeze_base(self, directory: str) -> BaseFacts:
        self.calls.append("freeze_base")
        return BaseFacts(directory, "d0")

    def log_probs(
        self, tokens: Sequence[tuple[int, ...]], response_lengths: Sequence[int], which: Literal["actor", "ref"]
    ) -> list[tuple[float, ...]]:
        self.calls.append(("log_probs", which))
        return [(-0.25,) * length for length in response_lengths]

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [reward - 0.5 for reward in rewards]

    def train_step(self, samples: Sequence[StepSample], rollout_id: int) -> dict[str, float]:
        self.calls.append(("train_step", rollout_id, tuple(samples)))
        return {"loss": 0.5, "grad_norm": 0.1, "train_rollout_logprob_abs_diff": 0.001 * (1 + rollout_id), "lr": 1e-3}

    def save_train_data(self, rollout_id: int, samples: Sequence[Sample]) -> Dumped:
        self.calls.append(("save_train_data", rollout_id, len(samples)))
        return Dumped(f"/dumps/{rollout_id}.pt", self.disk)

    def grad_norm_file(self, rollout_id: int, step_id: int, grad_norm: float) -> Dumped | None:
        self.calls.append(("grad_norm_file", rollout_id, step_id, grad_norm))
        return Dumped("/norm.pt", self.disk)

    def verify(self, engines: Sequence[EngineFacts]) -> SyncReport:
        self.calls.append("verify")
        return self._report(BASE_VERSION, self.base_reply)

    def prove(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        self.calls.append(("prove", version, rollout_id))
        return replace(self._report(version, self.base_reply), checked=True)

    def publish(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        self.calls.append(("publish", version, rollout_id))
        return self._report(version, self.reply, planted=self.planted)

    def save_checkpoint(self, rollout_id: int) -> None:
        self.calls.append(("save_checkpoint", rollout_id))

    def save(self, directory: str) -> None:
        self.calls.append(("save", directory))

    def sleep(self, *, weights: bool) -> Sequence[MemoryLook]:
        self.calls.append(("sleep", weights))
        return [MemoryLook(0, {"gpu": "cpu"}, {"gpu": "cpu"})]

    def wake_up(self, *, weights_only: bool = False) -> Sequence[MemoryLook]:
        self.calls.append(("wake_up", weights_only))
        return [MemoryLook(0, {"gpu": "cpu"}, {"gpu": "cpu"})]

    def _report(self, version: str, reply: EngineReply | None = None, *, planted: bool = False) -> SyncReport:
        good = EngineReply(ok=True, version=version, digest="d", same=True)
        return SyncReport(version, "d", "disk", {"0": reply or good}, planted=planted)


@dataclass
class FakeRollouts:
    """Hands out two groups of two samples, the second of each rewarded."""

    calls: list[Any]
    engines: list[EngineFacts] = field(default_factory=lambda: [ENGINE])
    supervised: bool = False
    back: list[list[EngineFacts]] = field(default_factory=list)
    """Engines that come back without weights, per rollout."""
    held: list[Holding] = field(default_factory=list)
    """What released engines hold."""
    disk: str | None = None
    """Why dumps cannot be written; None: none are."""

    def load(self, checkpoint: str) -> None:
        self.calls.append(("tokenizer", checkpoint))

    def demonstrations(self) -> list[Example]:
        return [((1, 2, 3), 1)]

    def checkpoint(self) -> str:
        return "/model"

    def start(self, base: BaseFacts) -> Sequence[EngineFacts]:
        self.calls.append(("engines", base.checkpoint))
        return self.engines

    def loaded(self) -> Sequence[EngineFacts]:
        return self.engines

    def took(self, report: SyncReport, engines: Sequence[EngineFacts], seconds: float) -> None:
        if self.supervised:
            self.calls.append(("took", report.version, [engine.id for engine in engines]))

    def generate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        self.calls.append(("generate", rollout_id, version))
        if self.back:
            resync(self.back.pop(0))
        return self._batch(rollout_id, version)

    def evaluate(self, rollout_id: int, version: str, resync: Resync) -> RolloutBatch:
        self.calls.append(("evaluate", rollout_id, version))
        return self._batch(rollout_id, version, dataset="sort")

    def _batch(self, rollout_id: int, version: str, dataset: str = "") -> RolloutBatch:
        samples = tuple(
            Sample(
                index=at,
                group_index=at // 2,
                prompt="q",
                prompt_ids=(9, at),
                response="r",
                response_ids=(5, 6),
                rollout_log_probs=(-0.5, -0.5),
                reward=float(at % 2),
                label="r",
                status="completed",
                finish_reason="stop",
                weight_version=version,
                engine="0",
            )
            for at in range(4)
        )
        dumped = None if self.disk is None else Dumped(f"/dumps/{rollout_id}.pt", self.disk)
        return RolloutBatch(rollout_id, samples, 0.5, dumped=dumped, dataset=dataset)

    def offload(self, *, late: bool = False) -> None:
        self.calls.append(("offload", late))

    def holdings(self) -> Sequence[Holding]:
        return self.held

    def onload(self, tags: Sequence[str], *, no_update: bool = False) -> None:
        self.calls.append(("onload", tuple(tags), no_update))
