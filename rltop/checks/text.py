"""Measures of a response's text: what `rollout.text` judges.

`measure` takes one to two milliseconds for any length: it reads the first 1,000 and the last 400 characters (and counts
one character over the whole). It judges nothing; the thresholds are in `thresholds.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rltop.checks.disorder import features, score
from rltop.checks.language import coverage, cycle, stray_stops, variety
from rltop.checks.scripts import UNSPACED, families, mixture, runs
from rltop.checks.words import FUNCTION_WORDS, SENTENCE_STARTERS

HEAD_CHARS = 1_000
TAIL_CHARS = 400
WINDOW_CHARS = 400
"""Stretch within which scripts are counted (CHECKS: 4 scripts within 400 characters)."""
LEAST_FAMILIES = 4
"""Fewer families than this are no mixture at all, whatever the threshold."""
LEAST_WORDS = 16
"""Latin words before their order is judged."""
MOST_CODE = 0.12
"""Digits and signs of code up to which a text counts as prose."""
NOT_JUDGED = -99.0
LEAST_BEFORE_TERMINATOR = 20
"""Characters of text before a turn terminator that make the rest a matter of the stop set."""

_TERMINATOR = re.compile(
    r"<\|(?:im_end|eot_id|eot|endoftext|end|eom_id|return|end_of_text|end_of_turn|assistant_end|user|observation)\|>|"
    r"<end_of_turn>|<turn\|>|\[\|endofturn\|\]|<seed:eos>|\[e~\[|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_CUT_CHARACTER = re.compile("\ufffd{1,3}$")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ud800-\udfff\ue000-\uf8ff]")
_WHITESPACE = " \n\t\r\u3000\u00a0"
_ASKS_FOR_SCRIPTS = re.compile(
    r"translat|languages|alphabet|unicode|multilingual|scripts\b|transliterat|\u7ffb\u8bd1|\u7ffb\u8b6f|\u7ffb\u8a33|\u8bed\u8a00|"
    r"\u043f\u0435\u0440\u0435\u0432\u0435\u0434|\u00fcbersetz|traduc|tradui|traduz",
    re.IGNORECASE,
)
_ONE_NUMBER = re.compile(r"[\s$]*[-+]?[1-9][\d,.\s]*\$*\s*$")
_NUMBER_CHARS = 120
_STRAY = re.compile(r"\s*(?P<head>[A-Za-z_]\w*) +(?P<word>[A-Z][a-z]*)['\u2019]?[a-z]* +[a-z]")
_GLUED = re.compile(r"\s*(?P<head>[^\W\d_]*[^\W\d_A-Z])(?P<word>[A-Z][a-z]*)['\u2019]?[a-z]*[ ,]\s*[a-z\d]")
_IDENTIFIER = re.compile(r"[a-z\d][A-Z]|_")
_LATER = (
    "[\x80-\xbf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018\u2019\u201c\u201d"
    "\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178]"
)
_UNDECODED = re.compile(
    f"[\xc2\xc3\xce-\xd1\xd7-\xda]{_LATER}|[\xe0-\xef]{_LATER}{{2}}"  # UTF-8 read as Latin-1 or Windows-1252
    "|<0x[0-9A-F]{2}>|[\u0120\u010a\u2581](?=[^\\W\\d_])"  # byte tokens, and the space marks of byte-level BPE
)
_STUTTER = re.compile(r"([,;:])\1{3,}")
_HUMP = re.compile(r"[^\W\d_A-Z][A-Z]")
_MOSTLY = 0.5
_FIRST_WORDS = 60
"""Words whose variety is measured."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Measures of one response. Shares are 0 to 1."""

    chars: int
    """Length of the text that was judged: up to a turn terminator if there is text before it."""
    families: int = 0
    """Script families in the worst stretch of 400 characters with at least 4; else 0."""
    switch_share: float = 0.0
    """Word boundaries of that stretch at which the script family changes."""
    third_share: float = 0.0
    """Letters that belong neither to the most nor to the second most frequent script family."""
    joined_share: float = 0.0
    """Word boundaries at which one script follows another without anything between, where both put spaces."""
    control_share: float = 0.0
    """U+FFFD, control, private-use and lone surrogate characters among all."""
    latin_words: int = 0
    latin_share: float = 0.0
    """Latin letters among all letters."""
    function_share: float = 0.0
    """Words of `words.FUNCTION_WORDS` among the Latin words."""
    coverage: float = 0.0
    """Sequences of four characters frequent in `language` (`language.coverage`); 0 if less than half is Latin."""
    language: str = ""
    """The language, or `code`, that explains the text best."""
    words: int = 0
    """Runs of letters of one script."""
    distinct_share: float = 1.0
    pairs_per_word: float = 0.0
    """Of the first 60 words (`language.variety`)."""
    hump_share: float = 0.0
    """Capital letters right after a small one, per Latin word."""
    stops_share: float = 0.0
    code_share: float = 0.0
    """Sentence punctuation, digits and signs of code (`language.stray_stops`)."""
    disorder: float = NOT_JUDGED
    """Log-odds that the words stand in no order (`disorder.score`); for Latin text of 16 words on that is no code."""
    undecoded_share: float = 0.0
    """Characters in UTF-8 read as Latin-1, in `<0xE3>` byte tokens and in the space marks of tokenizers."""
    stutter_share: float = 0.0
    """Characters in runs of four or more of one comma, colon or semicolon."""
    phrase: str = ""
    phrase_share: float = 0.0
    """A short phrase that is repeated over and over, and how much of the text it makes up (`language.cycle`)."""
    structure: float = 0.0
    """Digits, punctuation and line ends among all but spaces: 2-7 % in prose, over 8 % in code, maths, lists, data."""
    top_char: str = ""
    top_char_share: float = 0.0
    """The most frequent character among all that are not white space (of a blank text: white space itself)."""
    counted_chars: int = 0
    top_id: int | None = None
    top_id_share: float = 0.0
    counted_ids: int = 0
    first_token: str = ""
    """`script`, `glued` or `identifier` if only the very start does not belong to the text that follows; else empty."""
    prompted: bool = False
    """The prompt asks for other scripts or contains several, or contains the phrase that is repeated."""


def measure(response: str, *, prompt: str = "", token_ids: Sequence[int] = ()) -> TextFacts:
    """Measures of `response`. `token_ids` are the response's own; the prompt only excuses a mixture of scripts."""
    text, cut = _before_terminator(_CUT_CHARACTER.sub("", response))
    if not text.strip():
        cut = False
        text = response
    part = text if len(text) <= HEAD_CHARS + TAIL_CHARS else f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"
    words = list(runs(part))
    latin = [word.lower() for _, family, word in words if family == "latin"]
    letters = sum(len(word) for _, _, word in words)
    latin_share = sum(map(len, latin)) / letters if letters else 0.0
    mixed, switches = mixture([(at, family) for at, family, _ in words], window=WINDOW_CHARS, least=LEAST_FAMILIES)
    char, char_share, counted = _top_char(text, part)
    top_id, id_share = _top_id(token_ids) if not cut else (None, 0.0)
    covered, language = coverage(part) if latin_share >= _MOSTLY else (0.0, "")
    distinct, pairs = variety([word.lower() for _, _, word in words[:_FIRST_WORDS]])
    stops, code = stray_stops(part)
    phrase, phrase_share = cycle(part)
    functions = sum(word in FUNCTION_WORDS for word in latin) / len(latin) if latin else 0.0
    disorder = NOT_JUDGED
    if latin_share >= _MOSTLY and len(latin) >= LEAST_WORDS and code <= MOST_CODE:
        signs = features(part, latin, coverage=covered, function_share=functions, distinct=distinct, code_share=code)
        disorder = score(signs)
    return TextFacts(
        chars=len(text),
        families=mixed,
        switch_share=switches,
        third_share=_third_share(words, letters),
        joined_share=_joined_share(words),
        control_share=len(_CONTROL.findall(part)) / len(part) if part else 0.0,
        latin_words=len(latin),
        latin_share=latin_share,
        function_share=functions,
        coverage=covered,
        language=language,
        words=len(words),
        distinct_share=distinct,
        pairs_per_word=pairs,
        hump_share=len(_HUMP.findall(part)) / len(latin) if latin else 0.0,
        stops_share=stops,
        code_share=code,
        disorder=disorder,
        undecoded_share=sum(map(len, _UNDECODED.findall(part))) / len(part) if part else 0.0,
        stutter_share=sum(len(run.group()) for run in _STUTTER.finditer(part)) / len(part) if part else 0.0,
        phrase=phrase,
        phrase_share=phrase_share,
        structure=_structure(part, letters),
        top_char=char,
        top_char_share=char_share,
        counted_chars=counted,
        top_id=top_id,
        top_id_share=id_share,
        counted_ids=0 if cut else len(token_ids),
        first_token=_first_token(part, prompt),
        prompted=(mixed > 0 and _asks_for_scripts(prompt)) or (phrase_share > 0 and _holds(prompt, phrase)),
    )


def _third_share(words: list[tuple[int, str, str]], letters: int) -> float:
    counts: Counter[str] = Counter()
    for _, family, word in words:
        counts[family] += len(word)
    return 1 - sum(count for _, count in counts.most_common(2)) / letters if len(counts) > 2 else 0.0


def _joined_share(words: list[tuple[int, str, str]]) -> float:
    joined = sum(
        family != after and at + len(word) == start and family not in UNSPACED and after not in UNSPACED
        for (at, family, word), (start, after, _) in pairwise(words)
    )
    return joined / (len(words) - 1) if len(words) > 1 else 0.0


def _holds(prompt: str, phrase: str) -> bool:
    """All words of the phrase stand in the prompt: it may have asked for the repetition."""
    words = {word.lower() for _, _, word in list(runs(phrase * 2))[1:-1]}  # whole words: a phrase may start inside one
    return bool(words) and words <= {word.lower() for _, _, word in runs(prompt[:HEAD_CHARS])}


def _before_terminator(text: str) -> tuple[str, bool]:
    """Text before the first turn terminator, and whether it was cut: what follows a turn's end is no part of it."""
    for found in _TERMINATOR.finditer(text):
        before = text[: found.start()]
        if len(before.strip()) >= LEAST_BEFORE_TERMINATOR:
            return before, True
    return text, False


def _asks_for_scripts(prompt: str) -> bool:
    return bool(_ASKS_FOR_SCRIPTS.search(prompt)) or len(families(prompt[:HEAD_CHARS])) >= LEAST_FAMILIES - 1


def _top_char(text: str, part: str) -> tuple[str, float, int]:
    """Most frequent character of `part`, its share in `text`, and how many characters of `text` were counted."""
    dense = "".join(part.split())
    if not dense:
        return (text[:1], 1.0, len(text)) if text else ("", 0.0, 0)
    if len(text) <= _NUMBER_CHARS and _ONE_NUMBER.match(text):  # 10^30 is an answer
        return "", 0.0, len(dense)
    ((char, _),) = Counter(dense).most_common(1)
    counted = len(text) - sum(text.count(space) for space in _WHITESPACE)
    return char, min(1.0, text.count(char) / max(counted, 1)), counted


def _top_id(token_ids: Sequence[int]) -> tuple[int | None, float]:
    if not token_ids:
        return None, 0.0
    ((top, count),) = Counter(token_ids).most_common(1)
    return top, count / len(token_ids)


def _structure(part: str, letters: int) -> float:
    """Share of characters that are neither letters nor spaces, line ends included."""
    spaces = sum(part.count(space) for space in " \t\r\u3000\u00a0")
    solid = len(part) - spaces
    return (solid - letters) / solid if solid else 0.0


def _first_token(text: str, prompt: str) -> str:
    """Why the first token does not belong, or empty.

    Narrow on purpose: the rest must open like an English answer, with nothing between it and the odd start. Camel case
    names (`iPhone`, `getItem`) and words of another script that are followed by punctuation are ordinary beginnings.
    """
    start = text[:200]
    words = list(runs(start))
    if len(words) < 3:
        return ""
    (at, family, word), (after, second, follower), *rest = words
    alone = all(kind != family for _, kind, _ in words[1:])
    between = start[at + len(word) : after]
    if family != second and alone and not between.strip(" ") and not start[:at].strip():
        opens = follower in SENTENCE_STARTERS and rest[0][1] == second
        return "script" if opens and family not in families(prompt[:HEAD_CHARS]) else ""
    if (glued := _GLUED.match(start)) and glued["word"] in SENTENCE_STARTERS and glued["head"] not in ("i", "e"):
        return "glued"
    stray = _STRAY.match(start)
    if stray and stray["word"] in SENTENCE_STARTERS and _IDENTIFIER.search(stray["head"]):
        return "identifier"
    return ""
