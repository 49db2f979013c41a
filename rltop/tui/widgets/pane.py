"""The one widget of the dashboard: it paints rows and repaints only lines that changed."""

from __future__ import annotations

from collections.abc import Callable

from rich.segment import Segment
from textual import events
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from rltop.tui.rows import Row, extend, merged, painted_to
from rltop.tui.theme import Palette


class Pane(Widget):
    """A rectangle of styled text. `show` gives it rows; the palette turns style names into colours.

    Textual sends what is marked dirty and compares nothing with the previous screen, so marking is the optimisation:
    `show` marks, per line, only what differs from the rows before.
    """

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Pane { position: absolute; width: 1; height: 1; }
    """

    def __init__(
        self,
        name: str,
        palette: Palette,
        *,
        ascii_only: bool = False,
        on_press: Callable[[int, int], None] | None = None,
        on_wheel: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(id=f"pane-{name}")
        self._palette = palette
        self._flag = ""
        self._ascii_only = ascii_only
        self._rows: list[Row] = []
        self._on_press = on_press
        self._on_wheel = on_wheel

    def place(self, region: Region) -> None:
        """Move and size the pane."""
        styles = self.styles
        styles.offset = (region.x, region.y)
        styles.width, styles.height = region.width, region.height

    def paint_with(self, palette: Palette, *, grey: bool) -> None:
        """Another palette, or all in grey; repaints everything if that is a change."""
        flag = "+grey" if grey else ""
        if palette is not self._palette or flag != self._flag:
            self._palette, self._flag = palette, flag
            self.refresh()

    def show(self, rows: list[Row], width: int, height: int) -> int:
        """Paint `rows`, cut and filled to `width` x `height`. Returns how many lines changed."""
        new = [extend(row, width) for row in rows[:height]]
        if self._ascii_only:
            new = [tuple((_ascii(text), style) for text, style in row) for row in new]
        new += [((" " * width, "text"),)] * (height - len(new))
        old, self._rows = self._rows, new
        if len(old) != len(new):
            self.refresh()
            return height
        dirty = [
            Region(0, y, max(1, painted_to(before, after, width)), 1)
            for y, (before, after) in enumerate(zip(old, new, strict=True))
            if before != after
        ]
        if dirty:
            self.refresh(*dirty)
        return len(dirty)

    @property
    def rows(self) -> list[Row]:
        """What is painted now."""
        return self._rows

    def render_line(self, y: int) -> Strip:
        """Line API: one row in the palette's colours."""
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self._palette["text" + self._flag])
        palette, flag = self._palette, self._flag
        return Strip([Segment(text, palette[style + flag]) for text, style in merged(self._rows[y])])

    def on_click(self, event: events.Click) -> None:
        """Hand a click to whoever owns the pane, in cells of the pane."""
        if self._on_press is not None:
            self._on_press(event.x, event.y)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel moves the cursor."""
        if self._on_wheel is not None:
            self._on_wheel("up")

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel moves the cursor."""
        if self._on_wheel is not None:
            self._on_wheel("down")


def _ascii(text: str) -> str:
    """The last guard of `--ascii`: whatever got here, one ASCII character per cell leaves."""
    return text if text.isascii() else "".join("~" if char == "…" else char if char.isascii() else "?" for char in text)
