"""The engines of the engine screen: one row each, a bar before the selected ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from rltop.tui.fleet import EngineView
from rltop.tui.rows import Row, Span, extend, restyle
from rltop.tui.text import fit_middle, num, pad
from rltop.tui.view import Frame, Picker, matches
from rltop.tui.widgets.engine_cells import STATE_CELLS, signals_cell, state_cell, weights_cell

_Cell = Callable[[EngineView, Frame, int], Span]


def _id(view: EngineView, frame: Frame, width: int) -> Span:
    return fit_middle(frame.safe(view.id) or "-", width, mark=frame.glyphs.cut), "text"


def _rate(view: EngineView, frame: Frame, width: int) -> Span:
    return num(view.tokens_per_s), "text"


def _arm(view: EngineView, frame: Frame, width: int) -> Span:
    return frame.safe(view.arm), "accent"


def _columns(width: int, *, arms: bool) -> list[tuple[str, int, bool, _Cell]]:
    """(head, cells, to the right, cell) of what fits into `width`, in their order."""
    chosen: list[tuple[str, int, bool, _Cell]] = [("id", 4, False, _id)]
    chosen += [("", 1, False, _arm)] if arms else []
    chosen += [("state", STATE_CELLS, False, state_cell), ("PHGTL", 5, False, signals_cell)]
    for more in (("weights", 9, False, weights_cell), ("tok/s", 6, True, _rate)):
        if 1 + sum(size + 1 for _, size, _, _ in chosen) + more[1] <= width:
            chosen.append(more)
    return chosen


class EngineList(Struct):
    """A list with a cursor; the selection itself is the screen's."""

    filter: str = ""
    picker: Picker = field(default_factory=Picker)

    def views(self, frame: Frame) -> list[EngineView]:
        """Engines that match the filter, by id: they keep their places under the operator's fingers."""
        views = frame.engines()
        if not self.filter:
            return views
        return [
            view
            for view in views
            if matches(f"{view.id} {view.kind} {view.state} {view.host} {view.weights} {view.owner}", self.filter)
        ]

    def cursor(self, frame: Frame) -> EngineView | None:
        """The engine under the cursor."""
        views = self.views(frame)
        return views[self.picker.index([view.id for view in views])] if views else None

    def body(self, frame: Frame, selected: set[str], width: int, height: int, *, focused: bool) -> list[Row]:
        """At most `height` rows of `width` cells, the first one the head."""
        self.picker.lines = []
        views = self.views(frame)
        if not views:
            return [((("  no engine matches the filter" if self.filter else "  no engines yet"), "dim"),)]
        columns = _columns(width, arms=any(view.arm for view in views))
        head = " ".join(pad(name, size, right=right) for name, size, right, _ in columns)

        def rows(index: int, here: bool) -> list[Row]:
            view = views[index]
            row = self._row(view, frame, columns, selected=view.id in selected)
            return [restyle(extend(row, width), "+sel" if focused else "+b") if here else row]

        drawn = self.picker.draw([view.id for view in views], height - 1, lambda index: 1, rows)
        return [((" " + head, "faint"),), *drawn]

    def _row(
        self, view: EngineView, frame: Frame, columns: Sequence[tuple[str, int, bool, _Cell]], *, selected: bool
    ) -> Row:
        out: list[Span] = [(frame.glyphs.half, "accent") if selected else (" ", "text")]
        for index, (_, size, right, cell) in enumerate(columns):
            text, style = cell(view, frame, size)
            out.append((" " * bool(index) + pad(text, size, right=right), style))
        return tuple(out)

    def position(self, frame: Frame) -> str:
        """`3-14/64` when not all are in sight."""
        return self.picker.position(len(self.views(frame)))

    def move(self, action: str, frame: Frame) -> bool:
        """A movement of the cursor."""
        return self.picker.move(action, [view.id for view in self.views(frame)])

    def click(self, y: int, frame: Frame) -> None:
        """A click on a row; the head is row 0."""
        self.picker.click(y - 1, [view.id for view in self.views(frame)])
