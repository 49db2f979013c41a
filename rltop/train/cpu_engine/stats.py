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
    prefill_graph_passes: int = 0
    decode_tokens: int = 0
    decode_passes: int = 0
    decode_graph_passes: int = 0
    last_pass_graph: bool = False
    """Whether the last decode pass would have replayed a CUDA graph."""
    speculative: tuple[int, int] | None = None
    """(steps, draft tokens) with speculative decoding on."""
    verify_steps: int = 0
    verified_tokens: int = 0
    """Tokens that the verify steps gave."""
    spec_accept_length: float = 0.0
    """Tokens per verify step, over the last log interval."""
    spec_accept_rate: float = 0.0
    """Accepted share of the drafted tokens, over the last log interval."""
    measured: tuple[int, int] = (0, 0)
    """(verify steps, tokens) when the acceptance was last measured."""
    requests: int = 0
    aborted: int = 0
    retractions: int = 0
    weight_load_seconds: dict[str, float] = field(default_factory=dict)
    """Source (`disk`, `tensor`) -> seconds of the last weight update."""
    http_requests: dict[tuple[str, str], int] = field(default_factory=dict)
    """(endpoint, method) -> count. Written by the HTTP thread only."""
    http_active: dict[tuple[str, str], int] = field(default_factory=dict)
    """(endpoint, method) -> requests that are open now. Right even while the scheduler stands still."""

    @property
    def token_usage(self) -> float:
        """Filled share of the KV pool."""
        return self.used_tokens / self.max_total_num_tokens

    def count_prefill(self, passes: int, *, graph: bool) -> None:
        """passes: forward passes so far. graph: whether a CUDA graph covers the latest batch."""
        if graph:
            self.prefill_graph_passes += passes - self.prefill_passes
        self.prefill_passes = passes

    def count_decode(self, tokens: int, *, graph: bool) -> None:
        """One forward pass over as many samples as it gave tokens."""
        self.decode_passes += 1
        self.decode_graph_passes += graph
        self.decode_tokens += tokens
        self.last_pass_graph = graph

    def measure_acceptance(self, draft_tokens: int) -> None:
        """SGLang's two numbers, over what came since the last call; unchanged while no verify step ended."""
        steps, tokens = self.verify_steps - self.measured[0], self.verified_tokens - self.measured[1]
        if steps:
            self.measured = (self.verify_steps, self.verified_tokens)
            self.spec_accept_length = tokens / steps
            self.spec_accept_rate = (self.spec_accept_length - 1) / max(1, draft_tokens - 1)


def prefill_line(
    *,
    sequences: int,
    computed: int,
    cached: int,
    usage: float,
    running: int,
    queued: int,
    graph: bool,
    throughput: float,
) -> str:
    """SGLang's line for a prefill batch. Throughput in tokens per second."""
    return (
        f"Prefill batch, #new-seq: {sequences}, #new-token: {computed}, #cached-token: {cached}, "
        f"token usage: {usage:.2f}, #running-req: {running}, #queue-req: {queued}, #pending-token: 0, "
        f"cuda graph: {graph}, input throughput (token/s): {throughput:.2f}"
    )


def decode_line(
    *,
    running: int,
    tokens: int,
    usage: float,
    accepted: tuple[float, float] | None,
    graph: bool,
    throughput: float,
    queued: int,
) -> str:
    """SGLang's line for a decode batch, one per `--decode-log-interval` steps.

    accepted: (length, rate) with speculative decoding on.
    """
    speculative = "" if accepted is None else f"accept len: {accepted[0]:.2f}, accept rate: {accepted[1]:.2f}, "
    return (
        f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, "
        f"{speculative}cuda graph: {graph}, gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}"
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
        ("is_cuda_graph", "Imitated: a CUDA graph would cover the last decode batch.", stats.last_pass_graph),
        ("spec_accept_length", "Imitated: tokens per verify step of an n-gram drafter.", stats.spec_accept_length),
        ("spec_accept_rate", "Imitated: accepted share of the drafted tokens.", stats.spec_accept_rate),
        *_speculative(stats),
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
        "Forward passes, by whether a CUDA graph would have covered the batch. Imitated.",
        [
            (ranks | {"mode": "prefill_cuda_graph"}, stats.prefill_graph_passes),
            (ranks | {"mode": "prefill_none"}, stats.prefill_passes - stats.prefill_graph_passes),
            (ranks | {"mode": "decode_cuda_graph"}, stats.decode_graph_passes),
            (ranks | {"mode": "decode_none"}, stats.decode_passes - stats.decode_graph_passes),
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
        *((("spec_verify_calls_total", "Imitated: verify steps.", stats.verify_steps),) if stats.speculative else ()),
    ):
        yield name, "counter", text, [(front, value)]
    yield (
        "http_requests_active",
        "gauge",
        "HTTP requests that are open now.",
        [({"endpoint": path, "method": verb}, count) for (path, verb), count in list(stats.http_active.items())],
    )
    yield (
        "http_requests_total",
        "counter",
        "HTTP requests by endpoint and method.",
        [({"endpoint": path, "method": verb}, count) for (path, verb), count in list(stats.http_requests.items())],
    )


def _speculative(stats: Stats) -> list[tuple[str, str, int]]:
    if stats.speculative is None:
        return []
    steps, drafted = stats.speculative
    return [
        ("spec_num_steps", "Draft steps per verify step.", steps),
        ("spec_num_draft_tokens", "Tokens verified per step.", drafted),
    ]


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
