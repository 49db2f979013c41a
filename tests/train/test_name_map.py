"""Hugging Face <-> Megatron names and layouts: nothing is lost, nothing is computed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltop.errors import RltopError
from rltop.train.megatron.hf_checkpoint import ModelShape
from rltop.train.megatron.name_map import (
    checkpoint_names,
    from_hf,
    fuse_qkv,
    hf_names,
    is_split,
    padded_vocabulary,
    shard,
    split_qkv,
    to_hf,
    unshard,
)
from rltop.train.tiny_model import TinyModelConfig, initial_weights

pytestmark = pytest.mark.train

LOCAL_NAMES = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
FUSED_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def shape_of(config: TinyModelConfig, *, tied: bool = True) -> ModelShape:
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        rms_norm_eps=1e-6,
        rope_theta=config.rope_theta,
        tied=tied,
    )


def megatron_names(layers: int, *, fused: bool, tied: bool) -> list[str]:
    inside = [FUSED_NAMES.get(name, name) if fused else name for name in LOCAL_NAMES]
    names = [f"decoder.layers.{layer}.{name}" for layer in range(layers) for name in inside]
    outside = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    return names + outside + ([] if tied else ["output_layer.weight"])


@st.composite
def configs(draw: st.DrawFn) -> TinyModelConfig:
    groups = draw(st.integers(1, 3))
    return TinyModelConfig(
        hidden_size=draw(st.sampled_from([8, 12])),
        intermediate_size=draw(st.sampled_from([8, 20])),
        num_layers=draw(st.integers(1, 3)),
        num_heads=groups * draw(st.integers(1, 3)),
        num_kv_heads=groups,
        head_dim=draw(st.sampled_from([2, 6])),
        seed=draw(st.integers(0, 2**31)),
    )


@given(config=configs(), fused=st.booleans(), tied=st.booleans())
def test_a_round_trip_is_bitwise_and_covers_every_tensor(config: TinyModelConfig, fused: bool, tied: bool) -> None:
    shape, weights = shape_of(config, tied=tied), initial_weights(config)
    if not tied:
        weights["lm_head.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    back: dict[str, torch.Tensor] = {}
    for name in megatron_names(config.num_layers, fused=fused, tied=tied):
        back |= dict(to_hf(name, from_hf(name, weights, shape), shape))
    assert set(back) == set(weights)
    assert all(torch.equal(tensor, back[name]) for name, tensor in weights.items())


def test_query_groups_are_interleaved() -> None:
    # Four query heads over two groups of head_dim 2; the numbers are row numbers: q from 0, k from 10, v from 20.
    config = TinyModelConfig(num_heads=4, num_kv_heads=2, head_dim=2)
    shape = shape_of(config)
    q, k, v = (torch.arange(start, start + 2 * heads)[:, None] for start, heads in ((0, 4), (10, 2), (20, 2)))
    fused = fuse_qkv(q, k, v, shape)
    assert fused[:, 0].tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    assert all(torch.equal(part, row) for part, row in zip(split_qkv(fused, shape), (q, k, v), strict=True))


def test_a_pipeline_stage_counts_its_layers_from_its_first() -> None:
    assert hf_names("decoder.layers.1.mlp.linear_fc2.weight", first_layer=4) == ("model.layers.5.mlp.down_proj.weight",)


@given(config=configs(), ranks=st.sampled_from([1, 2, 4]), tied=st.booleans())
def test_shards_are_equal_parts_and_come_together_bitwise(config: TinyModelConfig, ranks: int, tied: bool) -> None:
    config = dataclasses.replace(
        config, num_heads=config.num_heads * 4, num_kv_heads=config.num_kv_heads * 4, intermediate_size=8
    )
    shape, weights = shape_of(config, tied=tied), initial_weights(config)
    if not tied:
        weights["lm_head.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    assert set(weights) == checkpoint_names(shape)
    for name in megatron_names(config.num_layers, fused=False, tied=tied):
        whole = from_hf(name, weights, shape)
        parts = [shard(name, whole, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert len({part.shape for part in parts}) == 1
        assert (parts[0].numel() < whole.numel()) == (is_split(name) and ranks > 1)
        assert torch.equal(unshard(name, parts, shape), whole)


def test_a_shard_holds_gate_above_up_and_whole_groups() -> None:
    fc1 = torch.arange(8)[:, None]  # gate 0..3, up 4..7
    assert shard("decoder.layers.0.mlp.linear_fc1.weight", fc1, rank=1, ranks=2)[:, 0].tolist() == [2, 3, 6, 7]
    columns = torch.arange(4)[None, :]
    assert shard("decoder.layers.0.mlp.linear_fc2.weight", columns, rank=1, ranks=2).tolist() == [[2, 3]]
    config = TinyModelConfig(num_heads=4, num_kv_heads=2, head_dim=2)
    q, k, v = (torch.arange(start, start + 2 * heads)[:, None] for start, heads in ((0, 4), (10, 2), (20, 2)))
    fused = fuse_qkv(q, k, v, shape_of(config))
    second = shard("decoder.layers.0.self_attention.linear_qkv.weight", fused, rank=1, ranks=2)
    assert second[:, 0].tolist() == [4, 5, 6, 7, 12, 13, 22, 23]


def test_an_odd_vocabulary_is_filled_up_with_zero_rows() -> None:
    shape = dataclasses.replace(shape_of(TinyModelConfig()), vocab_size=5)
    name, whole = "embedding.word_embeddings.weight", torch.arange(1.0, 6.0)[:, None]
    assert padded_vocabulary(5, 2) == 6
    parts = [shard(name, whole, rank=rank, ranks=2) for rank in range(2)]
    assert [part[:, 0].tolist() for part in parts] == [[1, 2, 3], [4, 5, 0]]
    assert torch.equal(unshard(name, parts, shape), whole)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.router.weight", "decoder.layers.x.mlp.linear_fc1.weight", "mtp.layers.0.weight"]
)
def test_a_parameter_of_another_architecture_is_refused(name: str) -> None:
    with pytest.raises(RltopError, match="no Hugging Face name") as caught:
        hf_names(name)
    assert caught.value.where == name


def test_a_missing_tensor_is_named() -> None:
    config = TinyModelConfig(num_layers=1)
    weights = initial_weights(config)
    del weights["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(RltopError, match="lacks a tensor") as caught:
        from_hf("decoder.layers.0.self_attention.linear_qkv.weight", weights, shape_of(config))
    assert caught.value.where == "model.layers.0.self_attn.k_proj.weight"
