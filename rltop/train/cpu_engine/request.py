"""One sample from request to answer: its state while it runs, when it ends, and the answer's fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rltop.train.cpu_engine.effects import Drafter
from rltop.train.cpu_engine.params import SamplingParams

if TYPE_CHECKING:
    from rltop.train.cpu_engine.loop import Codec
    from rltop.train.cpu_engine.model import Slab

Logprob = tuple[float | None, int, str | None]
"""SGLang's triple: natural log-probability (null for the first prompt token), token id, text (null unless wanted)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobWishes:
    """What a request wants to know about its tokens."""

    output: bool = False
    start: int = -1
    """First prompt position whose log-prob is returned; -1: none."""
    top: int = 0
    text: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Sample:
    """One sample, compared by identity. Only the scheduler's thread changes it after `submit`."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    stream: int
    limit: int
    """Most tokens it may generate: max_new_tokens, cut by the context."""
    wishes: LogprobWishes
    deliver: Callable[[dict[str, Any]], None]
    """Called in the scheduler's thread with the answer: once, or after every token if `streaming`."""
    streaming: bool = False
    quiet: bool = False
    """A health probe: not counted in the metrics."""
    received: float
    """Wall clock, seconds, when the request came in."""

    output: list[int] = field(default_factory=list)
    slab: Slab | None = None
    row: int = -1
    drafter: Drafter | None = None
    """Measures speculative decoding, where that is on."""
    cached_tokens: int = 0
    retractions: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(version, output tokens when it stopped being current): weight changes while this sample was running."""
    finish: dict[str, Any] | None = None
    input_logprobs: list[Logprob] = field(default_factory=list)
    input_top: list[list[Logprob] | None] = field(default_factory=list)
    output_logprobs: list[Logprob] = field(default_factory=list)
    output_top: list[list[Logprob] | None] = field(default_factory=list)
    started: float = 0.0
    first_token: float = 0.0

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class Endings:
    """When a sample is over, in SGLang's order: length, then end tokens, then stop strings."""

    text: Codec
    eos_token_ids: frozenset[int]
    modern: bool = True
    """Answers have the fields that SGLang added after 0.5.14."""

    def check(self, sample: Sample) -> dict[str, Any] | None:
        """The finish reason after the newest token, or None."""
        params = sample.params
        if len(sample.output) >= sample.limit:
            return {"type": "length", "length": len(sample.output)}
        newest = sample.output[-1]
        if not params.ignore_eos and (newest in self.eos_token_ids or newest in params.stop_token_ids):
            return {"type": "stop", "matched": newest}
        if params.stop:
            # A stop string of n bytes cannot reach further back than n tokens of at least a byte each; a few more
            # for special tokens, which decode to nothing.
            reach = max(len(stop.encode()) for stop in params.stop) + 4
            tail = self.text.decode(sample.output[-reach:], skip_special_tokens=params.skip_special_tokens)
            for stop in params.stop:
                if stop in tail:
                    return {"type": "stop", "matched": stop}
        return None

    def answer_text(self, sample: Sample) -> str:
        """The response's text, without the token or string that ended it (unless `no_stop_trim`)."""
        params, finish = sample.params, sample.finish or {}
        matched, ids = finish.get("matched"), sample.output
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        text = self.text.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            end = text.index(matched)
            text = text[: end + len(matched)] if params.no_stop_trim else text[:end]
        return text


def answer(sample: Sample, endings: Endings, version: str, *, now: float) -> dict[str, Any]:
    """The reply to `/generate` for one sample, field by field as SGLang sends it."""
    meta: dict[str, Any] = {
        "id": sample.rid,
        "finish_reason": sample.finish,
        "prompt_tokens": len(sample.prompt),
        "weight_version": version,
        "num_retractions": sample.retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": sample.started,
        "prefill_finished_time": sample.first_token,
        "queue_time": max(0.0, sample.started - sample.received) if sample.started else 0.0,
    }
    if sample.wishes.output:
        meta |= {
            "input_token_logprobs": list(sample.input_logprobs),
            "output_token_logprobs": list(sample.output_logprobs),
            "output_token_logprobs_length": len(sample.output_logprobs),
        }
        if sample.wishes.top:
            meta |= {"input_top_logprobs": list(sample.input_top), "output_top_logprobs": list(sample.output_top)}
    decoding = now - sample.first_token if sample.first_token else 0.0
    cached = {"device": sample.cached_tokens, "host": 0} if sample.cached_tokens else None
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": len(sample.output),
        "cached_tokens": sample.cached_tokens,
        "cached_tokens_details": cached,
        "dp_rank": None,
        "e2e_latency": now - sample.received,
        "request_received_ts": sample.received,
        "first_token_latency": max(0.0, sample.first_token - sample.received),
        "api_server_dispatch_finish_ts": sample.received,
        "request_finished_ts": now,
        "response_sent_to_client_ts": now,
    }
    if len(sample.output) > 1:
        meta["decode_throughput"] = (len(sample.output) - 1) / max(decoding, 1e-9)
    spans = _version_spans(sample, version)
    meta["weight_version"] = spans[-1]["version"]
    if sample.finish is not None:
        meta["weight_versions"] = spans
    if not endings.modern:
        meta = {name: value for name, value in meta.items() if name not in _META_LATER}
    return {"text": endings.answer_text(sample), "output_ids": list(sample.output), "meta_info": meta}


_META_LATER = frozenset(
    {
        *("storage_prefetch_wait", "storage_staging_wait", "forward_entry_time", "prefill_finished_time"),
        *("first_token_latency", "weight_versions"),
    }
)
"""Fields of `meta_info` that 0.5.14 does not have."""


def _version_spans(sample: Sample, version: str) -> list[dict[str, Any]]:
    """Which version made which output tokens, `[start, end)`; one span unless weights changed while it ran."""
    spans: list[dict[str, Any]] = []
    for name, end in [*sample.versions, (version, len(sample.output))]:
        start = spans[-1]["end"] if spans else 0
        if spans and spans[-1]["version"] == name:
            spans[-1]["end"] = end
        elif end > start or not spans:
            spans.append({"version": name, "start": start, "end": end})
    return spans
