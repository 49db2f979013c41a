"""Reads the text of a Python dict or of JSON without evaluating anything.

Accepts what frameworks print: `nan`, `inf`, `NaN`, `-Infinity`, `None`, `np.float64(1.25)`,
`tensor(0.5, device='cuda:0')`, nested lists and maps. What it does not know becomes its own text.
"""

from __future__ import annotations

import json
import math
import re

MOST_DEPTH = 32
MOST_ITEMS = 100_000

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<punct>[{}\[\](),:=])
  | (?P<string>[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
  | (?P<number>[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]))
  | (?P<word>[-+]?[^\s{}\[\](),:='"]+)
  )""",
    re.VERBOSE | re.DOTALL,
)
_WORDS: dict[str, object] = {
    "nan": math.nan,
    "+nan": math.nan,
    "-nan": math.nan,
    "inf": math.inf,
    "+inf": math.inf,
    "-inf": -math.inf,
    "infinity": math.inf,
    "-infinity": -math.inf,
    "none": None,
    "null": None,
    "true": True,
    "false": False,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "0": "\0", "a": "\a", "b": "\b", "f": "\f"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)


class Unreadable(ValueError):
    """The text is no literal."""


def parse(text: str) -> object:
    """The value that `text` begins with; what follows it is ignored. Raises Unreadable."""
    try:
        return _Parser(text).value(0)
    except (RecursionError, OverflowError) as error:
        raise Unreadable(str(error)) from None


def end_of(text: str) -> int:
    """Where the value that `text` begins with ends; 0 without a readable one."""
    parser = _Parser(text)
    try:
        parser.value(0)
    except (Unreadable, RecursionError, OverflowError):
        return 0
    return parser.at


def parse_map(text: str) -> dict[str, object] | None:
    """The map that begins at the first `{` of `text`; None without a readable one."""
    start = text.find("{")
    if start < 0:
        return None
    body = text[start:]
    try:
        # The usual dict of numbers is JSON but for its quotes.
        value = json.loads(body if '"' in body else body.replace("'", '"'))
    except (ValueError, RecursionError):
        try:
            value = parse(body)
        except Unreadable:
            return None
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else None


def unquote(token: str) -> str:
    """Text of a quoted string."""
    start = min((i for i in (token.find("'"), token.find('"')) if i >= 0), default=0)
    body = token[start + 1 : -1]
    return _ESCAPE.sub(_unescape, body) if "\\" in body else body


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 and not 0xD800 <= number < 0xE000 else "\ufffd"
    return _ESCAPES.get(code, code)


class _Parser:
    __slots__ = ("_at", "_items", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._items = 0

    @property
    def at(self) -> int:
        """Characters read so far."""
        return self._at

    def value(self, depth: int) -> object:
        kind, token = self._next()
        if kind == "string":
            return unquote(token)
        if kind == "number":
            return _number(token)
        if kind == "word":
            return self._word(token, depth)
        if token in "{[(":
            if depth >= MOST_DEPTH:
                raise Unreadable("nested too deep")
            return self._map(depth + 1) if token == "{" else self._list({"[": "]", "(": ")"}[token], depth + 1)
        raise Unreadable(f"unexpected {token!r}")

    def _next(self) -> tuple[str, str]:
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            raise Unreadable("ends early")
        self._at = found.end()
        self._items += 1
        if self._items > MOST_ITEMS:
            raise Unreadable("too large")
        return found.lastgroup, found[found.lastgroup]

    def _peek(self) -> str:
        found = _TOKEN.match(self._text, self._at)
        return found["punct"] or "" if found else ""

    def _word(self, word: str, depth: int) -> object:
        if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        if self._peek() == "(":  # np.float64(1.25), tensor(0.5, device='cuda:0')
            self._next()
            items = self._list(")", depth + 1)
            return items[0] if items else word
        return word

    def _list(self, close: str, depth: int) -> list[object]:
        items: list[object] = []
        while self._peek() != close:
            items.append(self.value(depth))
            if self._peek() in (":", "="):  # device='cuda:0' in a call
                self._next()
                items[-1] = self.value(depth)
            if self._peek() == ",":
                self._next()
            elif self._peek() != close:
                raise Unreadable("a comma is missing")
        self._next()
        return items

    def _map(self, depth: int) -> dict[object, object]:
        items: dict[object, object] = {}
        while self._peek() != "}":
            key = self.value(depth)
            if self._next()[1] != ":":
                raise Unreadable("a colon is missing")
            value = self.value(depth)
            items[key if isinstance(key, str | int | float | bool) else str(key)] = value
            if self._peek() == ",":
                self._next()
            elif self._peek() != "}":
                raise Unreadable("a comma is missing")
        self._next()
        return items


def _number(token: str) -> int | float:
    plain = token.replace("_", "")
    if plain.lstrip("+-").isdigit() and len(plain) < 400:
        return int(plain)
    return float(plain)
