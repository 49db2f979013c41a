"""Text from the run, made safe and measured in terminal cells; numbers and times in few characters.

Everything that a run, an engine or a model wrote is hostile until `clean` saw it: no escape sequence, control,
bidirectional override or invisible character reaches the terminal, and nothing is ever read as markup.
"""

from __future__ import annotations

import math
import re
import unicodedata
from functools import lru_cache
from typing import Any

from rich.cells import cell_len

_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor, modes
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"  # OSC, DCS, SOS, PM, APC: up to their end
    r"|\x1b[ -/]*[0-~]?",  # anything shorter
    re.DOTALL,
)
_MAX_MARKS = 2
"""Combining marks kept per character; more only serve to smear over the neighbours."""


def clean(text: object, *, ascii_only: bool = False, newline: str = "↵") -> str:
    """One line of printable text: escape sequences and invisible characters removed, newlines shown as `newline`.

    ascii_only: everything outside ASCII becomes `?`.
    """
    line = text if isinstance(text, str) else str(text)
    if line.isascii() and line.isprintable():
        return line
    line = _ESCAPES.sub("", line).replace("\r\n", "\n")
    out: list[str] = []
    marks = 0
    for char in line:
        if " " <= char <= "~":
            out.append(char)
            marks = 0
            continue
        if char in "\n\u2028\u2029":
            out.append(newline)
        elif char in "\t\v\f\r":
            out.append(" ")
        else:
            match unicodedata.category(char)[0]:
                case "C":  # controls, formats (joiners, overrides), surrogates, private use, unassigned
                    if unicodedata.category(char) in ("Co", "Cn", "Cs"):
                        out.append("\N{REPLACEMENT CHARACTER}")
                    continue
                case "M":
                    marks += 1
                    if marks <= _MAX_MARKS and not _is_selector(char):
                        out.append(char)
                    continue
                case "Z":
                    out.append(" ")
                case _:
                    out.append(char)
        marks = 0
    line = "".join(out)
    return line.replace("↵", "\\n").encode("ascii", "replace").decode() if ascii_only else line


def clean_lines(text: object, *, ascii_only: bool = False) -> list[str]:
    """The lines of a text, each as `clean` gives it."""
    whole = text if isinstance(text, str) else str(text)
    return [clean(line, ascii_only=ascii_only) for line in _ESCAPES.sub("", whole).replace("\r\n", "\n").split("\n")]


def _is_selector(char: str) -> bool:
    """Variation selectors change the width of the character before them, and terminals disagree about how."""
    return "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"


@lru_cache(4096)
def cells(text: str) -> int:
    """Width in terminal cells."""
    return len(text) if text.isascii() else cell_len(text)


def head(text: str, width: int) -> str:
    """The longest start of `text` that is at most `width` cells wide."""
    if text.isascii():
        return text[: max(0, width)]
    used = 0
    for index, char in enumerate(text):
        used += cells(char)
        if used > width:
            return text[:index]
    return text


def fit(text: str, width: int, *, mark: str = "…") -> str:
    """`text` if it fits into `width` cells, else its start and `mark`."""
    if width <= 0:
        return ""
    if cells(text) <= width:
        return text
    return head(text, width - cells(mark)) + mark if width >= cells(mark) else head(mark, width)


def fit_middle(text: str, width: int, *, mark: str = "…") -> str:
    """`text` if it fits, else its start and end around `mark`: for ids and paths, where both ends tell."""
    room = width - cells(mark)
    if cells(text) <= width or room < 2:
        return fit(text, width, mark=mark)
    tail_room = room // 2
    tail = head(text[::-1], tail_room)[::-1]
    return head(text, room - cells(tail)) + mark + tail


def pad(text: str, width: int, *, right: bool = False, mark: str = "…") -> str:
    """Exactly `width` cells: cut with `mark` or filled with spaces (`right`: text to the right)."""
    text = fit(text, width, mark=mark)
    fill = " " * (width - cells(text))
    return fill + text if right else text + fill


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken at spaces where there are any. At least one line."""
    if width <= 0:
        return [""]
    lines: list[str] = []
    rest = text
    while cells(rest) > width:
        piece = head(rest, width) or rest[0]
        cut = piece.rfind(" ")
        if cut > 0 and not rest[len(piece) :].startswith(" "):
            piece = piece[:cut]
        lines.append(piece.rstrip())
        rest = rest[len(piece) :].lstrip(" ")
    lines.append(rest)
    return lines


def num(value: Any, *, steady: bool = False) -> str:
    """A number in at most 7 characters and about 3 significant digits: `0.0123`, `12.3k`, `1e-9`, `NaN`, `-Inf`.

    steady: keep trailing zeros, so that a value that changes does not change its width.
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    size = abs(value)
    if value == 0:
        return "0"
    if size < 1e-3:
        short = f"{value:.{0 if size < 1e-99 else 1}e}"
        return short.replace(".0e", "e").replace("e-0", "e-")
    if float(value).is_integer() and size < 1e4:
        return str(int(value))
    for limit, scale, unit in ((1e4, 1.0, ""), (1e7, 1e3, "k"), (1e10, 1e6, "M"), (1e13, 1e9, "G")):
        if size < limit:
            text = _three(value / scale)
            return (text.rstrip("0").rstrip(".") if "." in text and not steady else text) + unit
    return f"{value:.0e}".replace("e+", "e")


def _three(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3 if size >= 0.09995 else 4
    return f"{value:.{digits}f}"


def age(seconds: float) -> str:
    """A duration in at most 6 characters: `0.4s`, `12s`, `3m20s`, `2h05m`, `4d03h`."""
    if not math.isfinite(seconds):
        return "?"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def whole_age(seconds: float) -> str:
    """`age` without tenths of a second."""
    return f"{int(max(0.0, seconds))}s" if seconds < 60 else age(seconds)


def coarse_age(seconds: float) -> str:
    """A duration that seldom changes, for columns of ages: `now` below 3 s, then `5s`, `10s`, `4m`, `2h`, `3d`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 3:
        return "now"
    for limit, unit, name in ((60, 1, "s"), (3600, 60, "m"), (86400, 3600, "h")):
        if seconds < limit:
            count = int(seconds) // unit
            return f"{count - count % 5 if unit == 1 and count >= 5 else count}{name}"
    return f"{int(seconds) // 86400}d"


def plain(value: Any) -> str:
    """A JSON value of the run in words: `a 1, b 2` for maps, integers whole (they are counts, ids, sizes that people
    compare), other numbers as `num`, text as it is (not cleaned)."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return str(value)
        case float():
            return num(value)
        case dict():
            return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(plain(item) for item in value)
        case _:
            return str(value)
