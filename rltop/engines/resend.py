"""Recorded samples put to an engine again: does it give their tokens the log-probs of the dump, and the same answer?

Two questions. `score` sends prompt and response with no token to generate and reads SGLang's log-probs of the input:
exact, whatever was sampled. They are of the distribution at temperature 1, so only such rollouts can be compared.
`sample_again` sends the prompt and compares the answer token by token.

Failure policy: every request names the weight version that the engine held at the start (`WrongWeightVersion` when that
changes meanwhile). `examine` and `ready` ask only routes that neither generate nor touch memory: a released SGLang dies
of a request, a paused one never answers it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rltop.engines.calls import EngineRefused
from rltop.engines.client import AsyncEngineClient
from rltop.errors import RltopError
from rltop.evidence.dump_sample import DumpSample

ASK_TIMEOUT_S = 10.0
"""For the questions before the first sample."""
MOST_CONFIG = 1 << 20


class NotServing(RltopError):
    """A request must not be sent: the engine is paused or released, or nobody knows that it is not."""


class Unsendable(Exception):
    """A sample that cannot be sent; the text says why."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What of a sample is needed to send it again."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    """Of the response, natural, at sampling time."""
    counted: tuple[bool, ...]
    """Which response tokens the engine drew (slime's loss mask is 0 for what a tool said)."""
    params: Mapping[str, Any]
    """Sampling parameters, where the dump has them."""
    status: str


def recorded(sample: DumpSample) -> Recorded:
    """Raises Unsendable."""
    if not sample.tokens:
        no_prompt = ": the prompt's are missing" if sample.response_tokens else ""
        raise Unsendable(f"it has no tokens{no_prompt}")
    length = sample.response_length
    if length is None or not 0 <= length <= len(sample.tokens):
        raise Unsendable(f"its response length is {length} of {len(sample.tokens)} tokens")
    tokens = tuple(map(int, sample.tokens))
    cut = len(tokens) - length
    masks = [one for one in (sample.loss_mask, _known(sample)) if one is not None and len(one) == length]
    values = sample.rollout_log_probs
    log_probs = tuple(map(float, values)) if values is not None and len(values) == length else None
    counted = tuple(all(mask[at] for mask in masks) for at in range(length))
    return Recorded(tokens[:cut], tokens[cut:], log_probs, counted, params_of(sample), sample.status or "")


def _known(sample: DumpSample) -> Sequence[Any] | None:
    """Relax's mask of the log-probs that were recorded (`rollout_log_probs_mask`, in its JSONL with `response_`)."""
    for name in ("rollout_log_probs_mask", "response_rollout_log_probs_mask"):
        found = sample.extra.get(name)
        if isinstance(found, list | tuple):
            return found
    return None


async def with_prompt(client: AsyncEngineClient, sample: DumpSample, *, version: str) -> DumpSample:
    """A sample with the tokens of its prompt too, which Relax's JSONL lacks: as the engine reads the text.

    Raises Unsendable where that gives another number of tokens than the dump says.
    """
    response = sample.response_tokens
    if sample.tokens or not response or sample.messages is not None or not sample.prompt:
        return sample
    ids = await tokens_of(client, sample.prompt, version=version)
    count = sample.extra.get("prompt_length")
    if ids is None:
        return sample
    if isinstance(count, int) and len(ids) != count:
        raise Unsendable(f"its prompt had {count} tokens, the engine reads it into another number")
    return replace(sample, tokens=[*ids, *response], response_length=len(response))


def params_of(sample: DumpSample) -> Mapping[str, Any]:
    """SGLang's sampling parameters of a sample: `sampling_params` of itself or of its metadata; empty without."""
    for holder in (sample.extra, sample.metadata or {}):
        found = holder.get("sampling_params")
        if isinstance(found, Mapping):
            return {str(key): value for key, value in found.items() if value is not None}
    return {}


@dataclass(frozen=True, slots=True)
class Examined:
    """What an engine says of itself, without a token."""

    version: str
    model_path: str
    stand_in: str
    """rltop's own stand-in, in its words; empty: SGLang."""
    vocab_size: int | None
    """From its answers, or from the checkpoint's config.json where that can be read here."""
    vocab_from: str
    has_tokenizer: bool
    memory_saver: bool
    """Its memory can be released."""
    seen_working: bool
    """A request runs at this moment: its memory is there."""


async def examine(client: AsyncEngineClient) -> Examined:
    """Ask it what it is. Raises EngineUnreachable, EngineRefused."""
    info = await client.model_info()
    try:
        server: Mapping[str, Any] = await client.server_info()
    except EngineRefused:
        server = {}
    stats = await client.scrape()
    if stats.paused:
        raise _paused(client.url, f"its /metrics counts {stats.paused} requests that a pause holds")
    model_path = str(info.get("model_path") or server.get("model_path") or "")
    vocab, where = _vocab(info, server, model_path)
    return Examined(
        version=str(info.get("weight_version")),
        model_path=model_path,
        stand_in=str(info.get("rltop_engine") or ""),
        vocab_size=vocab,
        vocab_from=where,
        has_tokenizer=not server.get("skip_tokenizer_init") and bool(server),
        memory_saver=bool(server.get("enable_memory_saver")),
        seen_working=bool(stats.running),
    )


def _vocab(info: Mapping[str, Any], server: Mapping[str, Any], model_path: str) -> tuple[int | None, str]:
    for source, name in ((info, "/model_info"), (server, "/server_info")):
        if isinstance(source.get("vocab_size"), int):
            return int(source["vocab_size"]), name
    config = Path(model_path) / "config.json"
    try:
        if config.stat().st_size > MOST_CONFIG:
            return None, ""
        found = json.loads(config.read_text())
    except (OSError, ValueError):
        return None, ""
    texts = (found, found.get("text_config")) if isinstance(found, dict) else ()
    sizes = [one.get("vocab_size") for one in texts if isinstance(one, dict)]
    size = next((one for one in sizes if isinstance(one, int)), None)
    return size, str(config) if size is not None else ""


async def ready(client: AsyncEngineClient) -> None:
    """Raises NotServing where the engine says that it is paused or not up (`/ready`, SGLang 0.5.23 and later)."""
    try:
        await client.ready()
    except EngineRefused as refused:
        if refused.status == 503:
            raise _paused(client.url, "its /ready answers 503") from refused


def _paused(url: str, why: str) -> NotServing:
    return NotServing(
        "the engine is paused, or not up yet: it would not answer",
        where=url,
        why=why,
        do="wait for the end of the weight update, or POST /continue_generation if nobody else will",
        exit_code=1,
    )


@dataclass(frozen=True, slots=True)
class Scored:
    """The engine's log-probs of recorded tokens beside the dump's."""

    gaps: tuple[float, ...]
    """engine - dump per counted token; NaN where either is."""
    worst_at: int
    """Place in the response of the token with the largest gap."""
    worst: tuple[int, float, float]
    """(token id, dump, engine) there."""

    @property
    def mean_gap(self) -> float:
        """Mean |engine - dump|; NaN if any is."""
        return math.fsum(map(abs, self.gaps)) / len(self.gaps)

    @property
    def max_gap(self) -> float:
        """Largest |engine - dump|; NaN if any is NaN."""
        return math.nan if any(map(math.isnan, self.gaps)) else max(map(abs, self.gaps))


async def score(client: AsyncEngineClient, one: Recorded, *, version: str, timeout_s: float) -> Scored:
    """Teacher-forced: the engine's log-probs of the recorded response. Raises Unsendable and the client's errors."""
    if one.log_probs is None:
        raise Unsendable("it has no rollout_log_probs")
    tokens = [*one.prompt_ids, *one.response_ids]
    # The first position of the answer has no log-prob: begin one token before the response.
    start = max(len(one.prompt_ids) - 1, 0)
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    answers = await client.generate(body, require_version=version, timeout_s=timeout_s)
    values = input_log_probs(answers[0], tokens, start)
    engine = values[len(values) - len(one.response_ids) :] if one.response_ids else []
    rows = [
        (at, token, dump, value)
        for at, (token, dump, value, counts) in enumerate(
            zip(one.response_ids, one.log_probs, engine, one.counted, strict=True)
        )
        if counts and value is not None
    ]
    if not rows:
        raise Unsendable("it has no token that an engine drew")
    gaps = tuple(value - dump for _, _, dump, value in rows)
    most = max(range(len(gaps)), key=lambda at: math.inf if math.isnan(gaps[at]) else abs(gaps[at]))
    at, token, dump, value = rows[most]
    return Scored(gaps, at, (token, dump, value))


def input_log_probs(answer: Any, tokens: Sequence[int], start: int) -> list[float | None]:
    """Log-probs of the input from `start` on; None where there is none. Raises Unsendable: they are of other tokens.

    SGLang answers (log-prob, token id, text) for each position, the first without a log-prob.
    """
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    triples = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(triples, list) or len(triples) != len(tokens) - start:
        have = f"{len(triples)} positions" if isinstance(triples, list) else "none"
        raise Unsendable(f"the engine answers log-probs of {have}, not of {len(tokens) - start}")
    if any(int(triple[1]) != token for triple, token in zip(triples, tokens[start:], strict=True)):
        raise Unsendable("the engine's log-probs are of other tokens than were sent")
    return [None if triple[0] is None else float(triple[0]) for triple in triples]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A new answer beside the recorded one."""

    response_ids: tuple[int, ...]
    diverges_at: int | None
    """Place in the response of the first other token; None: as far as both go, they are the same."""
    recorded_length: int
    gaps: tuple[float, ...]
    """engine - dump log-prob of the tokens before that; empty without recorded ones."""
    text: str
    finish: str

    @property
    def same(self) -> bool:
        """All tokens, and as many."""
        return self.diverges_at is None and len(self.response_ids) == self.recorded_length


async def sample_again(
    client: AsyncEngineClient, one: Recorded, params: Mapping[str, Any], *, version: str, timeout_s: float
) -> Sampled:
    """The prompt once more. params: SGLang's sampling parameters. Raises Unsendable and the client's errors."""
    if not one.prompt_ids:
        raise Unsendable("it has no prompt tokens")
    body = {"input_ids": list(one.prompt_ids), "sampling_params": dict(params), "return_logprob": True}
    answers = await client.generate(body, require_version=version, timeout_s=timeout_s)
    answer = answers[0]
    triples = answer["meta_info"]["output_token_logprobs"]
    ids = tuple(int(triple[1]) for triple in triples)
    pairs = list(zip(ids, one.response_ids, strict=False))
    diverges = next((at for at, (new, old) in enumerate(pairs) if new != old), None)
    shared = len(pairs) if diverges is None else diverges
    gaps: tuple[float, ...] = ()
    if one.log_probs is not None:
        gaps = tuple(float(triples[at][0]) - one.log_probs[at] for at in range(shared) if triples[at][0] is not None)
    finish = answer["meta_info"].get("finish_reason") or {}
    return Sampled(ids, diverges, len(one.response_ids), gaps, str(answer.get("text", "")), str(finish.get("type", "")))


async def tokens_of(client: AsyncEngineClient, text: str, *, version: str) -> list[int] | None:
    """How the engine's own tokenizer reads a text; None where it has none."""
    body = {
        "text": text,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        answers = await client.generate(body, require_version=version, timeout_s=ASK_TIMEOUT_S)
    except EngineRefused:
        return None
    triples = answers[0].get("meta_info", {}).get("input_token_logprobs")
    return [int(triple[1]) for triple in triples] if isinstance(triples, list) else None
