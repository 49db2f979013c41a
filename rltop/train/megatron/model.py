"""Builds the Megatron model of a checkpoint on this rank: process groups, configuration, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from rltop.errors import RltopError
from rltop.train.megatron.compat import Megatron, quietly
from rltop.train.megatron.hf_checkpoint import ModelShape
from rltop.train.megatron.name_map import from_hf, hf_names, to_hf


@quietly()
def start_single_rank(megatron: Megatron, *, seed: int) -> None:
    """Process groups of one rank, and the random streams of the model. Safe to call again in the same process.

    The store lives in this process (no port, no file), so any number of such trainers share a machine.
    Raises `RltopError` if the process already is one of several ranks: this trainer does not split a model yet.
    """
    if not distributed.is_initialized():
        backend = "gloo" if megatron.on_cpu else "nccl"
        store = distributed.HashStore()  # type: ignore[attr-defined]  # public and documented, missing in the stub
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    if distributed.get_world_size() != 1:
        raise RltopError(
            "the trainer runs on one rank",
            where="torch.distributed",
            why=f"this process is rank {distributed.get_rank()} of {distributed.get_world_size()}",
        )
    if not megatron.parallel_state.model_parallel_is_initialized():
        megatron.parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    megatron.seed_model_parallel(seed)


@quietly()
def build_model(megatron: Megatron, shape: ModelShape) -> torch.nn.Module:
    """A `GPTModel`: local layer spec, fp32, no dropout, no fused kernels. Its weights are undefined."""
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
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
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
        transformer_layer_spec=megatron.local_layer_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
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


def config_of(model: Any) -> Any:
    """The `TransformerConfig` of a Megatron model, wrapped or not."""
    return model.config


def load_weights(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor], shape: ModelShape, *, first_layer: int = 0
) -> None:
    """Copy a Hugging Face state dict into the Megatron model.

    Raises `RltopError` for a tensor that is missing, left over or of another shape: a checkpoint is never loaded in
    part.
    """
    used: set[str] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = from_hf(name, weights, shape, first_layer=first_layer)
            used.update(hf_names(name, first_layer=first_layer))
            if tensor.shape != parameter.shape:
                raise RltopError(
                    "a tensor of the checkpoint has the wrong shape",
                    where=", ".join(hf_names(name, first_layer=first_layer)),
                    why=f"config.json asks for {tuple(parameter.shape)} in {name}, the file has {tuple(tensor.shape)}",
                )
            parameter.copy_(tensor)
    # A tied checkpoint may carry a copy of its embedding as lm_head; everything else must have a place.
    left = set(weights) - used - ({"lm_head.weight"} if shape.tied else set())
    if left:
        raise RltopError("the checkpoint has tensors that the model lacks", where=", ".join(sorted(left)[:5]))


def named_hf_tensors(
    model: torch.nn.Module, shape: ModelShape, *, first_layer: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under their Hugging Face names, detached. They may share memory with the model: copy to keep."""
    for name, parameter in model.named_parameters():
        yield from to_hf(name, parameter.detach(), shape, first_layer=first_layer)
