"""The rollout side: a Ray actor with the task, the tokenizer and one HTTP client per engine.

It holds no weights and needs no torch (but to save or load a rollout for debugging). Which engines there are may
change while a rollout runs: see `dispatch`. Every request names the weight version that it requires; a sample of
another version is never handed out (`EngineClient.generate`).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.engines.client import EngineClient
from rltop.engines.traffic_ring import Ring
from rltop.train.arguments import TrainConfig
from rltop.train.chat import Chat
from rltop.train.dispatch import Key, News, Roster, Turn, Unanswered, dispatch
from rltop.train.dump import Dumped, save_rollout, save_tokenizer
from rltop.train.load_dump import Expected, check_text, dump_path, load_rollout
from rltop.train.ports import EngineFacts, RolloutBatch
from rltop.train.sample import Asked, Sample, Status
from rltop.train.task import Prompt, SortDigits, Task, stream_seed

DEMONSTRATIONS = 4096
"""Worked examples of the cold start; batches are drawn from them."""
IN_FLIGHT = 2
"""Requests per engine at a time when load decides: while one is answered, the next is there already."""
EVALUATION_PROMPTS = 64
"""Prompts of an evaluation."""
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

    def __init__(self, config: TrainConfig, traffic: str = "") -> None:
        """traffic: folder in which the newest requests are kept, for an engine that dies of one; empty: nowhere."""
        self._config = config
        self._ring = Ring(Path(traffic)) if traffic else None
        self._task: Task = SortDigits(config.seed)
        self._roster = Roster(config.rollout_engine_wait_s, time.monotonic)
        self._retry = False
        self._clients: dict[str, EngineClient] = {}
        self._lock = threading.Lock()

    def process_id(self) -> int:
        """Of this worker."""
        return os.getpid()

    def checkpoint(self, work_dir: str) -> str:
        """What the engines serve where no trainer starts: --hf-checkpoint, else rltop's tiny model, made here."""
        if self._config.hf_checkpoint is not None:
            return str(self._config.hf_checkpoint)
        from rltop.train.tiny_model import TinyModelConfig, make_tiny_model  # needs torch

        return str(make_tiny_model(Path(work_dir) / "tiny", TinyModelConfig(seed=self._config.seed)))

    def load(self, checkpoint: str) -> None:
        """Read the tokenizer."""
        if self._config.dump_details is not None:
            # Of no consequence for the run; the dumps themselves say it when the disk takes nothing.
            save_tokenizer(Path(checkpoint), self._config.dump_details / "tokenizer")
        self._chat = Chat(Path(checkpoint), use_template=self._config.apply_chat_template)
        self._prompt_template = self._config.apply_chat_template and not self._config.plants("no-template")

    def demonstrations(self) -> list[tuple[tuple[int, ...], int]]:
        """(tokens, response length) of the cold start's examples."""
        return [self._chat.demonstration(example) for example in self._task.demonstrations(DEMONSTRATIONS)]

    def connect(self, engines: Sequence[EngineFacts]) -> None:
        """Use these engines from now on. Nobody brings one back: a request that fails ends its rollout."""
        self._retry = False
        self._roster.set(engines)
        self._forget(())

    def exchange(self, engines: Sequence[EngineFacts], dead: Sequence[Key], told: str, reserved: bool = False) -> News:
        """Use these engines from now on, also in the middle of a rollout (a second thread of the actor calls this).

        Somebody brings engines back: a request that fails is asked again. dead: engines that will not answer any more.
        told: the states of all engines, for an error. reserved: some are on trial for a bisection, and will be back.
        Returns what happened since the last call.
        """
        self._retry = True
        return self._roster.set(engines, dead, told, reserved=reserved)

    def generate(self, rollout_id: int, version: str) -> RolloutBatch:
        """All samples of a rollout, from weights of exactly `version`, in order of their index, with rewards."""
        began, config = time.monotonic(), self._config
        prompts = self._task.prompts(rollout_id, config.rollout_batch_size)
        requests = self._requests(rollout_id, "sample", prompts, config.n_samples_per_prompt)
        samples, extra = self._answered(requests, version, f"rollout {rollout_id}")
        dumped = self._saved(rollout_id, samples)
        return RolloutBatch(rollout_id, samples, time.monotonic() - began, extra, dumped)

    def evaluate(self, rollout_id: int, version: str) -> RolloutBatch:
        """The samples of an evaluation. The same prompts and seeds every time: only the weights differ."""
        began = time.monotonic()
        prompts = self._task.evaluation(EVALUATION_PROMPTS)
        requests = self._requests(0, "evaluation", prompts, self._config.n_samples_per_eval_prompt)
        samples, extra = self._answered(requests, version, f"evaluation of rollout {rollout_id}")
        dumped = self._saved(rollout_id, samples, evaluation=True)
        return RolloutBatch(rollout_id, samples, time.monotonic() - began, extra, dumped, self._task.name)

    def replay(self, rollout_id: int, expected: Expected) -> RolloutBatch:
        """The samples of a rollout out of a dump. Raises RltopError for one that does not fit."""
        began, pattern = time.monotonic(), str(self._config.load_debug_rollout_data)
        path = dump_path(pattern, rollout_id)
        samples = load_rollout(pattern, rollout_id, expected)
        check_text(path, samples, self._chat.read)
        return RolloutBatch(rollout_id, samples, time.monotonic() - began, source=str(path))

    def _answered(
        self, requests: Sequence[Request], version: str, where: str
    ) -> tuple[tuple[Sample, ...], dict[str, float]]:
        self._forget(self._roster.members)
        found = dispatch(
            self._turns(requests),
            functools.partial(self._ask, version),
            self._roster,
            in_flight=1 if self._fixed else IN_FLIGHT,
            retry=self._retry,
            where=where,
        )
        extra: dict[str, float] = {}
        if self._retry:
            extra["rollout/requests_retried"] = float(found.retried)
            extra |= {f"rollout/engine_failures/{name}": float(n) for name, n in sorted(found.failures.items())}
        if self._ring is not None and self._ring.lost:
            extra["rollout/requests_not_kept"] = float(self._ring.lost)
        return tuple(sorted(found.samples, key=lambda sample: sample.index)), extra

    def _saved(self, rollout_id: int, samples: Sequence[Sample], *, evaluation: bool = False) -> Dumped | None:
        pattern = self._config.rollout_dumps
        return None if pattern is None else save_rollout(pattern, rollout_id, samples, evaluation=evaluation)

    @property
    def _fixed(self) -> bool:
        """Whether it is settled beforehand who samples what."""
        return self._config.deterministic or self._config.rollout_num_engines == 1

    def _turns(self, requests: Sequence[Request]) -> list[Turn[Request]]:
        """The requests in the pieces that go to an engine together. An engine prefills a prompt once: groups are whole.

        One engine, or a fixed map: everybody gets its share at once, groups in turn. Else every engine takes the next
        few groups when it has room, so that a slow or busy one gets fewer.
        """
        count = self._config.rollout_num_engines
        if self._fixed:
            shares = [[request for request in requests if request.group_index % count == at] for at in range(count)]
            return [Turn(share, str(at) if count > 1 else "") for at, share in enumerate(shares) if share]
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.group_index, []).append(request)
        ordered = list(groups.values())
        size = max(1, len(ordered) // (count * TURNS))
        pieces = [ordered[at : at + size] for at in range(0, len(ordered), size)]
        return [Turn([request for group in piece for request in group]) for piece in pieces]

    def _requests(self, rollout_id: int, use: str, prompts: Sequence[Prompt], responses: int) -> list[Request]:
        """use: names the random stream, so that an evaluation draws nothing that training does."""
        requests: list[Request] = []
        for group, prompt in enumerate(prompts):
            text, ids = self._chat.prompt(prompt.messages, use_template=self._prompt_template)
            for _ in range(responses):
                index = len(requests)
                seed = stream_seed(self._config.seed, use, rollout_id, index)
                requests.append(Request(index, group, text, ids, prompt.label, seed))
        return requests

    def _client(self, engine: EngineFacts) -> EngineClient:
        """One per address: making one costs more than a small request. Called by the threads that ask."""
        with self._lock:
            if engine.url not in self._clients:
                self._clients[engine.url] = EngineClient(engine.url)
            return self._clients[engine.url]

    def _forget(self, engines: Sequence[EngineFacts]) -> None:
        """Close the connections to all other engines. Only between rollouts."""
        with self._lock:
            for url in self._clients.keys() - {engine.url for engine in engines}:
                self._clients.pop(url).close()

    def _ask(self, version: str, engine: EngineFacts, requests: Sequence[Request]) -> list[tuple[Request, Sample]]:
        """The finished samples among them. What was aborted in the middle is not, where it will be asked again."""
        params = [self._params(request) for request in requests]
        payload = {
            "input_ids": [list(request.prompt_ids) for request in requests],
            "sampling_params": params,
            "return_logprob": True,
        }
        began = time.time()
        with self._ring.request(engine.id, engine.generation, payload) if self._ring is not None else nullcontext():
            answers = self._client(engine).generate(payload, require_version=version)
        ended = time.time()
        if len(answers) != len(requests):
            raise Unanswered(
                "the engine lost samples",
                where=engine.url,
                why=f"{len(requests)} were asked for, {len(answers)} came",
                exit_code=1,
            )
        pairs = [
            (request, self._sample(request, answer, engine, _asked(used, answer, began, ended)))
            for request, used, answer in zip(requests, params, answers, strict=True)
        ]
        return [pair for pair in pairs if pair[1].status != "aborted" or not self._retry]

    def _params(self, request: Request) -> dict[str, Any]:
        return {
            "temperature": self._config.rollout_temperature,
            "max_new_tokens": self._config.rollout_max_response_len,
            "sampling_seed": request.seed,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }

    def _sample(self, request: Request, answer: dict[str, Any], engine: EngineFacts, asked: Asked) -> Sample:
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
            engine=engine.id,
            engine_generation=engine.generation,
            asked=asked,
        )


def _asked(params: dict[str, Any], answer: dict[str, Any], began: float, ended: float) -> Asked:
    """One sample of a call for many: where the engine has times of its own for each, they count."""
    meta = answer["meta_info"]
    told = {name: meta[name] for name in _TOLD if isinstance(meta.get(name), int | float | str)}
    own = [meta.get(name) for name in ("request_received_ts", "request_finished_ts")]
    if all(isinstance(one, float) for one in own) and began <= own[0] <= own[1] <= ended:
        began, ended = own
    return Asked(began, ended, params, told)


_TOLD = (
    *("id", "prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput"),
    *("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"),
)
"""What of `meta_info` slime keeps in a trace or adds up."""
_STATUS: dict[str, Status] = {"stop": "completed", "length": "truncated", "abort": "aborted"}
"""SGLang's finish reason -> slime's status."""
