"""The toggles of the engine screen: wanted, in effect, staged; the choices of the one under the cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from rltop.tui.rows import Row, Span, extend, restyle, row_cells, split
from rltop.tui.staging import Staging
from rltop.tui.text import cells, fit, pad, wrap
from rltop.tui.toggle_views import MIXED, ToggleView
from rltop.tui.view import Frame, Picker

_NAME = 20
_HOW = 16
"""Cells below which a longer word on how a value was seen is not begun."""


class TogglesSection(Struct):
    """A list with a cursor."""

    picker: Picker = field(default_factory=Picker)

    def cursor(self, toggles: Sequence[ToggleView]) -> ToggleView | None:
        """The toggle under the cursor."""
        return toggles[self.picker.index([toggle.name for toggle in toggles])] if toggles else None

    def rows(
        self, toggles: Sequence[ToggleView], staging: Staging, frame: Frame, width: int, height: int, *, focused: bool
    ) -> list[Row]:
        """The list, and under it the choices of the cursor's toggle when the section has the keyboard."""
        if not toggles:
            self.picker.lines = []
            return [((" nothing is known of its toggles", "dim"),)]
        about = list(self._about(toggles, staging, frame, width)) if focused else []

        def rows(index: int, here: bool) -> list[Row]:
            row = toggle_row(toggles[index], staging, frame, width)
            return [restyle(extend(row, width), "+sel") if here and focused else row]

        room = max(1, height - len(about))
        drawn = self.picker.draw([toggle.name for toggle in toggles], room, lambda index: 1, rows)
        return [*drawn, *about][:height]

    def need(self, toggles: Sequence[ToggleView], staging: Staging, frame: Frame, width: int, *, focused: bool) -> int:
        """Rows for all of it."""
        about = len(list(self._about(toggles, staging, frame, width))) if focused and toggles else 0
        return max(1, len(toggles)) + about

    def _about(self, toggles: Sequence[ToggleView], staging: Staging, frame: Frame, width: int) -> Iterator[Row]:
        toggle = self.cursor(toggles)
        if toggle is None:
            return
        yield ((frame.glyphs.limit * max(1, width - 1), "rule"),)
        if toggle.choices:
            yield from _choices(toggle, staging, frame, width)
        seen = staging.looking.get(toggle.name, "")
        if toggle.locked:
            yield from _lines(f"cannot be changed: {toggle.locked}", "warn", frame, width)
        if seen in toggle.refused:
            yield from _lines(f"{seen} cannot be had: {toggle.refused[seen]}", "warn", frame, width)
        if toggle.free:
            yield from _lines(f"= types a value: {toggle.free}", "dim", frame, width)
        if toggle.aliases:
            yield from _lines(f"moves with it: {', '.join(toggle.aliases)}", "accent", frame, width)
        if toggle.trainer_side:
            sides = f"engine {toggle.engine_side or '?'}, trainer {toggle.trainer_side}"
            # The trainer has it or has it not; the engine may have it in several ways.
            differ = toggle.engine_side and (toggle.engine_side == "off") != (toggle.trainer_side == "off")
            style = "warn" if differ else "dim"
            yield from _lines(f"two sides: {sides}", style, frame, width)
        yield from _lines(effect_text(toggle), "warn" if toggle.ignored else "dim", frame, width)


def effect_text(toggle: ToggleView) -> str:
    """What is in effect and how that is known, in words."""
    how = f" ({toggle.verify})" if toggle.verify and toggle.verify != MIXED else ""
    if toggle.ignored:
        return f"asked for {toggle.wanted}, but the engine ignores it: {toggle.value or '?'} is in effect{how}"
    if not toggle.value and toggle.starting:
        return (f"asked for {toggle.wanted}; " if toggle.wanted else "") + "seen when the engine has started"
    if not toggle.value and not toggle.wanted:
        return f"nothing is known of it now{how}"
    if not toggle.value:
        return f"asked for {toggle.wanted}; what is in effect cannot be seen{how}"
    if toggle.value == MIXED:
        return "differs between the selected engines"
    return f"in effect: {toggle.value}{how}"


def toggle_row(toggle: ToggleView, staging: Staging, frame: Frame, width: int) -> Row:
    """Mark, name, value, staged value; how it was verified at the right end where there is room."""
    glyphs = frame.glyphs
    wrong = toggle.wrong and toggle.value != MIXED
    if toggle.ignored:
        mark, style = glyphs.fail, "bad"
    elif wrong:
        mark, style = glyphs.warn, "warn"
    elif toggle.value == MIXED:
        mark, style = glyphs.dot, "dim"
    else:
        mark, style = (glyphs.ok, "ok") if toggle.value else (glyphs.skip, "dim")
    told: list[Span] = [(frame.safe(toggle.value or toggle.wanted) or "-", "strong" if toggle.value else "dim")]
    if toggle.ignored:
        told.append((f", ignores {frame.safe(toggle.wanted)}", "bad"))
    elif wrong:
        told.append((f", wanted {frame.safe(toggle.wanted)}", "warn"))
    elif not toggle.value and toggle.wanted:
        told.append((", starting" if toggle.starting else ", not verified", "faint"))
    staged = staging.changes.get(toggle.name)
    if staged is not None:
        told.append((f" {glyphs.arrow} {frame.safe(staged)}", "accent+b"))
    name = pad(frame.safe(toggle.name), _NAME, mark=glyphs.cut)
    left: Row = ((f" {mark} ", style), (f"{name} ", "text"), *told)
    verify = "" if toggle.verify == MIXED or toggle.ignored or wrong else frame.safe(toggle.verify)
    room = width - row_cells(left) - 3
    if verify and room >= min(cells(verify), _HOW):
        return split(left, ((f"{fit(verify, room, mark=glyphs.cut)} ", "faint"),), width)
    return left


def _choices(toggle: ToggleView, staging: Staging, frame: Frame, width: int) -> Iterator[Row]:
    """All choices, the one that will be in accent brackets, refused ones grey in round ones."""
    here = staging.looking.get(toggle.name) or staging.changes.get(toggle.name) or toggle.now
    row: list[Span] = [(" ", "text")]
    used = 1
    for choice in toggle.choices:
        text = frame.safe(choice)
        refused = choice in toggle.refused
        piece = f"({text})" if refused else f" {text} "
        style = "faint" if refused else "text"
        if choice == here:
            piece, style = f"[{text}]", "warn+b" if refused else "accent+b"
        if used + len(piece) + 1 > width and used > 1:
            yield tuple(row)
            row, used = [(" ", "text")], 1
        row.append((f"{piece} ", style))
        used += len(piece) + 1
    yield tuple(row)


def _lines(text: str, style: str, frame: Frame, width: int) -> Iterator[Row]:
    for piece in wrap(frame.safe(text), max(10, width - 2)):
        yield ((f" {piece}", style),)
