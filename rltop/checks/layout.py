"""Text in columns: lines of a given width, measured in cells of a terminal and broken at spaces only.

A flag or a path that is broken at one of its hyphens can not be pasted, and a Chinese character takes two cells.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator


def cells(text: str) -> int:
    """Columns that a printable text takes: 2 for wide characters, 0 for combining ones."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def one_line(text: str) -> str:
    """No control characters: a terminal must not act on what a model wrote."""
    return "".join(ch if ch.isprintable() else " " for ch in text)


def cut(text: str, width: int) -> str:
    """The text in one line of at most `width` columns; an ellipsis says that some is missing."""
    plain = one_line(text)
    return plain if cells(plain) <= width else _head(plain, width - 1) + "…"


def wrap(text: str, lead: str, width: int, *, most: int = 0) -> list[str]:
    """Lines that begin with `lead`, then with as many spaces. A word breaks only where it is wider than a whole line.

    With `most` > 0 there are at most so many lines; an ellipsis after a whole word says that some are missing.
    """
    room = max(width - cells(lead), 2)
    lines = list(_lines(one_line(text), room))
    if 0 < most < len(lines):
        lines = [*lines[: most - 1], _ended(lines[most - 1], room)]
    pad = " " * cells(lead)
    return [(pad if number else lead) + line for number, line in enumerate(lines)] or [lead.rstrip()]


def _lines(text: str, room: int) -> Iterator[str]:
    line = ""
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        left = word
        while left:
            start = line + gap if line else ""
            free = room - cells(start)
            if cells(left) <= free:
                line, left = start + left, ""
            elif line and (cells(left) <= room or left.isascii() or free < 2):
                yield line
                line = ""
            else:  # wider than a line: text without spaces, which goes on where the line is
                piece = _head(left, free) or left[0]
                yield start + piece
                line, left = "", left[len(piece) :]
    if line:
        yield line


def _ended(line: str, room: int) -> str:
    while cells(line) > room - 2 and " " in line:
        line = line.rpartition(" ")[0]
    return (line if cells(line) <= room - 2 else _head(line, room - 2)) + " …"


def _head(text: str, width: int) -> str:
    """As much of the text as fits."""
    used = 0
    for at, char in enumerate(text):
        used += _cells(char)
        if used > width:
            return text[:at]
    return text
