"""The rollout side: a Ray actor with the task, the tokenizer and one HTTP client per engine.

It holds no weights and needs no torch. Every request names the weight version that it requires; a sample of another
version is never handed out (`EngineClient.generate`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.engines.client import EngineClient
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.chat import Chat
from rltop.train.ports import EngineFacts, RolloutBatch
from rltop.train.sample import Sample, Status
from rltop.train.task import SortDigits, Task, stream_seed

DEMONSTRATIONS = 4096
"""Worked examples of the cold start; batches are drawn from them."""
IN_FLIGHT = 2
"""Requests per engine at a time when load decides: while one is answered, the next is there already."""
TURNS = 4
"""How many requests an engine makes of its even share then: more balance better, fewer batch better."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to be: what the engine is asked for it, and what is remembered meanwhile."""

    index: int
    group_index: int
    prompt: str
    prompt_ids: tuple[int, ...]
    label: str
    seed: int


class RolloutManager:
    """See `ports.Rollouts`."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._task: Task = SortDigits(config.seed)
        self._engines: list[EngineFacts] = []
        self._clients: list[EngineClient] = []

    def process_id(self) -> int:
        """Of this worker."""
        return os.getpid()

    def load(self, checkpoint: str) -> None:
        """Read the tokenizer."""
        self._chat = Chat(Path(checkpoint), use_template=self._config.apply_chat_template)
        self._prompt_template = self._config.apply_chat_template and not self._config.plants("no-template")

    def demonstrations(self) -> list[tuple[tuple[int, ...], int]]:
        """(tokens, response length) of the cold start's examples."""
        return [self._chat.demonstration(example) for example in self._task.demonstrations(DEMONSTRATIONS)]

    def connect(self, engines: Sequence[EngineFacts]) -> None:
        """Use these engines from now on."""
        for client in self._clients:
            client.close()
        self._engines = list(engines)
        self._clients = [EngineClient(engine.url) for engine in engines]

    def generate(self, rollout_id: int, version: str) -> RolloutBatch:
        """All samples of a rollout, from weights of exactly `version`, in order of their index, with rewards."""
        began = time.monotonic()
        requests, engines = self._requests(rollout_id), len(self._clients)
        if engines == 1 or self._config.deterministic:
            samples = self._ask_fixed(requests, version)
        else:
            samples = self._ask_by_load(requests, version)
        samples.sort(key=lambda sample: sample.index)
        return RolloutBatch(rollout_id, tuple(samples), time.monotonic() - began)

    def _ask_fixed(self, requests: Sequence[Request], version: str) -> list[Sample]:
        """Every engine gets its share at once."""
        shares = self._dealt(requests)
        with ThreadPoolExecutor(max_workers=len(shares)) as pool:
            answers = list(pool.map(self._ask, range(len(shares)), shares, [version] * len(shares)))
        return [sample for answer in answers for sample in answer]

    def _ask_by_load(self, requests: Sequence[Request], version: str) -> list[Sample]:
        """Every engine takes the next few groups when it has room, so that a slow or busy one gets fewer."""
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.group_index, []).append(request)
        ordered, engines = list(groups.values()), len(self._clients)
        size = max(1, len(ordered) // (engines * TURNS))
        waiting = deque(ordered[at : at + size] for at in range(0, len(ordered), size))

        def work(engine: int) -> list[Sample]:
            samples: list[Sample] = []
            while True:
                try:
                    turn = waiting.popleft()
                except IndexError:
                    return samples
                try:
                    samples += self._ask(engine, [request for group in turn for request in group], version)
                except BaseException:
                    waiting.clear()  # the rollout is lost: nobody shall start another turn of it
                    raise

        with ThreadPoolExecutor(max_workers=engines * IN_FLIGHT) as pool:
            answers = list(pool.map(work, [engine for _ in range(IN_FLIGHT) for engine in range(engines)]))
        return [sample for answer in answers for sample in answer]

    def _requests(self, rollout_id: int) -> list[Request]:
        config = self._config
        requests: list[Request] = []
        for group, prompt in enumerate(self._task.prompts(rollout_id, config.rollout_batch_size)):
            text, ids = self._chat.prompt(prompt.messages, use_template=self._prompt_template)
            for _ in range(config.n_samples_per_prompt):
                index = len(requests)
                seed = stream_seed(config.seed, "sample", rollout_id, index)
                requests.append(Request(index, group, text, ids, prompt.label, seed))
        return requests

    def _dealt(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Samples per engine: whole groups in turn, so that an engine prefills a prompt once. The map is fixed."""
        count = len(self._clients)
        return [[request for request in requests if request.group_index % count == at] for at in range(count)]

    def _ask(self, at: int, requests: Sequence[Request], version: str) -> list[Sample]:
        if not requests:
            return []
        config = self._config
        payload = {
            "input_ids": [list(request.prompt_ids) for request in requests],
            "sampling_params": [
                {
                    "temperature": config.rollout_temperature,
                    "max_new_tokens": config.rollout_max_response_len,
                    "sampling_seed": request.seed,
                    "skip_special_tokens": False,
                    "no_stop_trim": True,
                }
                for request in requests
            ],
            "return_logprob": True,
        }
        answers = self._clients[at].generate(payload, require_version=version)
        if len(answers) != len(requests):
            raise RltopError(
                "the engine lost samples",
                where=self._engines[at].url,
                why=f"{len(requests)} were asked for, {len(answers)} came",
                exit_code=1,
            )
        name = self._engines[at].id
        return [self._sample(request, answer, name) for request, answer in zip(requests, answers, strict=True)]

    def _sample(self, request: Request, answer: dict[str, Any], engine: str) -> Sample:
        """The ids are those of the log-probs, so that the two cannot disagree."""
        meta = answer["meta_info"]
        triples = meta["output_token_logprobs"]
        ids = tuple(int(triple[1]) for triple in triples)
        text = self._chat.read(ids)
        finish = meta.get("finish_reason") or {}
        status: Status = _STATUS.get(str(finish.get("type")), "aborted")
        return Sample(
            index=request.index,
            group_index=request.group_index,
            prompt=request.prompt,
            prompt_ids=request.prompt_ids,
            response=text,
            response_ids=ids,
            rollout_log_probs=tuple(float(triple[0]) for triple in triples),
            reward=self._task.reward(text, request.label) if status == "completed" else 0.0,
            label=request.label,
            status=status,
            finish_reason=str(finish.get("type", "")),
            weight_version=str(meta.get("weight_version", "")),
            engine=engine,
        )


_STATUS: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
"""SGLang's finish reason -> slime's status."""
