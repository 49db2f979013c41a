"""The engine screen: engines at the left, everything about the one under the cursor at the right.

It owns cursors, selection and what is staged; what goes to the daemon is the desk's (`rltop.tui.desk`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen

from rltop.protocol.messages import LinesAnswer
from rltop.tui.engine_scene import Scene, scene_of
from rltop.tui.keymap import Context, find, hints, works
from rltop.tui.keytable import KEYS
from rltop.tui.layout import LEAST, fits
from rltop.tui.rows import Row, Span
from rltop.tui.staging import Staging
from rltop.tui.theme import Palette
from rltop.tui.toggle_views import ToggleView
from rltop.tui.view import Frame
from rltop.tui.widgets.ask import AskLine
from rltop.tui.widgets.bars import footer_row, too_small
from rltop.tui.widgets.engine_list import EngineList
from rltop.tui.widgets.engine_parts import SECTIONS, EngineParts, rule_row
from rltop.tui.widgets.engine_strip import strip_rows
from rltop.tui.widgets.header import header_rows
from rltop.tui.widgets.pane import Pane

if TYPE_CHECKING:
    from textual.widgets import Input

_NARROW = 70
"""Below that many columns the list and the parts take turns."""


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
        self.parts = EngineParts(self.staging)
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
        return scene_of(frame, self.staging, self.list.cursor(frame))

    @property
    def context(self) -> Context:
        """What decides which keys work now."""
        scene = self.scene()
        targets = scene.targets
        return Context(
            screen="engines",
            pane=self.parts.active,
            control=scene.frame.control,
            live=scene.frame.link.status == "live",
            filtered=bool(self.list.filter),
            full=self.parts.full,
            alone=self.size.width < _NARROW,
            deep=True,
            selected=scene.cursor is not None,
            engines=bool(scene.views),
            owned=bool(targets) and all(view.owned for view in targets),
            stopped=bool(targets) and all(view.stopped for view in targets),
            staged=bool(self.staging.changes),
            previous=any(view.previous is not None for view in targets),
            operation=any(op.runs for op in scene.ops),
            ab=scene.ab,
            ima=scene.cursor is not None and scene.cursor.hunted and scene.cursor.owned,
            access=self.parts.access or self.parts.hides(scene) > 0,
        )

    @property
    def log_wanted(self) -> str:
        """The log that is on the screen; empty: none."""
        cursor = self.scene().cursor
        return cursor.log if cursor is not None and "log" in self.parts.places else ""

    def take_log(self, answer: LinesAnswer) -> None:
        """The newest lines of a log."""
        self.parts.log = {answer.source: answer}
        if self.is_mounted:
            self.paint(None)

    def selection(self, frame: Frame) -> str:
        """Text for the clipboard: of the part that has the keyboard."""
        return self.parts.text(self.scene())

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
        strip = strip_rows(scene, self.staging, width)[: max(0, height - len(head) - 8)]
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
        changed += self._right.show(self.parts.rows(scene, width - edge, body), max(0, width - edge), body)
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
        if self.parts.full or width < _NARROW:
            return 0 if self.parts.active != "list" else width if width < _NARROW else self._beside(width)
        return self._beside(width)

    def _beside(self, width: int) -> int:
        return 30 if width < 100 else 46

    def _left_rows(self, scene: Scene, width: int, height: int) -> list[Row]:
        if width <= 0:
            return []
        focused = self.parts.active == "list"
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
        return [rule_row(scene.frame, "Engines", tuple(right), width, focused=focused), *rows]

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
        if why := scene.why_not():
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
                order = ["list", *self.parts.there(scene)]
                at = order.index(self.parts.active) if self.parts.active in order else 0
                self.parts.go(order[(at + (1 if action == "next-section" else -1)) % len(order)])
            case "select" if scene.cursor is not None:
                self.staging.select(scene.cursor.id)
                self.list.move("down", scene.frame)
            case "select-all":
                shown = self.list.views(scene.frame)
                # Others' engines would only stand in the way of what can be done to ours.
                self.staging.select_all([view.id for view in shown if view.owned] or [view.id for view in shown])
            case "edit":
                self.parts.go("toggles")
            case "log":
                self.parts.go("log")
                self.parts.tops["log"] = 0
            case "access":
                self.parts.access = not self.parts.access
            case "full":
                self.parts.full = not self.parts.full
                self.parts.go(self.parts.shown if self.parts.active == "list" else self.parts.active)
            case "choose-left" | "choose-right" | "value":
                self._change(action, scene)
            case "drop":
                toggle = self.parts.toggles.cursor(scene.toggles) if self.parts.active == "toggles" else None
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

    def _filter(self, text: str | None) -> None:
        self.list.filter = text or ""
        self.paint(None)

    def _back(self) -> None:
        """One thing per key press, the innermost first."""
        if self.staging.looking:
            self.staging.looking.clear()
        elif self.parts.full:
            self.parts.full = False
        elif self.parts.active != "list":
            self.parts.go("list")
        elif self.list.filter:
            self.list.filter = ""
        elif self.staging.selected and not self.staging.changes:
            self.staging.selected.clear()
        else:
            self._perform("close")

    def _move(self, action: str, scene: Scene) -> None:
        match self.parts.active:
            case "list":
                before = scene.cursor
                self.list.move(action, scene.frame)
                if before != self.list.cursor(scene.frame):
                    self.parts.tops.clear()
            case "toggles":
                self.staging.looking.clear()
                self.parts.toggles.picker.move(action, [toggle.name for toggle in scene.toggles])
            case part:
                self.parts.scroll(part, action)

    def _change(self, action: str, scene: Scene) -> None:
        toggle = self.parts.toggles.cursor(scene.toggles)
        step = 1 if action == "choose-right" else -1
        why = scene.why_not()
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
        self.parts.go("list")
        frame = self._frame()
        self.list.click(y - 1, frame)
        if x == 0 and y > 1 and (cursor := self.list.cursor(frame)) is not None:
            self.staging.select(cursor.id)
        self.paint(None)

    def _press_right(self, x: int, y: int) -> None:
        if part := self.parts.at(y):
            self.parts.go(part)
            above = self.parts.places[part][0] + 1
            if part == "toggles" and y >= above:
                self.parts.toggles.picker.click(y - above, [toggle.name for toggle in self.scene().toggles])
        self.paint(None)

    def _wheel(self, part: str, action: str) -> None:
        self.parts.go(part)
        for _ in range(3):
            self._move(action, self.scene())
        self.paint(None)

    def _wheel_right(self, action: str) -> None:
        self._wheel(self.parts.active if self.parts.active in SECTIONS else self.parts.shown, action)
