"""Title lines with tabs, and the footer: one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rltop.tui.rows import Row, Span, crop, row_cells, split
from rltop.tui.theme import Glyphs
from rltop.tui.view import Frame, View


def title_rows(
    tabs: Sequence[tuple[int, View]], current: View, frame: Frame, width: int, *, focused: bool
) -> list[Row]:
    """Rule with the tabs of one place at its left and the current pane's summary at its right.

    tabs: (number key, view). When both do not fit the summary gets a line of its own; when the tabs alone do not, only
    the current one keeps its name.
    """
    rule = frame.glyphs.rule_focus if focused else frame.glyphs.rule
    line = "accent" if focused else "rule"
    summary = current.summary(frame)
    note: Row = ((f" /{frame.safe(current.filter)} ", "warn+b"),) if current.filter else ()
    left = _tabs(tabs, current, frame, focused, names=True)
    if row_cells(left) + row_cells(note) + 3 > width:
        left = _tabs(tabs, current, frame, focused, names=False)
    tail: Row = ((" ", line), *summary, (" ", line)) if summary else ()
    room = width - row_cells(left) - row_cells(note) - 2
    beside = row_cells(tail) + 1 <= room
    if beside:
        room -= row_cells(tail)
    title = crop(
        ((rule, line), *left, *note, (rule * max(1, room), line), *(tail if beside else ()), (rule, line)), width
    )
    return [title] if beside or not summary else [title, split((), (*summary, (" ", "text")), width)]


def _tabs(tabs: Sequence[tuple[int, View]], current: View, frame: Frame, focused: bool, *, names: bool) -> Row:
    row: list[Span] = []
    for number, view in tabs:
        here = view is current
        title = f" {number} {view.title}" if names or here else f" {number}"
        row.append((title, ("accent+b" if focused else "strong") if here else "dim"))
        badge = view.badge(frame)
        # A lone pane tells its counts in the summary already.
        if badge and len(tabs) > 1 and not here:
            row += [(" ", "text"), *badge]
        row.append((" ", "text"))
    return tuple(row)


def footer_row(hints: Iterable[tuple[str, str]], width: int, message: str = "") -> Row:
    """Keys that work now, as many whole ones as fit; the last hint (help) always stays, at the right end."""
    items = list(hints)
    if not items:
        return ()
    last = _hint(*items[-1])
    room = width - row_cells(last)
    out: list[Span] = []
    if message:
        out = [(f" {message} ", "accent")]
        room -= row_cells(tuple(out))
    for keys, label in items[:-1]:
        hint = _hint(keys, label)
        if row_cells(hint) > room:
            break
        out += hint
        room -= row_cells(hint)
    return (*out, (" " * max(0, room), "text"), *last)


def _hint(keys: str, label: str) -> Row:
    return ((f" {keys}", "accent"), (f" {label} ", "dim"))


def too_small(width: int, height: int, least: tuple[int, int], glyphs: Glyphs) -> list[Row]:
    """One message for a terminal in which nothing can be shown."""
    need = f"{least[0]}x{least[1]}"
    full = f"rltop needs {need}, this is {width}x{height}: enlarge the terminal"
    for text in (full, f"needs {need}, is {width}x{height}", f"needs {need}", "too small"):
        if len(text) <= width:
            return [((text, "warn"),)]
    words = full.replace(": enlarge the terminal", "").replace(",", "").split()
    return [((word, "warn"),) for word in words[:height]]
