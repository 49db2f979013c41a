"""The Live screen: header, six panes, footer. It owns focus, filters and what is on top; the app owns time and data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen

from rltop.tui.evidence import ChartPlace, LinePlace, places
from rltop.tui.keymap import Context, find, hints, works
from rltop.tui.keytable import KEYS, PANES
from rltop.tui.layout import LEAST, Box, Place, arrange, fits
from rltop.tui.picture import CheckView, run_view, under
from rltop.tui.theme import Palette
from rltop.tui.view import Frame, View
from rltop.tui.widgets.ask import AskLine
from rltop.tui.widgets.bars import footer_row, title_rows, too_small
from rltop.tui.widgets.chart import ChartsView
from rltop.tui.widgets.checks import ChecksView
from rltop.tui.widgets.events import EventsView
from rltop.tui.widgets.header import header_rows
from rltop.tui.widgets.pane import Pane
from rltop.tui.widgets.rollouts import RolloutsView
from rltop.tui.widgets.run import RunFactsView
from rltop.tui.widgets.table import EnginesView

if TYPE_CHECKING:
    from textual.widgets import Input


_LOOKS = ("zoom-in", "zoom-out", "page-up", "page-down", "left", "right", "home", "end", "up")
"""Actions of views after which there may be something in sight that must be asked for."""


class LiveScreen(Screen[None], inherit_bindings=False):
    """Shows frames. `perform` takes every action that it does not do itself.

    frame: the current frame; perform: called as `perform(action)` for actions of the app.
    """

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(name, f"do('{key.action}','{name}')", key.short, show=False, id=f"{key.action}-{name}")
        for key in KEYS
        if "live" in key.screens
        for name in key.keys
    ]

    def __init__(
        self, frame: Callable[[], Frame], palette: Palette, perform: Callable[[str], None], *, ascii_only: bool = False
    ) -> None:
        super().__init__()
        self._frame = frame
        self._palette = palette
        self._perform = perform
        self.charts = ChartsView()
        self.events_view = EventsView()
        self.engines_view = EnginesView()
        self._checks = ChecksView()
        self.views: dict[str, View] = {
            "checks": self._checks,
            "charts": self.charts,
            "engines": self.engines_view,
            "events": self.events_view,
            "rollouts": RolloutsView(),
            "run": RunFactsView(),
        }
        self.active = "checks"
        self._low_tab = "events"
        self._full = False
        self._places: list[Place] = []
        self._facts: tuple[object, ...] = ()
        self._titles: dict[str, int] = {}
        self._header = Pane("header", palette, ascii_only=ascii_only)
        self._footer = Pane("footer", palette, ascii_only=ascii_only)
        self._panes = {
            name: Pane(
                name,
                palette,
                ascii_only=ascii_only,
                on_press=partial(self._press, name),
                on_wheel=partial(self._wheel, name),
            )
            for name in PANES
        }
        self._line = AskLine(self, self._repaint)
        self.message = ""

    def compose(self) -> ComposeResult:
        # Everything in its place and painted before the first layout: the first frame is the right one.
        self.paint(None)
        yield self._header
        yield from self._panes.values()
        yield self._footer

    # -------------------------------------------------------------- painting

    def on_resize(self, event: events.Resize) -> None:
        # Textual tells the first size several times.
        if self._facts[:2] != tuple(self.size):
            self.paint(None)

    def paint_with(self, palette: Palette) -> None:
        """Another theme."""
        self._palette = palette
        self.paint(None)

    def paint(self, dirty: set[str] | None) -> int:
        """Bring the screen up to date. dirty: changed state keys; None: anything may have. Returns changed lines."""
        width, height = self.size
        if not width or not height:
            return 0
        frame = self._frame()
        grey = frame.link.lost
        for pane in (self._header, self._footer, *self._panes.values()):
            pane.paint_with(self._palette, grey=grey and pane not in (self._header, self._footer))
        if not fits(width, height):
            return self._paint_too_small(frame, width, height)
        head = header_rows(frame, width)
        if self._lay_out(width, height, frame):
            dirty = None
        changed = self._header.show(head, width, len(head))
        for place in self._places:
            view = self.views[place.shown]
            # A tick always concerns ages (engines), and titles of tabs tell of other panes.
            whole = dirty is None or view.name in ("engines", "run") or any(map(view.uses, dirty)) or "events" in dirty
            changed += self._paint_place(place, view, frame, body=whole)
        return changed + self._paint_footer(frame)

    def _repaint(self) -> None:
        self.paint(None)

    def _paint_place(self, place: Place, view: View, frame: Frame, *, body: bool) -> int:
        pane, box = self._panes[place.shown], place.box
        focused = place.shown == self.active
        tabs = [(PANES.index(name) + 1, self.views[name]) for name in place.panes]
        title = title_rows(tabs, view, frame, box.width, focused=focused)
        if not body and len(title) == self._titles.get(place.shown):
            return pane.show([*title, *pane.rows[len(title) :]], box.width, box.height)
        rows = view.body(frame, box.width, box.height - len(title), focused)
        # The summary tells what the body just found out (positions, hidden columns).
        title = title_rows(tabs, view, frame, box.width, focused=focused)
        self._titles[place.shown] = len(title)
        return pane.show([*title, *rows], box.width, box.height)

    def _paint_footer(self, frame: Frame) -> int:
        width = self.size.width
        said = self._line.label or self.message
        return self._footer.show([footer_row(hints(self.context), width, said)], width, 1)

    def _lay_out(self, width: int, height: int, frame: Frame) -> bool:
        """Move the panes when the size, the choice of panes or the number of engines asks for it."""
        if not fits(width, height):
            return False
        count = len(under(frame.state, "engine/"))
        header = len(header_rows(frame, width))
        facts = (width, height, header, count, self.active, self._low_tab, self._full)
        if facts == self._facts:
            return False
        self._facts = facts
        places = arrange(width, height, header, count, self.active, self._low_tab, full=self._full)
        self._arrange(places, header, width, height)
        return True

    def _paint_too_small(self, frame: Frame, width: int, height: int) -> int:
        self._facts = ()
        self._arrange([], height, width, height)
        return self._header.show(too_small(width, height, LEAST, frame.glyphs), width, height)

    def _arrange(self, places: list[Place], header: int, width: int, height: int) -> None:
        self._places = places
        self._header.place(Region(0, 0, width, header))
        self._footer.display = bool(places)
        self._footer.place(Region(0, height - 1, width, 1))
        shown = {place.shown: place.box for place in places}
        for name, pane in self._panes.items():
            pane.display = name in shown
            if name in shown:
                pane.place(_region(shown[name]))
        self._line.place()

    # -------------------------------------------------------------- actions

    @property
    def context(self) -> Context:
        """What decides which keys work now."""
        frame = self._frame()
        view = self.views[self.active]
        run = run_view(frame.state)
        return Context(
            pane=self.active,
            control=frame.control,
            live=frame.link.status == "live",
            has_run="trainer" in frame.state and run.ended is None,
            paused=frame.link.paused_s is not None,
            filtered=bool(view.filter),
            full=self._full,
            alone=len(self._places) == 1 and not self._full,
            tabs=any(len(place.panes) > 1 for place in self._places),
            deep=view.deep(),
            single_chart=self.charts.single,
            zoom=self.charts.zoom,
            selected=view.has_selection(),
            evidence=self.active == "checks" and any(map(bool, self.evidence(frame))),
            engines=bool(under(frame.state, "engine/")),
        )

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dangerous actions do not exist without control; others only where they mean something."""
        if action != "do" or not parameters:
            return True
        return works(find(str(parameters[0])), self.context)

    def action_do(self, action: str, key: str = "") -> None:
        """Take an action of the key table."""
        if not fits(*self.size) and action not in ("quit", "interrupt", "suspend"):
            return
        frame = self._frame()
        self.message = ""
        match action:
            case "pane":
                self.go(PANES[int(key) - 1])
            case "next-pane" | "previous-pane":
                step = 1 if action == "next-pane" else -1
                order = [place.shown for place in self._places] if len(self._places) > 1 else list(PANES)
                self.go(order[(order.index(self.active) + step) % len(order)])
            case "next-tab" | "previous-tab" if self.active != "charts":
                self._turn(1 if action == "next-tab" else -1)
            case "full":
                self._full = not self._full
            case "filter":
                self._ask_filter()
            case "back":
                self._back(frame)
            case _:
                if not self.views[self.active].act(action, frame):
                    self._perform(action)
        self.paint(None)
        if action in _LOOKS:
            self._perform("look")

    def go(self, name: str) -> None:
        """Give a pane the keyboard, and the place that it shares with others."""
        self.active = name
        if name in ("events", "rollouts", "run"):
            self._low_tab = name

    def _turn(self, step: int) -> None:
        place = next((p for p in self._places if self.active in p.panes and len(p.panes) > 1), None)
        place = place or next((p for p in self._places if len(p.panes) > 1), None)
        if place is not None:
            self.go(place.panes[(place.panes.index(place.shown) + step) % len(place.panes)])

    def _back(self, frame: Frame) -> None:
        """One thing per key press, the innermost first."""
        view = self.views[self.active]
        if view.filter:
            view.filter = ""
        elif not view.act("back", frame):
            self._full = False

    def _press(self, name: str, x: int, y: int) -> None:
        """A click: on a tab or into a pane."""
        place = next((place for place in self._places if place.shown == name), None)
        if place is None:
            return
        if y == 0 and len(place.panes) > 1:
            self.go(self._tab_at(place, x) or name)
        else:
            self.go(name)
            above = self._titles.get(name, 1)
            if y >= above:
                self.views[name].click(x, y - above, self._frame())
        self.paint(None)

    def _tab_at(self, place: Place, x: int) -> str | None:
        """The tab whose title is drawn at column `x`."""
        text = "".join(part for part, _ in self._panes[place.shown].rows[0])
        starts = [(text.find(f" {PANES.index(name) + 1}"), name) for name in place.panes]
        left = [name for at, name in starts if 0 <= at <= x]
        return left[-1] if left else None

    def _wheel(self, name: str, action: str) -> None:
        self.go(name)
        for _ in range(3):
            self.views[name].act(action, self._frame())
        self.paint(None)

    # -------------------------------------------------------------- one line of input

    def _ask_filter(self) -> None:
        view = self.views[self.active]

        def live(text: str) -> None:
            view.filter = text
            self.paint(None)

        # Esc clears: what was filtered before is gone too.
        self.ask(f"filter {view.title.lower()}: ", lambda text: live(text or ""), text=view.filter, live=live)

    def selection(self, frame: Frame) -> str:
        """Text of what is selected in the pane with the keyboard."""
        return self.views[self.active].selection(frame)

    def chosen_check(self, frame: Frame) -> CheckView | None:
        """The selected check of the list, if one is selected."""
        return self._checks.chosen(frame)

    def evidence(self, frame: Frame) -> tuple[list[LinePlace], list[ChartPlace]]:
        """Lines and charts of the selected check's evidence."""
        view = self._checks.chosen(frame)
        return places(view, frame.state) if view is not None else ([], [])

    def show_step(self, place: ChartPlace) -> None:
        """Go to a chart, its cursor at a step."""
        self.go("charts")
        self.charts.show_step(place.chart, place.key, place.step, self._frame())
        self.paint(None)

    def ask(
        self,
        label: str,
        done: Callable[[str | None], None],
        *,
        text: str = "",
        live: Callable[[str], None] | None = None,
    ) -> None:
        """A line of input in place of the footer; `done` gets the text, or None after Esc. `live`: each change."""
        self._line.open(label, done, text=text, live=live)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._line.changed(event)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._line.close(event.value)

    def on_key(self, event: events.Key) -> None:
        if self._line.asking and event.key == "escape":
            event.stop()
            event.prevent_default()
            self._line.close(None)

    @property
    def asking(self) -> bool:
        """A line of input is open."""
        return self._line.asking


def _region(box: Box) -> Region:
    return Region(box.x, box.y, box.width, box.height)
