"""Qwen3 forward pass with a KV cache, in plain torch, fp32, whose bits do not depend on the batch.

A sample must get the same log-probabilities whoever shares its batch, else `--deterministic` training could not be
repeated: requests arrive in another order every time. A matrix library picks its kernel by the number of rows, and
reductions are grouped by their length, so this module keeps both constant for each sample:

- every product is a batched product in which each sample is its own small product of always the same shape: prompt by
  prompt in prefill (prompts of equal length share a call), `1 x K` by `K x N` in a decode step (about three times the
  cost of one large product, still far below a millisecond here);
- attention runs over a slab whose length is a power of two chosen by the sample's own limits (`Slab`), never by its
  neighbours; masked positions add exact zeros;
- no element falls into the scalar tail of a vectorised loop, where `exp` rounds differently: unless the MLP's width is
  a multiple of 32, rows are padded to one and prompts run alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rltop.train.cpu_engine.checkpoint import ModelConfig
from rltop.train.cpu_engine.memory import Arena

VECTOR_LOOP = 32
"""Elements per round of torch's vectorised loops (two AVX-512 registers; narrower ones divide it)."""

FIRST_ROWS = 32
"""Rows of a new slab."""

MIN_SLAB_LENGTH = 32

MAX_PROMPTS_PER_PREFILL = 64
"""Prompts of one length in one prefill call: bounds the memory of its logits, `[prompts, length, vocab]`."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, projections fused and transposed to `[in, out]`."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights in the layout of the forward pass. An update makes new ones, or writes over these: see `LiveWeights`."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def pack_weights(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Weights:
    """From Hugging Face names to the layout of the forward pass."""
    layers = []
    for index in range(config.num_layers):
        own = {name: tensors[f"model.layers.{index}.{name}.weight"] for name in _LAYER_TENSORS}
        qkv = torch.cat([own["self_attn.q_proj"], own["self_attn.k_proj"], own["self_attn.v_proj"]])
        layers.append(
            Layer(
                input_norm=own["input_layernorm"],
                qkv=qkv.t().contiguous(),
                q_norm=own["self_attn.q_norm"],
                k_norm=own["self_attn.k_norm"],
                out=own["self_attn.o_proj"].t().contiguous(),
                post_norm=own["post_attention_layernorm"],
                gate_up=torch.cat([own["mlp.gate_proj"], own["mlp.up_proj"]]).t().contiguous(),
                down=own["mlp.down_proj"].t().contiguous(),
            )
        )
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding if config.tied_embeddings else tensors["lm_head.weight"]
    return Weights(embedding, tuple(layers), tensors["model.norm.weight"], head.t().contiguous())


_LAYER_TENSORS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prompt leaves: keys and values `[layers, kv_heads, prompt, head_dim]`, logits `[prompt, vocab]`."""

    keys: Tensor
    values: Tensor
    logits: Tensor


class Slab:
    """KV cache of the running samples whose limit (prompt + max_new_tokens) rounds up to `length` positions.

    Rows `[0, used)` are running; a finished row is filled by the last one. Grows by doubling.
    """

    __slots__ = ("_pool", "config", "keys", "length", "used", "values")

    def __init__(self, config: ModelConfig, length: int, pool: Arena | None = None) -> None:
        """pool: where its memory comes from as long as there is room."""
        self.config = config
        self.length = length
        self._pool = pool
        self.used = 0
        self.keys, self.values = self._allocate(FIRST_ROWS)

    def _allocate(self, rows: int) -> tuple[Tensor, Tensor]:
        shape = (self.config.num_layers, rows, self.config.num_kv_heads, self.length, self.config.head_dim)
        return self._zeros(shape), self._zeros(shape)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        found = self._pool.zeros(shape) if self._pool is not None else None
        return torch.zeros(shape) if found is None else found

    def add(self, prefill: Prefill) -> int:
        """Copy a prompt's keys and values into a new row; return the row."""
        rows = self.keys.shape[1]
        if self.used == rows:
            old_keys, old_values = self.keys, self.values
            self.keys, self.values = self._allocate(2 * rows)
            self.keys[:, :rows], self.values[:, :rows] = old_keys, old_values
        row, prompt = self.used, prefill.keys.shape[2]
        self.keys[:, row, :, :prompt] = prefill.keys
        self.values[:, row, :, :prompt] = prefill.values
        self.used += 1
        return row

    def remove(self, row: int) -> int:
        """Free a row. Returns the row that moved into its place (the former last one; `row` itself if it was last)."""
        self.used -= 1
        last = self.used
        if row != last:
            self.keys[:, row], self.values[:, row] = self.keys[:, last], self.values[:, last]
        return last


def slab_length(limit: int) -> int:
    """Smallest power of two that holds `limit` positions, at least `MIN_SLAB_LENGTH`."""
    return max(MIN_SLAB_LENGTH, 1 << (limit - 1).bit_length())


class Qwen3:
    """The forward pass. Holds the shape and the rotary tables; weights are passed in, so an update swaps them whole."""

    __slots__ = ("_cos", "_sin", "config")

    def __init__(self, config: ModelConfig, context_length: int) -> None:
        self.config = config
        # As transformers computes it: fp32 frequencies, both halves of the head turned by the same angle.
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(context_length, dtype=torch.float32), 1.0 / config.rope_theta**exponent)
        table = torch.cat([angles, angles], dim=-1)
        self._cos, self._sin = table.cos(), table.sin()

    def buffers(self) -> dict[str, Tensor]:
        """The rotary table under the name and in the layout that SGLang has it: `[positions, cos | sin]`.

        All layers share one, so it is listed once, with the first.
        """
        half = self.config.head_dim // 2
        table = torch.cat([self._cos[:, :half], self._sin[:, :half]], dim=-1)
        return {"model.layers.0.self_attn.rotary_emb.cos_sin_cache": table}

    def lose_buffers(self) -> None:
        """Zero the rotary table, for good: an injected fault. No update brings it back, as on a real engine."""
        self._cos, self._sin = torch.zeros_like(self._cos), torch.zeros_like(self._sin)

    def prefill(self, weights: Weights, ids: Tensor) -> list[Prefill]:
        """Run prompts of one length, `[prompts, length]`, each as its own product; all logits of each."""
        config = self.config
        prompts, length = ids.shape
        kv_heads, groups, head_dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        hidden = weights.embedding[ids]
        cos, sin = self._cos[:length].repeat(prompts, 1), self._sin[:length].repeat(prompts, 1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        all_keys, all_values = [], []
        for layer in weights.layers:
            normed = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            projected = _product(normed, layer.qkv).view(prompts * length, -1)
            query, key, value = (
                heads.view(prompts, length, -1, head_dim).transpose(1, 2).contiguous()
                for heads in self._project(projected, layer, cos, sin)
            )
            query = query.view(prompts * kv_heads, groups * length, head_dim)
            scores = torch.bmm(query, key.view(prompts * kv_heads, length, head_dim).transpose(1, 2)) * head_dim**-0.5
            scores = scores.view(prompts, kv_heads, groups, length, length).masked_fill_(future, float("-inf"))
            chances = torch.softmax(scores, dim=-1).view(prompts * kv_heads, groups * length, length)
            mixed = torch.bmm(chances, value.view(prompts * kv_heads, length, head_dim))
            mixed = mixed.view(prompts, config.num_heads, length, head_dim).transpose(1, 2).reshape(prompts, length, -1)
            hidden = hidden + _product(mixed, layer.out)
            normed = _rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
            gate, up = _product(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + _product(functional.silu(gate.contiguous()) * up, layer.down)
            all_keys.append(key)
            all_values.append(value)
        logits = _product(_rms_norm(hidden, weights.norm, config.rms_norm_eps), weights.head)
        keys, values = torch.stack(all_keys, dim=1), torch.stack(all_values, dim=1)
        return [Prefill(keys[index], values[index], logits[index]) for index in range(prompts)]

    @property
    def prompts_per_prefill(self) -> int:
        """How many prompts of one length may share a call without touching each other's bits (module docstring)."""
        return MAX_PROMPTS_PER_PREFILL if self.config.intermediate_size % VECTOR_LOOP == 0 else 1

    def padded_rows(self, used: int) -> int:
        """How many rows a decode step needs for `used` samples (module docstring)."""
        return used if self.config.intermediate_size % VECTOR_LOOP == 0 else -(-used // VECTOR_LOOP) * VECTOR_LOOP

    def decode(self, weights: Weights, slab: Slab, ids: Tensor, positions: Tensor) -> Tensor:
        """One token for each of the slab's rows.

        ids, positions: `[rows]`, the token to feed and where, with rows padded by `padded_rows` (padding rows use 0).
        Returns logits `[rows, vocab]`; the padding rows hold nonsense.
        """
        config, rows = self.config, ids.shape[0]
        kv_heads, groups, head_dim = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        hidden = weights.embedding[ids]
        cos, sin = self._cos[positions], self._sin[positions]
        future = (torch.arange(slab.length) > positions[:, None]).view(rows, 1, 1, slab.length)
        row_index = torch.arange(rows)
        for index, layer in enumerate(weights.layers):
            normed = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
            query, key, value = self._project(_row_product(normed, layer.qkv), layer, cos, sin)
            slab.keys[index, row_index, :, positions] = key
            slab.values[index, row_index, :, positions] = value
            keys = slab.keys[index, :rows].view(rows * kv_heads, slab.length, head_dim)
            values = slab.values[index, :rows].view(rows * kv_heads, slab.length, head_dim)
            query = query.reshape(rows * kv_heads, groups, head_dim)
            scores = torch.bmm(query, keys.transpose(1, 2)) * head_dim**-0.5
            scores = scores.view(rows, kv_heads, groups, slab.length).masked_fill_(future, float("-inf"))
            mixed = torch.bmm(torch.softmax(scores, dim=-1).view(rows * kv_heads, groups, slab.length), values)
            hidden = hidden + _row_product(mixed.view(rows, -1), layer.out)
            normed = _rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
            gate, up = _row_product(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + _row_product(functional.silu(gate.contiguous()) * up, layer.down)
        return _row_product(_rms_norm(hidden, weights.norm, config.rms_norm_eps), weights.head)

    def _project(self, qkv: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split, normalise per head and turn. `[tokens, …]` in, `[tokens, heads, head_dim]` out."""
        config, tokens = self.config, qkv.shape[0]
        kv_width = config.num_kv_heads * config.head_dim
        query, key, value = torch.split(qkv, [config.num_heads * config.head_dim, kv_width, kv_width], dim=-1)
        query = _rms_norm(query.reshape(tokens, -1, config.head_dim), layer.q_norm, config.rms_norm_eps)
        key = _rms_norm(key.reshape(tokens, -1, config.head_dim), layer.k_norm, config.rms_norm_eps)
        cos, sin = cos[:, None], sin[:, None]
        return _turn(query, cos, sin), _turn(key, cos, sin), value.reshape(tokens, -1, config.head_dim)


def score(config: ModelConfig, tensors: Mapping[str, Tensor], ids: Sequence[int]) -> list[float]:
    """Log-probs of the tokens, nats, from the second one on; `tensors` under Hugging Face names, fp32."""
    with torch.inference_mode():
        (prefill,) = Qwen3(config, len(ids)).prefill(pack_weights(config, tensors), torch.tensor([list(ids)]))
        chances = prefill.logits[:-1].log_softmax(-1)
        return [float(chances[at, token]) for at, token in enumerate(ids[1:])]


def _product(samples: Tensor, weight: Tensor) -> Tensor:
    """`samples @ weight` as one product per sample, so that a sample's bits do not depend on how many there are.

    samples: `[samples, tokens, in]`, weight: `[in, out]`; returns `[samples, tokens, out]`.
    """
    return torch.bmm(samples, weight.expand(samples.shape[0], *weight.shape))


def _row_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`_product` for one token per sample, `[rows, in]`."""
    return _product(rows.unsqueeze(1), weight).squeeze(1)


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps))


def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin
