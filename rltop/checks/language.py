"""Measures that tell text of a language from words thrown together, without knowing the language.

Each looks at one side of a text: how well the best of thirty languages (or code) explains its letters, how few words
it has and how freely they follow each other, whether one phrase makes up all of it, how much is stray punctuation.
None decides anything; `text.measure` collects them and the rule compares them with `thresholds.py`.
"""

from __future__ import annotations

import base64
import functools
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import eq
from types import MappingProxyType

from rltop.checks import grams

GRAM = 4
"""Characters of a sequence in the table."""
LONGEST_CYCLE = 50
"""Characters of a phrase whose repetition counts as a cycle. Longer ones are paragraphs that a user asked for twice."""
_PROBE = 24
_SPACE = re.compile(r"\s+")
_DIGITS = re.compile(r"\d+")
_RUN = re.compile(r"(\W|_)\1+")
_STOPS = re.compile(r"[.,;:!?()\-\u2026\u3001\u3002\uff0c]")
_CODE = re.compile(r"[\[\]{}=\\<>/*+|#&^_`~$@%\d]")


def normal(text: str) -> str:
    """Lower case, every number one `0`, every run of white space one space."""
    return _DIGITS.sub("0", _SPACE.sub(" ", text.lower()))


@functools.cache
def _table() -> Mapping[str, int]:
    """Sequence -> bits of the languages in which it is frequent."""
    lines = zlib.decompress(base64.b85decode(grams.PACKED)).decode().split("\n")
    return MappingProxyType({line[:GRAM]: int(line[GRAM:], 16) for line in lines})


def coverage(text: str) -> tuple[float, str]:
    """(share of the sequences of four characters that are frequent in the best fitting language, its name).

    Prose of a known language has 0.25 to 0.6, of an unknown one and other things 0.05 to 0.3.
    """
    plain = normal(text)
    count = len(plain) - GRAM + 1
    if count < 1:
        return 0.0, ""
    masks = Counter(map(_table().get, [plain[i : i + GRAM] for i in range(count)]))
    hits = [0] * len(grams.NAMES)
    for mask, times in masks.items():
        rest = mask or 0
        while rest:
            low = rest & -rest
            hits[low.bit_length() - 1] += times
            rest ^= low
    best = max(hits)
    return best / count, grams.NAMES[hits.index(best)] if best else ""


def cycle(text: str) -> tuple[str, float]:
    """(phrase, share of the text that repeats it), or ("", 0.0) when no short phrase is repeated throughout.

    The phrase has at most `LONGEST_CYCLE` characters. Numbers do not count: rows of zeros are data.
    """
    if len(text) < 2 * _PROBE:
        return "", 0.0
    at = len(text) // 2 - _PROBE // 2
    probe = text[at : at + _PROBE]
    found = text.find(probe, at + 1, at + LONGEST_CYCLE + _PROBE)
    if found < 0:
        return "", 0.0
    period = found - at
    phrase = text[at : at + period]
    if any(map(str.isdigit, phrase)) and not any(map(str.isalpha, phrase)):
        return "", 0.0
    return phrase, sum(map(eq, text, text[period:])) / (len(text) - period)


def variety(words: Sequence[str]) -> tuple[float, float]:
    """(distinct words per word, distinct pairs of neighbours per distinct word); (1.0, 0.0) without words.

    A text that repeats itself has few words, but each is followed by the same few others: about 1.5 pairs per word.
    Noise over few words has many.
    """
    if not words:
        return 1.0, 0.0
    distinct = len(set(words))
    return distinct / len(words), len(set(pairwise(words))) / distinct


def stray_stops(text: str) -> tuple[float, float]:
    """(share of sentence punctuation, share of digits and the signs of code), among all but white space.

    A run of one sign counts once: leaders and rules are no punctuation.
    """
    dense = "".join(_RUN.sub(r"\1", text).split())
    if not dense:
        return 0.0, 0.0
    return len(_STOPS.findall(dense)) / len(dense), len(_CODE.findall(dense)) / len(dense)
