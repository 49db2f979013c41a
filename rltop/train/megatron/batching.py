"""Samples of different lengths -> micro-batches of padded tensors.

There is one planning function, and the actor pass, the reference pass and the train step all use it. A matrix product
may round differently for another batch shape, so equal micro-batches are what makes the three passes equal bit for bit.

Sequences are padded on the right, because Megatron's local attention refuses packed sequences. With a causal mask
nothing that matters can see the padding: a response token only looks left.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rltop.errors import RltopError

LogProbs = Tensor | Sequence[float]


class HasTokens(Protocol):
    """What a sample must have to be batched."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def response_length(self) -> int: ...
    @property
    def loss_mask(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence: prompt and response."""

    tokens: Sequence[int]
    """Prompt, then response."""
    response_length: int
    """How many of the last tokens are the response: at least 1, and at least one token is prompt."""
    loss_mask: Sequence[int] | None = None
    """One bit per response token, 0 = not trained on; None = all ones."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """A `TokenSample` with what the policy loss needs. Log-probs are natural logarithms, one per response token."""

    tokens: Sequence[int]
    response_length: int
    advantage: float
    """The same for every token of the response (GRPO)."""
    old_log_probs: LogProbs | None = None
    """From `log_probs(which="actor")` before the rollout's first step; None: those of the step's own forward, which
    makes ppo_kl and pg_clipfrac 0 by construction."""
    ref_log_probs: LogProbs | None = None
    """From `log_probs(which="ref")`; None: no KL is measured."""
    rollout_log_probs: LogProbs | None = None
    """As reported by the engine; None: the gap is not measured."""
    loss_mask: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward. `samples` are positions in the caller's list; responses come in that order."""

    samples: tuple[int, ...]
    tokens: Tensor
    """`[batch, length]` int64, padded on the right with token 0."""
    positions: Tensor
    """`[batch, length]` int64."""
    mask: Tensor
    """`[1, 1, length, length]` bool, True = must not look (Megatron's convention)."""
    predicted_by: Tensor
    """`[response tokens]` int64: the row of the logits, as `[length * batch, vocabulary]` (Megatron's order), that
    predicts each."""
    span: tuple[int, int]
    """First of these rows, and one past the last; all samples' rows of these positions lie between."""
    targets: Tensor
    """`[response tokens]` int64."""
    sizes: tuple[int, ...]
    """Response length per sample."""


def plan(lengths: Sequence[int], *, max_tokens: int, step_samples: int | None = None) -> list[tuple[int, ...]]:
    """Which samples go into which micro-batch; every index once.

    `step_samples` cuts the list into optimizer steps first, so a micro-batch never straddles two steps and each step's
    micro-batches do not depend on the rest of the rollout. Within a step, samples are ordered by length (longest first,
    ties in the given order) to pad little, and cut where `max_tokens` padded tokens would be exceeded. A sample longer
    than `max_tokens` is a micro-batch of its own.
    """
    batches: list[tuple[int, ...]] = []
    step = step_samples or max(len(lengths), 1)
    for start in range(0, len(lengths), step):
        order = sorted(range(start, min(start + step, len(lengths))), key=lambda index: -lengths[index])
        while order:
            fits = max(1, max_tokens // lengths[order[0]])
            batches.append(tuple(order[:fits]))
            order = order[fits:]
    return batches


def collate(samples: Sequence[HasTokens], chosen: tuple[int, ...], device: torch.device) -> MicroBatch:
    """Pad the chosen samples to the longest of them.

    In arrays, not token by token: the GPU waits for this, and 40,000 tokens cost 2 % of a step of a 0.6B model.
    """
    rows = [torch.frombuffer(array("q", samples[index].tokens), dtype=torch.long) for index in chosen]
    sizes = tuple(samples[index].response_length for index in chosen)
    length = max(map(len, rows))
    batch = len(chosen)
    firsts = [len(row) - size - 1 for row, size in zip(rows, sizes, strict=True)]
    return MicroBatch(
        samples=chosen,
        tokens=pad_sequence(rows, batch_first=True).to(device),
        positions=torch.arange(length, device=device).expand(len(chosen), length),
        mask=torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None],
        predicted_by=torch.cat(
            [
                torch.arange(first, first + size) * batch + at
                for at, (first, size) in enumerate(zip(firsts, sizes, strict=True))
            ]
        ).to(device),
        span=(min(firsts) * batch, (max(map(len, rows)) - 1) * batch),
        targets=torch.cat([row[-size:] for row, size in zip(rows, sizes, strict=True)]).to(device),
        sizes=sizes,
    )


def mask_of(sample: HasTokens) -> Sequence[int]:
    """The sample's loss mask; all ones where it has none."""
    return sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length


def check_samples(samples: Sequence[HasTokens], *, vocab_size: int, max_positions: int) -> None:
    """Raise `RltopError` naming the first sample that the model cannot take."""
    if not samples:
        raise RltopError("no samples", where="the training batch", why="a step needs at least one sample")
    for index, sample in enumerate(samples):
        size = len(sample.tokens)
        why = None
        if not 1 <= sample.response_length < size:
            why = f"{size} tokens, {sample.response_length} of them response: both prompt and response need one"
        elif size > max_positions:
            why = f"{size} tokens, the model has {max_positions} positions"
        elif min(sample.tokens) < 0 or max(sample.tokens) >= vocab_size:
            why = f"token ids {min(sample.tokens)}..{max(sample.tokens)}, the vocabulary has {vocab_size}"
        elif len(mask_of(sample)) != sample.response_length:
            why = f"loss mask of {len(mask_of(sample))} for {sample.response_length} response tokens"
        if why:
            raise RltopError("a sample does not fit the model", where=f"sample {index}", why=why)
