"""Log-probs and entropy of a micro-batch's logits, whose vocabulary may be split over the tensor parallel ranks.

No rank ever holds a whole row: three numbers per token travel instead (maximum, sum of exponentials, and the target's
logit), plus one for the entropy. That is Megatron-LM's vocab-parallel cross entropy, written for log-probs. With one
rank the plain function is used, so that a single rank's numbers do not depend on this module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from rltop.train.log_probs import Entropy, token_log_probs
from rltop.train.megatron.batching import MicroBatch
from rltop.train.megatron.ranks import Ranks

DENSE = 2
"""Rows in a span per row that is wanted, up to which all of them are computed: reading a row that nobody wants costs
less than copying one that is wanted there and its gradient back."""


class _Sum(torch.autograd.Function):
    """Sum over ranks. Every rank computes the same loss from it, so the gradient of each part is the sum's."""

    @staticmethod
    def forward(_ctx: Any, part: Tensor, group: Any) -> Tensor:
        total = part.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Rows(torch.autograd.Function):
    """Some rows, each at most once. torch's own backward of an index adds row by row, for rows that came twice: with
    rows as long as a vocabulary that is a tenth of a train step."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = whole.shape
        return whole.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (index,) = ctx.saved_tensors
        whole = gradients[0].new_zeros(ctx.shape)
        whole[index] = gradients[0]
        return whole, None


def rows_of(whole: Tensor, index: Tensor) -> Tensor:
    """`whole [rows, ...]`, `index [tokens]` without repetition -> `[tokens, ...]`."""
    rows: Tensor = _Rows.apply(whole, index)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


def scores(
    logits: Tensor, micro: MicroBatch, temperature: float, *, ranks: Ranks, vocab_size: int, entropy: Entropy
) -> Tensor:
    """`logits [length, batch, vocabulary / ranks]` as Megatron's output layer leaves them -> `[2, tokens]` fp32: the
    response tokens' log-probs and entropies (nats), in the order of the samples. `[1, tokens]` without entropies."""
    flat = logits.reshape(-1, logits.shape[-1])
    first, last = micro.span
    found: tuple[Tensor, ...]
    if ranks.place.layout.tensor > 1:
        rows = rows_of(flat, micro.predicted_by)
        found = sharded_log_probs(rows, micro.targets, temperature, ranks=ranks, vocab_size=vocab_size, entropy=entropy)
    elif last - first <= DENSE * len(micro.targets):
        at = micro.predicted_by - first
        targets = micro.targets.new_zeros(last - first).scatter_(0, at, micro.targets)
        every = token_log_probs(flat, targets, temperature, rows=slice(first, last), entropy=entropy)
        found = tuple(rows_of(one, at) for one in every[: 1 if entropy == "none" else 2])
    else:
        found = token_log_probs(flat, micro.targets, temperature, rows=micro.predicted_by, entropy=entropy)
    return torch.stack(found[:1] if entropy == "none" else found)


def sharded_log_probs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    ranks: Ranks,
    vocab_size: int,
    entropy: Entropy = "trained",
) -> tuple[Tensor, Tensor]:
    """`logits [tokens, vocabulary / ranks]`, `targets [tokens]` -> log-probs and entropy (nats), `[tokens]`.

    All ranks get the same. An entropy of kind "none" is empty.

    Columns from `vocab_size` on are padding that makes the vocabulary divide; they have probability 0.
    """

    def total(part: Tensor) -> Tensor:
        result: Tensor = _Sum.apply(part, ranks.tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return result

    width = logits.shape[-1]
    first = ranks.place.tensor * width
    real = max(0, min(width, vocab_size - first))
    logits = logits[:, :real].float() / temperature
    highest = logits.detach().amax(-1) if real else logits.new_full(logits.shape[:1], -torch.inf)
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX, group=ranks.tensor)
    logits = logits - highest[:, None]
    weights = logits.exp()
    normaliser = total(weights.sum(-1))
    here = (targets >= first) & (targets < first + real)
    place = torch.where(here, targets - first, 0)
    own = logits.gather(-1, place[:, None])[:, 0] if real else logits.sum(-1)
    chosen = total(torch.where(here, own, 0.0)) - normaliser.log()
    if entropy == "none":
        return chosen, chosen.new_empty(0)
    with torch.set_grad_enabled(entropy == "trained" and torch.is_grad_enabled()):
        # -sum(p log p) with log p = logit - log(normaliser)
        return chosen, normaliser.log() - total((weights * logits).sum(-1)) / normaliser
