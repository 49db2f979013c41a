"""One look at an engine from outside: what `/metrics`, `/v1/loads` and `/model_info` say, over SGLang's versions.

`/metrics` exists only with `--enable-metrics`, `/v1/loads` not on older versions, `/model_info` was `/get_model_info`
before; each is tried, what is missing stays None, and no failure raises. `/health` and `/health_generate` are never
asked: both run a forward pass, which disturbs a busy engine and kills one whose memory is released.

What answers with something that cannot be read (too long, compressed, nested beyond measure, other types than SGLang's)
is named in `garbled`, and what it said is unknown.

With several data-parallel ranks counts and rates are summed and ratios averaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from rltop.engines.bounded import PLAIN, Unreadable, cut, fetch

SCRAPE_TIMEOUT_S = 2.0
"""For a whole answer. `/metrics` of a busy SGLang took up to 18 ms; an engine that needs seconds is news in itself."""
MOST_LINES, LONGEST_LINE = 5000, 4096
"""Of the wanted lines of `/metrics`: 13 per data-parallel rank, some 200 characters each. Parsing takes 10 µs a line,
and more than its length for a long one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What was seen; None is unknown."""

    url: str
    reachable: bool = False
    """Some endpoint answered."""
    problem: str = ""
    """Why not, or which endpoint failed."""
    garbled: str = ""
    """Which endpoint answered what cannot be read, and why."""
    running: int | None = None
    queued: int | None = None
    tokens_per_s: float | None = None
    """Generation throughput. 0 when nothing runs: SGLang's own gauge would keep its last value."""
    token_usage: float | None = None
    """Filled share of the KV pool, 0 to 1."""
    cache_hit_rate: float | None = None
    max_total_tokens: int | None = None
    cuda_graph: bool | None = None
    """Whether the last batch used one."""
    spec_accept_length: float | None = None
    """None also when speculation is off (SGLang then reports 0)."""
    weight_version: str | None = None
    model_path: str | None = None
    generation_tokens_total: float | None = None
    """Counter, of finished requests."""
    decode_tokens_total: float | None = None
    """Counter that moves while requests run: the one to take rates from. A decrease means a restart."""
    prefill_tokens_total: float | None = None
    """Counter of prompt tokens that were computed, as they are."""
    requests_total: float | None = None
    paused: int | None = None
    """Requests that a pause holds."""
    active: int | None = None
    """HTTP requests for tokens that wait for their answer. Counted by the server's front: it is right while the
    scheduler, which counts `running`, hangs."""
    stand_in: bool = False
    """The engine says that it is rltop's CPU engine."""


async def scrape(url: str, http: httpx.AsyncClient) -> EngineStats:
    """Ask the three endpoints at once. Never raises for what an engine does."""
    url = url.rstrip("/")
    metrics, loads, info = await asyncio.gather(
        _get(http, f"{url}/metrics"),
        _get(http, f"{url}/v1/loads?include=core"),
        _first(http, [f"{url}/model_info", f"{url}/get_model_info"]),
    )
    answers = (metrics, loads, info)
    stats = EngineStats(
        url=url,
        reachable=any(isinstance(answer, bytes | Unreadable) for answer in answers),
        problem="; ".join(answer for answer in answers if isinstance(answer, str)),
        garbled="; ".join(str(answer) for answer in answers if isinstance(answer, Unreadable)),
    )
    stats = _read(stats, loads, _with_loads, f"{url}/v1/loads")
    stats = _read(stats, metrics, _with_metrics, f"{url}/metrics")
    stats = _read(stats, info, _with_info, f"{url}/model_info")
    if stats.running == 0:
        stats = replace(stats, tokens_per_s=0.0)
    if stats.garbled:
        stats = replace(stats, problem="; ".join(part for part in (stats.garbled, stats.problem) if part))
    return stats


def _read(
    stats: EngineStats,
    answer: bytes | str | Unreadable,
    take: Callable[[EngineStats, bytes], EngineStats],
    address: str,
) -> EngineStats:
    """With what the answer says. Whatever a parser says of foreign bytes is a cause, never an exception."""
    if not isinstance(answer, bytes):
        return stats
    try:
        return take(stats, answer)
    except Exception as error:
        why = f"{address}: cannot be read ({cut(f'{type(error).__name__}: {error}', 120)})"
        return replace(stats, garbled="; ".join(part for part in (stats.garbled, why) if part))


async def _get(http: httpx.AsyncClient, address: str) -> bytes | str | Unreadable:
    """The body, or why there is none, or why it is not read."""
    try:
        request = http.build_request("GET", address, timeout=SCRAPE_TIMEOUT_S, headers=PLAIN)
        status, body = await fetch(http, request, timeout_s=SCRAPE_TIMEOUT_S)
    except TimeoutError:
        return f"{address}: no whole answer within {SCRAPE_TIMEOUT_S:g} s"
    except Unreadable as error:
        return Unreadable(f"{address}: its answer is {error}")
    except httpx.HTTPError as error:
        return f"{address}: {type(error).__name__}"
    return body if status == 200 else f"{address}: status {status}"


async def _first(http: httpx.AsyncClient, addresses: Iterable[str]) -> bytes | str | Unreadable:
    answer: bytes | str | Unreadable = ""
    for address in addresses:
        answer = await _get(http, address)
        if not isinstance(answer, str) or ": status " not in answer:
            break
    return answer


def _with_loads(stats: EngineStats, content: bytes) -> EngineStats:
    ranks = _object(content).get("loads")
    if not isinstance(ranks, list) or not ranks:
        return stats
    return replace(
        stats,
        running=_as_int(_total(ranks, "num_running_reqs")),
        queued=_as_int(_total(ranks, "num_waiting_reqs")),
        tokens_per_s=_total(ranks, "gen_throughput"),
        token_usage=_mean(ranks, "token_usage"),
        cache_hit_rate=_mean(ranks, "cache_hit_rate"),
        max_total_tokens=_as_int(_total(ranks, "max_total_num_tokens")),
    )


def _with_metrics(stats: EngineStats, content: bytes) -> EngineStats:
    values = read_metrics(content.decode(errors="replace"))

    def total(name: str, old: float | None = None, **labels: str) -> float | None:
        found = [value for seen, value in values.get(name, ()) if labels.items() <= seen.items()]
        return sum(found) if found else old

    def mean(name: str, old: float | None = None) -> float | None:
        found = [value for _, value in values.get(name, ())]
        return sum(found) / len(found) if found else old

    graph, accepted = total("is_cuda_graph"), mean("spec_accept_length")
    return replace(
        stats,
        running=_as_int(total("num_running_reqs", stats.running)),
        queued=_as_int(total("num_queue_reqs", stats.queued)),
        tokens_per_s=total("gen_throughput", stats.tokens_per_s),
        token_usage=mean("token_usage", stats.token_usage),
        cache_hit_rate=mean("cache_hit_rate", stats.cache_hit_rate),
        max_total_tokens=_as_int(total("max_total_num_tokens", stats.max_total_tokens)),
        cuda_graph=None if graph is None else graph > 0,
        spec_accept_length=accepted or None,
        generation_tokens_total=total("generation_tokens_total"),
        decode_tokens_total=total("realtime_tokens_total", mode="decode"),
        prefill_tokens_total=total("realtime_tokens_total", mode="prefill_compute"),
        requests_total=total("num_requests_total"),
        paused=_as_int(total("num_paused_reqs")),
        active=_active(values),
    )


def _with_info(stats: EngineStats, content: bytes) -> EngineStats:
    info = _object(content)
    version, path = info.get("weight_version"), info.get("model_path")
    return replace(
        stats,
        weight_version=None if version is None else cut(version),
        model_path=None if path is None else cut(path, 4096),
        stand_in="rltop_engine" in info,
    )


_WANTED = (
    "num_running_reqs",
    "num_queue_reqs",
    "gen_throughput",
    "token_usage",
    "cache_hit_rate",
    "max_total_num_tokens",
    "is_cuda_graph",
    "spec_accept_length",
    "generation_tokens_total",
    "realtime_tokens_total",
    "num_requests_total",
    "num_paused_reqs",
    "http_requests_active",
)
_TOKENS = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Paths that ask for tokens. `/health` asks for one too, but that is not work."""


def _active(values: dict[str, list[tuple[dict[str, str], float]]]) -> int | None:
    known = values.get("http_requests_active")
    if known is None:
        return None
    return int(sum(value for labels, value in known if labels.get("endpoint") in _TOKENS))


def read_metrics(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Name without `sglang:` -> (labels, value) of every wanted sample. Raises ValueError: it is malformed, or endless.

    NaN and Inf are left out. SGLang's text is 50 KB, mostly histogram buckets: lines are chosen before they are parsed.
    """
    starts = tuple(f"sglang:{name}{end}" for name in _WANTED for end in "{ ")
    chosen = [line for line in text.splitlines() if line.startswith(starts)]
    if len(chosen) > MOST_LINES or any(len(line) > LONGEST_LINE for line in chosen):
        raise ValueError(f"more than {MOST_LINES} lines of {LONGEST_LINE} characters")
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    # A colon is legal in a metric name but reserved for recording rules; the parser takes it.
    for family in text_string_to_metric_families("\n".join(chosen) + "\n"):
        for sample in family.samples:
            if isfinite(sample.value):
                values.setdefault(sample.name.removeprefix("sglang:"), []).append((sample.labels, sample.value))
    return values


def _object(content: bytes) -> dict[str, Any]:
    decoded = msgspec.json.decode(content)
    if not isinstance(decoded, dict):
        raise TypeError(f"a {type(decoded).__name__} where an object belongs")
    return decoded


def _total(ranks: list[Any], key: str) -> float | None:
    found = _numbers(ranks, key)
    return sum(found) if found else None


def _mean(ranks: list[Any], key: str) -> float | None:
    found = _numbers(ranks, key)
    return sum(found) / len(found) if found else None


def _numbers(ranks: list[Any], key: str) -> list[float]:
    values = [rank.get(key) for rank in ranks if isinstance(rank, dict)]
    return [value for value in values if isinstance(value, int | float) and isfinite(value)]


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)
