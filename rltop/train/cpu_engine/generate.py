"""`/generate`: from the request's JSON to samples, and from their answers back to JSON or server-sent events."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from rltop.train.cpu_engine.params import parse_sampling_params, stream_of
from rltop.train.cpu_engine.request import LogprobWishes, Sample

if TYPE_CHECKING:
    from rltop.train.cpu_engine.loop import Codec, Loop

Answer = dict[str, Any]

_UNSUPPORTED = frozenset(
    {
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
        "token_ids_logprob",
        "return_hidden_states",
        "return_routed_experts",
        "return_sampling_mask",
        "lora_path",
        "custom_logit_processor",
        "session_params",
        "bootstrap_host",
    }
)
"""Fields of SGLang that would change the answer: refused rather than ignored. Others are ignored, as SGLang does."""


class WrongType(ValueError):
    """A field of the body has another JSON type."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A parsed `/generate` request."""

    samples: list[Sample]
    batched: bool
    """The answer is a list (a list came in, or n > 1)."""
    stream: bool


class RequestReader:
    """Turns request bodies into samples. Holds what requests without a seed need: a counter."""

    __slots__ = ("_context_length", "_counter", "_seed", "_text", "_vocab_size")

    def __init__(self, text: Codec, *, context_length: int, vocab_size: int, seed: int) -> None:
        self._text, self._context_length, self._vocab_size, self._seed = text, context_length, vocab_size, seed
        self._counter: Iterator[int] = itertools.count()

    def read(self, body: Any, deliver: Callable[[int, Answer], None]) -> Generation:
        """Check the body and build its samples. Raises `ValueError` with the message for the client.

        deliver: called in the scheduler's thread with (sample index, answer).
        """
        if not isinstance(body, dict):
            raise WrongType("the body must be a JSON object")
        for key in sorted(_UNSUPPORTED & body.keys()):
            if body[key]:
                raise ValueError(f"The CPU engine does not implement {key!r}.")
        prompts, listed = self._prompts(body)
        size = len(prompts)
        rids = _per_prompt(body.get("rid"), size, "rid", listed) or [uuid.uuid4().hex for _ in prompts]
        params = _per_prompt(body.get("sampling_params"), size, "sampling_params", listed) or [{}] * size
        wishes = self._wishes(body, size, listed)
        stream, received = bool(body.get("stream")), time.time()
        samples: list[Sample] = []
        for prompt, rid, raw, wish in zip(prompts, rids, params, wishes, strict=True):
            if not isinstance(raw, dict):
                raise WrongType("sampling_params must be an object or a list of objects")
            checked, count = parse_sampling_params(raw)
            limit = self._limit(prompt, checked.max_new_tokens)
            seed = checked.sampling_seed
            if seed is None:
                seed = stream_of(self._seed, next(self._counter))
            for index in range(count):
                position = len(samples)
                samples.append(
                    Sample(
                        rid=str(rid) if count == 1 else f"{rid}_{index}",
                        prompt=prompt,
                        params=checked,
                        stream=stream_of(seed, index),
                        limit=limit,
                        wishes=wish,
                        deliver=lambda answer, position=position: deliver(position, answer),  # type: ignore[misc]  # mypy cannot infer a lambda's default
                        streaming=stream,
                        received=received,
                    )
                )
        return Generation(samples, listed or len(samples) > 1, stream)

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """Token ids of every prompt, and whether a list of prompts came in."""
        text, ids = body.get("text"), body.get("input_ids")
        if text is None and ids is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if ids is None:
            texts: list[Any] = text if isinstance(text, list) else [text]
            if not texts or not all(isinstance(item, str) for item in texts):
                raise WrongType("text must be a string or a list of strings")
            return [self._text.encode(item) for item in texts], isinstance(text, list)
        listed = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        prompts: list[Any] = ids if isinstance(ids, list) and listed else [ids]
        for prompt in prompts:
            if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
                raise WrongType("input_ids must be a list of integers or a list of such lists")
            if any(not 0 <= token < self._vocab_size for token in prompt):
                raise ValueError(f"input_ids must be in [0, {self._vocab_size - 1}]")
        return prompts, listed

    def _wishes(self, body: dict[str, Any], size: int, listed: bool) -> list[LogprobWishes]:
        output = _per_prompt(body.get("return_logprob"), size, "return_logprob", listed) or [False] * size
        start = _per_prompt(body.get("logprob_start_len"), size, "logprob_start_len", listed) or [-1] * size
        top = _per_prompt(body.get("top_logprobs_num"), size, "top_logprobs_num", listed) or [0] * size
        text = bool(body.get("return_text_in_logprobs"))
        return [
            LogprobWishes(
                output=bool(wanted), start=int(first) if wanted else -1, top=int(best) if wanted else 0, text=text
            )
            for wanted, first, best in zip(output, start, top, strict=True)
        ]

    def _limit(self, prompt: list[int], max_new_tokens: int | None) -> int:
        if not prompt:
            raise ValueError("The prompt has no tokens.")
        if len(prompt) >= self._context_length:
            raise ValueError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self._context_length} tokens)."
            )
        room = self._context_length - len(prompt)
        if max_new_tokens is None:
            return room
        if max_new_tokens > room:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {self._context_length} tokens: "
                f"{len(prompt)} tokens from the input and {max_new_tokens} tokens for the completion."
            )
        return max_new_tokens


def _per_prompt(value: Any, size: int, name: str, listed: bool) -> list[Any] | None:
    """A field that may be one value for all prompts or a list with one each."""
    if value is None:
        return None
    if isinstance(value, list):
        if not listed or len(value) != size:
            raise ValueError(f"{name} has {len(value)} entries for {size} prompts")
        return value
    if name == "rid" and size > 1:
        return [f"{value}_{index}" for index in range(size)]
    return [value] * size


async def collect(reader: RequestReader, scheduler: Loop, body: Any) -> list[Answer] | Answer:
    """Run a request without streaming. Raises `ValueError` for a bad one."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[Answer]] = loop.create_future()
    answers: dict[int, Answer] = {}
    expected = 0

    def deliver(index: int, answer: Answer) -> None:
        # In the scheduler's thread. One wake-up of the loop per request, not per sample.
        answers[index] = answer
        if len(answers) == expected:
            loop.call_soon_threadsafe(_settle, done, [answers[key] for key in sorted(answers)])

    generation = reader.read(body, deliver)
    expected = len(generation.samples)
    scheduler.submit(generation.samples)
    try:
        results = await done
    except asyncio.CancelledError:
        scheduler.abandon(generation.samples)
        raise
    return results if generation.batched else results[0]


async def stream(reader: RequestReader, scheduler: Loop, body: Any) -> AsyncIterator[bytes]:
    """Server-sent events, each with the answer so far, then `[DONE]`. The body must have been checked before."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, Answer]] = asyncio.Queue()

    def deliver(index: int, answer: Answer) -> None:
        loop.call_soon_threadsafe(events.put_nowait, (index, answer))

    generation = reader.read(body, deliver)
    scheduler.submit(generation.samples)
    left = len(generation.samples)
    try:
        while left:
            index, answer = await events.get()
            if generation.batched:
                answer["index"] = index
            left -= answer["meta_info"]["finish_reason"] is not None
            yield b"data: " + msgspec.json.encode(answer) + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        if left:
            scheduler.abandon(generation.samples)


def _settle(future: asyncio.Future[list[Answer]], value: list[Answer]) -> None:
    if not future.done():  # the client may have gone
        future.set_result(value)
