"""The draw of a token: one random stream per sample.

A draw depends on the sample's seed and on how many tokens it has, never on a shared generator: the uniform number for
token `t` of a stream is a hash of (stream, t), so neither batching nor the order of requests can change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rltop.train.cpu_engine.params import GOLDEN, MIX_1, MIX_2, SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each row: ids `[rows]`, their log-probs `[rows]`, and all of them `[rows, vocab]`."""

    tokens: list[int]
    logprobs: list[float]
    distribution: Tensor


def draw(logits: Tensor, rows: Sequence[tuple[SamplingParams, int, int]]) -> Draw:
    """Draw one token per row from `logits` `[padded rows, vocab]`.

    rows: (parameters, stream, tokens drawn so far) of each real row, in order; padding rows follow in `logits`.
    The log-probs are natural logarithms of the temperature-scaled distribution before top_k, top_p and min_p cut it,
    which is what SGLang returns.
    """
    padded, real = logits.shape[0], len(rows)
    temperatures = torch.ones(padded, 1)
    temperatures[:real, 0] = torch.tensor([params.temperature for params, _, _ in rows])
    distribution = torch.log_softmax(logits / temperatures, dim=-1)
    chances = torch.softmax(distribution, dim=-1, dtype=torch.float64)
    for row, (params, _, _) in enumerate(rows):
        if params.filters and params.top_k != 1:
            chances[row] = _cut(chances[row], params)
    uniform = torch.from_numpy(uniforms([stream for _, stream, _ in rows], [drawn for _, _, drawn in rows]))
    cumulative = chances[:real].cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that rounding cannot point behind the last token with a chance.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    greedy = torch.tensor([params.top_k == 1 for params, _, _ in rows], dtype=torch.bool)
    tokens = torch.where(greedy, distribution[:real].argmax(dim=-1), drawn)
    logprobs = distribution[:real].gather(1, tokens[:, None]).squeeze(1)
    return Draw(tokens.tolist(), logprobs.tolist(), distribution)


def all_zero(drawn: Draw) -> Draw:
    """Token 0 in place of what was drawn: what real SGLang answers while it has no weights."""
    rows = len(drawn.tokens)
    return Draw([0] * rows, drawn.distribution[:rows, 0].tolist(), drawn.distribution)


def _cut(chances: Tensor, params: SamplingParams) -> Tensor:
    """Zero what top_k, top_p and min_p exclude. A token stays if the tokens before it hold at most top_p."""
    ordered, order = torch.sort(chances, descending=True, stable=True)
    keep = (ordered.cumsum(dim=-1) - ordered) <= params.top_p
    if params.top_k != -1:
        keep[params.top_k :] = False
    keep &= ordered >= ordered[0] * params.min_p
    return torch.zeros_like(chances).scatter_(0, order, torch.where(keep, ordered, torch.zeros_like(ordered)))


def uniforms(streams: Sequence[int], drawn: Sequence[int]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (stream, tokens drawn so far): the top 53 bits of splitmix64's output function.

    splitmix64 is the generator that Java's SplittableRandom and many seeders use (Steele, Lea, Flood 2014).
    """
    state = np.array(streams, dtype=np.uint64)
    step = np.array(drawn, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = state + step * np.uint64(GOLDEN)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(MIX_1)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(MIX_2)
    mixed = mixed ^ (mixed >> np.uint64(31))
    unit: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit
