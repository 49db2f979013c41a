"""Log-probs of tokens and the entropy of what they were drawn from, out of logits, with a gradient written by hand.

Logits are the largest tensor of a train step: with a vocabulary of 150,000 every fp32 copy of a micro-batch's takes
gigabytes, and every pass over one about a percent of the step. Autograd keeps three such copies and makes two more on
its way back. Here one is kept, the rest is made in blocks of rows, and the gradient is one pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Entropy = Literal["none", "measured", "trained"]
"""What becomes of the entropy: it is not computed; it is a measurement, without a gradient; it has a gradient."""

Rows = slice | Tensor
"""Rows of logits: neighbours, of which no copy is made, or an index `[tokens]` int64 without repetition."""

BLOCK = 2**27
"""Logits of one block of rows, 0.5 GiB in fp32: enough rows to fill a GPU, and little beside a micro-batch."""


def token_log_probs(
    logits: Tensor, targets: Tensor, temperature: float, *, rows: Rows = slice(None), entropy: Entropy = "trained"
) -> tuple[Tensor, Tensor]:
    """`logits [rows, vocabulary]`, `targets [tokens]` -> log-probs of the targets and entropy (nats), `[tokens]` fp32.

    `rows` says which row each target belongs to; by default there is one target per row. In fp32 whatever the logits
    are in: a sum over a vocabulary of bf16 numbers is no log-prob. An entropy of kind "none" is empty. Rows that are
    not named get a gradient of exactly 0.
    """
    if isinstance(rows, slice):
        rows = slice(*rows.indices(len(logits)))
    result: tuple[Tensor, Tensor] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        logits, targets, temperature, rows, entropy
    )
    return result


class _TokenLogProbs(torch.autograd.Function):
    """With p the probabilities, H the entropy, g and h the gradients of the target's log-prob and of H, the gradient of
    a logit is g (1[target] - p) - h p (log p + H), over the temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, rows: Rows, entropy: Entropy
    ) -> tuple[Tensor, Tensor]:
        tokens, trained = len(targets), entropy == "trained"
        chosen = logits.new_empty(tokens, dtype=torch.float32)
        spread = chosen.new_empty(0 if entropy == "none" else tokens)
        # Probabilities, or their logarithms where the gradient of the entropy needs both.
        kept = chosen.new_empty(tokens, logits.shape[1]) if ctx.needs_input_grad[0] else None
        for part in _blocks(tokens, logits.shape[1]):
            log_probs = _log_softmax(_rows_of(logits, rows, part), temperature)
            chosen[part] = log_probs.gather(-1, targets[part, None])[:, 0]
            if kept is not None and trained:
                kept[part] = log_probs
            if kept is not None and not trained:
                probs = torch.exp(log_probs, out=kept[part])
            elif entropy != "none":
                probs = log_probs.exp()
            if entropy != "none":
                spread[part] = log_probs.mul_(probs).sum(dim=-1).neg_()
        ctx.set_materialize_grads(False)
        if not trained:
            ctx.mark_non_differentiable(spread)
        if kept is not None:
            ctx.save_for_backward(kept, targets, spread, *([rows] if isinstance(rows, Tensor) else []))
            ctx.rows, ctx.temperature, ctx.trained = rows if isinstance(rows, slice) else None, temperature, trained
            ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return chosen, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        kept, targets, spread, *index = ctx.saved_tensors
        rows: Rows = ctx.rows if ctx.rows is not None else index[0]
        of_chosen, of_spread = (None if one is None else one / ctx.temperature for one in gradients)
        if of_chosen is None:
            of_chosen = kept.new_zeros(len(targets))
        gradient = kept.new_empty(ctx.shape, dtype=ctx.dtype)
        if isinstance(rows, slice):
            gradient[: rows.start].zero_()
            gradient[rows.stop :].zero_()
        else:
            gradient.zero_()
        for part in _blocks(len(targets), ctx.shape[1]):
            one, target = of_chosen[part, None], targets[part, None]
            into = _rows_of(gradient, rows, part) if isinstance(rows, slice) else kept.new_empty(kept[part].shape)
            if not ctx.trained:
                at_target = one - one * kept[part].gather(-1, target)
                torch.mul(kept[part], -one, out=into)
                into.scatter_(-1, target, at_target.to(into.dtype))
            else:
                into.copy_(_with_entropy(kept[part], target, one, spread[part, None], of_spread, part))
            if not isinstance(rows, slice):
                gradient.index_copy_(0, rows[part], into.to(ctx.dtype))
        return gradient, None, None, None, None


def _with_entropy(
    log_probs: Tensor, target: Tensor, of_chosen: Tensor, entropy: Tensor, of_entropy: Tensor | None, part: slice
) -> Tensor:
    """Gradient of a block of rows whose entropy has one too."""
    probs = log_probs.exp()
    if of_entropy is None:
        factor = of_chosen.neg()
    else:
        factor = (log_probs + entropy).mul_(-of_entropy[part, None]).sub_(of_chosen)
    return probs.mul_(factor).scatter_add_(-1, target, of_chosen)


def _blocks(tokens: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK // width)
    for first in range(0, tokens, step):
        yield slice(first, min(first + step, tokens))


def _rows_of(whole: Tensor, rows: Rows, part: slice) -> Tensor:
    """The rows of these tokens: a view of neighbours, a copy of others."""
    if isinstance(rows, slice):
        return whole[rows.start + part.start : rows.start + part.stop]
    return whole.index_select(0, rows[part])


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 1.0:
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    return torch.log_softmax(logits.float() / temperature, dim=-1)
