# ruff: noqa: E501
"""The samples by which `rollout.text` is measured: healthy responses, and responses that damaged models wrote.

Healthy ones stand in `tests/data/text/healthy_*.txt`: `%%% KIND LANGUAGE-OR-FORM`, then the text. All were written for these
tests, but for old poems, the first article of the Universal Declaration of Human Rights and short proverbs. No weight was
fitted to `healthy_heldout.txt`, nor to the half of `damaged.jsonl` that `held_out` names (`make_damaged.py` says how it was
made); the thresholds were last set with the results on both in view.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "text"
HEALTHY = ("languages", "shapes", "heldout")
LOOPS = 0.2
"""Responses of the intact models that loop more than this are left out: greedy decoding of a small model loops."""


@dataclass(frozen=True, slots=True)
class Response:
    """One sample."""

    text: str
    group: str
    """Kind of a healthy one; model and damage of a broken one."""
    detail: str
    """Language or form; kind of the prompt."""
    held_out: bool


def healthy() -> Iterator[Response]:
    """Texts as they should be, among them those of the intact models."""
    for part in HEALTHY:
        for block in f"\n{(DATA / f'healthy_{part}.txt').read_text('utf-8')}".split("\n%%% ")[1:]:
            head, text = block.split("\n", 1)
            kind, detail = head.split(" ", 1)
            yield Response(text.rstrip("\n"), kind, detail, part == "heldout")
    for row in _rows():
        if row["label"] == "intact" and float(str(row["loop"])) < LOOPS:
            yield Response(str(row["text"]), f"intact {row['model']}", str(row["kind"]), False)


def damaged(label: str = "nonsense") -> Iterator[Response]:
    """Responses of damaged models: `nonsense`, or `impaired` where a reader still finds sense."""
    for row in _rows():
        if row["label"] == label:
            model = "SmolLM2" if str(row["model"]).startswith("Smol") else "gemma"
            name, text = f"{str(row['model'])[:4]}/{row['damage']}", str(row["text"])
            held_out = zlib.crc32((name + text[:30]).encode()) % 2 == 0
            yield Response(text, f"{model} {row['damage']}", str(row["kind"]), held_out)


def _rows() -> Iterator[dict[str, object]]:
    for line in (DATA / "damaged.jsonl").read_text("utf-8").splitlines():
        yield json.loads(line)


def generated(count: int = 30) -> Iterator[Response]:
    """Broken responses that no model wrote: what decoders, NaN logits and loops make of text. `count` of each kind."""
    pick = random.Random(3)
    sources = [
        response.text for response in healthy() if response.group in ("prose", "reasoning") and len(response.text) > 120
    ]
    foreign = [text for text in sources if sum(char > "\u036f" for char in text) > len(text) / 2]
    words = [text.split() for text in sources]
    spaced = [line for line in words if len(line) >= 15]
    makers: dict[str, Callable[[], str]] = {
        "words of all languages": lambda: " ".join(pick.choice(pick.choice(words)) for _ in range(40)),
        "glued scripts": lambda: "".join(pick.choice(pick.choice(words))[:5] for _ in range(40)),
        "random bytes": lambda: pick.randbytes(pick.randint(60, 400)).decode("utf-8", "replace"),
        "short bytes": lambda: pick.randbytes(pick.randint(10, 40)).decode("utf-8", "replace"),
        "read as Latin-1": lambda: pick.choice(foreign).encode().decode("latin-1"),
        "byte tokens": lambda: "".join(f"<0x{byte:02X}>" for byte in pick.choice(foreign)[:60].encode()),
        "tokenizer marks": lambda: "\u0120".join(pick.choice(spaced)[:30]),
        "one character": lambda: pick.choice("!.,0a\n#\u7684") * pick.randint(20, 400),
        "one phrase": lambda: " ".join(pick.choice(words)[:3])[:30] * pick.randint(12, 90),
        "one token id": lambda: "<pad>" * pick.randint(12, 100),
    }
    for kind, make in makers.items():
        for _ in range(count):
            yield Response(make(), kind, "generated", True)
