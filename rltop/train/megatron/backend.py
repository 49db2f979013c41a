"""`MegatronBackend`: log-probs, optimizer steps, cold start and weights of one trainer rank.

With several ranks every public method is collective: all ranks call it with the same arguments, each works on its
share (samples of its replica, layers of its stage, its part of a layer), and all return the same values. What a rank
computes follows from the arguments and the layout alone, so one layout gives the same bits twice.

Failure policy. Input that cannot be trained on raises `RltopError` before anything is touched. A gradient that is not
finite never reaches the weights: the step is skipped, `grad_norm` is reported as it is (NaN or Inf), `step_skipped`
is 1 and a warning is logged. There is no path on which a NaN goes into the weights silently.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rltop.errors import RltopError
from rltop.train.inject import Fault, active, perturb, poison
from rltop.train.layout import Divisible, Layout, Place, balanced, check_layout
from rltop.train.log_probs import Entropy
from rltop.train.loss import LossConfig, policy_loss, token_weights
from rltop.train.megatron.batching import (
    HasTokens,
    MicroBatch,
    TrainSample,
    check_samples,
    collate,
    mask_of,
    plan,
)
from rltop.train.megatron.checkpoint import TrainState
from rltop.train.megatron.compat import load_megatron, quietly
from rltop.train.megatron.hf_checkpoint import ModelShape, read_shape, read_weights, write_checkpoint
from rltop.train.megatron.model import (
    Build,
    build_model,
    config_of,
    gather_stages,
    local_weights,
    put_weights,
    refuse_on_cpu,
    scored,
    transformer_engine,
    wrap_ddp,
)
from rltop.train.megatron.ranks import join_ranks
from rltop.train.megatron.terms import flat, token_terms
from rltop.train.megatron.vocab_parallel import scores
from rltop.train.offload import Offload, Part
from rltop.train.resume import Checkpoint

_log = logging.getLogger(__name__)

MicroLoss = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(micro-batch, what `scores` says of it) -> (its share of the step's loss, its shares of the metrics)."""


class Forward(NamedTuple):
    """What a training forward saw of one sample: `[response_length]` fp32 CPU tensors, in nats."""

    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """How the trainer trains. Defaults of the optimizer are slime's."""

    lr: float = 1e-6
    """Learning rate of the policy, constant after the warm-up."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate grows linearly to `lr`. Adam's first steps have full size in every direction,
    noise included: without warm-up, a large `lr` undoes the cold start at once."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    """Decoupled (AdamW); norms are exempt, as in Megatron."""
    clip_grad: float = 1.0
    """Largest global L2 norm of the gradient; 0 does not clip."""
    seed: int = 1234
    deterministic: bool = False
    """Ask torch for deterministic kernels only. One CPU thread is deterministic without it."""
    temperature: float = 1.0
    """Rollout temperature: log-probs are of logits divided by it."""
    max_tokens_per_micro_batch: int = 2048
    """Padded tokens of one forward."""
    global_batch_size: int | None = None
    """Samples of one optimizer step. Set it when a rollout has several steps, so that the log-prob passes over the
    whole rollout are cut into the same micro-batches as the steps; None: a rollout is one step."""
    build: Build = field(default_factory=Build)
    """Layer spec and precision."""
    threads: int = 1
    """Torch threads of this process. Tiny models are slower with two, many times so on a busy machine."""

    def __post_init__(self) -> None:
        for name in ("lr", "temperature"):
            if not getattr(self, name) > 0:
                raise RltopError(
                    f"{name} must be positive", where=f"BackendConfig.{name}", why=f"{getattr(self, name)}"
                )


class MegatronBackend:
    """One trainer rank. Not thread-safe; one live instance per process is the intended use."""

    def __init__(
        self,
        hf_checkpoint: Path,
        *,
        config: BackendConfig,
        faults: Sequence[Fault] = (),
        place: Place | None = None,
        store: Any = None,
    ) -> None:
        """Load `hf_checkpoint` (Hugging Face format, dense Qwen3) into a Megatron model.

        place: which rank this is; without it the only one. store: where the ranks meet, see `join_ranks`.
        Raises `RltopError` for a checkpoint that cannot be read, mapped or split, or when Megatron-Core is missing.
        """
        place = place or Layout().place(0)
        torch.set_num_threads(config.threads)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses cuBLAS without it
            os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # TransformerEngine's attention
        self.config = config
        self.shape = read_shape(hf_checkpoint)
        check_layout(place.layout, _divisible(self.shape), where=str(hf_checkpoint))
        self._source = hf_checkpoint
        self._faults = tuple(faults)
        weights = read_weights(hf_checkpoint)
        self._megatron = load_megatron()
        if self._megatron.on_cpu:
            refuse_on_cpu(config.build)
        fused = config.build.transformer_impl == "transformer_engine"
        self._spec = f"TransformerEngine {transformer_engine(self._megatron.on_cpu)}" if fused else "local spec"
        self.ranks = join_ranks(self._megatron, place, seed=config.seed, store=store)
        self._device = self.ranks.device
        self._model = build_model(self._megatron, self.shape, place, config.build)
        put_weights(self._model, local_weights(self._model, weights, self.shape, place))
        self._ddp = wrap_ddp(self._megatron, self._model)
        config_of(self._model).finalize_model_grads_func = self._megatron.finalize_grads
        self._optimizer = self._make_optimizer(config.lr)
        self._cold_optimizer: Any = None
        self._cold_random = torch.Generator().manual_seed(config.seed)
        self._reference: dict[str, Tensor] = {}
        self._steps = 0
        self._nan_planted = False
        if not self._megatron.on_cpu:
            _take_workspaces(self._device, config.build.dtype)

    @property
    def description(self) -> str:
        """For people: what trains, on what, how it batches."""
        where = "cpu/gloo" if self._megatron.on_cpu else "cuda/nccl"
        layout = self.ranks.place.layout
        split = f", {layout}" if layout.world > 1 else ""
        precision = "bf16" if self.config.build.bf16 else "fp32"
        return (
            f"megatron-core {self._megatron.version}, {self._spec}, {where}{split}, {precision}, padded micro-batches"
        )

    # --- reference --------------------------------------------------------------------------------------------------

    def snapshot_ref(self) -> None:
        """Keep a copy of the current weights as the reference model."""
        self._set_reference({name: parameter.detach().clone() for name, parameter in self._model.named_parameters()})

    def load_ref(self, hf_checkpoint: Path) -> None:
        """Take the reference model from a checkpoint of the same shape."""
        shape = read_shape(hf_checkpoint)
        if shape != self.shape:
            raise RltopError(
                "the reference model has another shape", where=str(hf_checkpoint), why=f"{shape} is not {self.shape}"
            )
        weights = read_weights(hf_checkpoint)
        local = local_weights(self._model, weights, self.shape, self.ranks.place)
        self._set_reference(
            {name: tensor.to(self._device, self.config.build.dtype, copy=True) for name, tensor in local.items()}
        )

    def _set_reference(self, reference: dict[str, Tensor]) -> None:
        if any(fault.name == "ref-perturb" for fault in self._faults):
            perturb(reference.values(), seed=self.config.seed)
        self._reference = reference

    @contextmanager
    def _weights_of(self, which: Literal["actor", "ref"]) -> Iterator[None]:
        """The model holds the named weights inside the block. One model serves both, so both take the same kernels."""
        if which == "actor":
            yield
            return
        if not self._reference:
            raise RltopError(
                "no reference model", where="MegatronBackend", do="call snapshot_ref() or load_ref(checkpoint) first"
            )
        actor = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        put_weights(self._model, self._reference)
        try:
            yield
        finally:
            put_weights(self._model, actor)

    # --- passes -----------------------------------------------------------------------------------------------------

    def log_probs(self, batch: Sequence[HasTokens], *, which: Literal["actor", "ref"]) -> list[Tensor]:
        """Log-probs of the response tokens, one `[response_length]` fp32 CPU tensor per sample, in the given order.

        Before an update, "actor", "ref" (after `snapshot_ref`) and what `train_step` computes are equal bit for bit
        when the same samples come in the same order, or in whole steps of `global_batch_size`.
        """
        batches = self._micro_batches(batch)
        with self._weights_of(which), torch.no_grad():
            parts = self._forward(batches, None)
        mine = {
            index: values
            for micro, part in zip(batches, parts, strict=False)  # only the last stage has parts
            for index, values in zip(micro.samples, part.cpu().split(micro.sizes), strict=True)
        }
        every = self.ranks.from_last_stage(self.ranks.union_of_replicas(mine))
        return [every[index] for index in range(len(batch))]

    def train_step(
        self,
        samples: Sequence[TrainSample],
        loss: LossConfig,
        *,
        rollout_id: int | None = None,
        capture: list[Forward] | None = None,
    ) -> dict[str, float]:
        """One optimizer step over all samples, in as many micro-batches as they need.

        Returns loss, pg_loss, entropy_loss, ppo_kl, pg_clipfrac, kl_loss (with reference),
        train_rollout_logprob_abs_diff (with engine log-probs), grad_norm (global L2 before clipping), lr,
        step_skipped (0 or 1). `rollout_id` only decides when planted faults act; without it the number of steps so
        far is taken. `capture` gets what the step's own forward saw of every sample, in the given order; it must be
        wanted on all ranks or on none.
        """
        self._cold_optimizer = None  # its moments and master weights are of no use any more, and large
        rollout = self._steps if rollout_id is None else rollout_id
        batches = self._micro_batches(samples)
        summed = active(self._faults, "loss-sum", rollout)
        weights = self._token_weights(samples, per_token=loss.calculate_per_token_loss or summed)
        # The planted fault: the mean over tokens times their number. Only the loss is wrong, the other metrics are not.
        scale = sum(sum(mask_of(sample)) for sample in samples) if summed else 1

        # Before the schedule: a copy to the device between a forward and its backward would wait for the forward.
        terms = {
            micro.samples: token_terms(
                [samples[index] for index in micro.samples], [weights[index] for index in micro.samples], self._device
            )
            for micro in batches
        }
        mine: dict[int, Tensor] = {}

        def micro_loss(micro: MicroBatch, seen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = seen.unbind()
            if capture is not None:
                both = seen.detach().cpu()
                mine.update(zip(micro.samples, torch.split(both, list(micro.sizes), dim=1), strict=True))
            share, metrics = policy_loss(log_probs, entropy, terms[micro.samples], loss)
            return share * scale, metrics | {"loss": metrics["loss"] * scale}

        self._set_lr(self._optimizer, self.config.lr * min(1.0, (self._steps + 1) / (self.config.lr_warmup_steps + 1)))
        entropy: Entropy = "trained" if loss.entropy_coef else "measured"
        metrics = self._backward(batches, micro_loss, self._optimizer, entropy=entropy)
        if active(self._faults, "nan-grad", rollout) and not self._nan_planted:
            poison(_gradients(self._model))
            self._nan_planted = True
        metrics |= self._update(self._optimizer)
        self._steps += 1
        if capture is not None:
            every = self.ranks.from_last_stage(self.ranks.union_of_replicas(mine))
            capture += [Forward(*(part.clone() for part in every[index])) for index in range(len(samples))]
        return metrics

    def schedule(self, samples: Sequence[HasTokens], replica: int) -> list[tuple[int, ...]]:
        """The micro-batches of one data parallel rank, as indices of `samples`. Any rank can tell those of all."""
        lengths, step = [len(sample.tokens) for sample in samples], self.config.global_batch_size
        replicas = self.ranks.place.layout.data
        share = balanced(lengths, replicas, step_samples=step)[replica]
        chosen = plan(
            [lengths[index] for index in share],
            max_tokens=self.config.max_tokens_per_micro_batch,
            step_samples=-(-step // replicas) if step else None,
        )
        return [tuple(share[at] for at in part) for part in chosen]

    def cold_start(self, examples: Sequence[HasTokens], steps: int, lr: float, *, batch_size: int = 256) -> list[float]:
        """Supervised steps on the responses of `examples`; returns the mean token loss (nats) of each step.

        Batches are drawn with the backend's seed. Calls continue each other: calling twice with 10 steps is calling
        once with 20. It has an optimizer of its own, so that reinforcement learning starts with fresh Adam moments.
        """
        check_samples(examples, vocab_size=self.shape.vocab_size, max_positions=self.shape.max_positions)
        if self._cold_optimizer is None:
            self._cold_optimizer = self._make_optimizer(lr)
        self._set_lr(self._cold_optimizer, lr)
        losses = [self._cold_step(self._draw(examples, batch_size)) for _ in range(steps)]
        # In bf16 the policy's optimizer has fp32 weights of its own, which it would put back at its first step.
        self._optimizer.reload_model_params()
        return losses

    def _draw(self, examples: Sequence[HasTokens], batch_size: int) -> list[HasTokens]:
        order = torch.randperm(len(examples), generator=self._cold_random)
        return [examples[index] for index in order[:batch_size].tolist()]

    def _cold_step(self, batch: Sequence[HasTokens]) -> float:
        masks = [mask_of(sample) for sample in batch]
        weights = token_weights(masks, per_token=True, total=max(1, sum(map(sum, masks))))
        batches = self._micro_batches(batch)
        flat_weights = {
            micro.samples: flat([weights[index] for index in micro.samples], self._device) for micro in batches
        }

        def micro_loss(micro: MicroBatch, seen: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = -(seen[0] * flat_weights[micro.samples]).sum()
            return loss, {"loss": loss.detach()}

        metrics = self._backward(batches, micro_loss, self._cold_optimizer)
        self._update(self._cold_optimizer)
        return metrics["loss"]

    # --- weights ----------------------------------------------------------------------------------------------------

    def hf_stages(self) -> list[dict[str, Tensor]] | None:
        """On rank 0 the whole model's weights by Hugging Face name, one dict per pipeline stage; None elsewhere.

        Detached. They may share memory with the model: copy to keep.
        """
        return gather_stages(self._model, self.shape, self.ranks)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under the checkpoint's names, as `hf_stages` gives them; nothing on ranks other than 0."""
        for stage in self.hf_stages() or []:
            yield from stage.items()

    def save_hf(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint (tokenizer included) from rank 0; see `write_checkpoint`."""
        stages = self.hf_stages()
        if stages is not None:
            write_checkpoint(directory, self._source, (item for stage in stages for item in stage.items()))
        self.ranks.barrier()

    # --- resume -----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, root: Path, iteration: int) -> None:
        """Keep everything that the next rollout depends on, except the reference; see `TrainState.save`."""
        self._state().save(root, iteration, {"steps": self._steps, "nan_planted": int(self._nan_planted)})

    def load_checkpoint(self, found: Checkpoint) -> None:
        """Go on where `save_checkpoint` stopped; see `TrainState.load`."""
        extra = self._state().load(found)
        self._steps, self._nan_planted = extra["steps"], bool(extra["nan_planted"])

    # --- memory -----------------------------------------------------------------------------------------------------

    def offload(self, directory: Path) -> Offload:
        """What gives this rank's device memory back and takes it again. directory: see `Offload`."""
        return Offload(self._on_device, self._device, directory)

    def _on_device(self) -> dict[Part, list[Tensor]]:
        rest = list(self._reference.values())
        for optimizer in (self._optimizer, self._cold_optimizer):
            for one in getattr(optimizer, "chained_optimizers", [optimizer]):
                inner = getattr(one, "optimizer", None)  # torch's
                if inner is None:
                    continue
                rest += [parameter for group in inner.param_groups for parameter in group["params"]]
                rest += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
        return {
            "weights": [*self._model.parameters(), *self._model.buffers()],
            "gradients": list(_gradients(self._model)),
            "rest": rest,
        }

    def _state(self) -> TrainState:
        return TrainState(self._megatron, self.ranks, self._model, self._optimizer)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _micro_batches(self, samples: Sequence[HasTokens]) -> list[MicroBatch]:
        """This replica's share of the samples. Every rank checks all of them, so that all refuse a bad one together."""
        check_samples(samples, vocab_size=self.shape.vocab_size, max_positions=self.shape.max_positions)
        place = self.ranks.place
        replicas = place.layout.data
        if len(samples) < replicas:
            raise RltopError(
                "fewer samples than data parallel replicas", where="the batch", why=f"{len(samples)} for {replicas}"
            )
        return [collate(samples, part, self._device) for part in self.schedule(samples, place.data)]

    def _token_weights(self, samples: Sequence[TrainSample], *, per_token: bool) -> list[list[float]]:
        masks = [mask_of(sample) for sample in samples]
        total = max(1, sum(map(sum, masks))) if per_token else len(samples)
        return token_weights(masks, per_token=per_token, total=total)

    def _forward(
        self, batches: Sequence[MicroBatch], micro_loss: MicroLoss | None, *, entropy: Entropy = "none"
    ) -> list[Any]:
        """Run Megatron's schedule. Without `micro_loss`: forward only, returns the log-probs per micro-batch.

        The list is empty on every pipeline stage but the last.
        """
        # The schedule divides by the number of micro-batches and Megatron's DDP by that of replicas; our shares already
        # add up to the mean.
        parts = len(batches) * self.ranks.place.layout.data

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(iterator)

            def score(logits: Tensor) -> Tensor:
                settings: dict[str, Any] = {"ranks": self.ranks, "vocab_size": self.shape.vocab_size}
                return scores(logits, micro, self.config.temperature, **settings, entropy=entropy)

            with scored(self._model, score):
                seen = model(micro.tokens, micro.positions, micro.mask, labels=micro.targets)

            def finish(output: Tensor, non_loss_data: bool = False) -> Any:
                if micro_loss is None or non_loss_data:
                    return output[0]
                loss, metrics = micro_loss(micro, output)
                return loss * parts, metrics

            return seen, finish

        with quietly("megatron"):
            result: list[Any] = self._megatron.forward_backward()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=self._ddp,
                num_microbatches=len(batches),
                seq_length=max(micro.tokens.shape[1] for micro in batches),
                micro_batch_size=max(micro.tokens.shape[0] for micro in batches),
                forward_only=micro_loss is None,
                collect_non_loss_data=micro_loss is None,
            )
        return result

    def _backward(
        self, batches: Sequence[MicroBatch], micro_loss: MicroLoss, optimizer: Any, *, entropy: Entropy = "none"
    ) -> dict[str, float]:
        """Put the step's gradient into Megatron's buffer; returns the metrics, summed over all micro-batches."""
        ddp: Any = self._ddp
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        shares = self._forward(batches, micro_loss, entropy=entropy)
        mine: dict[str, float] = {}
        if shares:  # one copy to the host for all of them
            table = torch.stack([torch.stack(list(share.values())) for share in shares]).tolist()
            mine = dict(zip(shares[0], map(sum, zip(*table, strict=True)), strict=True))
        return self.ranks.from_last_stage(self.ranks.sum_over_replicas(mine))

    def _update(self, optimizer: Any) -> dict[str, float]:
        """Clip and step, unless the gradient is not finite."""
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        finite = math.isfinite(grad_norm)
        if finite:
            optimizer.step()
        else:
            _log.warning("grad_norm is %s: optimizer step skipped, weights unchanged", grad_norm)
        return {
            "grad_norm": grad_norm,
            "lr": float(optimizer.param_groups[0]["lr"]),
            "step_skipped": 0.0 if finite else 1.0,
        }

    @staticmethod
    def _set_lr(optimizer: Any, lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr

    @quietly()
    def _make_optimizer(self, lr: float) -> Any:
        """Megatron's optimizer over the current parameters, with empty moments."""
        config = self._megatron.optimizer_config(
            optimizer="adam",
            lr=lr,
            min_lr=lr,
            weight_decay=self.config.weight_decay,
            adam_beta1=self.config.adam_beta1,
            adam_beta2=self.config.adam_beta2,
            adam_eps=self.config.adam_eps,
            clip_grad=self.config.clip_grad,
            bf16=self.config.build.bf16,
            fp16=False,
            params_dtype=self.config.build.dtype,
            use_distributed_optimizer=False,
        )
        return self._megatron.make_optimizer(config, [self._ddp], use_gloo_process_groups=False)


def _take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Have cuBLAS take its workspaces, one of this thread and one of the backward pass's, before anything is large.

    Taken later they lie in the middle of a block that held logits, and `--offload-train` cannot give that block back:
    4.1 GiB stayed with a model of 0.6 billion parameters.
    """
    for kind in {dtype, torch.float32}:
        matrix = torch.ones(16, 16, device=device, dtype=kind, requires_grad=True)
        (matrix @ matrix).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.cuda.synchronize(device)


def _gradients(model: Any) -> Iterator[Tensor]:
    """The gradients as Megatron's DDP accumulates them, views into its buffer."""
    for parameter in model.parameters():
        yield parameter.main_grad


def _divisible(shape: ModelShape) -> Divisible:
    return Divisible(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
    )
