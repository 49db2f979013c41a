"""Reads a Hugging Face checkpoint directory: `config.json`, generation settings and safetensors weights.

Only what a Qwen3 forward pass needs; anything that would silently give other numbers is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rltop.errors import RltopError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a Qwen3 decoder, from `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    eos_token_ids: frozenset[int]
    """Union of config.json and generation_config.json: either ends a response."""
    architecture: str
    model_type: str

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face parameter name -> shape, for every tensor that the forward pass reads."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (heads, hidden),
                prefix + "self_attn.k_proj.weight": (kv_heads, hidden),
                prefix + "self_attn.v_proj.weight": (kv_heads, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, heads),
                prefix + "self_attn.q_norm.weight": (self.head_dim,),
                prefix + "self_attn.k_norm.weight": (self.head_dim,),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "mlp.gate_proj.weight": (ffn, hidden),
                prefix + "mlp.up_proj.weight": (ffn, hidden),
                prefix + "mlp.down_proj.weight": (hidden, ffn),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`. Raises `RltopError` for a missing file or a model this engine cannot compute."""
    raw = _read_json(directory / "config.json", required=True)
    generation = _read_json(directory / "generation_config.json", required=False)
    where = str(directory / "config.json")
    if raw.get("model_type") != "qwen3":
        raise RltopError(
            "the CPU engine cannot run this model",
            where=where,
            why=f"model_type is {raw.get('model_type')!r}, it computes only 'qwen3'",
            do="use a Qwen3 checkpoint, or real SGLang",
        )
    rope = _rope(raw, where)
    for key in ("attention_bias", "use_sliding_window"):
        if raw.get(key):
            raise RltopError("the CPU engine cannot run this model", where=where, why=f"{key} is set")
    if raw.get("hidden_act", "silu") != "silu":
        raise RltopError(
            "the CPU engine cannot run this model", where=where, why=f"hidden_act is {raw['hidden_act']!r}"
        )
    try:
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=int(raw["num_attention_heads"]),
            num_kv_heads=int(raw["num_key_value_heads"]),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // int(raw["num_attention_heads"])),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=rope,
            max_positions=int(raw["max_position_embeddings"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=frozenset(_ids(raw.get("eos_token_id"))) | frozenset(_ids(generation.get("eos_token_id"))),
            architecture=str((raw.get("architectures") or ["Qwen3ForCausalLM"])[0]),
            model_type=str(raw["model_type"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RltopError("config.json is incomplete", where=where, why=f"{type(error).__name__}: {error}") from error


def read_weights(directory: Path, config: ModelConfig, *, complete: bool = True) -> dict[str, torch.Tensor]:
    """`config.expected_shapes()` as contiguous fp32. Raises `RltopError` naming what is missing or bent.

    complete: whether a tensor may not be missing.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        why = "no such directory" if not directory.is_dir() else "it holds no *.safetensors file"
        raise RltopError("cannot read the checkpoint", where=str(directory), why=why, do="check --model-path")
    expected = config.expected_shapes()
    found: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                    if name in expected:
                        found[name] = tensors.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise RltopError("cannot read the checkpoint", where=str(file), why=str(error)) from error
    checked = check_tensors(found.items(), expected, where=str(directory))
    missing = sorted(expected.keys() - checked.keys())
    if missing and complete:
        raise RltopError(
            "the checkpoint lacks tensors",
            where=str(directory),
            why=f"{len(missing)} of {len(expected)} are missing, among them {', '.join(missing[:3])}",
        )
    return checked


def check_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, tuple[int, ...]], *, where: str
) -> dict[str, torch.Tensor]:
    """The tensors as contiguous fp32, if names and shapes are `expected`. Raises `RltopError` naming the first bad."""
    checked: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name == "lm_head.weight" and name not in expected:
            continue  # a tied output layer: some exporters write it although the embedding is the weight
        if name not in expected:
            raise RltopError("unknown parameter", where=where, why=f"the model has no tensor {name!r}")
        if tuple(tensor.shape) != expected[name]:
            raise RltopError(
                "a tensor has another shape",
                where=where,
                why=f"{name} is {tuple(tensor.shape)}, the model wants {expected[name]}",
            )
        checked[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
    return checked


def _rope(raw: Mapping[str, Any], where: str) -> float:
    """Base of the rotary embedding. transformers 5 writes `rope_parameters`, older versions `rope_theta`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise RltopError("the CPU engine cannot run this model", where=where, why=f"rope_type is {kind!r}")
    return float(scaling.get("rope_theta", raw.get("rope_theta", 10_000.0)))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        if not required:
            return {}
        raise RltopError(
            "cannot read the checkpoint", where=str(path), why="no such file", do="check --model-path"
        ) from error
    except (OSError, ValueError) as error:
        raise RltopError("cannot read the checkpoint", where=str(path), why=str(error)) from error
    if not isinstance(content, dict):
        raise RltopError("cannot read the checkpoint", where=str(path), why="it is not a JSON object")
    return content
