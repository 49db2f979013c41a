"""Notes a sample's log-probabilities in SGLang's form: triples of (natural log-prob, token id, text or null)."""

from __future__ import annotations

import torch
from torch import Tensor

from rltop.train.cpu_engine.loop import Codec
from rltop.train.cpu_engine.request import Logprob, Sample
from rltop.train.cpu_engine.sampling import Draw


def note_prompt(sample: Sample, logits: Tensor, text: Codec) -> None:
    """Of the prompt from `wishes.start` on, of the unscaled distribution. The first is null: nothing predicts it.

    logits: `[prompt, vocab]`, every position.
    """
    start = sample.wishes.start
    if start < 0 or sample.input_logprobs or start >= len(sample.prompt):
        return
    distribution = torch.log_softmax(logits[start : len(sample.prompt) - 1], dim=-1)
    targets = torch.tensor(sample.prompt[start + 1 :], dtype=torch.long)
    values = distribution.gather(1, targets[:, None]).squeeze(1).tolist()
    for value, token in zip([None, *values], sample.prompt[start:], strict=True):
        sample.input_logprobs.append(_triple(sample, value, token, text))
    if sample.wishes.top:
        sample.input_top = [None, *(_top(sample, row, text) for row in distribution)]


def note_token(sample: Sample, drawn: Draw, row: int, text: Codec) -> None:
    """Of the token that was just drawn, of the temperature-scaled distribution."""
    if not sample.wishes.output:
        return
    sample.output_logprobs.append(_triple(sample, drawn.logprobs[row], drawn.tokens[row], text))
    if sample.wishes.top:
        sample.output_top.append(_top(sample, drawn.distribution[row], text))


def _top(sample: Sample, distribution: Tensor, text: Codec) -> list[Logprob]:
    values, tokens = distribution.topk(min(sample.wishes.top, distribution.shape[0]))
    return [_triple(sample, value, token, text) for value, token in zip(values.tolist(), tokens.tolist(), strict=True)]


def _triple(sample: Sample, logprob: float | None, token: int, text: Codec) -> Logprob:
    return logprob, token, text.decode([token], skip_special_tokens=False) if sample.wishes.text else None
