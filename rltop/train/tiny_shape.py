"""Shape, special tokens and chat template of the tiny model. Needs no torch, which `rltop.train.tiny_model` does."""

from __future__ import annotations

from dataclasses import dataclass

from rltop.errors import RltopError

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD)
"""Ids 256 to 259, in this order. `<|im_end|>` ends a turn and therefore a response: it is the EOS token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelConfig:
    """Shape and seed of the checkpoint. The default has 92 thousand parameters."""

    hidden_size: int = 64
    intermediate_size: int = 128
    """Width of the gated MLP: gate and up are each `[intermediate_size, hidden_size]`."""
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    """Grouped-query attention: `num_heads` must be a multiple."""
    head_dim: int = 16
    max_positions: int = 1024
    rope_theta: float = 10_000.0
    vocab_rows: int = 0
    """Rows of the embedding; 0: as many as the tokenizer has tokens. More have no text: the size of a real model."""
    seed: int = 0
    """Two checkpoints of one seed and shape are equal bit for bit."""

    def __post_init__(self) -> None:
        if 0 < self.vocab_rows < 256 + len(SPECIAL_TOKENS):
            raise RltopError(
                "a vocabulary smaller than the tokenizer's",
                where="TinyModelConfig.vocab_rows",
                why=f"{self.vocab_rows} rows for {256 + len(SPECIAL_TOKENS)} tokens",
            )
        if self.num_heads % self.num_kv_heads:
            raise RltopError(
                "attention heads do not divide into groups",
                where="TinyModelConfig.num_kv_heads",
                why=f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads",
                do=f"use a divisor of {self.num_heads}",
            )
        if self.head_dim % 2:
            raise RltopError(
                "odd head_dim",
                where="TinyModelConfig.head_dim",
                why=f"rotary embedding turns pairs, {self.head_dim} is odd",
            )

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens, or `vocab_rows`."""
        return self.vocab_rows or 256 + len(SPECIAL_TOKENS)
