"""The trainer's process: a Ray actor around the Megatron backend.

A plain class with light imports: the driver hands it to Ray without loading torch, the worker loads torch in `load`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rltop.engines.client import EngineClient
from rltop.train.arguments import TrainConfig
from rltop.train.ports import BASE_VERSION, BaseFacts, EngineFacts, StepSample, SyncReport, TrainerFacts

if TYPE_CHECKING:
    from rltop.train.megatron.backend import MegatronBackend


COLD_START_BATCH = 64
"""Examples per supervised step."""
COLD_START_CHUNK = 5
"""Steps between two looks at the loss."""


class TrainActor:
    """Holds the model. See `ports.Trainer` for what each method promises."""

    def __init__(self, config: TrainConfig, work_dir: str) -> None:
        self._config = config
        self._work_dir = Path(work_dir)
        self._clients: dict[str, EngineClient] = {}

    def process_id(self) -> int:
        """Of this worker."""
        return os.getpid()

    def load(self) -> TrainerFacts:
        """Build the model from the given checkpoint, or from a tiny one made here."""
        from rltop.train.inject import parse_fault
        from rltop.train.megatron.backend import BackendConfig, MegatronBackend
        from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

        config = self._config
        checkpoint = config.hf_checkpoint
        if checkpoint is None:
            checkpoint = make_tiny_model(self._work_dir / "tiny", TinyModelConfig(seed=config.seed))
        self._faults = [parse_fault(text) for text in config.inject]
        self._backend: MegatronBackend = MegatronBackend(
            checkpoint,
            config=BackendConfig(
                lr=config.lr,
                lr_warmup_steps=config.lr_warmup_iters,
                clip_grad=config.clip_grad,
                seed=config.seed,
                deterministic=config.deterministic,
                temperature=config.rollout_temperature,
                max_tokens_per_micro_batch=config.max_tokens_per_gpu,
                global_batch_size=config.step_size,
            ),
            faults=self._faults,
        )
        return TrainerFacts(
            backend=self._backend.description,
            vocab_size=self._backend.shape.vocab_size,
            checkpoint=str(checkpoint),
        )

    def cold_start(self, examples: Sequence[tuple[tuple[int, ...], int]]) -> list[float]:
        """Supervised steps on (tokens, response length) pairs, until there were enough or the loss is low enough.

        How fast the model learns varies a lot with the seed; the loss at which it starts to get answers right does not.
        """
        from rltop.train.megatron.batching import TokenSample

        config, samples = self._config, [TokenSample(tokens, length) for tokens, length in examples]
        losses: list[float] = []
        while len(losses) < config.cold_start_steps:
            steps = min(COLD_START_CHUNK, config.cold_start_steps - len(losses))
            chunk = self._backend.cold_start(samples, steps, config.cold_start_lr, batch_size=COLD_START_BATCH)
            losses += chunk
            if sum(chunk) / steps <= config.cold_start_loss:
                break
        return losses

    def freeze_base(self, directory: str) -> BaseFacts:
        """Write the base checkpoint to `directory` and take the reference model."""
        from rltop.train.sync import digest_of

        self._base = Path(directory)
        self._backend.save_hf(self._base)
        if self._config.use_kl_loss:
            if self._config.ref_load is None:
                self._backend.snapshot_ref()
            else:
                self._backend.load_ref(self._config.ref_load)
        return BaseFacts(directory, digest_of(self._backend.hf_tensors()))

    def log_probs(
        self, tokens: Sequence[tuple[int, ...]], response_lengths: Sequence[int], which: Literal["actor", "ref"]
    ) -> list[tuple[float, ...]]:
        """Per response token. fp32 values survive the way through Python floats bit for bit."""
        from rltop.train.megatron.batching import TokenSample

        batch = [TokenSample(ids, length) for ids, length in zip(tokens, response_lengths, strict=True)]
        return [tuple(values.tolist()) for values in self._backend.log_probs(batch, which=which)]

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """Normalised over groups of neighbours."""
        from rltop.train.loss import group_advantages

        return group_advantages(rewards, self._config.n_samples_per_prompt)

    def train_step(self, samples: Sequence[StepSample], rollout_id: int) -> dict[str, float]:
        """One optimizer step; metrics without prefix."""
        from rltop.train.loss import LossConfig
        from rltop.train.megatron.batching import TrainSample

        config = self._config
        batch = [
            TrainSample(
                tokens=sample.tokens,
                response_length=sample.response_length,
                advantage=sample.advantage,
                old_log_probs=sample.log_probs,
                ref_log_probs=sample.ref_log_probs,
                rollout_log_probs=sample.rollout_log_probs,
            )
            for sample in samples
        ]
        loss = LossConfig(
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            kl_loss_coef=config.kl_loss_coef,
            kl_loss_type=config.kl_loss_type,
            entropy_coef=config.entropy_coef,
            calculate_per_token_loss=config.calculate_per_token_loss,
        )
        return self._backend.train_step(batch, loss, rollout_id=rollout_id)

    def verify(self, engines: Sequence[EngineFacts]) -> SyncReport:
        """Whether the engines hold the base weights under SGLang's name for them; nothing is pushed."""
        from rltop.train.sync import compare

        return compare(
            self._backend.hf_tensors, version=BASE_VERSION, transport="start", engines=self._connected(engines)
        )

    def publish(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        """Push the weights after the steps of `rollout_id`."""
        from rltop.train.inject import active, swap_layers
        from rltop.train.sync import push

        swapped = active(self._faults, "swap-layers", rollout_id)
        held = self._backend.hf_tensors
        return push(
            (lambda: swap_layers(held())) if swapped else held,
            held,
            version=version,
            transport=self._config.weight_transport,
            engines=self._connected(engines),
            directory=self._work_dir / "weights",
            checkpoint=self._base,
            planted=swapped,
        )

    def _connected(self, engines: Sequence[EngineFacts]) -> dict[str, EngineClient]:
        """A client per engine, kept from sync to sync; a new one where an engine came back at another address."""
        for engine in engines:
            known = self._clients.get(engine.id)
            if known is None or known.url != engine.url.rstrip("/"):
                self._clients[engine.id] = EngineClient(engine.url)
        return {engine.id: self._clients[engine.id] for engine in engines}

    def disconnect(self) -> None:
        """Close the connections to the engines."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def save(self, directory: str) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self._backend.save_hf(Path(directory))
