"""The engine screen: engines at the left, everything about the one under the cursor at the right.

It owns cursors, selection and what is staged; what goes to the daemon is the desk's (`rltop.tui.desk`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from msgspec import Struct
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen

from rltop.protocol.messages import LinesAnswer
from rltop.tui.fleet import (
    EngineView,
    FleetView,
    OpView,
    ToggleView,
    fleet_view,
    merge,
    op_of,
    op_views,
    toggle_views,
)
from rltop.tui.keymap import Context, find, hints, works
from rltop.tui.keytable import KEYS
from rltop.tui.layout import LEAST, fits
from rltop.tui.rows import Row, Span, crop, plain_text, row_cells, split
from rltop.tui.staging import Staging, changes_text, names
from rltop.tui.text import age, wrap
from rltop.tui.theme import Palette
from rltop.tui.view import Frame
from rltop.tui.widgets.ask import AskLine
from rltop.tui.widgets.bars import footer_row, too_small
from rltop.tui.widgets.engine_details import ab_rows, log_rows, status_rows, without_access
from rltop.tui.widgets.engine_list import EngineList
from rltop.tui.widgets.header import header_rows
from rltop.tui.widgets.pane import Pane
from rltop.tui.widgets.toggles import TogglesSection

if TYPE_CHECKING:
    from textual.widgets import Input

SECTIONS = {"status": "Status", "toggles": "Toggles", "log": "Log", "ab": "A/B"}
_LOG_LEAST = 5
"""Rows that a log needs to be worth showing beside something else."""
_MOST_OPS = 3
_NARROW = 70
"""Below that many columns the list and the parts take turns."""


class Scene(Struct, frozen=True):
    """One moment as this screen sees it."""

    frame: Frame
    views: list[EngineView]
    fleet: FleetView | None
    ops: list[OpView]
    cursor: EngineView | None
    targets: list[EngineView]
    """Whom an action would be for."""
    toggles: list[ToggleView]


class EnginesScreen(Screen[None], inherit_bindings=False):
    """`perform` takes every action that is not about cursors, selection or staging."""

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(name, f"do('{key.action}','{name}')", key.short, show=False, id=f"{key.action}-{name}")
        for key in KEYS
        if "engines" in key.screens
        for name in key.keys
    ]

    def __init__(
        self,
        frame: Callable[[], Frame],
        palette: Palette,
        perform: Callable[[str], None],
        *,
        ascii_only: bool = False,
        cursor: str | None = None,
        staging: Staging | None = None,
    ) -> None:
        """cursor: the engine to begin with. staging: what was picked when the screen was last open."""
        super().__init__()
        self._frame, self._palette, self._perform = frame, palette, perform
        self.list = EngineList()
        self.list.picker.key = cursor
        self.staging = staging or Staging()
        self.toggles = TogglesSection()
        self.active = "list"
        self._shown = "status"
        """The part at the right that was looked at last."""
        self._full = False
        """One part at the right has the whole screen."""
        self._access = False
        """The log is shown with its lines of good HTTP requests."""
        self._tops: dict[str, int] = {}
        """Rows that a part is scrolled down; of the log, up from its end."""
        self._log: dict[str, LinesAnswer] = {}
        self._places: dict[str, tuple[int, int]] = {}
        """Part at the right -> its rows there."""
        self.message = ""
        self._line = AskLine(self, self._repaint)
        press = partial(Pane, palette=palette, ascii_only=ascii_only)
        self._header, self._footer, self._strip = press("head"), press("foot"), press("strip")
        self._left = press("list", on_press=self._press_left, on_wheel=partial(self._wheel, "list"))
        self._right = press("details", on_press=self._press_right, on_wheel=self._wheel_right)

    def compose(self) -> ComposeResult:
        self.paint(None)
        yield from (self._header, self._left, self._right, self._strip, self._footer)

    # -------------------------------------------------------------- the moment

    def scene(self) -> Scene:
        """Now."""
        frame = self._frame()
        views = frame.engines()
        self.staging.forget([view.id for view in views])
        cursor = self.list.cursor(frame)
        targets = self.staging.targets(views, cursor.id if cursor is not None else None)
        toggles = merge([(view.id, toggle_views(frame.state, view.id)) for view in targets]) if targets else []
        return Scene(frame, views, fleet_view(frame.state), op_views(frame.state), cursor, targets, toggles)

    @property
    def context(self) -> Context:
        """What decides which keys work now."""
        scene = self.scene()
        targets = scene.targets
        return Context(
            screen="engines",
            pane=self.active,
            control=scene.frame.control,
            live=scene.frame.link.status == "live",
            filtered=bool(self.list.filter),
            full=self._full,
            alone=self.size.width < _NARROW,
            deep=True,
            selected=scene.cursor is not None,
            engines=bool(scene.views),
            owned=bool(targets) and all(view.owned for view in targets),
            stopped=bool(targets) and all(view.stopped for view in targets),
            staged=bool(self.staging.changes),
            previous=any(view.previous is not None for view in targets),
            operation=any(op.runs for op in scene.ops),
            ab=scene.fleet is not None and scene.fleet.ab is not None,
            access=self._access or self._hides(scene) > 0,
        )

    @property
    def log_wanted(self) -> str:
        """The log that is on the screen; empty: none."""
        cursor = self.scene().cursor
        return cursor.log if cursor is not None and "log" in self._places else ""

    def take_log(self, answer: LinesAnswer) -> None:
        """The newest lines of a log."""
        self._log = {answer.source: answer}
        if self.is_mounted:
            self.paint(None)

    def selection(self, frame: Frame) -> str:
        """Text for the clipboard: of the part that has the keyboard."""
        scene = self.scene()
        if scene.cursor is None:
            return ""
        match self.active:
            case "toggles":
                return "\n".join(f"{t.name}\t{t.now}\t{t.value or 'not seen'}\t{t.verify}" for t in scene.toggles)
            case "log":
                answer = self._log.get(scene.cursor.log)
                return "\n".join(map(frame.safe, answer.lines)) if answer is not None else ""
            case part:
                rows = self._part(part if part in SECTIONS else "status", scene, 200, 1 << 16)
                return f"engine {frame.safe(scene.cursor.id)}\n{plain_text(rows)}"

    # -------------------------------------------------------------- painting

    def on_resize(self, event: events.Resize) -> None:
        self.paint(None)

    def paint_with(self, palette: Palette) -> None:
        """Another theme."""
        self._palette = palette
        self.paint(None)

    def _repaint(self) -> None:
        self.paint(None)

    def paint(self, dirty: set[str] | None) -> int:
        """Bring the screen up to date: ages tick, so every part is made anew; only lines that differ are painted."""
        width, height = self.size
        if not width or not height:
            return 0
        scene = self.scene()
        grey = scene.frame.link.lost
        for pane in (self._header, self._left, self._right, self._strip, self._footer):
            pane.paint_with(self._palette, grey=grey and pane not in (self._header, self._footer))
        if not fits(width, height):
            self._place(self._header, 0, 0, width, height)
            for pane in (self._left, self._right, self._strip, self._footer):
                pane.display = False
            return self._header.show(too_small(width, height, LEAST, scene.frame.glyphs), width, height)
        head = header_rows(scene.frame, width)
        strip = self._strip_rows(scene, width)[: max(0, height - len(head) - 8)]
        body = height - len(head) - len(strip) - 1
        left = self._left_width(width)
        self._place(self._header, 0, 0, width, len(head))
        self._place(self._left, 0, len(head), left, body)
        edge = left + 1 if left else 0
        self._place(self._right, edge, len(head), width - edge, body)
        self._place(self._strip, 0, len(head) + body, width, len(strip))
        self._place(self._footer, 0, height - 1, width, 1)
        self._line.place()
        changed = self._header.show(head, width, len(head))
        changed += self._left.show(self._left_rows(scene, left, body), left, body)
        changed += self._right.show(self._right_rows(scene, width - edge, body), max(0, width - edge), body)
        changed += self._strip.show(strip, width, len(strip))
        said = self._line.label or self.message
        keys = list(hints(self.context))
        if scene.frame.glyphs.ascii_only:
            keys = [(key.replace("← →", "left right"), label) for key, label in keys]
        return changed + self._footer.show([footer_row(keys, width, said)], width, 1)

    def _place(self, pane: Pane, x: int, y: int, width: int, height: int) -> None:
        pane.display = width > 0 and height > 0
        if pane.display:
            pane.place(Region(x, y, width, height))

    def _left_width(self, width: int) -> int:
        if self._full or width < _NARROW:
            return 0 if self.active != "list" else width if width < _NARROW else self._beside(width)
        return self._beside(width)

    def _beside(self, width: int) -> int:
        return 30 if width < 100 else 46

    def _rule(self, scene: Scene, title: str, right: Row, width: int, *, focused: bool) -> Row:
        """A title line. What does not fit beside the title gives way, from its end."""
        glyphs = scene.frame.glyphs
        rule = glyphs.rule_focus if focused else glyphs.rule
        line = "accent" if focused else "rule"
        left: Row = ((rule, line), (f" {title} ", "accent+b" if focused else "strong"))
        while right and row_cells(left) + row_cells(right) + 4 > width:
            right = right[:-1]
        tail: Row = ((" ", line), *right, (" ", line), (rule, line)) if right else ()
        return crop(split(left, tail, width, gap=rule, style=line), width)

    def _left_rows(self, scene: Scene, width: int, height: int) -> list[Row]:
        if width <= 0:
            return []
        focused = self.active == "list"
        rows = self.list.body(scene.frame, self.staging.selected, width, height - 1, focused=focused)
        right: list[Span] = []
        if self.list.filter:
            right.append((f"/{scene.frame.safe(self.list.filter)}", "warn+b"))
        elif self.staging.selected:
            right.append((f"{len(self.staging.selected)} selected", "accent"))
        elif scene.fleet is not None and scene.fleet.total:
            whole = scene.fleet.serving == scene.fleet.total
            right.append((f"{scene.fleet.serving}/{scene.fleet.total} serve", "ok" if whole else "warn"))
        if position := self.list.position(scene.frame):
            right += [(" " * bool(right), "text"), (position, "dim")]
        return [self._rule(scene, "Engines", tuple(right), width, focused=focused), *rows]

    # -------------------------------------------------------------- the parts at the right

    def _parts(self, scene: Scene) -> list[str]:
        there = scene.fleet is not None and scene.fleet.ab is not None
        return [part for part in SECTIONS if part != "ab" or there]

    def _part(self, part: str, scene: Scene, width: int, height: int) -> list[Row]:
        """The rows of a part; of the toggles at most `height`, of others all."""
        frame, view = scene.frame, scene.cursor
        if view is None:
            return []
        focused = self.active == part
        match part:
            case "status":
                return list(status_rows(view, frame, scene.fleet, op_of(scene.ops, view.id), width))
            case "toggles":
                why = self._why_not(scene) if focused else ""
                notice = _notice(why, width)
                room = height - len(notice)
                rows = self.toggles.rows(scene.toggles, self.staging, frame, width, room, focused=focused)
                return [*rows, *notice]
            case "log":
                answer = self._log.get(view.log)
                lines, why = (answer.lines, answer.why) if answer is not None else ([], "")
                if not self._access and lines:
                    lines = without_access(lines)
                    why = "only lines of good HTTP requests: v shows them"
                return log_rows(lines, why if view.log else "it names no log", frame, width)
            case _:
                ab = scene.fleet.ab if scene.fleet is not None else None
                return list(ab_rows(ab, scene.views, frame, width)) if ab is not None else []

    def _hides(self, scene: Scene) -> int:
        """How many lines of the log are left out."""
        answer = self._log.get(scene.cursor.log) if scene.cursor is not None and not self._access else None
        return len(answer.lines) - len(without_access(answer.lines)) if answer is not None else 0

    def _need(self, part: str, scene: Scene, width: int) -> int:
        if part == "log":
            return _LOG_LEAST
        if part == "toggles":
            focused = self.active == "toggles"
            extra = len(_notice(self._why_not(scene) if focused else "", width))
            return self.toggles.need(scene.toggles, self.staging, scene.frame, width, focused=focused) + extra
        return len(self._part(part, scene, width, 1 << 16))

    def _right_rows(self, scene: Scene, width: int, height: int) -> list[Row]:
        """The part with the keyboard, and as many others as fit beside it; a log takes what is left."""
        self._places = {}
        if width <= 0 or height <= 0:
            return []
        parts = self._parts(scene)
        self._shown = self._shown if self._shown in parts else "status"
        order = [self._shown, *(part for part in ("status", "toggles", "ab", "log") if part != self._shown)]
        room, heights = height, dict[str, int]()
        for part in (part for part in order[: 1 if self._full else None] if part in parts):
            need = self._need(part, scene, width) + 1
            if not heights or need <= room:
                heights[part] = min(need, room)
                room -= heights[part]
        grow = "log" if "log" in heights else self._shown
        heights[grow] += room
        rows: list[Row] = []
        hidden = [SECTIONS[part] for part in parts if part not in heights]
        for part in (part for part in parts if part in heights):
            self._places[part] = (len(rows), len(rows) + heights[part])
            rows += self._titled(part, scene, hidden, width, heights[part])
            hidden = []
        return rows

    def _titled(self, part: str, scene: Scene, hidden: Sequence[str], width: int, height: int) -> list[Row]:
        rows = self._part(part, scene, width, height - 1)
        room = height - 1
        top = min(self._tops.get(part, 0), max(0, len(rows) - room))
        self._tops[part] = top
        more = ""
        if len(rows) > room:
            first = len(rows) - room - top if part == "log" else top
            more = f"{first + 1}-{first + room}/{len(rows)}"
            rows = rows[first : first + room]
        elif part == "toggles":
            more = self.toggles.picker.position(len(scene.toggles))
        right: list[Span] = [(more, "dim")] if more else []
        if part == "log" and (hides := self._hides(scene)):
            right.append((f"{'  ' if more else ''}{hides} HTTP lines hidden (v)", "faint"))
        if hidden:
            right.append((f"{'  ' if right else ''}tab: {', '.join(hidden)}", "dim"))
        who = names([scene.frame.safe(view.id) for view in scene.targets]) if part == "toggles" else ""
        name = f"engine {scene.frame.safe(scene.cursor.id)}" if scene.cursor is not None and not who else who
        short = width < 60 and bool(more) and len(hidden) > 1
        title = SECTIONS[part] + (f" of {name}" if part != "ab" and name and not short else "")
        title_row = self._rule(scene, title, tuple(right), width, focused=self.active == part)
        return [title_row, *rows, *[()] * (room - len(rows))]

    def _why_not(self, scene: Scene) -> str:
        """Why nothing can be changed here; empty when it can."""
        foreign = [view.id for view in scene.targets if not view.owned]
        if not scene.frame.control:
            return "read-only: attach with --control to change it"
        if foreign:
            is_are = "is" if len(foreign) == 1 else "are"
            allowed = "rltop can only flush, pause, continue or profile (h)"
            return f"{names([scene.frame.safe(item) for item in foreign])} {is_are} not rltop's: {allowed}"
        if scene.frame.link.status != "live":
            return "not connected: nothing can be changed now"
        return ""

    # -------------------------------------------------------------- the strip

    def _strip_rows(self, scene: Scene, width: int) -> list[Row]:
        """What is staged, and the operations that run."""
        rows: list[Row] = []
        if self.staging.changes:
            told = f"{names([scene.frame.safe(view.id) for view in scene.targets])}: "
            told += scene.frame.safe(changes_text(self.staging.changes))
            rows.append(crop(((" staged for ", "accent"), (told, "accent+b")), width))
        for op in [op for op in scene.ops if op.runs][:_MOST_OPS]:
            rows.append(self._op_row(op, scene, width))
        return rows

    def _op_row(self, op: OpView, scene: Scene, width: int) -> Row:
        frame = scene.frame
        timed = op.timed(frame.server_now)
        seconds = timed[-1][1] if timed else frame.since(op.t)
        stage = frame.safe(op.stage or op.state)
        who = f" {frame.glyphs.dot} {frame.safe(op.who)}" if op.who else ""
        row: Row = (
            (f" {frame.glyphs.wait} {op.name} {frame.safe(op.target)}", "accent+b"),
            (f"  {stage}", "text"),
            (f" {age(seconds)}" if seconds is not None else "", "strong"),
            (f"  {op.percent:.0f}%" if op.percent is not None else "", "text"),
            (who, "dim"),
        )
        return crop(row, width)

    # -------------------------------------------------------------- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that cannot do anything now still come through, so that they can say why."""
        return True

    def action_do(self, action: str, key: str = "") -> None:
        """Take an action of the key table."""
        if not fits(*self.size) and action not in ("close", "interrupt", "suspend"):
            return
        self.message = ""
        scene = self.scene()
        entry = find(action)
        if not works(entry, self.context):
            if entry.dangerous or action == "value":
                self.message = self._not_now(action, scene)
        elif not self._own(action, scene):
            self._perform(action)
        if self.is_current:
            self.paint(None)

    def _not_now(self, action: str, scene: Scene) -> str:
        """Why an action cannot be had now."""
        if why := self._why_not(scene):
            return why
        match action:
            case "diff" | "ab-run":
                return "nothing is staged: change a toggle first (e)"
            case "revert":
                return "there is no generation before this one"
            case "cancel-op":
                return "no operation runs"
            case _:
                return "there is no engine"

    def _own(self, action: str, scene: Scene) -> bool:
        """Actions of cursors, selection and staging."""
        match action:
            case "next-section" | "previous-section":
                order = ["list", *self._parts(scene)]
                at = order.index(self.active) if self.active in order else 0
                self._go(order[(at + (1 if action == "next-section" else -1)) % len(order)])
            case "select" if scene.cursor is not None:
                self.staging.select(scene.cursor.id)
                self.list.move("down", scene.frame)
            case "select-all":
                shown = self.list.views(scene.frame)
                # Others' engines would only stand in the way of what can be done to ours.
                self.staging.select_all([view.id for view in shown if view.owned] or [view.id for view in shown])
            case "edit":
                self._go("toggles")
            case "log":
                self._go("log")
                self._tops["log"] = 0
            case "access":
                self._access = not self._access
            case "full":
                self._full = not self._full
                self._go(self._shown if self.active == "list" else self.active)
            case "choose-left" | "choose-right" | "value":
                self._change(action, scene)
            case "drop":
                toggle = self.toggles.cursor(scene.toggles) if self.active == "toggles" else None
                staged = toggle is not None and toggle.name in self.staging.changes
                self.staging.drop(toggle.name if toggle is not None and staged else "")
            case "filter":
                self._line.open("filter engines:", self._filter, text=self.list.filter, live=self._filter)
            case "back":
                self._back()
            case "up" | "down" | "page-up" | "page-down" | "home" | "end":
                self._move(action, scene)
            case _:
                return False
        return True

    def _go(self, part: str) -> None:
        self.active = part
        if part in SECTIONS:
            self._shown = part

    def _filter(self, text: str | None) -> None:
        self.list.filter = text or ""
        self.paint(None)

    def _back(self) -> None:
        """One thing per key press, the innermost first."""
        if self.staging.looking:
            self.staging.looking.clear()
        elif self._full:
            self._full = False
        elif self.active != "list":
            self._go("list")
        elif self.list.filter:
            self.list.filter = ""
        elif self.staging.selected and not self.staging.changes:
            self.staging.selected.clear()
        else:
            self._perform("close")

    def _move(self, action: str, scene: Scene) -> None:
        match self.active:
            case "list":
                before = scene.cursor
                self.list.move(action, scene.frame)
                if before != self.list.cursor(scene.frame):
                    self._tops.clear()
            case "toggles":
                self.staging.looking.clear()
                self.toggles.picker.move(action, [toggle.name for toggle in scene.toggles])
            case part:
                self._scroll(part, action)

    def _scroll(self, part: str, action: str) -> None:
        lo, hi = self._places.get(part, (0, 2))
        page = max(1, hi - lo - 2)
        step = {"up": -1, "down": 1, "page-up": -page, "page-down": page, "home": -(1 << 30), "end": 1 << 30}[action]
        if part == "log":
            step = -step
        self._tops[part] = max(0, self._tops.get(part, 0) + step)

    def _change(self, action: str, scene: Scene) -> None:
        toggle = self.toggles.cursor(scene.toggles)
        step = 1 if action == "choose-right" else -1
        why = self._why_not(scene)
        if why and toggle is not None and action != "value":
            self.staging.look(toggle, step)
        elif why:
            self.message = why
        elif toggle is None:
            self.message = "nothing is known of its toggles"
        elif action == "value":
            self._line.open(
                f"{toggle.name}:", partial(self._typed, toggle), text=self.staging.changes.get(toggle.name, "")
            )
        else:
            why = self.staging.turn(toggle, step, scene.targets)
            if why and toggle.name not in self.staging.looking:
                self.message = why

    def _typed(self, toggle: ToggleView, text: str | None) -> None:
        if text is not None and text.strip():
            self.message = self.staging.put(toggle, text.strip(), self.scene().targets)

    # -------------------------------------------------------------- input

    def ask(
        self,
        label: str,
        done: Callable[[str | None], None],
        *,
        text: str = "",
        live: Callable[[str], None] | None = None,
    ) -> None:
        """A line of input in place of the footer."""
        self._line.open(label, done, text=text, live=live)

    @property
    def asking(self) -> bool:
        """A line of input is open."""
        return self._line.asking

    def on_input_changed(self, event: Input.Changed) -> None:
        self._line.changed(event)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._line.close(event.value)

    def on_key(self, event: events.Key) -> None:
        if self._line.asking and event.key == "escape":
            event.stop()
            event.prevent_default()
            self._line.close(None)

    def _press_left(self, x: int, y: int) -> None:
        self._go("list")
        frame = self._frame()
        self.list.click(y - 1, frame)
        if x == 0 and y > 1 and (cursor := self.list.cursor(frame)) is not None:
            self.staging.select(cursor.id)
        self.paint(None)

    def _press_right(self, x: int, y: int) -> None:
        for part, (lo, hi) in self._places.items():
            if lo <= y < hi:
                scene = self.scene()
                self._go(part)
                if part == "toggles" and y > lo:
                    self.toggles.picker.click(y - lo - 1, [toggle.name for toggle in scene.toggles])
        self.paint(None)

    def _wheel(self, part: str, action: str) -> None:
        self._go(part)
        for _ in range(3):
            self._move(action, self.scene())
        self.paint(None)

    def _wheel_right(self, action: str) -> None:
        self._wheel(self.active if self.active in SECTIONS else self._shown, action)


def _notice(text: str, width: int) -> list[Row]:
    """A remark under the toggles, wrapped; nothing for no text."""
    return [((f" {piece}", "accent"),) for piece in wrap(text, max(10, width - 2))] if text else []
