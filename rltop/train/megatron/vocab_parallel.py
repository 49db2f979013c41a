"""Log-probs and entropy of logits whose vocabulary is split over the tensor parallel ranks.

No rank ever holds a whole row: three numbers per token travel instead (maximum, sum of exponentials, and the target's
logit), plus one for the entropy. That is Megatron-LM's vocab-parallel cross entropy, written for log-probs. With one
rank the plain function is used, so that a single rank's numbers do not depend on this module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from rltop.train.loss import token_log_probs
from rltop.train.megatron.ranks import Ranks


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
    """`whole [rows, vocabulary]`, `index [tokens]` without repetition -> `[tokens, vocabulary]`."""
    rows: Tensor = _Rows.apply(whole, index)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return rows


def sharded_log_probs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    ranks: Ranks,
    vocab_size: int,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor]:
    """`logits [tokens, vocabulary / ranks]`, `targets [tokens]` -> log-probs and entropy (nats), `[tokens]`.

    All ranks get the same.

    Columns from `vocab_size` on are padding that makes the vocabulary divide; they have probability 0.
    """
    if ranks.place.layout.tensor == 1:
        return token_log_probs(logits, targets, temperature, entropy_gradient=entropy_gradient)

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
    # -sum(p log p) with log p = logit - log(normaliser)
    entropy = normaliser.log() - total((weights * logits).sum(-1)) / normaliser
    return chosen, entropy
