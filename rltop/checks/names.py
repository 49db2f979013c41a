"""Tensor names of model checkpoints: layers, experts, parameters, and which weights are no Linear."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_LAYER = re.compile(r"^(?P<prefix>(?:[\w]+\.)*?)(?:layers|h|blocks)\.(?P<layer>\d+)\.(?P<rest>.+)$")
_ASIDE = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|mtp|draft|eagle|encoder|image\w*)\.")
_EXPERT = re.compile(r"(?P<before>(?:^|.*\.)experts)\.(?P<expert>\d+)\.(?P<rest>.+)$")
_QUANTISED = re.compile(r"_(?:packed|scale|scale_inv|scale_2|shape|zero_point|g_idx|global_scale)$")
_ROUTER = re.compile(
    r"(?:^|\.)(?:gate|router|shared_experts?_gate|wg)(?:\.(?:layer|linear|classifier|proj|wg))?\.weight$"
)
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|wpe|word_embeddings|tok_embeddings|position_embeddings|embed\w*)\.weight$"
)
_FLAT = re.compile(r"(?:norm|layernorm|ln_\w+|_ln)\d*\.weight$|(?:^|\.)ln\w*\.weight$")


@dataclass(frozen=True, slots=True)
class LayerName:
    """A tensor of a numbered layer."""

    prefix: str
    layer: int
    rest: str


def layer_of(name: str) -> LayerName | None:
    """Layer of a tensor's name; None outside of the layers, and for encoders and draft layers beside the model."""
    found = _LAYER.match(name)
    if found is None or _ASIDE.search(found["prefix"]) or len(found["layer"]) > 6:
        return None
    return LayerName(found["prefix"], int(found["layer"]), found["rest"])


def layers_of(names: Iterable[str]) -> tuple[int, ...]:
    """Layer numbers that occur in names, in order."""
    return tuple(sorted({found.layer for name in names if (found := layer_of(name))}))


def expert_of(rest: str) -> tuple[int, str] | None:
    """(expert, name with the expert's number left out) of a tensor inside a layer."""
    found = _EXPERT.match(rest)
    return (
        (int(found["expert"]), f"{found['before']}.*.{found['rest']}") if found and len(found["expert"]) <= 6 else None
    )


def parameter(name: str) -> str:
    """The parameter's name: `w.weight_packed` and `w.weight_scale` belong to `w.weight`."""
    return _QUANTISED.sub("", name)


def is_router(name: str) -> bool:
    """The weight of a router or of a shared expert's gate: two-dimensional, and no Linear of the engine."""
    return bool(_ROUTER.search(name))


def is_embedding(name: str) -> bool:
    return bool(_EMBEDDING.search(name))


def is_flat(name: str) -> bool:
    """A weight of one dimension, by its name (norms)."""
    return bool(_FLAT.search(name))


def text_config(config: Mapping[str, object] | None) -> Mapping[str, object]:
    """The language model's part of a config, with what lies above it."""
    whole = config or {}
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = whole.get(key)
        if isinstance(inner, dict):
            return {**whole, **inner}
    return whole


def integer(config: Mapping[str, object], *keys: str) -> int | None:
    """The first of `keys` that is a whole number."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)


def some(items: Sequence[str], most: int = 6) -> str:
    """A few names and how many more there are."""
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")
