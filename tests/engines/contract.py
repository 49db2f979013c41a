"""The calls that the CPU engine must answer like SGLang, and how two answers are compared: by shape, not by value.

`tests/soak/sglang_cpu/record.py` puts the calls to real SGLang and writes the answers to `tests/data/sglang`; the
contract test puts them to the CPU engine. Both use the same tiny checkpoint, so log-probs can be compared too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import torch

from rltop.engines.weights import serialize
from rltop.train.tiny_model import TinyModelConfig, initial_weights, make_tiny_model

MODEL = TinyModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
    rope_theta=10_000.0,
    seed=7,
)
"""Spelled out: recorded log-probs belong to exactly this checkpoint."""

PROMPT = "<|im_start|>user\nsort 3 1 2<|im_end|>\n<|im_start|>assistant\n"


def contract_model(directory: Path) -> Path:
    """The checkpoint under `directory/contract-model`."""
    return make_tiny_model(directory / "contract-model", MODEL)


def other_weights() -> dict[str, torch.Tensor]:
    """Weights of the same shape and other values. The vectors are exact fractions, so their digests hold anywhere."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: 1 + torch.arange(len(tensor)) / 128
        if tensor.dim() == 1
        else tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in initial_weights(MODEL).items()
    }


@dataclass(frozen=True, slots=True)
class ContractCall:
    """One request. `check` is False where only the status is part of the contract."""

    name: str
    path: str
    body: Mapping[str, Any] | None = None
    method: Literal["GET", "POST"] = "POST"
    check: bool = True


def calls(model: Path) -> Iterator[ContractCall]:
    """In this order: later calls rely on the state that earlier ones leave."""
    yield from _information()
    yield from _generation()
    yield from _control(model)
    yield from _refusals()


def _information() -> Iterator[ContractCall]:
    for path in ("/ready", "/health", "/model_info", "/get_model_info", "/v1/models", "/server_info", "/v1/loads"):
        yield ContractCall(path, path, method="GET")


def _generation() -> Iterator[ContractCall]:
    greedy = {"temperature": 0, "max_new_tokens": 4}
    every = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    bodies: dict[str, dict[str, Any]] = {
        "greedy": {"text": PROMPT, "sampling_params": greedy},
        "greedy with log-probs": {"text": PROMPT, "sampling_params": greedy, **every},
        "log-probs of the output": {"text": "abc", "sampling_params": greedy, "return_logprob": True},
        "log-probs from a position": {"text": "hello", "sampling_params": greedy} | every | {"logprob_start_len": 2},
        "token ids": {"input_ids": [104, 105, 32], "sampling_params": {"max_new_tokens": 3, "temperature": 0.7}},
        "a batch": {"text": ["abc", PROMPT], "sampling_params": [greedy, {"max_new_tokens": 2}], **every},
        "two samples": {"text": "abc", "sampling_params": {"n": 2, "max_new_tokens": 2}},
        "nothing to generate": {"text": "abc", "sampling_params": {"max_new_tokens": 0}},
        "stop token": {"text": "abc", "sampling_params": {"max_new_tokens": 9, "stop_token_ids": list(range(260))}},
        "top_k and top_p": {"text": "abc", "sampling_params": {"max_new_tokens": 3, "top_k": 5, "top_p": 0.9}},
        "text in log-probs": {"text": "abc", "sampling_params": greedy, **every, "return_text_in_logprobs": True},
        "field that nobody knows": {"text": "abc", "sampling_params": {"max_new_tokens": 1}, "nonsense": 1},
    }
    for name, body in bodies.items():
        yield ContractCall(f"generate: {name}", "/generate", body)


def _control(model: Path) -> Iterator[ContractCall]:
    tensors = {"serialized_named_tensors": [serialize(other_weights().items())]}
    steps: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
        ("flush", "/flush_cache", None),
        ("snapshot", "/weights_checker", {"action": "snapshot"}),
        ("begin", "/begin_weight_update", {}),
        ("tensors", "/update_weights_from_tensor", tensors | {"weight_version": "tensor-1"}),
        ("end", "/end_weight_update", {}),
        ("version after tensors", "/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 1}}),
        ("compare after another update", "/weights_checker", {"action": "compare"}),
        ("checksum", "/weights_checker", {"action": "checksum"}),
        ("disk", "/update_weights_from_disk", {"model_path": str(model), "weight_version": "disk-2"}),
        ("disk without version", "/update_weights_from_disk", {"model_path": str(model)}),
        ("version label", "/update_weight_version", {"new_version": "label-3"}),
        ("pause", "/pause_generation", {}),
        ("continue", "/continue_generation", {}),
        ("pause in place", "/pause_generation", {"mode": "in_place"}),
        ("disk while paused", "/update_weights_from_disk", {"model_path": str(model), "weight_version": "disk-4"}),
        ("continue in place", "/continue_generation", {}),
        ("abort everything", "/abort_request", {"abort_all": True}),
        ("release", "/release_memory_occupation", {}),
        ("resume", "/resume_memory_occupation", {}),
    )
    for name, path, body in steps:
        yield ContractCall(f"control: {name}", path, body)


def _refusals() -> Iterator[ContractCall]:
    sampling = {"temperature": -1}
    for name, path, body in (
        ("no prompt", "/generate", {"sampling_params": {}}),
        ("bad temperature", "/generate", {"text": "x", "sampling_params": sampling}),
        ("prompt too long", "/generate", {"text": "x" * 2000}),
        ("response too long", "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5000}}),
        ("missing checkpoint", "/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("unknown checker action", "/weights_checker", {"action": "nonsense"}),
        ("bad pause mode", "/pause_generation", {"mode": "nonsense"}),
        ("missing field", "/update_weights_from_disk", {}),
        ("prompt of another type", "/generate", {"text": 5}),
    ):
        yield ContractCall(f"refusal: {name}", path, body)
    yield ContractCall("refusal: unknown sampling parameter", "/generate", {"text": "x", "sampling_params": {"zz": 1}})
    yield ContractCall("refusal: unknown path", "/nowhere", method="GET")


def ask(http: httpx.Client, model: Path) -> dict[str, dict[str, Any]]:
    """Name -> `{status, content}` of every call; content is decoded JSON or text, without this machine's paths."""
    answers = {}
    for call in calls(model):
        response = http.request(call.method, call.path, json=None if call.body is None else dict(call.body))
        answers[call.name] = {"status": response.status_code, "content": content_of(response.text, model)}
    return answers


def content_of(text: str, model: Path) -> Any:
    """A body as decoded JSON, or as text; the checkpoint's path is replaced."""
    text = text.replace(str(model), "<model>")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def shape(value: Any, path: str = "") -> dict[str, str]:
    """Flat description of a JSON value: path -> types seen there, for example `null|number`.

    Items of a list share the path `[]`, so lists of different length compare equal; the keys of `checksums` are data.
    """
    found: dict[str, set[str]] = {}
    _collect(value, path, found)
    return {where: "|".join(sorted(kinds)) for where, kinds in sorted(found.items())}


def _collect(value: Any, path: str, found: dict[str, set[str]]) -> None:
    kind = next(name for types, name in _KINDS if isinstance(value, types))
    found.setdefault(path, set()).add(kind)
    if isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}.*" if path.endswith("checksums") else f"{path}.{key}", found)
    elif isinstance(value, list):
        for item in value:
            _collect(item, f"{path}[]", found)


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"),
    ((int, float), "number"),
    (str, "string"),
    (type(None), "null"),
    (dict, "object"),
    (list, "list"),
)


def log_shape(line: str) -> str:
    """A log line without its values: numbers, quoted strings and paths become marks."""
    line = re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]", "[time]", line)
    line = re.sub(r"'[^']*'|\"(GET|POST|PUT) [^\"]*\"", "<quoted>", line)
    line = re.sub(r"\d+(\.\d+)*(:\d+)?", "<n>", line)
    return re.sub(r"-<n>", "<n>", line).strip()


def metric_families(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Metric name -> (type, label names) of a Prometheus text."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    families: dict[str, tuple[str, frozenset[str]]] = {}
    for name, labels in re.findall(r"^(sglang:\w+)\{([^}]*)\}", text, re.MULTILINE):
        if name in kinds:
            families[name] = (kinds[name], frozenset(re.findall(r'(\w+)="', labels)))
    return families
