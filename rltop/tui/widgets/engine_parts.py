"""The parts of the engine screen at its right: status, toggles, log and A/B of what is under the cursor.

As many as fit stand one above the other; the one with the keyboard first, and a log gets what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from rltop.evidence.access import without_access
from rltop.protocol.messages import LinesAnswer
from rltop.tui.engine_scene import Scene
from rltop.tui.operations import op_of
from rltop.tui.rows import Row, Span, crop, plain_text, row_cells, split
from rltop.tui.staging import Staging
from rltop.tui.text import wrap
from rltop.tui.view import Frame
from rltop.tui.widgets.engine_details import ab_rows, log_rows, status_rows
from rltop.tui.widgets.toggles import TogglesSection

SECTIONS = {"status": "Status", "toggles": "Toggles", "log": "Log", "ab": "A/B"}
_LOG_LEAST = 5
"""Rows that a log needs to be worth showing beside something else."""


class EngineParts(Struct):
    """What is shown of them, and where each was drawn last."""

    staging: Staging
    active: str = "list"
    """What has the keyboard: `list`, or one of `SECTIONS`."""
    shown: str = "status"
    """The part that was looked at last."""
    full: bool = False
    """One part has the whole screen."""
    access: bool = False
    """The log is shown with its lines of good HTTP requests."""
    toggles: TogglesSection = field(default_factory=TogglesSection)
    tops: dict[str, int] = field(default_factory=dict)
    """Rows that a part is scrolled down; of the log, up from its end."""
    log: dict[str, LinesAnswer] = field(default_factory=dict)
    """The newest lines of the log that was asked for last, by its name."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Part -> its rows as last drawn."""

    def go(self, part: str) -> None:
        """Give a part, or the list, the keyboard."""
        self.active = part
        if part in SECTIONS:
            self.shown = part

    def at(self, y: int) -> str:
        """The part that was drawn at row `y`; empty: none."""
        return next((part for part, (lo, hi) in self.places.items() if lo <= y < hi), "")

    def scroll(self, part: str, action: str) -> None:
        """Move what a part shows."""
        lo, hi = self.places.get(part, (0, 2))
        page = max(1, hi - lo - 2)
        step = {"up": -1, "down": 1, "page-up": -page, "page-down": page, "home": -(1 << 30), "end": 1 << 30}[action]
        if part == "log":
            step = -step
        self.tops[part] = max(0, self.tops.get(part, 0) + step)

    def text(self, scene: Scene) -> str:
        """Text for the clipboard: of the part that has the keyboard."""
        if scene.cursor is None:
            return ""
        match self.active:
            case "toggles":
                return "\n".join(f"{t.name}\t{t.now}\t{t.value or 'not seen'}\t{t.verify}" for t in scene.toggles)
            case "log":
                answer = self.log.get(scene.cursor.log)
                return "\n".join(map(scene.frame.safe, answer.lines)) if answer is not None else ""
            case part:
                rows = self._part(part if part in SECTIONS else "status", scene, 200, 1 << 16)
                return f"engine {scene.frame.safe(scene.cursor.id)}\n{plain_text(rows)}"

    def there(self, scene: Scene) -> list[str]:
        """The parts that there are."""
        return [part for part in SECTIONS if part != "ab" or scene.ab]

    def _part(self, part: str, scene: Scene, width: int, height: int) -> list[Row]:
        """The rows of a part; of the toggles at most `height`, of others all."""
        frame, view = scene.frame, scene.cursor
        if view is None:
            return []
        focused = part == self.active
        match part:
            case "status":
                return list(status_rows(view, frame, scene.fleet, op_of(scene.ops, view.id), width))
            case "toggles":
                why = scene.why_not() if focused else ""
                notice = _notice(why, width)
                room = height - len(notice)
                rows = self.toggles.rows(scene.toggles, self.staging, frame, width, room, focused=focused)
                return [*rows, *notice]
            case "log":
                answer = self.log.get(view.log)
                lines, why = (answer.lines, answer.why) if answer is not None else ([], "")
                if not self.access and lines:
                    lines = without_access(lines)
                    why = "only lines of good HTTP requests: v shows them"
                return log_rows(lines, why if view.log else "it names no log", frame, width)
            case _:
                ab = scene.fleet.ab if scene.fleet is not None else None
                return list(ab_rows(ab, scene.views, frame, width)) if ab is not None else []

    def hides(self, scene: Scene) -> int:
        """How many lines of the log are left out."""
        answer = self.log.get(scene.cursor.log) if scene.cursor is not None and not self.access else None
        return len(answer.lines) - len(without_access(answer.lines)) if answer is not None else 0

    def _need(self, part: str, scene: Scene, width: int) -> int:
        if part == "log":
            return _LOG_LEAST
        if part == "toggles":
            focused = self.active == "toggles"
            extra = len(_notice(scene.why_not() if focused else "", width))
            return self.toggles.need(scene.toggles, self.staging, scene.frame, width, focused=focused) + extra
        return len(self._part(part, scene, width, 1 << 16))

    def rows(self, scene: Scene, width: int, height: int) -> list[Row]:
        """The part with the keyboard, and as many others as fit beside it; a log takes what is left."""
        self.places = {}
        if width <= 0 or height <= 0:
            return []
        parts = self.there(scene)
        self.shown = self.shown if self.shown in parts else "status"
        order = [self.shown, *(part for part in ("status", "toggles", "ab", "log") if part != self.shown)]
        room, heights = height, dict[str, int]()
        for part in (part for part in order[: 1 if self.full else None] if part in parts):
            need = self._need(part, scene, width) + 1
            if not heights or need <= room:
                heights[part] = min(need, room)
                room -= heights[part]
        grow = "log" if "log" in heights else self.shown
        heights[grow] += room
        rows: list[Row] = []
        hidden = [SECTIONS[part] for part in parts if part not in heights]
        for part in (part for part in parts if part in heights):
            self.places[part] = (len(rows), len(rows) + heights[part])
            rows += self._titled(part, scene, hidden, width, heights[part])
            hidden = []
        return rows

    def _titled(self, part: str, scene: Scene, hidden: Sequence[str], width: int, height: int) -> list[Row]:
        rows = self._part(part, scene, width, height - 1)
        room = height - 1
        top = min(self.tops.get(part, 0), max(0, len(rows) - room))
        self.tops[part] = top
        more = ""
        if len(rows) > room:
            first = len(rows) - room - top if part == "log" else top
            more = f"{first + 1}-{first + room}/{len(rows)}"
            rows = rows[first : first + room]
        elif part == "toggles":
            more = self.toggles.picker.position(len(scene.toggles))
        right: list[Span] = [(more, "dim")] if more else []
        if part == "log" and (hides := self.hides(scene)):
            right.append((f"{'  ' if more else ''}{hides} HTTP lines hidden (v)", "faint"))
        if hidden:
            right.append((f"{'  ' if right else ''}tab: {', '.join(hidden)}", "dim"))
        who = scene.named(scene.targets) if part == "toggles" else ""
        name = scene.named([scene.cursor]) if scene.cursor is not None and not who else who
        short = width < 60 and bool(more) and len(hidden) > 1
        title = SECTIONS[part] + (f" of {name}" if part != "ab" and name and not short else "")
        title_row = rule_row(scene.frame, title, tuple(right), width, focused=part == self.active)
        return [title_row, *rows, *[()] * (room - len(rows))]


def rule_row(frame: Frame, title: str, right: Row, width: int, *, focused: bool) -> Row:
    """A title line. What does not fit beside the title gives way, from its end."""
    glyphs = frame.glyphs
    rule = glyphs.rule_focus if focused else glyphs.rule
    line = "accent" if focused else "rule"
    left: Row = ((rule, line), (f" {title} ", "accent+b" if focused else "strong"))
    while right and row_cells(left) + row_cells(right) + 4 > width:
        right = right[:-1]
    tail: Row = ((" ", line), *right, (" ", line), (rule, line)) if right else ()
    return crop(split(left, tail, width, gap=rule, style=line), width)


def _notice(text: str, width: int) -> list[Row]:
    """A remark under the toggles, wrapped; nothing for no text."""
    return [((f" {piece}", "accent"),) for piece in wrap(text, max(10, width - 2))] if text else []
