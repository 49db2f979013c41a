"""Makes a tiny Qwen3-architecture checkpoint in Hugging Face format: the model of `rltop demo` and of the tests.

Nothing is downloaded: weights are drawn from a seed and the vocabulary is the 256 bytes plus four special tokens, so
a prompt in any script has a tokenization. `transformers`, real SGLang and the CPU engine load the directory like any
other checkpoint. It needs torch, safetensors and tokenizers, not transformers.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rltop.errors import RltopError
from rltop.train.tiny_shape import CHAT_TEMPLATE, END_OF_TEXT, IM_END, PAD, SPECIAL_TOKENS, TinyModelConfig

__all__ = [
    "CHAT_TEMPLATE",
    "IM_END",
    "SPECIAL_TOKENS",
    "TinyModelConfig",
    "byte_tokenizer",
    "initial_weights",
    "make_tiny_model",
]


def make_tiny_model(directory: Path, config: TinyModelConfig | None = None) -> Path:
    """Write the checkpoint to `directory` and return it. The directory appears complete or not at all.

    An existing checkpoint of the same configuration is kept as it is; anything else in the way raises `RltopError`.
    """
    config = config or TinyModelConfig()
    if directory.exists():
        _check_reusable(directory, config)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        save_file(initial_weights(config), staging / "model.safetensors", metadata={"format": "pt"})
        for name, content in _json_files(config).items():
            (staging / name).write_text(json.dumps(content, indent=2) + "\n")
        byte_tokenizer().save(str(staging / "tokenizer.json"))
        staging.chmod(0o755)
        try:
            os.replace(staging, directory)
        except OSError:
            # Another process finished first: its checkpoint is as good as ours.
            _check_reusable(directory, config)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def initial_weights(config: TinyModelConfig) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, fp32. The embedding is tied to the output layer, which therefore has no entry.

    Normal with standard deviation 1/sqrt(fan-in) (residual outputs also 1/sqrt(2 layers), as in GPT-2) and 0.02 for
    the embedding: at width 64 the usual 0.02 everywhere would leave attention nearly flat for hundreds of steps.
    """
    generator = torch.Generator().manual_seed(config.seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv_heads, ffn = config.num_kv_heads * config.head_dim, config.intermediate_size
    into, residual = 1 / math.sqrt(hidden), 1 / math.sqrt(2 * config.num_layers)
    weights = {"model.embed_tokens.weight": normal(config.vocab_size, hidden, 0.02)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": normal(heads, hidden, into),
            prefix + "self_attn.k_proj.weight": normal(kv_heads, hidden, into),
            prefix + "self_attn.v_proj.weight": normal(kv_heads, hidden, into),
            prefix + "self_attn.o_proj.weight": normal(hidden, heads, residual / math.sqrt(heads)),
            prefix + "self_attn.q_norm.weight": torch.ones(config.head_dim),
            prefix + "self_attn.k_norm.weight": torch.ones(config.head_dim),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "mlp.gate_proj.weight": normal(ffn, hidden, into),
            prefix + "mlp.up_proj.weight": normal(ffn, hidden, into),
            prefix + "mlp.down_proj.weight": normal(hidden, ffn, residual / math.sqrt(ffn)),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights


def byte_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: token id = byte value, then `SPECIAL_TOKENS`."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value (the table of GPT-2's tokenizer).

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def _json_files(config: TinyModelConfig) -> dict[str, dict[str, Any]]:
    ids = {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
    return {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": config.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "initializer_range": 0.02,
            "eos_token_id": ids[IM_END],
            "bos_token_id": ids[END_OF_TEXT],
            "pad_token_id": ids[PAD],
            "torch_dtype": "float32",
        },
        "generation_config.json": {
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[IM_END],
            "pad_token_id": ids[PAD],
            "do_sample": True,
            "temperature": 1.0,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": PAD,
            "unk_token": None,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
        "rltop_tiny_model.json": _fingerprint(config),
    }


def _fingerprint(config: TinyModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def _check_reusable(directory: Path, config: TinyModelConfig) -> None:
    marker = directory / "rltop_tiny_model.json"
    try:
        found = json.loads(marker.read_text())
    except (OSError, ValueError) as error:
        raise RltopError(
            "cannot write the tiny model there",
            where=str(directory),
            why=f"the path exists and is not a tiny model made by rltop ({error})",
            do=f"give another path, or remove it: rm -r {directory}",
        ) from error
    if found != _fingerprint(config):
        changed = sorted(key for key, value in _fingerprint(config).items() if found.get(key) != value)
        raise RltopError(
            "a tiny model of another configuration is there",
            where=str(directory),
            why="these differ: " + ", ".join(changed),
            do=f"give another path, or remove it: rm -r {directory}",
        )
