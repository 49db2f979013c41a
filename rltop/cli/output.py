"""stdout is data, stderr is narration: JSON that every parser reads, and plain tables."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1
"""Version of every JSON object that the command line prints; a change that breaks a reader makes it 2."""


def plain(value: Any) -> Any:
    """`value` with NaN and Inf as the strings "NaN", "Infinity", "-Infinity", which JSON has no numbers for."""
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(item) for item in value]
        case bytes():
            return value.hex()
        case _:
            return value


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on stdout, `schema` first."""
    # A stdout that is not UTF-8 gets ASCII: JSON has its own escapes, the stream's would make it no JSON.
    wide = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    print(json.dumps(plain({"schema": SCHEMA, **value}), ensure_ascii=not wide, indent=2, allow_nan=False))


def note(text: str) -> None:
    """One line of narration on stderr. A terminal that is gone (closed window, dropped ssh) keeps no work undone."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def number(value: Any) -> str:
    """A value for people: six significant digits; NaN and Inf in words, `-` where unknown; maps as `key value`."""
    match value:
        case None:
            return "-"
        case bool() | str():
            return str(value)
        case int():
            return str(value)
        case float():
            return "NaN" if math.isnan(value) else "inf" if value == math.inf else f"{value:.6g}"
        case Mapping():
            return ", ".join(f"{key} {number(item)}" for key, item in value.items() if item is not None)
        case list() | tuple():
            return ", ".join(map(number, value))
        case _:
            return str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: str = "") -> list[str]:
    """Lines of a left-aligned table without borders; the last column may be as long as it likes."""
    cells = [list(head), *([clean(number(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def clean(text: str) -> str:
    """Text from a run on one line, without the control characters that could command the terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def age(seconds: float) -> str:
    """`12s`, `3m05s`, `2h10m`, `4d02h`."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes == 0:
        return f"{whole}s"
    if hours == 0:
        return f"{minutes}m{whole % 60:02d}s"
    if days == 0:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{days}d{hours % 24:02d}h"


def size(count: int | None) -> str:
    """`512 B`, `1.5 MB`: bytes in powers of 1000; `-` where unknown."""
    if count is None:
        return "-"
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if value >= 99.5 or units[0] == "B" else f"{value:.2g} {units[0]}"
