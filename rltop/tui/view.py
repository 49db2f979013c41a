"""What a pane shows and how it reacts, without Textual: `Frame` in, rows out. Every pane is one `View`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from msgspec import Struct, field

from rltop.tui.fleet import EngineMemo, EngineView
from rltop.tui.history import History
from rltop.tui.picture import Link, State
from rltop.tui.rows import Row, window
from rltop.tui.text import clean
from rltop.tui.theme import UNICODE, Glyphs


class Frame(Struct, frozen=True, kw_only=True):
    """One moment of the run and of the connection: all that a view may look at."""

    state: State
    link: Link
    events: Sequence[Mapping[str, Any]] = ()
    """Oldest first."""
    gaps: Sequence[tuple[int, int]] = ()
    """Event sequences that this viewer missed, inclusive."""
    histories: Mapping[str, History] = field(default_factory=dict)
    server_now: float | None = None
    """The daemon's wall clock now, seconds; None before its first tick."""
    clock: Callable[[float], str] = str
    """Wall time -> `HH:MM:SS`."""
    glyphs: Glyphs = UNICODE
    run_name: str = ""
    control: bool = False
    memo: EngineMemo = field(default_factory=EngineMemo)

    def engines(self) -> list[EngineView]:
        """The engines, by id."""
        return self.memo.views(self.state)

    def safe(self, text: object) -> str:
        """Text of the run as one printable line."""
        return clean(text, ascii_only=self.glyphs.ascii_only, newline=self.glyphs.newline)

    def stamp(self, when: object) -> str:
        """`HH:MM:SS` of a wall time that a run sent; dashes for what is no time on any calendar."""
        if isinstance(when, int | float) and not isinstance(when, bool):
            with suppress(ValueError, OverflowError, OSError):
                return self.clock(when)
        return "--:--:--"

    def since(self, when: float | None) -> float | None:
        """Seconds from a server time to now."""
        return None if when is None or self.server_now is None else max(0.0, self.server_now - when)


class View(Protocol):
    """One pane. It keeps its own cursor, scroll position, filter and sort order."""

    name: str
    title: str
    filter: str

    def uses(self, key: str) -> bool:
        """Whether a change of this state key can change the rows."""

    def badge(self, frame: Frame) -> Row:
        """A few characters behind the title, also in tab bars: counts of what is wrong."""

    def summary(self, frame: Frame) -> Row:
        """Right end of the title line."""

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        """At most `height` rows; each may be narrower than `width`."""

    def act(self, action: str, frame: Frame) -> bool:
        """Take a key's action; False when it means nothing here."""

    def click(self, x: int, y: int, frame: Frame) -> None:
        """A mouse click on a cell of the body."""

    def deep(self) -> bool:
        """Something is open that the action `back` closes: a story, a detail, the chart cursor."""

    def has_selection(self) -> bool:
        """Something was drawn that can be opened and copied."""

    def selection(self, frame: Frame) -> str:
        """Text of the selected row for the clipboard; empty when nothing is selected."""


class Picker(Struct):
    """Cursor of a list whose rows come, go and change places: it remembers the key, not the index."""

    key: str | None = None
    """None: nobody moved it yet; it is on the first row (or the last, with `tail`)."""
    tail: bool = False
    top: int = 0
    page: int = 1
    lines: list[int] = field(default_factory=list)
    """Item index of each body row as last drawn, for clicks."""
    shown: tuple[int, int] = (0, 0)
    """First and last item (exclusive) as last drawn."""

    def index(self, keys: Sequence[str]) -> int:
        """Where the cursor is; 0 for an empty list."""
        if self.key is not None and self.key in keys:
            return keys.index(self.key)
        self.key = None
        return max(0, len(keys) - 1) if self.tail else 0

    def move(self, action: str, keys: Sequence[str]) -> bool:
        """Take `up`, `down`, `page-up`, `page-down`, `home` or `end`."""
        if not keys:
            return False
        at, last = self.index(keys), len(keys) - 1
        match action:
            case "up":
                at -= 1
            case "down":
                at += 1
            case "page-up":
                at -= max(1, self.page - 1)
            case "page-down":
                at += max(1, self.page - 1)
            case "home":
                at = 0
            case "end":
                at = last
            case _:
                return False
        at = min(last, max(0, at))
        follow = at == last if self.tail else at == 0
        self.key = None if follow else keys[at]
        return True

    def click(self, y: int, keys: Sequence[str]) -> None:
        """Select the item that was drawn at body row `y`."""
        if 0 <= y < len(self.lines) and self.lines[y] < len(keys):
            self.key = keys[self.lines[y]]

    def draw(
        self, keys: Sequence[str], height: int, size: Callable[[int], int], rows: Callable[[int, bool], list[Row]]
    ) -> list[Row]:
        """The visible rows of a list of items of different heights, with the cursor's item in sight.

        size: height of item `i` in rows; rows: its rows, given whether it is the selected one.
        """
        at = self.index(keys)
        sizes = [size(index) for index in range(len(keys))]
        first = sum(sizes[:at])
        total = sum(sizes)
        bottom = first + (sizes[at] if sizes else 1) - 1
        self.page = height
        # Show the end of a tall item only as far as its start stays in sight.
        self.top = window(total, max(first, min(bottom, first + height - 1)), self.top, height)
        self.top = window(total, first, self.top, height)
        out: list[Row] = []
        self.lines = []
        row, seen = 0, []
        for index, item_size in enumerate(sizes):
            if row + item_size > self.top and len(out) < height:
                seen.append(index)
                skip = max(0, self.top - row)
                part = rows(index, index == at)[skip : skip + height - len(out)]
                out.extend(part)
                self.lines.extend([index] * len(part))
            row += item_size
        self.shown = (seen[0], seen[-1] + 1) if seen else (0, 0)
        return out

    def position(self, count: int) -> str:
        """`3-14/64` when not all items are visible, else empty."""
        lo, hi = self.shown
        return f"{lo + 1}-{hi}/{count}" if hi - lo < count and hi else ""


def matches(text: str, needle: str) -> bool:
    """Filter rule of every list: all words occur, in any order, whatever their case."""
    low = text.lower()
    return all(word in low for word in needle.lower().split())
