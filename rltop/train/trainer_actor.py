"""One rank of the trainer: a Ray actor around the Megatron backend.

The driver calls every rank with the same arguments and takes rank 0's answer; the others' is nothing. Rank 0 also talks
to the engines. A plain class with light imports: the driver hands it to Ray without loading torch, the worker loads
torch in `load`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rltop.engines.client import EngineClient
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.dump import Dumped, write_dump
from rltop.train.ports import (
    BASE_VERSION,
    BaseFacts,
    EngineFacts,
    MemoryLook,
    StepSample,
    SyncReport,
    TrainerFacts,
)
from rltop.train.resume import REFERENCE, Checkpoint, find_checkpoint, keep_reference
from rltop.train.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from rltop.train.megatron.backend import Forward, MegatronBackend
    from rltop.train.offload import Offload, Part
    from rltop.train.sync import Memory, Named, Stages, Truth
    from rltop.train.train_dump import TrainRecord
    from rltop.train.update_group import UpdateGroups


COLD_START_BATCH = 64
"""Examples per supervised step."""
COLD_START_CHUNK = 5
"""Steps between two looks at the loss."""
_SILENT = SyncReport(version="", digest="", transport="", engines={})
"""What a rank has to say of a sync that only rank 0 takes to the engines."""


class TrainActor:
    """Holds the model. See `ports.Trainer` for what each method promises."""

    def __init__(self, config: TrainConfig, work_dir: str, rank: int = 0) -> None:
        self._config = config
        self._place = config.layout.place(rank)
        self._store: Any = None
        self._resumed: Checkpoint | None = None
        self._work_dir = Path(work_dir)
        self._clients: dict[str, EngineClient] = {}
        self._engines: dict[str, EngineFacts] = {}
        """Whom the clients lead to."""
        self._groups: UpdateGroups | None = None
        self._record: TrainRecord | None = None
        self._memory: Memory | None = None
        self._now: Memory | None = None
        """What the engines were brought last, and before that."""
        self._last: Mapping[str, Tensor] = {}
        """A tensor of the version before, for a planted fault."""
        self._published: tuple[str, Path] | None = None
        """The version that this process put on disk last, and where."""

    def process_id(self) -> int:
        """Of this worker."""
        return os.getpid()

    def rendezvous(self) -> str:
        """On rank 0: open the store where the ranks meet, on a free port, and return its address, `host:port`."""
        from rltop.train.update_group import listening_store

        host = self._host()
        self._store, port = listening_store(host)
        return f"{host}:{port}"

    def _host(self) -> str:
        """Under which the run's other processes reach this one."""
        if self._config.ray_address is None:
            return "127.0.0.1"
        import ray

        return str(ray.util.get_node_ip_address())

    def load(self, address: str = "") -> TrainerFacts:
        """Build this rank's part of the model, from the given checkpoint or from a tiny one made here.

        address: what `rendezvous` returned; empty when the rank is alone.
        """
        from rltop.train.inject import parse_fault
        from rltop.train.megatron.backend import BackendConfig, MegatronBackend
        from rltop.train.megatron.model import Build
        from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

        config = self._config
        checkpoint = config.hf_checkpoint
        if checkpoint is None:
            # A directory per rank: ranks may run on machines that share no disk, and the seed makes them equal.
            name = f"tiny-{self._place.rank}" if self._place.rank else "tiny"
            checkpoint = make_tiny_model(self._work_dir / name, TinyModelConfig(seed=config.seed))
        self._faults = [parse_fault(text) for text in config.inject]
        if config.weight_transport == "distributed":
            from rltop.train.update_group import agree_with_sglang

            agree_with_sglang()
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
                build=Build(config.transformer_impl, config.bf16),
            ),
            faults=self._faults,
            place=self._place,
            store=self._meet(address),
        )
        self._offload: Offload = self._backend.offload(self._work_dir / "offload" / str(self._place.rank))
        self._source = checkpoint
        self._resumed = find_checkpoint(config.load) if config.load is not None else None
        if self._resumed is not None:
            self._backend.load_checkpoint(self._resumed)
        return TrainerFacts(
            backend=self._backend.description,
            vocab_size=self._backend.shape.vocab_size,
            checkpoint=str(checkpoint),
            loaded_iteration=self._resumed.iteration if self._resumed else None,
        )

    def _meet(self, address: str) -> Any:
        if not address or self._store is not None:
            return self._store
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in the stub

        host, _, port = address.rpartition(":")
        return TCPStore(host, int(port), is_master=False)

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
        """Write the weights to `directory` and take the reference model: --ref-load, else the run's first weights."""
        from rltop.train.sync import digest_of, named

        config, self._base = self._config, Path(directory)
        if directory:
            self._backend.save_hf(self._base)
        source = config.ref_load
        if config.keeps_reference and self._resumed is not None:
            source = self._resumed.root / REFERENCE
        if config.use_kl_loss:
            if source is None:
                self._backend.snapshot_ref()
            else:
                self._backend.load_ref(source)
        if config.keeps_reference and config.save is not None and self._place.rank == 0:
            keep_reference(source or self._base, config.save)
        stages = self._backend.hf_stages()
        return BaseFacts(directory, digest_of(named(stages)) if stages else "")

    def log_probs(
        self, tokens: Sequence[tuple[int, ...]], response_lengths: Sequence[int], which: Literal["actor", "ref"]
    ) -> list[tuple[float, ...]]:
        """Per response token. fp32 values survive the way through Python floats bit for bit."""
        from rltop.train.megatron.batching import TokenSample

        batch = [TokenSample(ids, length) for ids, length in zip(tokens, response_lengths, strict=True)]
        every = self._backend.log_probs(batch, which=which)
        return [tuple(values.tolist()) for values in every] if self._place.rank == 0 else []

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
                loss_mask=sample.loss_mask,
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
        if config.train_dumps is None:
            return self._backend.train_step(batch, loss, rollout_id=rollout_id)
        seen: list[Forward] = []
        metrics = self._backend.train_step(batch, loss, rollout_id=rollout_id, capture=seen)
        if self._place.rank == 0:
            self._note_step(samples, seen)
        return metrics

    def _note_step(self, samples: Sequence[StepSample], seen: Sequence[Forward]) -> None:
        """For the dump of the rollout."""
        from rltop.train.megatron.batching import TokenSample
        from rltop.train.train_dump import TrainRecord

        if self._record is None:
            self._record = TrainRecord(self._config.layout)
        tokens = [TokenSample(sample.tokens, sample.response_length) for sample in samples]
        schedule = [self._backend.schedule(tokens, replica) for replica in range(self._config.layout.data)]
        self._record.add(samples, [one.log_probs for one in seen], [one.entropy for one in seen], schedule)

    def save_train_data(self, rollout_id: int, samples: Sequence[Sample]) -> Dumped:
        """Write the dump of the rollout whose steps are done, from rank 0."""
        pattern, record = self._config.train_dumps, self._record
        self._record = None
        if pattern is None or record is None:
            return Dumped("")
        return write_dump(Path(pattern.format(rollout_id=rollout_id, rank=0)), record.payload(rollout_id, samples))

    def grad_norm_file(self, rollout_id: int, step_id: int, grad_norm: float) -> Dumped | None:
        """slime's comparison of two runs, and its numbers."""
        from rltop.train.grad_norm import compare_grad_norm, save_grad_norm

        config = self._config
        if self._place.rank != 0:
            return None
        if config.ci_save_grad_norm is not None:
            return save_grad_norm(config.ci_save_grad_norm, rollout_id, step_id, grad_norm)
        if config.ci_load_grad_norm is not None:
            compare_grad_norm(config.ci_load_grad_norm, rollout_id, step_id, grad_norm)
        return None

    def verify(self, engines: Sequence[EngineFacts]) -> SyncReport:
        """Whether the engines hold the base weights under SGLang's name for them; nothing is pushed."""
        from rltop.train.sync import compare

        stages = self._backend.hf_stages()
        if stages is None:
            return _SILENT
        truth = self._truth(stages)
        report = compare(truth, version=BASE_VERSION, transport="start", engines=self._connected(engines))
        self._remember(BASE_VERSION, truth)
        return report

    def prove(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        """`publish`, after the engines' weights were made random; then every tensor is compared."""
        from rltop.train import proof

        held = self._backend.hf_stages()
        if held is None:
            return _SILENT
        clients, vocab_size = self._connected(engines), self._backend.shape.vocab_size
        prepared = proof.prepare(clients, vocab_size)
        resets = {name: one.digests for name, one in prepared.items()}
        report, truth = self._brought(held, version, rollout_id, clients, resets)
        report = proof.conclude(report, clients, prepared, vocab_size)
        if self._resumed is None and not self._config.cold_start_steps:
            report = dataclasses.replace(report, source=tuple(proof.against_source(truth, self._source)))
        return report

    def publish(self, version: str, rollout_id: int, engines: Sequence[EngineFacts]) -> SyncReport:
        """Push the weights after the steps of `rollout_id`."""
        reference = self._probe() if self._config.check_weight_update_equal else ()
        held = self._backend.hf_stages()
        if held is None:
            return _SILENT
        clients = self._connected(engines)
        report, truth = self._brought(held, version, rollout_id, clients)
        if reference:
            from rltop.train.proof import compare_probes

            vocab_size = self._backend.shape.vocab_size
            report = compare_probes(report, clients, reference, vocab_size, exact=truth.exact)
        return report

    def _probe(self) -> tuple[float, ...]:
        """What the trainer gives the probe's tokens; nothing where it would scale them, or sleeps in between.

        Every rank takes part; rank 0 gets the values.
        """
        from rltop.engines.probe import probe_ids
        from rltop.train.megatron.batching import TokenSample

        if self._config.rollout_temperature != 1.0 or self._config.offloads_train:
            return ()
        ids = tuple(probe_ids(self._backend.shape.vocab_size))
        values = self._backend.log_probs([TokenSample(ids, len(ids) - 1)], which="actor")
        return tuple(values[0].tolist()) if values and self._place.rank == 0 else ()

    def _brought(
        self,
        held: Stages,
        version: str,
        rollout_id: int,
        clients: Mapping[str, EngineClient],
        resets: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
    ) -> tuple[SyncReport, Truth]:
        """Push `held`, with the faults that act, and compare."""
        from rltop.train.inject import active
        from rltop.train.sync import Memory, Suspects, push

        truth = self._truth(held)
        pushed = self._with_faults(held, rollout_id)
        memory = self._now if self._now is not None and self._now.version != version else self._memory
        lost = active(self._faults, "lost-rotary", rollout_id)
        if lost:
            for client in clients.values():
                client.inject("rotary-lost:count=1")
        report = push(
            pushed,
            held,
            version=version,
            transport=self._config.weight_transport,
            engines=clients,
            directory=self._on_disk(version, pushed, planted=pushed is not held)
            if self._config.weight_transport == "disk"
            else None,
            planted=pushed is not held or lost,
            truth=truth,
            suspects=Suspects(memory or Memory(), shapes=self._shapes(), resets=resets or {}),
            shared=self._shares_gpu,
            send=self._in_groups(version) if self._config.weight_transport == "distributed" else None,
        )
        self._remember(version, truth)
        return report, truth

    def _in_groups(self, version: str) -> Callable[[str, EngineClient, Named], None]:
        """What broadcasts tensors to one of the engines that were connected last."""
        from rltop.train.update_group import UpdateGroups

        if self._groups is None:
            on_gpus = self._config.engine == "sglang" and self._offload.device.type == "cuda"
            self._groups = UpdateGroups(self._host(), self._offload.device if on_gpus else None)
        groups, engines = self._groups, self._engines
        return lambda name, client, tensors: groups.push(engines[name], client, tensors, version)

    @property
    def _shares_gpu(self) -> bool:
        """Whether the engines can open this process's tensors where they lie. The stand-in takes them by value."""
        config = self._config
        return config.engine == "sglang" and config.colocate and self._offload.device.type == "cuda"

    def _truth(self, held: Stages) -> Truth:
        from rltop.train.sync import Truth

        return Truth(held, kv_heads=self._backend.shape.num_kv_heads)

    def _remember(self, version: str, truth: Truth) -> None:
        """Keep the digests of this version and of the one before: an engine may still hold that."""
        if self._now is not None and self._now.version != version:
            self._memory = self._now
        self._now = truth.memory(version)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the checkpoint that the engines were started from."""
        from rltop.engines.raw_tensors import Checkpoint

        with Checkpoint(self._base) as base:
            return {name: base.shape(name) for name in base.names()}

    def _on_disk(self, version: str, pushed: Stages, *, planted: bool) -> Path:
        """The published version. Written once: an engine that comes back may read it while others do.

        planted: it is not what the trainer holds, so that the base checkpoint does not do for the base version.
        """
        if version == BASE_VERSION and not planted:
            return self._base
        from rltop.engines.weights import publish
        from rltop.train.sync import named

        if self._published is None or self._published[0] != version:
            number = 0 if version == BASE_VERSION else int(version)
            path = publish(self._work_dir / "weights", number, named(pushed), checkpoint=self._base)
            self._published = (version, path)
        return self._published[1]

    def _with_faults(self, held: Stages, rollout_id: int) -> Stages:
        """What is pushed: the weights themselves, unless a fault of the sync acts after this rollout."""
        from rltop.train.inject import BENT, active, bend, local_layer_ids, remembered, swap_layers
        from rltop.train.sync import named

        stages = held
        if active(self._faults, "swap-layers", rollout_id):
            swapped = dict(swap_layers(named(stages)))
            stages = [{name: swapped[name] for name in stage} for stage in stages]
        if active(self._faults, "pp-layer-ids", rollout_id):
            stages = local_layer_ids(stages)
        for name in BENT:
            if active(self._faults, name, rollout_id):
                stages = bend(name, stages, self._last)
        if any(fault.name == "stale-tensor" for fault in self._faults):
            self._last = remembered(held)
        return stages

    def _connected(self, engines: Sequence[EngineFacts]) -> dict[str, EngineClient]:
        """A client per engine, kept from sync to sync; a new one where an engine came back at another address."""
        self._engines = {engine.id: engine for engine in engines}
        for engine in engines:
            known = self._clients.get(engine.id)
            if known is None or known.url != engine.url.rstrip("/"):
                if known is not None:
                    known.close()
                self._clients[engine.id] = EngineClient(engine.url)
        return {engine.id: self._clients[engine.id] for engine in engines}

    def disconnect(self) -> None:
        """Close the connections to the engines."""
        if self._groups is not None:
            self._groups.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def save_checkpoint(self, rollout_id: int) -> None:
        """Everything that the next rollout depends on, in Megatron's format."""
        if self._config.save is None:
            raise RltopError("nowhere to save to", where="--save", do="--save DIR --save-interval N")
        self._backend.save_checkpoint(self._config.save, rollout_id)

    def save(self, directory: str) -> None:
        """Write the weights as a Hugging Face checkpoint."""
        self._backend.save_hf(Path(directory))

    def sleep(self, weights: bool) -> list[MemoryLook]:
        """See `ports.Trainer.sleep`; of this rank."""
        parts: tuple[Part, ...] = ("gradients", "rest", "weights") if weights else ("gradients", "rest")
        return [self._looked(lambda: self._offload.sleep(parts))]

    def wake_up(self, weights_only: bool = False) -> list[MemoryLook]:
        """See `ports.Trainer.wake_up`; of this rank."""
        return [
            self._looked(
                lambda: self._offload.wake_up(("weights",) if weights_only else ("weights", "gradients", "rest"))
            )
        ]

    def _looked(self, work: Callable[[], None]) -> MemoryLook:
        from rltop.train.offload import memory_now

        before = memory_now(self._offload.device)
        work()
        return MemoryLook(self._place.rank, before, memory_now(self._offload.device))
