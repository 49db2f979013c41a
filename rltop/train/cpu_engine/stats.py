"""What the engine counts, and the line shapes it shares with SGLang: log lines, `/metrics`, `/v1/loads`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

LOGGER = logging.getLogger("rltop.cpu_engine")


@dataclass(slots=True)
class Stats:
    """Written by the scheduler's thread only; single numbers, so other threads may read them at any time."""

    max_total_num_tokens: int
    max_running_requests: int
    context_length: int
    running: int = 0
    queued: int = 0
    paused: int = 0
    retracted: int = 0
    used_tokens: int = 0
    gen_throughput: float = 0.0
    """Tokens per second over the last log interval; like SGLang's it keeps its value when the engine idles."""
    cache_hit_rate: float = 0.0
    """Of the last prefill."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefill_computed: int = 0
    prefill_passes: int = 0
    decode_tokens: int = 0
    decode_passes: int = 0
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    weight_load_seconds: dict[str, float] = field(default_factory=dict)
    """Source (`disk`, `tensor`) -> seconds of the last weight update."""
    http_requests: dict[tuple[str, str], int] = field(default_factory=dict)
    """(endpoint, method) -> count. Written by the HTTP thread only."""

    @property
    def token_usage(self) -> float:
        """Filled share of the KV pool."""
        return self.used_tokens / self.max_total_num_tokens


def prefill_line(
    *, sequences: int, computed: int, cached: int, usage: float, running: int, queued: int, throughput: float
) -> str:
    """SGLang's line for a prefill batch. Throughput in tokens per second."""
    return (
        f"Prefill batch, #new-seq: {sequences}, #new-token: {computed}, #cached-token: {cached}, "
        f"token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queued}, #pending-token: 0, "
        f"cuda graph: False, input throughput (token/s): {throughput:.2f}"
    )


def decode_line(*, running: int, tokens: int, usage: float, throughput: float, queued: int) -> str:
    """SGLang's line for a decode batch, one per `--decode-log-interval` steps."""
    return (
        f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, "
        f"cuda graph: False, gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}"
    )


_Sample = tuple[dict[str, str], float]


def metrics_text(stats: Stats, model_name: str) -> str:
    """Prometheus text under SGLang's names and labels."""
    lines: list[str] = []
    for name, kind, text, samples in _families(stats, model_name):
        lines += [f"# HELP sglang:{name} {text}", f"# TYPE sglang:{name} {kind}"]
        for labels, value in samples:
            joined = ",".join(f'{key}="{_escape(item)}"' for key, item in sorted(labels.items()))
            lines.append(f"sglang:{name}{{{joined}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


def _families(stats: Stats, model_name: str) -> Iterator[tuple[str, Literal["gauge", "counter"], str, list[_Sample]]]:
    front = {"engine_type": "unified", "model_name": model_name}
    ranks = front | {"moe_ep_rank": "0", "pp_rank": "0", "tp_rank": "0"}
    for name, text, value in (
        ("num_running_reqs", "Requests being decoded.", stats.running),
        ("num_queue_reqs", "Requests waiting for a place in the batch.", stats.queued),
        ("num_grammar_queue_reqs", "Requests waiting for a grammar: none, there are no grammars.", 0),
        ("num_paused_reqs", "Requests held by a pause.", stats.paused),
        ("num_retracted_reqs", "Requests sent back to the queue by a pause.", stats.retracted),
        ("token_usage", "Filled share of the KV pool.", stats.token_usage),
        ("full_token_usage", "Filled share of the KV pool.", stats.token_usage),
        ("num_used_tokens", "Tokens in the KV pool.", stats.used_tokens),
        ("gen_throughput", "Generated tokens per second over the last log interval.", stats.gen_throughput),
        ("cache_hit_rate", "Prompt cache hit rate of the last prefill.", stats.cache_hit_rate),
        ("utilization", "Running requests over the most that may run.", stats.running / stats.max_running_requests),
        ("is_cuda_graph", "Always 0: there is no CUDA here.", 0),
        ("spec_accept_length", "Always 0: there is no speculative decoding here.", 0),
        ("spec_accept_rate", "Always 0: there is no speculative decoding here.", 0),
        ("max_total_num_tokens", "Tokens that the KV pool may hold.", stats.max_total_num_tokens),
        ("page_size", "Tokens per KV page.", 1),
        ("num_pages", "KV pages.", stats.max_total_num_tokens),
        ("context_len", "Longest prompt plus response.", stats.context_length),
    ):
        yield name, "gauge", text, [(ranks, value)]
    modes = {"prefill_compute": stats.prefill_computed, "prefill_cache": stats.cached_tokens}
    modes |= {"decode": stats.decode_tokens}
    yield (
        "realtime_tokens_total",
        "counter",
        "Tokens by how they were made.",
        [(ranks | {"mode": mode}, value) for mode, value in modes.items()],
    )
    yield (
        "cuda_graph_passes_total",
        "counter",
        "Forward passes; none used a CUDA graph.",
        [
            (ranks | {"mode": "prefill_none"}, stats.prefill_passes),
            (ranks | {"mode": "decode_none"}, stats.decode_passes),
        ],
    )
    yield (
        "weight_load_duration_seconds",
        "gauge",
        "Seconds of the last weight update.",
        [(ranks | {"source": source}, value) for source, value in stats.weight_load_seconds.items()],
    )
    for name, text, value in (
        ("prompt_tokens_total", "Prompt tokens of finished requests.", stats.prompt_tokens),
        ("generation_tokens_total", "Tokens generated for finished requests.", stats.generation_tokens),
        ("num_requests_total", "Finished requests.", stats.requests),
        ("num_aborted_requests_total", "Aborted requests.", stats.aborted),
        ("num_retracted_requests_total", "Requests sent back to the queue.", stats.retractions),
    ):
        yield name, "counter", text, [(front, value)]
    yield (
        "http_requests_total",
        "counter",
        "HTTP requests by endpoint and method.",
        [({"endpoint": path, "method": verb}, count) for (path, verb), count in list(stats.http_requests.items())],
    )


def load_report(stats: Stats) -> dict[str, Any]:
    """One entry of `/v1/loads`' `loads`."""
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.queued,
        "num_used_tokens": stats.used_tokens,
        "num_total_tokens": stats.used_tokens,
        "num_active_tokens": stats.used_tokens,
        "num_prealloc_ready_tokens": 0,
        "num_waiting_uncached_tokens": 0,
        "total_prefill_uncached_tokens": stats.prefill_computed,
        "max_total_num_tokens": stats.max_total_num_tokens,
        "max_running_requests": stats.max_running_requests,
        "token_usage": stats.token_usage,
        "gen_throughput": stats.gen_throughput,
        "cache_hit_rate": stats.cache_hit_rate,
        "utilization": stats.running / stats.max_running_requests,
        "memory": {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": stats.max_total_num_tokens},
        "queues": {
            "waiting": stats.queued,
            "grammar": 0,
            "paused": stats.paused,
            "retracted": stats.retracted,
            "prealloc_ready": 0,
        },
    }


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
