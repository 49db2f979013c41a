"""How much a text in Latin letters looks like tokens drawn without order: one number from fifteen signs of it.

A broken model still draws real tokens: pieces of English and code, with real articles between them. What it loses is
the order: short words of English without the letter sequences of English between them, capitals inside sentences,
brackets that never close, sentences that start small, joints of punctuation that nobody writes. The weights are a
logistic regression of the responses of damaged models (half of `tests/data/text/damaged.jsonl`) against manuals, user
interfaces and code in ninety languages and the healthy samples of `tests/data/text` (not `healthy_heldout.txt`). The
score is in log-odds: 0 is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rltop.checks.words import ENGLISH_WORDS

FEATURES = (
    "English words beyond its letters", "English words", "joints", "humps", "open brackets", "small starts",
    "capitals inside", "loose stops", "long words", "function words", "variety", "joints beyond letters",
    "numbers and code", "lost characters", "word length",
)  # fmt: skip
"""What `features` measures, in order."""
WEIGHTS: tuple[float, ...] = (
    20.78,
    -1.3,
    5.6,
    1.62,
    8.07,
    11.92,
    10.21,
    5.67,
    33.13,
    -9.25,
    -4.85,
    -9.05,
    -45.2,
    30.67,
    0.12,
)
BIAS = 0.66

_JOINT = re.compile(r"(?<=[^\W\d_])[\W\d_]+(?=[^\W\d_])")
_NUMBER = re.compile(r"[\d.,:]*\d")
_BLANKS = re.compile(r"[ \t\xa0]+")
_LOOSE = re.compile(r"[ \t\n][.,;:)\]](?![\w.])|[(\[][ \n]")
_SMALL_START = re.compile(r"[.!?][\"')\]]*[ \n]+[a-z\u00df-\u00f6\u00f8-\u00ff]")
_CAPITAL_INSIDE = re.compile(r"(?<=[^\W\d_A-Z] )[A-Z][a-z]+")
_HUMP = re.compile(r"[^\W\d_A-Z][A-Z]")
_LONG = 14
_MOST_HUMPS = 0.5
_ORDINARY = frozenset(
    [
        "\n", "\n\n", "\n* ", "\n- ", "\n0. ", " ", " ! ", " \"", " $", " % ", " & ", " '", " (", " **", " + ",
        " - ", " 0 ", " 0 (", " 0, ", " 0. ", " : ", " ; ", " = ", " ? ", " `", " | ", " \u00ab", " \u2013 ",
        " \u2014 ", " \u201c", " \u201e", "!\n", "! ", "\"", "\" ", "\", \"", "$ ", "'", "' ", "(", ")", ")\n",
        ") ", "), ", ").\n", "). ", "** ", ",\n", ", ", ", \"", ",\" ", "-", ".", ".\n", ".\n\n", ".\n- ",
        ".\n0. ", ". ", ". \"", ".\" ", "... ", ".\u201d ", "/", "0", ":\n", ":\n\n", ": ", ": \"", "; ", "=",
        "?\n", "? ", "_", "` ", "\u00bb ", "\u2014", "\u2019", "\u201c ", "\u201d ", "\u2026",
    ]
)  # fmt: skip
"""What stands between two words in prose, Markdown and lists; every number is `0` here."""


def features(
    text: str, latin: Sequence[str], *, coverage: float, function_share: float, distinct: float, code_share: float
) -> list[float]:
    """The signs, in the order of `FEATURES`. `latin`: the Latin words, lower case, at least one."""
    count = len(latin)
    english = sum(word in ENGLISH_WORDS for word in latin) / count
    joints = [_BLANKS.sub(" ", _NUMBER.sub("0", joint)) for joint in _JOINT.findall(text)]
    odd = (len(set(joints) - _ORDINARY) / max(len(joints), 1)) ** 0.5
    unclosed = sum(abs(text.count(left) - text.count(right)) for left, right in ("()", "[]", "{}"))
    return [
        english - coverage,
        english,
        odd,
        min(len(_HUMP.findall(text)) / count, _MOST_HUMPS) ** 0.5,
        (unclosed / count) ** 0.5,
        (len(_SMALL_START.findall(text)) / count) ** 0.5,
        (len(_CAPITAL_INSIDE.findall(text)) / count) ** 0.5,
        (len(_LOOSE.findall(text)) / count) ** 0.5,
        sum(len(word) >= _LONG for word in latin) / count,
        function_share,
        distinct,
        odd * max(0.0, english - coverage + 0.1),
        code_share,
        (text.count("\ufffd") / count) ** 0.5,
        sum(map(len, latin)) / count,
    ]


def score(values: Sequence[float]) -> float:
    """Log-odds that a text with these signs is without order."""
    return BIAS + sum(weight * value for weight, value in zip(WEIGHTS, values, strict=True))
