"""Text of a model with every character in sight.

Nothing is dropped silently: what a terminal would obey or not show (controls, escape sequences, bidirectional
overrides, joiners) stands there as `<1B>`, so that hostile text is harmless and can be seen.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_MOST_MARKS = 2


def visible(text: str, *, ascii_only: bool = False, newline: str = "\n") -> str:
    """`text` as it may be printed; a line end becomes `newline`, a tab four blanks."""
    if text.isascii() and text.isprintable():
        return text
    out: list[str] = []
    marks = 0
    for char in text:
        if unicodedata.category(char)[0] == "M":
            marks += 1
            if marks > _MOST_MARKS:
                continue  # more would smear over the neighbours
        else:
            marks = 0
        out.append(_char(char, ascii_only, newline))
    return "".join(out)


@lru_cache(4096)
def _char(char: str, ascii_only: bool, newline: str) -> str:
    if " " <= char <= "~":
        return char
    if char == "\n":
        return newline
    if char == "\t":
        return "    "
    kind = unicodedata.category(char)
    hidden = kind[0] == "C" or kind in ("Zl", "Zp") or "\ufe00" <= char <= "\ufe0f" or char >= "\U000e0100"
    if hidden or (ascii_only and kind[0] != "Z"):
        return f"<{ord(char):02X}>"
    return " " if kind[0] == "Z" else char
