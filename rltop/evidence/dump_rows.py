"""What a list of samples shows of each, and which of them a filter takes: one line per sample, nothing of a file.

Pure arithmetic over `DumpSample`. What is not known of a sample is None: it is sorted to the end and taken by no
comparison.
"""

from __future__ import annotations

import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rltop.errors import RltopError
from rltop.evidence.dump_sample import DumpSample

MOST_TEXT = 300
"""Characters of the response in a line."""
SORTS = ("reward", "length", "gap", "status", "group")
_NUMBERS = frozenset({"at", "index", "group", "reward", "length", "gap"})
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
FIELDS = "at index group reward length gap status label version text prompt response metadata.KEY"
_NAME = r"at|index|group|reward|length|gap|status|label|version|text|prompt|response|metadata(?:\.[\w-]+)+"
_TERM = re.compile(rf"({_NAME})(<=|>=|!=|!~|=|<|>|~)(.+)", re.DOTALL)


class Line(msgspec.Struct, frozen=True):
    """One sample in a list."""

    at: int
    """Place in the file, from 0."""
    index: int | None
    group: int | None
    reward: float | None
    status: str
    length: int | None
    """Response tokens."""
    gap: float | None
    """Mean over the response tokens of |train - rollout| log-prob; NaN where one of them is NaN."""
    text: str
    """Start of the response."""

    def row(self) -> dict[str, Any]:
        """As it crosses the wire."""
        names = {"group": "group_index"}
        return {names.get(name, name): getattr(self, name) for name in self.__struct_fields__}


def line_of(sample: DumpSample, trained: Sequence[float] | None) -> Line:
    """The line of a sample. trained: the trainer's log-probs of its response tokens, where a train dump has them."""
    return Line(
        at=sample.at,
        index=sample.index,
        group=sample.group_index,
        reward=sample.score,
        status=str(sample.status or ""),
        length=length_of(sample),
        gap=mean_gap(trained, sample.rollout_log_probs),
        text=(sample.response or "")[:MOST_TEXT],
    )


def length_of(sample: DumpSample) -> int | None:
    """Response tokens: as the dump says, else as many as there are log-probs."""
    if sample.response_length is not None:
        return sample.response_length
    return len(sample.rollout_log_probs) if sample.rollout_log_probs is not None else None


def mean_gap(left: Sequence[float] | None, right: Sequence[float] | None) -> float | None:
    """Mean |left - right| over the tokens; None unless both are there in one length."""
    if not left or not right or len(left) != len(right):
        return None
    return math.fsum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)


_LIKE_TERM = re.compile(r"[A-Za-z_.]{3,}(<=|>=|!=|=|<|>|~)\S")


class Filter:
    """What a line of text asks for: words that all occur (any case, any order), and comparisons such as `reward<0.5`.

    Comparisons: `FIELDS` with `= != < <= > >=`, and `~ !~` for a regular expression (any case). `text` is prompt and
    response. Quotes keep a blank in a word: `text~"so the answer"`. Raises RltopError for a number or an expression
    that is none.
    """

    def __init__(self, text: str) -> None:
        self._words: list[str] = []
        self._terms: list[tuple[str, str, str]] = []
        self._patterns: dict[str, re.Pattern[str]] = {}
        self.odd: list[str] = []
        """Words that look like a comparison of a field that does not exist."""
        for word in _words(text):
            if found := _TERM.fullmatch(word):
                self._terms.append((found[1], found[2], found[3]))
                self._check(word, *found.groups())
            else:
                self._words.append(word.casefold())
                if _LIKE_TERM.match(word):
                    self.odd.append(word)

    def takes(self, line: Line, sample: DumpSample) -> bool:
        """Whether the sample is asked for."""
        for name, sign, wanted in self._terms:
            value = _value(name, line, sample)
            if "~" in sign:
                found = value is not None and self._patterns[wanted].search(str(value)) is not None
                if found is (sign == "!~"):
                    return False
            elif not _holds(value, sign, wanted, start=name == "status"):
                return False
        if not self._words:
            return True
        text = f"{line.status} {sample.label or ''}\n{sample.prompt or ''}\n{sample.response or ''}".casefold()
        return all(word in text for word in self._words)

    def _check(self, word: str, name: str, sign: str, wanted: str) -> None:
        if "~" in sign:
            try:
                self._patterns[wanted] = re.compile(wanted, re.IGNORECASE)
            except re.error as error:
                raise _refused(word, f"no regular expression: {error}") from error
        elif name in _NUMBERS:
            try:
                float(wanted)
            except ValueError as error:
                raise _refused(word, f"{name} is a number, {wanted!r} is none") from error


def _words(text: str) -> list[str]:
    try:
        return _split(text)
    except ValueError:  # a quote that is not closed yet: somebody is typing
        return text.split()


def _split(text: str) -> list[str]:
    """Words, kept together by double quotes; a backslash means itself, as regular expressions need it."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.quotes, lexer.escape = True, "", '"', ""
    return list(lexer)


def _refused(word: str, why: str) -> RltopError:
    return RltopError(f"cannot filter by {word!r}", why=why, do=f"comparisons of {FIELDS}; see docs/cli.md")


def _value(name: str, line: Line, sample: DumpSample) -> Any:
    match name:
        case "label":
            return str(sample.label)
        case "text":
            return f"{sample.prompt or ''}\n{sample.response or ''}"
        case "prompt" | "response":
            return getattr(sample, name)
        case _ if name.startswith("metadata."):
            return _deep(sample.metadata, name.split(".")[1:])
        case "version":
            versions = sample.weight_versions
            return str(versions[-1]) if versions else None
        case _:
            return getattr(line, name)


def _deep(value: Any, names: Sequence[str]) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value) if isinstance(value, bool) else value


def _holds(value: Any, sign: str, wanted: str, *, start: bool) -> bool:
    """start: of a text its start is enough for `=`: `status=trunc`."""
    if value is None:
        return False
    if not isinstance(value, int | float):
        text, low = str(value).casefold(), wanted.casefold()
        same = text.startswith(low) if start else text == low
        return same if sign == "=" else not same if sign == "!=" else bool(_COMPARE[sign](text, low))
    try:
        return bool(_COMPARE[sign](value, float(wanted)))
    except ValueError:
        return False


def sort_key(line: Line, sort: str) -> float:
    """A number to sort by; what is not known comes last, NaN first: it is what somebody looks for."""
    name, sign = sort.lstrip("-"), -1.0 if sort.startswith("-") else 1.0
    value: Any = sum(ord(char) << 8 * (6 - at) for at, char in enumerate(line.status[:6])) if name == "status" else None
    if name in ("reward", "length", "gap", "group"):
        value = getattr(line, name)
    if value is None:
        return math.inf
    return sign * value if value == value else -math.inf


def contains(sample: DumpSample, text: str) -> bool:
    """Whether prompt or response has the text, whatever the case."""
    low = text.casefold()
    return low in (sample.response or "").casefold() or low in (sample.prompt or "").casefold()
