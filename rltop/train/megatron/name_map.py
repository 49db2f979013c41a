"""Hugging Face names and layouts <-> Megatron-Core's, for dense Qwen3 models. Pure: tensors in, tensors out.

What differs between the two:

| Hugging Face, under `model.layers.N.` | Megatron, under `decoder.layers.N.` | layout |
|---|---|---|
| self_attn.{q,k,v}_proj | self_attention.linear_qkv | one matrix; per group: query heads, key head, value head |
| mlp.{gate,up}_proj | mlp.linear_fc1 | gate above up |
| self_attn.{q,k}_norm, self_attn.o_proj, mlp.down_proj | {q,k}_layernorm, linear_proj, mlp.linear_fc2 | the same |
| input_layernorm, post_attention_layernorm | input_layernorm, pre_mlp_layernorm | the same |

TransformerEngine's fused layers keep the two norms as linear_qkv.layer_norm_weight and
mlp.linear_fc1.layer_norm_weight.

A pipeline stage numbers its layers from 0; `first_layer` is the stage's first global layer. A tensor parallel rank
holds whole key/value groups of linear_qkv, its rows of gate above its rows of up, columns of linear_proj and
linear_fc2, and rows of the embedding, which zero rows fill up to a multiple of the ranks. Norms are whole everywhere.
Both directions move numbers and never compute with them, so a round trip is bitwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from rltop.errors import RltopError
from rltop.train.megatron.hf_checkpoint import ModelShape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

_IN_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}


_SPLIT_ROWS = ("linear_qkv.weight", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")
_SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def hf_names(name: str, *, first_layer: int = 0) -> tuple[str, ...]:
    """The Hugging Face names that the Megatron parameter `name` holds, in the order of `to_hf`.

    Raises `RltopError` for a parameter that a dense Qwen3 model does not have.
    """
    if name in _OUTSIDE_LAYERS:
        return (_OUTSIDE_LAYERS[name],)
    match = _LAYER.fullmatch(name)
    if match and match[2] in _IN_LAYER:
        layer = int(match[1]) + first_layer
        return tuple(f"model.layers.{layer}.{part}" for part in _IN_LAYER[match[2]])
    raise RltopError("no Hugging Face name for this parameter", where=name, why="not part of a dense Qwen3 model")


def to_hf(
    name: str, tensor: torch.Tensor, shape: ModelShape, *, first_layer: int = 0
) -> tuple[tuple[str, torch.Tensor], ...]:
    """The Megatron parameter as `(Hugging Face name, tensor)` pairs. Copies only where the layout differs."""
    names = hf_names(name, first_layer=first_layer)
    match names:
        case (only,):
            return ((only, tensor),)
        case (gate, up):
            upper, lower = tensor.chunk(2, dim=0)
            return ((gate, upper), (up, lower))
        case _:
            return tuple(zip(names, split_qkv(tensor, shape), strict=True))


def from_hf(name: str, weights: Mapping[str, torch.Tensor], shape: ModelShape, *, first_layer: int = 0) -> torch.Tensor:
    """The Megatron parameter `name` from a Hugging Face state dict. Raises `RltopError` naming a missing tensor."""
    names = hf_names(name, first_layer=first_layer)
    missing = [part for part in names if part not in weights]
    if missing:
        raise RltopError(
            "the checkpoint lacks a tensor", where=", ".join(missing), why=f"Megatron's {name} is made of it"
        )
    parts = [weights[part] for part in names]
    match parts:
        case [only]:
            return only
        case [gate, up]:
            return torch.cat((gate, up), dim=0)
        case [q, k, v]:
            return fuse_qkv(q, k, v, shape)
        case _:
            raise AssertionError(names)


def fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """`q [heads * head_dim, hidden]`, `k` and `v [kv_heads * head_dim, hidden]` -> one matrix of all their rows."""
    groups, hidden = shape.num_kv_heads, q.shape[-1]
    per_group = [part.reshape(groups, -1, hidden) for part in (q, k, v)]
    return torch.cat(per_group, dim=1).reshape(-1, hidden)


def split_qkv(qkv: torch.Tensor, shape: ModelShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `fuse_qkv`: contiguous q, k, v."""
    groups, hidden, dim = shape.num_kv_heads, qkv.shape[-1], shape.head_dim
    queries = shape.num_heads // groups * dim
    q, k, v = torch.split(qkv.reshape(groups, -1, hidden), [queries, dim, dim], dim=1)
    return q.reshape(-1, hidden), k.reshape(-1, hidden), v.reshape(-1, hidden)


def checkpoint_names(shape: ModelShape) -> set[str]:
    """All tensors of a Hugging Face checkpoint of this shape."""
    outside = {name for name in _OUTSIDE_LAYERS.values() if not (shape.tied and name == "lm_head.weight")}
    inside = {part for parts in _IN_LAYER.values() for part in parts}
    return outside | {f"model.layers.{layer}.{part}" for layer in range(shape.num_layers) for part in inside}


def padded_vocabulary(vocab_size: int, ranks: int) -> int:
    """Rows of the embedding over all tensor parallel ranks: the next multiple of their number."""
    return -(-vocab_size // ranks) * ranks


def is_split(name: str) -> bool:
    """Whether tensor parallel ranks hold different parts of the Megatron parameter `name`."""
    return name.endswith(_SPLIT_ROWS + _SPLIT_COLUMNS)


def shard(name: str, tensor: torch.Tensor, *, rank: int, ranks: int) -> torch.Tensor:
    """The part of the whole Megatron parameter `name` that tensor parallel rank `rank` holds."""
    if ranks == 1 or not is_split(name):
        return tensor
    if name.endswith(_SPLIT_COLUMNS):
        return tensor.chunk(ranks, dim=1)[rank]
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(ranks, dim=0)[rank] for half in tensor.chunk(2, dim=0)])
    missing = padded_vocabulary(tensor.shape[0], ranks) - tensor.shape[0]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).chunk(ranks, dim=0)[rank]


def unshard(name: str, parts: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """The inverse of `shard`: the whole parameter from the parts of all ranks, in their order."""
    if len(parts) == 1 or not is_split(name):
        return parts[0]
    if name.endswith(_SPLIT_COLUMNS):
        return torch.cat(list(parts), dim=1)
    if name.endswith("linear_fc1.weight"):
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    whole = torch.cat(list(parts))
    return whole if name.endswith("linear_qkv.weight") else whole[: shape.vocab_size]
