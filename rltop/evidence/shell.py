"""Splits shell text into commands and words, as far as a launch script needs it; nothing is expanded and nothing runs.

Redirections and here-documents are left out, a subshell is a command like another. A word keeps its expansions as they
are written; `pieces` finds them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BARE = re.compile(r"(?:[^\s\\'\"()`;|&$<>]|\$(?![({]))+")
_REDIRECT = re.compile(r"(?:&>>?|<<<|<<-?|<>|>>|>\||>&|<&|>|<)")
_BREAKS = (";", "&&", "||", "|", "&", "(", ")")
_MOST_SUBSTITUTION = 10_000


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command."""

    text: str
    line: int
    unread: str = ""
    """An expansion in it is left for the shell: `split` outside quotes (it may give several words), or `whole`."""


Token = tuple[Word, str]
"""A word and the quote around all of it (`"`, `'` or empty)."""


def commands(text: str) -> Iterator[list[Token]]:
    """The script's simple commands. An array's parentheses stay words, so that an assignment keeps its own."""
    command: list[Token] = []
    array = False
    for token in _Lexer(text).tokens():
        word, quoted = token
        bare = "" if quoted else word.text
        if array:
            command += [] if bare == "\n" else [token]
            array = bare != ")"
            continue
        if bare == "\n" or bare in _BREAKS:
            if command:
                yield command
            command = []
            continue
        array = bare.endswith("=(")
        command.append(token)
    if command:
        yield command


class _Lexer:
    """One pass over the text."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._line = text, 0, 1
        self._part: list[str] = []
        self._quotes: set[str] = set()
        self._started = 1
        self._target = False
        """The next word is where a redirection goes to."""
        self._heredocs: list[str] = []
        self._heredoc = False

    def tokens(self) -> Iterator[Token]:
        """Words, line ends, separators."""
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t\r\n":
                yield from self._close()
                if char == "\n":
                    yield Word("\n", self._line), ""
                    self._line += 1
                    self._at += 1
                    self._skip_heredocs()
                else:
                    self._at += 1
            elif char == "#" and not self._open():
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif (
                redirect := _REDIRECT.match(text, self._at) if char in "<>" or text.startswith("&>", self._at) else None
            ):
                yield from self._redirect(redirect[0])
            elif char == "(" and self._part and self._part[-1].endswith("="):
                self._part.append("(")
                yield from self._close()
                self._at += 1
            elif char in ";|&()":
                yield from self._close()
                double = text[self._at : self._at + 2]
                found = double if double in ("&&", "||") else char
                yield Word(found, self._line), ""
                self._at += len(found)
            else:
                self._take(char)
        yield from self._close()

    def _open(self) -> bool:
        return bool(self._part or self._quotes)

    def _take(self, char: str) -> None:
        """The next piece of a word."""
        text, at = self._text, self._at
        self._started = self._started if self._open() else self._line
        if char == "\\":
            if text[at + 1 : at + 2] == "\n":
                self._line += 1
            else:
                self._part.append(text[at + 1 : at + 2])
            self._at += 2
        elif char in "'\"":
            end = _closing(text, at)
            body = text[at + 1 : end]
            self._quotes.add(char)
            self._part.append(body if char == "'" else re.sub(r'\\(["\\`])', r"\1", body.replace("\\\n", "")))
            self._line += body.count("\n")
            self._at = end + 1
        elif char == "`" or text.startswith(("$(", "${"), at):
            end = expansion_end(text, at)
            self._part.append(text[at:end])
            self._line += text.count("\n", at, end)
            self._at = end
        else:
            found = _BARE.match(text, at)
            end = found.end() if found else at + 1
            self._part.append(text[at:end])
            self._at = end

    def _close(self) -> Iterator[Token]:
        if self._open():
            word = "".join(self._part)
            if self._heredoc:
                self._heredocs.append(word)
            elif not self._target:
                yield Word(word, self._started), next(iter(self._quotes)) if len(self._quotes) == 1 else ""
            self._target = self._heredoc = False
        self._part.clear()
        self._quotes.clear()

    def _redirect(self, operator: str) -> Iterator[Token]:
        """`2>&1`, `> file`, `<<EOF`: the digits before it and the word after it are no words of the command."""
        if not self._quotes and "".join(self._part).isdecimal():
            self._part.clear()
        yield from self._close()
        self._at += len(operator)
        self._heredoc = operator in ("<<", "<<-")
        self._target = not self._heredoc

    def _skip_heredocs(self) -> None:
        for end_word in self._heredocs:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                line = self._text[self._at : end if end >= 0 else len(self._text)]
                self._at = end + 1 if end >= 0 else len(self._text)
                self._line += 1
                if line.strip() == end_word:
                    break
        self._heredocs.clear()


def _closing(text: str, at: int) -> int:
    """Where the quote that opens at `at` ends."""
    quote, end = text[at], at + 1
    while end < len(text) and text[end] != quote:
        if quote == '"' and text.startswith(("$(", "${"), end):
            end = expansion_end(text, end)
        else:
            end += 2 if text[end] == "\\" and quote == '"' else 1
    return min(end, len(text))


def expansion_end(text: str, at: int) -> int:
    """End of the expansion (`$(…)`, `$((…))`, `${…}`, `` `…` ``, `$name`) that starts at `at`; one that is never closed
    ends after 10,000 characters."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    if not text.startswith(("$(", "${"), at):
        found = re.compile(r"\$(?:\w+|[@*#?$!-])?").match(text, at)
        return found.end() if found else at + 1
    pairs = {"(": ")", "{": "}"}
    stack = [pairs[text[at + 1]]]
    end = at + 2
    limit = min(len(text), at + _MOST_SUBSTITUTION)
    while end < limit:
        char = text[end]
        if char == "\\":
            end += 1
        elif char in "'\"":
            end = _closing(text, end) if char == '"' else max(end, text.find("'", end + 1))
        elif char == "(" or (char == "{" and text[end - 1] == "$"):
            stack.append(pairs[char])
        elif char == stack[-1]:
            stack.pop()
            if not stack:
                return end + 1
        end += 1
    return limit


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Parts of a word in order, and whether a part is an expansion."""
    at = start = 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text):
            at += 2
        elif text[at] in "$`":
            if start < at:
                yield text[start:at], False
            end = expansion_end(text, at)
            yield text[at:end], True
            at = start = end
        else:
            at += 1
    if start < len(text):
        yield text[start:], False
