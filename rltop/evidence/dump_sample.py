"""One sample of a dump under slime's names, whoever wrote it: slime (old and v2), Relax, rltop.

Nothing is required of a sample: a field that the dump lacks is None, one that is not known here is kept in `extra`, and
a part that wanted to import something is named in `refused`. Failure policy: an odd type makes a field None, no error.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rltop.evidence.samples import is_id, reward_of

DumpKind = Literal["rollout", "train-v1", "train-v2", "state", "samples", "other"]
"""`samples`: one JSON object per line (Relax)."""
MOST_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class DumpTensor:
    """A tensor of the dump that was not read yet."""

    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], Sequence[float]] = field(compare=False, repr=False)
    """Reads its elements, flat; empty where they can not be read. The file must still be open."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A part that wanted to import something outside of the allow-list. It was not made."""

    name: str


@dataclass(frozen=True, slots=True)
class DumpSample:
    """One sample. Log-probs are natural logs, one per token of the response; None: the dump does not have the field."""

    at: int
    """Position in the dump, from 0. slime's train dumps call it `rollout_position`."""
    index: int | None = None
    group_index: int | None = None
    prompt: str | None = None
    """Text; chat messages are rendered as `role: content` blocks."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The prompt as chat messages, where it was saved so."""
    response: str | None = None
    tokens: Sequence[int] | None = None
    """Prompt and response."""
    response_length: int | None = None
    label: Any = None
    reward: float | Mapping[str, Any] | None = None
    status: str | None = None
    weight_versions: tuple[str, ...] | None = None
    rollout_log_probs: Sequence[float] | None = None
    log_probs: Sequence[float] | None = None
    ref_log_probs: Sequence[float] | None = None
    loss_mask: Sequence[int] | None = None
    metadata: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other field, under its name: plain values, `DumpTensor`, `Refused`."""
    refused: tuple[str, ...] = ()
    """`field: module.name` of every part that was not made."""
    problem: str = ""
    """Why the entry of the dump is no sample at all: nothing but `at` is known of it."""

    @property
    def score(self) -> float | None:
        """The reward as one number: of a map its `score`, `reward` or `acc`, or its only number."""
        return reward_of(self.reward)

    @property
    def response_tokens(self) -> Sequence[int] | None:
        """Token ids of the response alone: the last `response_length` of `tokens`, or what Relax saved of them."""
        if self.tokens is None and "response_token_ids" in self.extra:
            return _numbers(self.extra["response_token_ids"])
        if self.tokens is None or self.response_length is None or not 0 <= self.response_length <= len(self.tokens):
            return None
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def effective_length(self) -> int | None:
        """Tokens of the response that are trained on: the sum of the loss mask, all without one."""
        return self.response_length if self.loss_mask is None else sum(1 for one in self.loss_mask if one)


_PLAIN = frozenset(
    {
        "index",
        "group_index",
        "prompt",
        "response",
        "tokens",
        "response_length",
        "label",
        "reward",
        "status",
        "weight_versions",
        "rollout_log_probs",
        "log_probs",
        "ref_log_probs",
        "loss_mask",
        "metadata",
    }
)
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "index": ("sample_index",),
    "response_length": ("response_lengths",),
    "reward": ("rewards",),
    "loss_mask": ("loss_masks",),
    "rollout_log_probs": ("response_rollout_log_probs",),
}
"""Names that slime's train dumps, and Relax's JSONL, use for a field."""


def make_sample(at: int, row: Mapping[str, Any], refused: Sequence[str] = ()) -> DumpSample:
    """row: the entry of the dump, its values plain, arrays of numbers, `DumpTensor` or `Refused`.

    refused: `field: module.name` of the parts that were not made.
    """
    taken: dict[str, str] = {}
    for name in _PLAIN:
        found = next((key for key in (name, *_ALIASES.get(name, ())) if key in row), None)
        if found is not None:
            taken[name] = found
    one = {name: row[key] for name, key in taken.items()}
    prompt, messages = _prompt(one.get("prompt"))
    reward, metadata = one.get("reward"), one.get("metadata")
    versions = one.get("weight_versions")
    used = set(taken.values())
    return DumpSample(
        at,
        index=_whole(one.get("index")),
        group_index=_whole(one.get("group_index")),
        prompt=prompt,
        messages=messages,
        response=one["response"] if isinstance(one.get("response"), str) else None,
        tokens=_numbers(one.get("tokens")),
        response_length=_whole(one.get("response_length")),
        label=one.get("label"),
        reward=reward if isinstance(reward, Mapping) else _number(reward),
        status=_status(one.get("status")),
        weight_versions=tuple(map(str, versions)) if isinstance(versions, list | tuple) else None,
        rollout_log_probs=_numbers(one.get("rollout_log_probs")),
        log_probs=_numbers(one.get("log_probs")),
        ref_log_probs=_numbers(one.get("ref_log_probs")),
        loss_mask=_numbers(one.get("loss_mask")),
        metadata=metadata if isinstance(metadata, Mapping) else None,
        extra={k: list(v) if isinstance(v, array) else v for k, v in row.items() if k not in used},
        refused=tuple(refused),
    )


def _prompt(value: object) -> tuple[str | None, Sequence[Mapping[str, Any]] | None]:
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return None, None
    return "\n".join(f"{one.get('role', '?')}: {_content(one.get('content'))}" for one in value[:MOST_MESSAGES]), value


def _content(value: object) -> str:
    """A message's content: text, or parts of which the texts count."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [one.get("text") or f"<{one.get('type', 'part')}>" for one in value if isinstance(one, Mapping)]
        return "".join(map(str, parts))
    return "" if value is None else str(value)


def _whole(value: object) -> int | None:
    if isinstance(value, DumpTensor):
        value = _single(value)
    return int(value) if is_id(value) or (isinstance(value, float) and value.is_integer()) else None  # type: ignore[call-overload]


def _number(value: object) -> float | None:
    if isinstance(value, DumpTensor):
        value = _single(value)
    return float(value) if isinstance(value, bool) else value if isinstance(value, int | float) else None


def _single(value: DumpTensor) -> float | None:
    return next(iter(value.values()), None) if math.prod(value.shape) == 1 else None


def _numbers(value: object) -> Sequence[Any] | None:
    """Flat numbers of a list or of a tensor of one dimension (or of one row)."""
    if isinstance(value, DumpTensor):
        if math.prod(value.shape) != max(value.shape, default=1):
            return None
        numbers = value.values()
        return list(map(int, numbers)) if value.dtype.startswith(("int", "uint", "bool")) else numbers
    if isinstance(value, array):
        return list(value)
    if not isinstance(value, list | tuple):
        return None
    return value if all(isinstance(one, int | float) for one in value) else None


def _status(value: object) -> str | None:
    """slime's statuses by value; `Status.COMPLETED` of older writers too."""
    return value.rpartition(".")[2].lower() if isinstance(value, str) else None
