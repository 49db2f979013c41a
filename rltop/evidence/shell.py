"""Splits shell text into words, as far as a launch script needs it; nothing is expanded and nothing runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_BARE = re.compile(r"(?:[^\s\\'\"()`;|&$]|\$(?!\())+")
_BREAK = re.compile(r"(?:;|&&|\|\||\||&)$")
_MOST_SUBSTITUTION = 10_000


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the command, after quotes and expansions."""

    text: str
    line: int


Token = tuple[Word, str]
"""A word and the quote around all of it (`"`, `'` or empty)."""


def commands(text: str) -> Iterable[list[Token]]:
    """The script's simple commands. An array's parentheses stay words, so that an assignment keeps its own."""
    command: list[Token] = []
    depth = 0
    for token in tokens(text):
        word, quoted = token
        if not quoted and word.text == "\n":
            if depth == 0 and command:
                yield command
                command = []
            continue
        if not quoted and depth == 0 and _BREAK.match(word.text):
            if command:
                yield command
                command = []
            continue
        if not quoted and word.text.endswith("=("):
            depth += 1
        elif not quoted and word.text == ")" and depth:
            depth -= 1
        command.append(token)
    if command:
        yield command


def tokens(text: str) -> Iterable[Token]:
    """Words, line ends, closing parentheses and separators."""
    line, at, size = 1, 0, len(text)
    part: list[str] = []
    quotes: set[str] = set()
    started = 1

    def close() -> Iterable[Token]:
        if part or quotes:
            quote = next(iter(quotes)) if len(quotes) == 1 else ""
            yield Word("".join(part), started), quote
        part.clear()
        quotes.clear()

    while at < size:
        char = text[at]
        if char == "\\" and at + 1 < size:
            if text[at + 1] == "\n":
                line += 1
            else:
                part.append(text[at + 1])
            at += 2
        elif char in "'\"":
            started = started if part or quotes else line
            end = _closing(text, at)
            body = text[at + 1 : end]
            quotes.add(char)
            part.append(body if char == "'" else re.sub(r'\\(["\\$`])', r"\1", body.replace("\\\n", "")))
            line += body.count("\n")
            at = end + 1
        elif char == "#" and not part and not quotes:
            at = _line_end(text, at)
        elif char == "\n" or char in " \t\r":
            yield from close()
            if char == "\n":
                yield Word("\n", line), ""
                line += 1
            at += 1
        elif char == "(" and part and part[-1].endswith("="):
            part.append("(")
            yield from close()
            at += 1
        elif (char == "$" and text[at : at + 2] == "$(") or char == "`":
            started = started if part or quotes else line
            end = substitution(text, at)
            part.append(text[at:end])
            line += text.count("\n", at, end)
            at = end
        elif char in ")(;|&":
            yield from close()
            yield Word(char, line), ""
            at += 1
        else:
            started = started if part or quotes else line
            found = _BARE.match(text, at)
            end = found.end() if found else at + 1
            part.append(text[at:end])
            at = end
    yield from close()


def _closing(text: str, at: int) -> int:
    quote, end = text[at], at + 1
    while end < len(text) and text[end] != quote:
        if quote == '"' and text.startswith("$(", end):
            end = substitution(text, end)
        else:
            end += 2 if text[end] == "\\" and quote == '"' else 1
    return min(end, len(text))


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def substitution(text: str, at: int) -> int:
    """End of the command substitution that starts at `at`; one that is never closed ends after 10,000 characters."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    depth = 0
    for end in range(at + 1, min(len(text), at + _MOST_SUBSTITUTION)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end + 1
    return min(len(text), at + _MOST_SUBSTITUTION)
