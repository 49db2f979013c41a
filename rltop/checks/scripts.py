"""Which script a run of letters belongs to.

Scripts that one language mixes as a matter of course are one family: Han, Hiragana, Katakana and Bopomofo are `cjk`.
Marks, digits and punctuation belong to no family, except that the blocks of a script carry their own marks. Ranges are
those of Unicode's block list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

FAMILIES: dict[str, str] = {
    "latin": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0300-\u036f\u1e00-\u1eff"
    "\uff21-\uff3a\uff41-\uff5a",
    "greek": "\u0370-\u037d\u0386\u0388-\u03ff\u1f00-\u1fff",
    "cyrillic": "\u0400-\u052f\u1c80-\u1c8f\u2de0-\u2dff\ua640-\ua69f",
    "armenian": "\u0531-\u0587",
    "hebrew": "\u0591-\u05f4\ufb1d-\ufb4f",
    "arabic": "\u0610-\u061a\u0620-\u063f\u0641-\u06d3\u06d5-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff"
    "\ufe70-\ufefc",
    "syriac": "\u0710-\u074f",
    "thaana": "\u0780-\u07bf",
    "devanagari": "\u0900-\u0963\u0966-\u097f\ua8e0-\ua8ff",
    "bengali": "\u0980-\u09ff",
    "gurmukhi": "\u0a00-\u0a7f",
    "gujarati": "\u0a80-\u0aff",
    "oriya": "\u0b00-\u0b7f",
    "tamil": "\u0b80-\u0bff",
    "telugu": "\u0c00-\u0c7f",
    "kannada": "\u0c80-\u0cff",
    "malayalam": "\u0d00-\u0d7f",
    "sinhala": "\u0d80-\u0dff",
    "thai": "\u0e01-\u0e3a\u0e40-\u0e5b",
    "lao": "\u0e80-\u0eff",
    "tibetan": "\u0f00-\u0fff",
    "myanmar": "\u1000-\u109f",
    "georgian": "\u10a0-\u10ff\u1c90-\u1cbf\u2d00-\u2d2f",
    "hangul": "\u1100-\u11ff\u3131-\u318e\ua960-\ua97f\uac00-\ud7ff",
    "ethiopic": "\u1200-\u139f",
    "khmer": "\u1780-\u17ff",
    "mongolian": "\u1810-\u18af",
    "cjk": "\u2e80-\u2fdf\u3005-\u3007\u3041-\u30fa\u30fc-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003134f",
}
"""Family -> characters, as the inside of a regular expression's class."""

UNSPACED = frozenset({"cjk", "hangul", "thai", "lao", "khmer", "myanmar", "tibetan"})
"""Families whose words touch foreign words: no spaces, or particles that are written on."""

_RUN = re.compile("|".join(f"(?P<{name}>[{chars}]+)" for name, chars in FAMILIES.items()))
_LONE_GREEK = 1


def runs(text: str) -> Iterator[tuple[int, str, str]]:
    """(position, family, word) of every maximal run of one family, left to right.

    A single Greek letter is a mathematical symbol in any language and is left out.
    """
    for found in _RUN.finditer(text):
        family = found.lastgroup or ""
        word = found.group()
        if family == "greek" and len(word) == _LONE_GREEK:
            continue
        yield found.start(), family, word


def families(text: str) -> frozenset[str]:
    """Families that occur in `text`."""
    return frozenset(family for _, family, _ in runs(text))


def mixture(words: list[tuple[int, str]], *, window: int, least: int) -> tuple[int, float]:
    """(families, share of word boundaries where the family changes) in the worst stretch of `window` characters.

    `words` holds (position, family) in order. Only stretches with at least `least` families count; (0, 0.0) when there
    is none. The worst stretch is the one with the highest share.
    """
    worst = (0, 0.0)
    counts: dict[str, int] = {}
    changes = 0
    first = 0
    for last, (at, family) in enumerate(words):
        counts[family] = counts.get(family, 0) + 1
        changes += last > first and words[last - 1][1] != family
        while at - words[first][0] > window:
            left = words[first][1]
            counts[left] -= 1
            if not counts[left]:
                del counts[left]
            changes -= words[first + 1][1] != left
            first += 1
        if len(counts) >= least:
            worst = max(worst, (len(counts), changes / (last - first)), key=lambda pair: pair[1])
    return worst
