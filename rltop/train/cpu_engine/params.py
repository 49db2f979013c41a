"""Sampling parameters under SGLang's names, and a sample's random stream. Without torch: requests need none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""

GREEDY_BELOW = 1e-6
"""SGLang treats a temperature below this as greedy and reports log-probs of the unscaled distribution."""

_UNSUPPORTED = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "stop_regex": None,
    "beam_width": None,
    "watermark": None,
}
"""Known to SGLang, not to this engine: the neutral value passes, any other is refused rather than ignored."""

_IGNORED = frozenset({"spaces_between_special_tokens", "stream_interval", "custom_params"})
"""No influence on the tokens of a byte-level tokenizer."""


class UnknownParameter(ValueError):
    """A sampling parameter that SGLang does not know either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Checked parameters of one sample. Greedy is `top_k == 1` at temperature 1, as in SGLang."""

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    """None: until the context is full."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    @property
    def filters(self) -> bool:
        """Whether the distribution is cut before the draw."""
        return self.top_k != -1 or self.top_p < 1.0 or self.min_p > 0.0


def parse_sampling_params(raw: Mapping[str, Any]) -> tuple[SamplingParams, int]:
    """A request's `sampling_params` -> the checked parameters and `n`. Raises `ValueError` for the client to read."""
    values = {key: value for key, value in raw.items() if value is not None}
    count = values.pop("n", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"n must be a positive integer, got {count!r}.")
    for key, neutral in _UNSUPPORTED.items():
        if key in values and values.pop(key) != neutral:
            raise ValueError(f"The CPU engine does not implement {key!r}.")
    for key in _IGNORED:
        values.pop(key, None)
    unknown = sorted(values.keys() - SamplingParams.__dataclass_fields__.keys())
    if unknown:
        raise UnknownParameter(f"unknown field `{unknown[0]}`, expected one of `n`, {_known()}")
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        values["max_new_tokens"] = None
    if "stop" in values:
        values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = frozenset(int(token) for token in values["stop_token_ids"])
    return _checked(SamplingParams(**values)), count


def _known() -> str:
    return ", ".join(f"`{name}`" for name in (*SamplingParams.__dataclass_fields__, *_UNSUPPORTED, *sorted(_IGNORED)))


def _checked(params: SamplingParams) -> SamplingParams:
    for name in ("temperature", "top_p", "min_p"):
        if isinstance(getattr(params, name), bool) or not isinstance(getattr(params, name), int | float):
            raise ValueError(f"{name} must be a number, got {getattr(params, name)!r}.")
    for name in ("top_k", "max_new_tokens", "sampling_seed"):
        value = getattr(params, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} must be an integer, got {value!r}.")
    if not math.isfinite(params.temperature) or params.temperature < 0:
        raise ValueError(f"temperature must be a non-negative finite number, got {params.temperature}.")
    if not 0.0 < params.top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {params.top_p}.")
    if not 0.0 <= params.min_p <= 1.0:
        raise ValueError(f"min_p must be in [0, 1], got {params.min_p}.")
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    if params.max_new_tokens is not None and params.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
    if not all(isinstance(text, str) and text for text in params.stop):
        raise ValueError("stop must be a string or a list of non-empty strings.")
    if params.temperature < GREEDY_BELOW:
        fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
        return SamplingParams(**(fields | {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}))
    return params


def stream_of(seed: int, index: int) -> int:
    """The random stream of sample `index` (0 to n-1) of a request with `seed`, as an unsigned 64-bit number."""
    return _mix(_mix(seed & _MASK) ^ (index * GOLDEN & _MASK))


_MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""Of splitmix64."""


def _mix(value: int) -> int:
    value = (value + GOLDEN) & _MASK
    value = (value ^ (value >> 30)) * MIX_1 & _MASK
    value = (value ^ (value >> 27)) * MIX_2 & _MASK
    return value ^ (value >> 31)
