"""The dump screen: samples at the left, the one under the cursor at the right; local files and the daemon's alike.

It asks its source for what is in sight and shows what has come; a file of a million samples is never loaded.
`run_pager` is the whole program of `rltop dump show` on a terminal.

Failure policy: an answer that says why something cannot be had is shown where it would have been.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen

from rltop.evidence.dump_find import DumpRef
from rltop.tui.dump_desk import DumpDesk
from rltop.tui.dump_source import DumpSource
from rltop.tui.keymap import Context, find, hints, works
from rltop.tui.keytable import KEYS
from rltop.tui.layout import LEAST, fits
from rltop.tui.rows import Row, Span, split
from rltop.tui.text import clean, fit, fit_middle
from rltop.tui.theme import Glyphs, Palette
from rltop.tui.widgets.ask import AskLine
from rltop.tui.widgets.bars import footer_row, too_small
from rltop.tui.widgets.dump_colours import MODES, known
from rltop.tui.widgets.pane import Pane

if TYPE_CHECKING:
    from textual.widgets import Input

_NARROW = 70
"""Below that many columns the list and the sample take turns."""
_SORTS = ("", "-gap", "reward", "-reward", "-length", "status")


def run_pager(
    dumps: Sequence[DumpRef],
    *,
    ascii_only: bool = False,
    tokenizer: Path | None = None,
    chosen: str = "",
    sort: str = "",
    search: str = "",
    place: int = 0,
) -> int:
    """Show dumps on this terminal until somebody leaves; returns the exit code (130 after Ctrl-C; 1 where a dump is
    damaged, which is said on stderr once the terminal is back).

    tokenizer: a checkpoint's directory with `tokenizer.json`, for dumps without one beside them. chosen, sort, search:
    what `/`, `s` and `F` would be told. place: in the list, from 0.
    """
    from rltop.tui.pager import PagerApp

    app = PagerApp(dumps, ascii_only=ascii_only, tokenizer=tokenizer)
    app.front.desk.begin(text=chosen, sort=sort, search=search, place=place)
    code = app.run() or 0
    damaged = {str(ref.path): ref.damage for ref in dumps if ref.damage} | app.front.desk.damaged
    for path, why in damaged.items():
        print(f"rltop: {clean(path)}: {clean(why)}", file=sys.stderr)
    return code or (1 if damaged else 0)


class DumpScreen(Screen[None], inherit_bindings=False):
    """`perform` takes every action that is not about samples. link: right end of the header (the connection)."""

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(name, f"do('{key.action}','{name}')", key.short, show=False, id=f"{key.action}-{name}")
        for key in KEYS
        if "dump" in key.screens
        for name in key.keys
    ]

    def __init__(
        self,
        source: DumpSource,
        palette: Palette,
        glyphs: Glyphs,
        perform: Callable[[str], None],
        *,
        link: Callable[[], Row] = tuple,
        alone: bool = False,
    ) -> None:
        """alone: nothing lies behind this screen, so Esc does not leave it."""
        super().__init__()
        self._palette, self._glyphs, self._perform, self._link, self._alone = palette, glyphs, perform, link, alone
        self.desk = DumpDesk(source, glyphs, self.spawn, self._repaint, newest=not alone)
        self.active = "samples"
        self.part = "text"
        """What stands at the right: `text`, `fields` or `stats`."""
        self.full = False
        self.mode = ""
        self.message = ""
        self._tops = {"fields": 0, "stats": 0}
        self._heights = {"fields": 0, "stats": 0}
        self._room = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._line = AskLine(self, self._repaint)
        press = partial(Pane, palette=palette, ascii_only=glyphs.ascii_only)
        self._header, self._footer = press("head"), press("foot")
        self._left = press("list", on_press=self._press_left, on_wheel=partial(self._wheel, "samples"))
        self._right = press("details", on_press=self._press_right, on_wheel=partial(self._wheel, ""))

    def compose(self) -> ComposeResult:
        self.paint(None)
        yield from (self._header, self._left, self._right, self._footer)

    def on_mount(self) -> None:
        self.desk.open()

    def on_unmount(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.desk.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as long as this screen lives; its failure is told in the footer."""

        async def told() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self.message = f"{type(error).__name__}: {clean(error)}"
                self._repaint()

        task = asyncio.get_running_loop().create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -------------------------------------------------------------- the moment

    @property
    def context(self) -> Context:
        """What decides which keys work now."""
        desk = self.desk
        return Context(
            screen="dump",
            pane=self.active,
            live=True,
            filtered=bool(desk.filter),
            full=self.full,
            alone=self.size.width < _NARROW,
            deep=self._deep() or not self._alone,
            selected=desk.list.current is not None,
            tokens=desk.text is not None and desk.text.tokens.count > 0,
            files=len(desk.dumps) > 1 or (bool(desk.dumps) and not self._alone),
            gaps=desk.text is not None and bool(desk.text.sample.get("gaps")),
            sought=bool(desk.search),
        )

    def _deep(self) -> bool:
        desk = self.desk
        return bool(self.full or self.part != "text" or self.active != "samples" or desk.group_at >= 0 or desk.search)

    @property
    def mode_now(self) -> str:
        """The colour mode: the chosen one, else the first that the sample has numbers for."""
        text = self.desk.text
        if self.mode or text is None:
            return self.mode or "off"
        return next(mode for mode in ("gap", "log-prob", "off") if known(mode, text.tokens))

    def selection(self, frame: object = None) -> str:
        """Text for the clipboard."""
        text = self.desk.text
        return "" if text is None else text.copied()

    # -------------------------------------------------------------- painting

    def on_resize(self, event: events.Resize) -> None:
        self.paint(None)

    def paint_with(self, palette: Palette) -> None:
        """Another theme."""
        self._palette = palette
        self.paint(None)

    def _repaint(self) -> None:
        if self.is_attached:
            self.paint(None)

    def paint(self, dirty: set[str] | None) -> int:
        """Bring the screen up to date; only lines that differ are painted."""
        width, height = self.size
        if not width or not height:
            return 0
        for pane in (self._header, self._left, self._right, self._footer):
            pane.paint_with(self._palette, grey=False)
        if not fits(width, height):
            self._place(self._header, 0, 0, width, height)
            for pane in (self._left, self._right, self._footer):
                pane.display = False
            return self._header.show(too_small(width, height, LEAST, self._glyphs), width, height)
        head = self._head(width)
        body = height - len(head) - 1
        left = self._left_width(width)
        edge = left + 1 if left else 0
        self._place(self._header, 0, 0, width, len(head))
        self._place(self._left, 0, len(head), left, body)
        self._place(self._right, edge, len(head), width - edge, body)
        self._place(self._footer, 0, height - 1, width, 1)
        self._line.place()
        changed = self._header.show(head, width, len(head))
        changed += self._left.show(self._left_rows(left, body), left, body)
        changed += self._right.show(self._right_rows(width - edge, body), max(0, width - edge), body)
        said = self._line.label or self.message or self.desk.message
        keys = list(hints(self.context))
        if self._glyphs.ascii_only:
            keys = [(key.replace("← →", "left right"), label) for key, label in keys]
        self.desk.look()
        return changed + self._footer.show([footer_row(keys, width, said)], width, 1)

    def _place(self, pane: Pane, x: int, y: int, width: int, height: int) -> None:
        pane.display = width > 0 and height > 0
        if pane.display:
            pane.place(Region(x, y, width, height))

    def _left_width(self, width: int) -> int:
        beside = 34 if width < 100 else 42 if width < 120 else 52
        if self.full or width < _NARROW:
            return 0 if self.active != "samples" else width
        return beside

    def _head(self, width: int) -> list[Row]:
        """Which file, and what is known of it."""
        desk, dot = self.desk, f" {self._glyphs.dot} "
        link = self._link()
        name, facts = desk.file_words(), desk.file_facts()
        room = max(10, width - 15 - len(name) - sum(len(text) for text, _ in link))
        path = fit_middle(clean(desk.path, ascii_only=self._glyphs.ascii_only), room, mark=self._glyphs.cut)
        first = split(((" rltop dump ", "accent+b"), (name, "strong"), (f"  {path}", "dim")), link, width)
        words: list[Span] = []
        for text, style in facts:
            words += [(dot if words else " ", "faint"), (text, style)]
        return [first, tuple(words)]

    def _rule(self, title: str, right: Row, width: int, *, focused: bool) -> Row:
        rule = self._glyphs.rule_focus if focused else self._glyphs.rule
        line = "accent" if focused else "rule"
        left: Row = ((rule, line), (f" {title} ", "accent+b" if focused else "strong"))
        tail: Row = ((" ", line), *right, (f" {rule}", line)) if right else ((rule, line),)
        return split(left, tail, width, gap=rule, style=line)

    def _left_rows(self, width: int, height: int) -> list[Row]:
        if width <= 0:
            return []
        focused = self.active == "samples"
        rows = self.desk.list.body(self._glyphs, width, height - 1, focused=focused)
        right: list[Span] = []
        if told := self.desk.list_words():
            right += [(fit(told, max(6, width - 24), mark=self._glyphs.cut), "warn+b"), (" ", "text")]
        right.append((self.desk.list.position(), "dim"))
        return [self._rule("Samples", tuple(right), width, focused=focused), *rows]

    def _right_rows(self, width: int, height: int) -> list[Row]:
        if width <= 0:
            return []
        focused, text = self.active != "samples", self.desk.text
        if self.part == "stats":
            rows = self._scrolled("stats", self.desk.stats_rows(width), height - 1)
            return [self._rule("Perf metrics of the file", (), width, focused=focused), *rows]
        title = self.desk.sample_words()
        if text is None:
            why = self.desk.sample_why
            told: Row = ((f" {why}" if why else f" {self._glyphs.more}" * bool(self.desk.list.current), "dim"),)
            return [self._rule(title or "Sample", (), width, focused=focused), told]
        if self.part == "fields":
            rows = self._scrolled("fields", text.field_rows(width), height - 1)
            return [self._rule(f"{title}: metadata and fields", (), width, focused=focused), *rows]
        facts = text.facts(width)
        below = text.token_rows(self.mode_now, width)
        room = height - 1 - len(facts) - len(below) - 1
        if room < 4:
            facts, below = facts[:1], below[:2]
            room = height - 1 - len(facts) - len(below) - 1
        lines = text.body(self.mode_now, width, max(1, room), focused=focused, hit=self.desk.search)
        right: Row = ((text.position(), "dim"),) if text.position() else ()
        blank: list[Row] = [()] * (room - len(lines))
        line: Row = ((self._glyphs.rule * width, "rule"),)
        return [self._rule(title, right, width, focused=focused), *facts, *lines, *blank, line, *below]

    def _scrolled(self, part: str, rows: list[Row], height: int) -> list[Row]:
        self._heights[part], self._room = len(rows), height
        self._tops[part] = max(0, min(self._tops[part], len(rows) - height))
        return rows[self._tops[part] : self._tops[part] + height]

    # -------------------------------------------------------------- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys exist where they mean something."""
        return works(find(str(parameters[0])), self.context) if action == "do" and parameters else True

    def action_do(self, action: str, key: str = "") -> None:
        """Take an action of the key table."""
        if not fits(*self.size) and action not in ("close", "interrupt", "suspend"):
            return
        self.message = self.desk.message = ""
        if works(find(action), self.context) and not self._own(action):
            self._perform(action)
        if self.is_current:
            self.paint(None)

    def _own(self, action: str) -> bool:
        desk = self.desk
        match action:
            case "next-section" | "previous-section":
                self._go("samples" if self.active != "samples" else self.part)
            case "read":
                self._go(self.part)
            case "next-dump" | "previous-dump":
                desk.turn(1 if action == "next-dump" else -1)
            case "fields" | "stats":
                self.part = "text" if self.part == action else action
                self._go(self.part if self.active != "samples" else "samples")
                if action == "stats":
                    desk.want_stats()
            case "colours":
                self.mode = MODES[(MODES.index(self.mode_now) + 1) % len(MODES)]
            case "group":
                desk.toggle_group()
            case "dump-sort":
                at = _SORTS.index(desk.sort) if desk.sort in _SORTS else 0
                desk.rearrange(sort=_SORTS[(at + 1) % len(_SORTS)])
            case "full":
                self.full = not self.full
            case "filter":
                self._line.open("filter:", lambda text: desk.rearrange(text=text or ""), text=desk.filter)
            case "search":
                self._line.open("find:", self._sought, text=desk.search)
            case "next-hit" | "previous-hit":
                desk.seek(back=action == "previous-hit")
            case "jump":
                self._line.open("to place (from 1) or index=N:", self._jump)
            case "back":
                self._back()
            case "worst":
                if desk.text is not None:
                    self.part = "text"
                    self._go("text")
                    desk.text.to_token(int(desk.text.sample["gaps"]["at"]))
            case _:
                return self._move(action)
        return True

    def _move(self, action: str) -> bool:
        if self.active == "samples" and action not in ("token-left", "token-right"):
            return self.desk.list.move(action)
        if self.part == "text":
            return self.desk.text is not None and self.desk.text.move(action)
        page = max(1, self._room - 1)
        steps = {"up": -1, "down": 1, "page-up": -page, "page-down": page, "home": -1 << 30, "end": 1 << 30}
        if action not in steps:
            return False
        self._tops[self.part] = max(
            0, min(self._tops[self.part] + steps[action], self._heights[self.part] - self._room)
        )
        return True

    def _go(self, name: str) -> None:
        self.active = name

    def _sought(self, text: str | None) -> None:
        self.desk.search = (text or "").strip()
        if self.desk.search:
            self.desk.seek(here=True)

    def _jump(self, text: str | None) -> None:
        if text is None or not text.strip():
            return
        name, _, value = text.replace(" ", "").rpartition("=")
        if not value.isdecimal() or name not in ("", "index", "at", "group"):
            self.message = f"{clean(text)[:30]} is neither a place nor index=N or group=N"
        elif name in ("", "at"):
            self.desk.list.go(int(value) - (name == ""))
        else:
            self.desk.rearrange(text=f"{name}={value}")

    def _back(self) -> None:
        """One thing per key press, the innermost first."""
        desk = self.desk
        if self.full:
            self.full = False
        elif self.part != "text":
            self.part = "text"
            self.active = "samples" if self.active == "samples" else "text"
        elif self.active != "samples":
            self._go("samples")
        elif desk.search:
            desk.search = ""
        elif desk.group_at >= 0:
            desk.toggle_group()
        elif desk.filter:
            desk.rearrange(text="")
        else:
            self._perform("close")

    def ask(self, label: str, done: Callable[[str | None], None], *, text: str = "") -> None:
        """A line of input in place of the footer."""
        self._line.open(label, done, text=text)

    # -------------------------------------------------------------- input

    @property
    def asking(self) -> bool:
        """A line of input is open."""
        return self._line.asking

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._line.close(event.value)

    def on_key(self, event: events.Key) -> None:
        if self._line.asking and event.key == "escape":
            event.stop()
            event.prevent_default()
            self._line.close(None)

    def _press_left(self, x: int, y: int) -> None:
        self._go("samples")
        self.desk.list.click(y - 1)
        self.paint(None)

    def _press_right(self, x: int, y: int) -> None:
        self._go(self.part)
        self.paint(None)

    def _wheel(self, part: str, action: str) -> None:
        self._go(part or self.part)
        for _ in range(3):
            self._move(action)
        self.paint(None)
