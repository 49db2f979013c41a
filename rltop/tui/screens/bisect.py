"""The Bisect screen: what was tried at the left, what is believed at the right, the story below, one trial's evidence.

It owns the cursor and the scroll position; what goes to the daemon is the desk's (`rltop.tui.bisect_desk`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen

from rltop.bisect.story import Story, TrialStory
from rltop.bisect.story_of import story_of
from rltop.evidence.access import without_access
from rltop.protocol.messages import LinesAnswer
from rltop.tui.keymap import Context, find, hints, works
from rltop.tui.keytable import KEYS
from rltop.tui.layout import LEAST, fits
from rltop.tui.rows import Row, Span, plain_text
from rltop.tui.screens.dialogs import Dialog
from rltop.tui.theme import Palette
from rltop.tui.view import Frame
from rltop.tui.widgets.bars import footer_row, too_small
from rltop.tui.widgets.bisect_view import (
    Matrix,
    belief_rows,
    empty_rows,
    evidence_rows,
    headline_rows,
    matrix_width,
    story_rows,
)
from rltop.tui.widgets.engine_details import log_rows
from rltop.tui.widgets.engine_parts import rule_row
from rltop.tui.widgets.header import header_rows
from rltop.tui.widgets.pane import Pane

_LEAST_RIGHT = 30
_LEAST_MATRIX = 5
LOG_LINES = 60
"""Of a trial's log, the last ones."""


class BisectScreen(Screen[None], inherit_bindings=False):
    """`perform` takes every action that is not about the cursor."""

    AUTO_FOCUS = None
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(name, f"do('{key.action}','{name}')", key.short, show=False, id=f"{key.action}-{name}")
        for key in KEYS
        if "bisect" in key.screens
        for name in key.keys
    ]

    def __init__(
        self,
        frame: Callable[[], Frame],
        palette: Palette,
        perform: Callable[[str], None],
        *,
        ascii_only: bool = False,
        engine: str = "",
    ) -> None:
        """engine: whose crash a start would hunt; "": the newest."""
        super().__init__()
        self._frame, self._palette, self._perform = frame, palette, perform
        self.engine = engine
        self.matrix = Matrix()
        self.active = "matrix"
        self._top = 0
        """First line of the story in sight."""
        self.message = ""
        press = partial(Pane, palette=palette, ascii_only=ascii_only)
        self._header, self._footer = press("head"), press("foot")
        self._left = press("matrix", on_press=self._press_left, on_wheel=partial(self._wheel, "matrix"))
        self._right = press("belief")
        self._below = press("story", on_press=self._press_below, on_wheel=partial(self._wheel, "story"))

    def compose(self) -> ComposeResult:
        self.paint(None)
        yield from (self._header, self._left, self._right, self._below, self._footer)

    # -------------------------------------------------------------- the moment

    def story(self) -> Story | None:
        """The bisection now; None: there is none, or the daemon does not know of any."""
        return story_of(self._frame().state.get("bisect"))

    @property
    def asking(self) -> bool:
        """It never has a line of input."""
        return False

    @property
    def context(self) -> Context:
        """What decides which keys work now."""
        frame, story = self._frame(), self.story()
        return Context(
            screen="bisect",
            pane=self.active,
            control=frame.control,
            live=frame.link.status == "live",
            deep=True,
            selected=story is not None and bool(story.trials),
            owned=any(view.owned for view in frame.engines()),
            bisection="" if story is None else story.phase,
        )

    def selection(self, frame: Frame) -> str:
        """Text for the clipboard: the trial under the cursor, or the story."""
        story = self.story()
        if story is None:
            return ""
        trial = self.matrix.cursor(story)
        if self.active == "matrix" and trial is not None:
            return f"trial {trial.n}\n{plain_text(evidence_rows(trial, frame, 200))}"
        return plain_text([*headline_rows(story, frame, 200), *story_rows(story, frame, 200)])

    # -------------------------------------------------------------- painting

    def on_resize(self, event: events.Resize) -> None:
        self.paint(None)

    def paint_with(self, palette: Palette) -> None:
        """Another theme."""
        self._palette = palette
        self.paint(None)

    def paint(self, dirty: set[str] | None) -> int:
        """Bring the screen up to date; only lines that differ are painted."""
        width, height = self.size
        if not width or not height:
            return 0
        frame, story = self._frame(), self.story()
        panes = (self._header, self._left, self._right, self._below, self._footer)
        for pane in panes:
            pane.paint_with(self._palette, grey=frame.link.lost and pane not in (self._header, self._footer))
        if not fits(width, height):
            for pane in panes[1:]:
                pane.display = False
            self._place(self._header, 0, 0, width, height)
            return self._header.show(too_small(width, height, LEAST, frame.glyphs), width, height)
        head = list(header_rows(frame, width))
        if story is not None:
            head += headline_rows(story, frame, width)
        head = head[: height - 10]
        self._place(self._header, 0, 0, width, len(head))
        self._place(self._footer, 0, height - 1, width, 1)
        body = height - len(head) - 1
        changed = self._header.show(head, width, len(head))
        if story is None:
            self._place(self._left, 0, len(head), width, body)
            self._right.display = self._below.display = False
            changed += self._left.show(empty_rows(frame, width, self.engine), width, body)
        else:
            changed += self._body(story, frame, len(head), width, body)
        keys = list(hints(self.context))
        return changed + self._footer.show([footer_row(keys, width, self.message)], width, 1)

    def _body(self, story: Story, frame: Frame, top: int, width: int, height: int) -> int:
        """Matrix and belief above, the story below."""
        left = matrix_width(story, width - _LEAST_RIGHT)
        right = width - left - 1
        beliefs = belief_rows(story, frame, max(1, right - 1))
        words = story_rows(story, frame, width)
        wants = 1 + max(len(story.trials) + 1, len(beliefs))
        above = max(_LEAST_MATRIX, min(wants, height - min(len(words) + 1, max(5, height // 3))))
        below = height - above
        self._place(self._left, 0, top, left, above)
        self._place(self._right, left + 1, top, right, above)
        self._place(self._below, 0, top + above, width, below)
        focused = self.active == "matrix"
        trials = self.matrix.rows(story, frame, left, above - 1, focused=focused)
        where = self.matrix.position(story)
        more: list[Span] = [(where, "dim")] if where else []
        changed = self._left.show([rule_row(frame, "Trials", tuple(more), left, focused=focused), *trials], left, above)
        cut = len(beliefs) - (above - 1)
        if cut > 0:
            beliefs = [*beliefs[: above - 2], ((f"{cut + 1} more: below, or enlarge", "dim"),)]
            words = story_rows(story, frame, width, believed=True)
        title = rule_row(frame, "Which toggles", (), right, focused=False)
        changed += self._right.show([title, *beliefs], right, above)
        room = max(0, below - 1)
        self._top = max(0, min(self._top, len(words) - room))
        part = f"{self._top + 1}-{self._top + room}/{len(words)}" if len(words) > room else ""
        tail: tuple[Span, ...] = ((part, "dim"),) if part else ()
        rows = [rule_row(frame, "Why", tail, width, focused=not focused), *words[self._top : self._top + room]]
        return changed + self._below.show(rows, width, below)

    def _place(self, pane: Pane, x: int, y: int, width: int, height: int) -> None:
        pane.display = width > 0 and height > 0
        if pane.display:
            pane.place(Region(x, y, width, height))

    # -------------------------------------------------------------- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys that cannot do anything now still come through, so that they can say why."""
        return True

    def action_do(self, action: str, key: str = "") -> None:
        """Take an action of the key table."""
        if not fits(*self.size) and action not in ("close", "interrupt", "suspend"):
            return
        self.message = ""
        entry = find(action)
        if not works(entry, self.context):
            if entry.dangerous:
                self.message = self._not_now(action)
        elif not self._own(action):
            self._perform(action)
        if self.is_current:
            self.paint(None)

    def _not_now(self, action: str) -> str:
        context = self.context
        if not context.control:
            return "read-only: attach with --control to act on it"
        if not context.live:
            return "not connected: nothing can be changed now"
        if action == "bisect-start":
            return "one runs already" if context.bisection else "rltop owns no engine of this run"
        if action == "bisect-pause" and context.bisection == "ending":
            return "it has its result; x cuts the rest short"
        return "no bisection runs: s starts one"

    def _own(self, action: str) -> bool:
        story = self.story()
        match action:
            case "next-section" | "previous-section":
                self.active = "story" if self.active == "matrix" else "matrix"
            case "back" if self.active == "story":
                self.active = "matrix"
            case "back":
                self._perform("close")
            case "up" | "down" | "page-up" | "page-down" | "home" | "end":
                if self.active == "story":
                    self._scroll(action)
                elif story is not None:
                    self.matrix.move(action, story)
            case _:
                return False
        return True

    def _scroll(self, action: str) -> None:
        page = max(1, self._below.size.height - 2)
        steps = {"up": -1, "down": 1, "page-up": -page, "page-down": page, "home": -(1 << 20), "end": 1 << 20}
        self._top = max(0, self._top + steps[action])

    def _press_left(self, x: int, y: int) -> None:
        self.active = "matrix"
        if (story := self.story()) is not None:
            self.matrix.click(y - 1, story)
        self.paint(None)

    def _press_below(self, x: int, y: int) -> None:
        self.active = "story"
        self.paint(None)

    def _wheel(self, part: str, action: str) -> None:
        self.active = part
        for _ in range(3):
            self._own(action)
        self.paint(None)


def cut_to(line: str, most: int) -> str:
    """A line of a log without what nobody reads to the end."""
    return line if len(line) <= most else f"{line[: most - 4]} ..."


class EvidenceDialog(Dialog):
    """One trial and the end of its log. `ask` has the daemon asked; `take` gets the answer."""

    def __init__(
        self, trial: TrialStory, frame: Frame, palette: Palette, ask: Callable[[EvidenceDialog], None]
    ) -> None:
        super().__init__(f"Trial {trial.n}", palette, frame.glyphs, hint="esc closes", widest=140)
        self.trial = trial
        self._frame, self._ask = frame, ask
        self._log: Sequence[Row] | None = None
        self._answer: LinesAnswer | None = None

    def on_mount(self) -> None:
        if self.trial.log:
            self._ask(self)

    def take(self, answer: LinesAnswer) -> None:
        """The end of the log."""
        self._answer = answer
        if self.is_mounted:
            self.paint()

    def body(self, width: int) -> list[Row]:
        rows = [*evidence_rows(self.trial, self._frame, width), (), (("the end of its log", "strong"),)]
        if not self.trial.log:
            return [*rows, (("it names no log", "dim"),)]
        lines, why = (self._answer.lines, self._answer.why) if self._answer is not None else ([], "")
        # SGLang's first line alone, all its arguments, would fill the dialog.
        lines = [cut_to(line, 2 * (width - 2)) for line in without_access(lines)[-LOG_LINES:]]
        return [*rows, *log_rows(lines, why, self._frame, width)]
