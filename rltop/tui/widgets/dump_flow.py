"""Text of a model in lines of a width, made only as far as somebody looks; every cell knows its token.

Hostile text is harmless and can be seen (`rltop.evidence.visible`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from rltop.evidence.visible import visible as evidence_visible
from rltop.tui.text import cells
from rltop.tui.theme import Glyphs

Run: TypeAlias = tuple[str, int]
"""(text, token that it belongs to; -1: none)."""
NO_TOKEN = -1
PIECE = 2_000
"""Characters that are taken at once of a text without tokens."""


def visible(text: str, glyphs: Glyphs) -> str:
    """`text` with every character in sight; a line end is a mark and a line end."""
    return evidence_visible(text, ascii_only=glyphs.ascii_only, newline=f"{glyphs.newline}\n")


def pieces(text: str) -> Iterator[Run]:
    """A text without tokens."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE], NO_TOKEN


def flow(parts: Iterable[Run], width: int, glyphs: Glyphs) -> Iterator[list[Run]]:
    """Lines of at most `width` cells, broken at blanks where there are any. A token without a text gets a dot."""
    width = max(2, width)
    line: list[str] = []
    owners: list[int] = []
    used, blank = 0, -1
    for text, owner in parts:
        for char in visible(text, glyphs) or (glyphs.dot if owner != NO_TOKEN else ""):
            if char == "\n":
                yield _runs(line, owners)
                line, owners, used, blank = [], [], 0, -1
                continue
            size = 1 if char < "\x7f" else cells(char)
            if used + size > width and line:
                cut = blank + 1 if blank >= 0 and char != " " else len(line)
                yield _runs(line[:cut], owners[:cut])
                line, owners, blank = line[cut:], owners[cut:], -1
                used = sum(map(cells, line))
                if char == " " and len(text) > 1:
                    continue  # the line end stands for it; a token that is nothing but a blank stays
            line.append(char)
            owners.append(owner)
            used += size
            if char == " ":
                blank = len(line) - 1
    if line:
        yield _runs(line, owners)


def _runs(line: list[str], owners: list[int]) -> list[Run]:
    out: list[Run] = []
    start = 0
    for at in range(1, len(line) + 1):
        if at == len(line) or owners[at] != owners[start]:
            out.append(("".join(line[start:at]), owners[start]))
            start = at
    return out
