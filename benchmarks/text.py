"""What the text check costs: `measure` over responses of 4,000 tokens, beside `zlib.compress` of the same text.

    python -m benchmarks.text

The texts are the healthy samples of the tests, joined to 16,000 characters each.
"""

from __future__ import annotations

import random
import time
import zlib

from rltop.checks.rules.rollout_text import pattern_of
from rltop.checks.text import measure
from rltop.checks.thresholds import DEFAULTS
from tests.checks.readable import healthy

CHARS = 16_000
"""About 4,000 tokens."""
RESPONSES = 10_000
BUDGET_S = 20.0
"""Most seconds for `RESPONSES` responses."""


def texts(count: int) -> list[str]:
    """`count` different texts of `CHARS` characters in all languages and forms."""
    pick = random.Random(1)
    parts = [response.text for response in healthy() if len(response.text) > 100]
    return ["\n".join(pick.choices(parts, k=CHARS // 100))[:CHARS] for _ in range(count)]


def rows(count: int = 300) -> list[tuple[str, str, str]]:
    """(what, measured, budget) for the table of all benchmarks."""
    responses = texts(count)
    began = time.process_time()
    for text in responses:
        pattern_of(measure(text), DEFAULTS)
    ours = (time.process_time() - began) / count
    began = time.process_time()
    for text in responses:
        zlib.compress(text.encode())
    peer = (time.process_time() - began) / count
    told = f"{ours * RESPONSES:.1f} s ({ours * 1e3:.2f} ms each, {ours / peer:.1f} x zlib.compress of the same text)"
    return [(f"judging {RESPONSES:,} responses of {CHARS:,} characters, CPU time", told, f"<= {BUDGET_S:.0f} s")]


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
