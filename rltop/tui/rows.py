"""Lines of a pane as plain data: a row is a tuple of spans, a span is (text, style name). No Textual, no colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rltop.tui.text import cells, fit, head

Span: TypeAlias = tuple[str, str]
"""(clean text, style name as in `rltop.tui.theme.Palette`)."""
Row: TypeAlias = tuple[Span, ...]


def row_cells(row: Row) -> int:
    """Width of a row in cells."""
    return sum(cells(text) for text, _ in row)


def crop(row: Row, width: int, mark: str = "…") -> Row:
    """`row` cut to `width` cells; what was cut ends in `mark`."""
    if row_cells(row) <= width:
        return row
    out: list[Span] = []
    room = width
    for index, (text, style) in enumerate(row):
        size = cells(text)
        more = any(rest for rest, _ in row[index + 1 :])
        if size < room or (size == room and not more):
            out.append((text, style))
            room -= size
            continue
        cut = fit(text, room, mark=mark) if size > room else head(text, room - cells(mark)) + mark
        out.append((cut, style))
        break
    return tuple(out)


def extend(row: Row, width: int, fill: str = "text") -> Row:
    """`row` cut or filled to exactly `width` cells."""
    row = crop(row, width)
    missing = width - row_cells(row)
    return (*row, (" " * missing, fill)) if missing > 0 else row


def split(left: Row, right: Row, width: int, *, gap: str = " ", style: str = "text") -> Row:
    """`left` and `right` at the two ends of `width` cells, `gap` repeated between; `left` gives way."""
    right = crop(right, width)
    room = width - row_cells(right)
    left = crop(left, max(0, room - 1)) if room > 0 else ()
    missing = room - row_cells(left)
    return (*left, (gap * missing, style), *right) if missing > 0 else (*left, *right)


def restyle(row: Row, flag: str) -> Row:
    """Every span with `flag` (`+sel`, `+b`) added to its style."""
    return tuple((text, style + flag) for text, style in row)


def plain_text(rows: Iterable[Row]) -> str:
    """The characters alone, trailing blanks removed."""
    return "\n".join("".join(text for text, _ in row).rstrip() for row in rows)


def painted_to(old: Row, new: Row, width: int) -> int:
    """First column from which both rows are equal up to `width`: repaint only what is left of it.

    Only whole equal spans at the end count, so a wide character is never cut in two. (Textual repaints a line from
    its widget's left edge whatever region was asked for, hence no left bound.)
    """
    end = width
    for (old_text, old_style), (new_text, new_style) in zip(reversed(old), reversed(new), strict=False):
        if old_text != new_text or old_style != new_style:
            break
        end -= cells(new_text)
    return max(0, end)


def merged(row: Row) -> list[Span]:
    """`row` with as few spans as possible: blanks look the same in any colour, so they join their neighbours.

    Every span costs about 40 bytes of escape sequences. Where blanks can be seen (a selected row, a cursor, heat, an
    underline) they stay on their side.
    """
    out: list[Span] = []
    for text, style in row:
        if not text:
            continue
        if out:
            before, last = out[-1]
            same_ground = _ground(last) == _ground(style)
            if style == last or (same_ground and text.isspace()):
                out[-1] = (before + text, last)
                continue
            if same_ground and before.isspace():
                out[-1] = (before + text, style)
                continue
        out.append((text, style))
    return out


def _ground(style: str) -> str:
    """What a style makes of a blank: empty where it cannot be seen."""
    base, *flags = style.split("+")
    seen = [flag for flag in flags if flag in ("sel", "cur")]
    return "+".join([base if base.startswith("heat") or base == "minus" else "", *seen]).rstrip("+")


def window(count: int, cursor: int, top: int, height: int) -> int:
    """New `top` of a list of `count` rows so that `cursor` is visible in `height` rows and no row is wasted."""
    if height <= 0:
        return 0
    top = min(top, cursor)
    top = max(top, cursor - height + 1)
    return max(0, min(top, count - height))


def columns(parts: Sequence[Row], widths: Sequence[int], gap: str = " ") -> Row:
    """Rows side by side, each in its width."""
    out: list[Span] = []
    for index, (part, size) in enumerate(zip(parts, widths, strict=True)):
        if index:
            out.append((gap, "text"))
        out.extend(extend(part, size))
    return tuple(out)
