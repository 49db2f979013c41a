"""Reads and writes Qwen3 checkpoints in Hugging Face format: shape from `config.json`, weights from safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rltop.errors import RltopError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the trainer needs to know of a dense Qwen3 model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    """The output layer is the embedding; the checkpoint then has no `lm_head.weight`."""


def read_shape(directory: Path) -> ModelShape:
    """The shape of the checkpoint in `directory`.

    Raises `RltopError` when `config.json` is missing, broken, or of a model that the Megatron mapping does not cover.
    """
    path = directory / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RltopError(
            "unreadable checkpoint",
            where=str(path),
            why=str(error),
            do="give a directory with config.json and *.safetensors",
        ) from error
    _refuse_unsupported(config, path)
    rope = config.get("rope_parameters") or {}

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key) or default
        if not isinstance(value, int) or value < 1:
            raise RltopError("incomplete checkpoint configuration", where=str(path), why=f"{key} = {config.get(key)!r}")
        return value

    return ModelShape(
        num_layers=size("num_hidden_layers"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads", size("num_attention_heads")),
        head_dim=size("head_dim", size("hidden_size") // size("num_attention_heads")),
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    scaling = config.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type") or (config.get("rope_parameters") or {}).get("rope_type") or "default"
    wanted = {
        "model_type": (config.get("model_type"), "qwen3"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(config.get("attention_bias", False)), False),
        "rope_type": (rope_type, "default"),
        "use_sliding_window": (bool(config.get("use_sliding_window", False)), False),
    }
    for key, (found, expected) in wanted.items():
        if found != expected:
            raise RltopError(
                f"{key} = {found!r} is not supported by this trainer",
                where=str(path),
                why=f"its name map and layer spec are for dense Qwen3 models ({key} = {expected!r})",
            )


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, as stored, from one file or from the shards that the index names.

    Raises `RltopError` naming the file that is missing or broken.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a dict: it is not iterable itself
                    weights[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RltopError(
                "unreadable weights", where=str(path), why=str(error), do="copy the checkpoint again"
            ) from error
    return weights


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise RltopError("unreadable weight index", where=str(index), why=str(error)) from error
        return [directory / name for name in names]
    return [directory / "model.safetensors"]


def write_checkpoint(directory: Path, source: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a complete checkpoint: `weights` as one safetensors file, everything else copied from `source`.

    `directory` is never seen in part. An existing one is replaced and is absent for an instant in between, so give each
    version a directory of its own where others read while you write.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        for path in source.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
                shutil.copy2(path, staging / path.name)
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights}
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        staging.chmod(0o755)
        _swap_in(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap_in(staging: Path, directory: Path) -> None:
    """Put `staging` at `directory`. A directory cannot be replaced in one call, so the old one steps aside first."""
    if not directory.exists():
        os.replace(staging, directory)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
    os.replace(directory, aside)
    os.replace(staging, directory)
    shutil.rmtree(aside, ignore_errors=True)
