"""The Megatron model of a checkpoint on this rank, and its weights in and out under Hugging Face names.

A rank builds its stage's layers and its share of each. Weights come out whole, on one rank.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rltop.errors import RltopError
from rltop.train.layout import Place
from rltop.train.megatron.compat import Megatron, quietly
from rltop.train.megatron.hf_checkpoint import ModelShape
from rltop.train.megatron.name_map import (
    checkpoint_names,
    from_hf,
    hf_names,
    is_split,
    padded_vocabulary,
    shard,
    to_hf,
    unshard,
)
from rltop.train.megatron.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Build:
    """What the layers are made of."""

    transformer_impl: Literal["local", "transformer_engine"] = "local"
    bf16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and activations."""
        return torch.bfloat16 if self.bf16 else torch.float32


def refuse_on_cpu(build: Build) -> None:
    """Raise `RltopError` for a precision that Megatron's optimizer has on GPUs only."""
    if build.bf16:
        raise RltopError(
            "bfloat16 training needs a GPU",
            where="--bf16",
            why="Megatron's optimizer with fp32 master weights takes CUDA tensors only",
            do="leave --bf16 out: fp32 on the CPU",
        )


def transformer_engine(on_cpu: bool) -> str:
    """TransformerEngine's version. Raises `RltopError` where it cannot be used."""
    if on_cpu:
        raise RltopError(
            "TransformerEngine needs a GPU",
            where="--transformer-impl transformer_engine",
            why="torch sees no CUDA device here",
            do="--transformer-impl local",
        )
    try:
        importlib.import_module("transformer_engine.pytorch")
        return importlib.metadata.version("transformer_engine")
    except (ImportError, OSError) as error:
        raise RltopError(
            "TransformerEngine cannot be used",
            where="--transformer-impl transformer_engine",
            why=str(error),
            do="pip install 'rltop[gpu]', or --transformer-impl local",
        ) from error


@quietly()
def build_model(megatron: Megatron, shape: ModelShape, place: Place, build: Build | None = None) -> torch.nn.Module:
    """A `GPTModel` without dropout; with the local spec also without fused kernels. Its weights are undefined."""
    layout, build = place.layout, build or Build()
    if build.transformer_impl == "transformer_engine":
        spec = megatron.fused_layer_spec(qk_layernorm=True)
    else:
        spec = megatron.local_layer_spec(qk_layernorm=True, normalization="RMSNorm")
    config = megatron.transformer_config(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=build.dtype,
        pipeline_dtype=build.dtype,
        bf16=build.bf16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        # Micro-batches differ in shape; the stages tell each other.
        variable_seq_lengths=layout.pipeline > 1,
        # A dense model dispatches nothing, but the default is refused together with the line above.
        moe_token_dispatcher_type="alltoall",
        # The weights come from the checkpoint; drawing them first would only cost time.
        perform_initialization=False,
        use_cpu_initialization=megatron.on_cpu,
        deallocate_pipeline_outputs=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        # Its default "full" is deprecated and warns; no CUDA graphs are made either way.
        cuda_graph_scope=[],
    )
    model: torch.nn.Module = megatron.gpt_model(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(shape.vocab_size, layout.tensor),
        max_sequence_length=shape.max_positions,
        pre_process=place.first_stage,
        post_process=place.last_stage,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    for name, parameter in model.named_parameters():
        # The local spec makes its norms in fp32 whatever it is told. Megatron's Float16Module does the same.
        parameter.data = parameter.data.to(build.dtype)
        if is_split(name):
            # Megatron does this where it draws weights, which is left out here. Without it the gradient norm takes
            # every shard for a copy of the first.
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron's mark
    return model if megatron.on_cpu else model.cuda()


@quietly()
def wrap_ddp(megatron: Megatron, model: torch.nn.Module) -> torch.nn.Module:
    """Megatron's DDP: it owns the gradient buffer that its optimizer reads. NaN gradients are the backend's matter."""
    wrapped: torch.nn.Module = megatron.ddp(
        config=config_of(model),
        ddp_config=megatron.ddp_config(check_for_nan_in_grad=False, grad_reduce_in_fp32=True),
        module=model,
    )
    return wrapped


@contextmanager
def scored(model: Any, score: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, the last stage's `model(..., labels=...)` returns `score(logits)`, logits being what its output layer
    gives: `[length, batch, vocabulary / ranks]`.

    Without labels `GPTModel` returns a transposed copy of them, and the gradient is copied back: a twentieth of a train
    step where the vocabulary is large. Its own loss sees no copy, so the score stands in its place for one forward.
    """
    model.compute_language_model_loss = lambda _labels, logits: score(logits)
    try:
        yield
    finally:
        del model.compute_language_model_loss


def config_of(model: Any) -> Any:
    """The `TransformerConfig` of a Megatron model, wrapped or not."""
    return model.config


def first_layer(shape: ModelShape, place: Place) -> int:
    """Global number of the first layer of this rank's stage."""
    return shape.num_layers // place.layout.pipeline * place.pipeline


def local_weights(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], shape: ModelShape, place: Place
) -> dict[str, torch.Tensor]:
    """This rank's part of a Hugging Face state dict, by the names of the model's parameters.

    Raises `RltopError` for a tensor that is missing, left over or of another shape: a checkpoint is never taken in
    part.
    """
    local, first = {}, first_layer(shape, place)
    for name, parameter in model.named_parameters():
        source = _origin(name, shape)
        whole = from_hf(source, weights, shape, first_layer=first)
        tensor = shard(source, whole, rank=place.tensor, ranks=place.layout.tensor)
        if tensor.shape != parameter.shape:
            raise RltopError(
                "a tensor of the checkpoint has the wrong shape",
                where=", ".join(hf_names(source, first_layer=first)),
                why=f"config.json asks for {tuple(parameter.shape)} in {name}, the file has {tuple(tensor.shape)}",
            )
        local[name] = tensor
    # A tied checkpoint may carry a copy of its embedding as lm_head; everything else must have a place.
    left = set(weights) - checkpoint_names(shape) - ({"lm_head.weight"} if shape.tied else set())
    if left:
        raise RltopError("the checkpoint has tensors that the model lacks", where=", ".join(sorted(left)[:5]))
    return local


@torch.no_grad()
def put_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's tensors into the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@torch.no_grad()
def gather_stages(model: torch.nn.Module, shape: ModelShape, ranks: Ranks) -> list[dict[str, torch.Tensor]] | None:
    """On rank 0: one dict per pipeline stage, Hugging Face name -> whole tensor. None on every other rank.

    All ranks call it; replicas other than the first return at once. A layer's name counts over all stages. The tensors
    are detached and may share memory with the model: copy to keep. Rank 0 must have room for the whole model.
    """
    place = ranks.place
    if not place.sends_weights:
        return None
    named: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        if _origin(name, shape) != name:
            continue  # the embedding's second copy, on the last stage
        tensor = parameter.detach()
        whole = unshard(name, ranks.shards(tensor), shape) if is_split(name) else tensor
        named += to_hf(name, whole, shape, first_layer=first_layer(shape, place))
    return ranks.stages(named) if place.tensor == 0 else None


def _origin(name: str, shape: ModelShape) -> str:
    """The parameter that `name` is a copy of: with pipeline stages a tied output layer is the embedding once more."""
    return "embedding.word_embeddings.weight" if shape.tied and name == "output_layer.weight" else name
