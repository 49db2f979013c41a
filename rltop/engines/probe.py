"""A prompt whose log-probs say whether an engine computes what it should: what no checksum of weights covers.

SGLang's weights checker leaves out rotary tables and other buffers that the model makes for itself. Once all parameters
are equal, log-probs that differ come from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rltop.engines.client import EngineClient
from rltop.engines.weight_findings import ROTARY, Finding

PROBE_TOKENS = 48
PROBE_GAP = 1e-3
"""Largest gap of a log-prob, nats, between two readings of the same prompt from the same weights. In fp32 on a CPU they
are equal bit for bit; bf16 on a GPU repeats itself too, for a prompt that is alone in its batch."""


def probe_ids(vocab_size: int) -> list[int]:
    """A prompt that is the same for every engine: tokens from all over the vocabulary, no two neighbours alike."""
    return [(at * 7919 + 104729 * (at // 7)) % vocab_size for at in range(1, PROBE_TOKENS + 1)]


def read_probe(client: EngineClient, vocab_size: int) -> tuple[float, ...]:
    """Log-probs that the engine gives the probe's tokens, from the second one on; NaN where it gives none."""
    payload = {
        "input_ids": probe_ids(vocab_size),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    (answer,) = client.generate(payload)
    triples = answer["meta_info"]["input_token_logprobs"][1:]
    return tuple(math.nan if triple[0] is None else float(triple[0]) for triple in triples)


def lost_buffer(before: Sequence[float], after: Sequence[float], *, limit: float = PROBE_GAP) -> Finding | None:
    """What the probe says once all parameters are equal."""
    gaps = [abs(now - then) for then, now in zip(before, after, strict=True)]
    worst = max((gap if not math.isnan(gap) else math.inf for gap in gaps), default=0.0)
    if worst <= limit:
        return None
    if gaps and gaps[0] <= limit:
        where = "they agree at the first position, where every angle is 0, and differ from the second on"
        name = ROTARY
    else:
        where, name = "at every position", "a buffer that the weights checker leaves out"
    detail = f"all parameters are equal and log-probs of one prompt differ by up to {worst:.3g} nats: {where}"
    return Finding(name, "buffer-lost", detail=detail)
