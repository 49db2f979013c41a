"""The corrected ignore list is right by both readings, or there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.checks.found import HfCheckpoint, Tensor
from rltop.checks.ignore_list import corrected, wanted_skips
from rltop.checks.rules.quant_map import engine_skips, trainer_skips

LAYER = ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.up_proj", "input_layernorm")
NAMES = ["model.embed_tokens.weight", "lm_head.weight"] + [
    f"model.layers.{i}.{part}.weight" for i in range(12) for part in LAYER
]


def checkpoint(ignore: list[str], names: list[str] | None = None) -> HfCheckpoint:
    shapes = {name: (8,) if "norm" in name else (8, 8) for name in names or NAMES}
    tensors = tuple(Tensor(name, "BF16", shape, "m.safetensors") for name, shape in shapes.items())
    config = {"quantization_config": {"quant_method": "compressed-tensors", "ignore": ignore}}
    return HfCheckpoint("ckpt", config=config, tensors=tensors)


def test_routers_and_embeddings_are_added_for_every_layer_in_one_rule() -> None:
    found = corrected(checkpoint(["lm_head"]))
    assert found is not None
    assert found == (("lm_head",), ("lm_head", "model.embed_tokens", r"re:.*\.mlp\.gate(\.weight)?$"))
    assert not trainer_skips(found[1], "model.layers.3.mlp.gate_proj.weight")


def test_a_prefix_that_swallows_a_sibling_is_narrowed() -> None:
    found = corrected(checkpoint(["lm_head", "model.embed_tokens", "model.layers.1", r"re:.*mlp\.gate(\.weight)?$"]))
    assert found is not None
    new = found[1]
    assert not trainer_skips(new, "model.layers.10.mlp.up_proj.weight")
    assert "model.layers.1" not in new


def test_what_a_packed_checkpoint_left_alone_stays_alone() -> None:
    names = ["model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight_packed"]
    wanted = wanted_skips([r"re:.*self_attn\.o_proj\.weight"], dict.fromkeys(names, 2))
    assert wanted == {
        "model.layers.0.self_attn.o_proj.weight": True,
        "model.layers.0.mlp.up_proj.weight": False,
    }


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "model.embed_tokens", r"re:.*mlp\.gate(\.weight)?$"],
        ["re:.*"],
    ],
)
def test_a_right_list_is_left_alone(ignore: list[str]) -> None:
    assert corrected(checkpoint(ignore)) is None


def test_other_methods_and_missing_lists_are_left_alone() -> None:
    assert corrected(HfCheckpoint("a")) is None
    assert corrected(HfCheckpoint("a", config={"quantization_config": {"quant_method": "fp8", "ignore": []}})) is None
    assert corrected(HfCheckpoint("a", config={"quantization_config": {"quant_method": "compressed-tensors"}})) is None


RULES = st.sampled_from(
    ["lm_head", "model.layers.1", "model.layers.1.mlp.gate", "re:.*mlp.*", r"re:.*gate\..*", "re:(", "model", ""]
)


@given(st.lists(RULES, max_size=5, unique=True))
def test_every_proposal_is_right_by_both_readings(ignore: list[str]) -> None:
    found = corrected(checkpoint(ignore))
    if found is None:
        return
    wanted = wanted_skips(found[0], dict.fromkeys(NAMES, 2) | dict.fromkeys([n for n in NAMES if "norm" in n], 1))
    for name, skip in wanted.items():
        assert trainer_skips(found[1], name) is engine_skips(found[1], name) is skip
