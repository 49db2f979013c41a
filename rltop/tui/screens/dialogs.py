"""Help, command palette and confirmation: boxes over the Live screen, painted like everything else."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from textual import events
from textual.app import ComposeResult
from textual.geometry import Region
from textual.screen import ModalScreen

from rltop.tui.fleet import SIGNALS
from rltop.tui.keymap import Context, help_groups
from rltop.tui.keytable import Key
from rltop.tui.picture import CHARTS
from rltop.tui.rows import Row, Span, crop, extend, restyle, row_cells
from rltop.tui.text import cells, wrap
from rltop.tui.theme import Glyphs, Palette
from rltop.tui.view import matches
from rltop.tui.widgets.pane import Pane


def box_rows(title: str, body: Sequence[Row], width: int, height: int, glyphs: Glyphs, hint: str = "") -> list[Row]:
    """`body` in a frame of `width` x `height` cells."""
    rule, side = glyphs.rule, glyphs.side
    corner = ("+", "+", "+", "+") if glyphs.ascii_only else ("╭", "╮", "╰", "╯")

    def edge(left: str, right: str, label: str) -> Row:
        fill = rule * max(0, width - 3 - cells(label))
        return ((left + rule, "accent"), (label, "accent+b"), (fill + right, "accent"))

    rows = [edge(corner[0], corner[1], f" {title} ")]
    for row in [*body, *[()] * height][: height - 2]:
        rows.append(((f"{side} ", "accent"), *extend(row, width - 4), (f" {side}", "accent")))
    rows.append(edge(corner[2], corner[3], f" {hint} " if hint else ""))
    return rows


class Dialog(ModalScreen[str | None], inherit_bindings=False):
    """A framed list in the middle of the screen. `rows(width)` gives its lines; `on_key` of the subclass its keys."""

    DEFAULT_CSS = "Dialog { background: $background 60%; overflow: hidden hidden; }"
    AUTO_FOCUS = None

    def __init__(self, title: str, palette: Palette, glyphs: Glyphs, *, hint: str = "", widest: int = 76) -> None:
        super().__init__()
        self._title, self._hint, self._widest = title, hint, widest
        self._glyphs = glyphs
        self._pane = Pane("dialog", palette, ascii_only=glyphs.ascii_only)
        self.top = 0

    def compose(self) -> ComposeResult:
        self.paint()
        yield self._pane

    def body(self, width: int) -> list[Row]:
        """The lines, however many."""
        return []

    def on_resize(self, event: events.Resize) -> None:
        self.paint()

    def paint(self) -> None:
        """Draw the box; it is as high as its lines need, and scrolls when that is too much."""
        wide, high = self.size
        width = min(self._widest, wide)
        lines = self.body(max(1, width - 4))
        height = min(high, len(lines) + 2)
        room = max(1, height - 2)
        self.top = max(0, min(self.top, len(lines) - room))
        hint = self._hint
        if len(lines) > room:
            hint += f" {self._glyphs.dot} {self.top + 1}-{self.top + room}/{len(lines)}"
        rows = box_rows(self._title, lines[self.top : self.top + room], width, height, self._glyphs, hint)
        self._pane.place(Region((wide - width) // 2, max(0, (high - height) // 2), width, height))
        self._pane.show([crop(row, width) for row in rows], width, height)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.press(event.key, event.character)
        if self.is_current:
            self.paint()

    def press(self, key: str, character: str | None) -> None:
        """A key. The default scrolls and closes."""
        match key:
            case "escape" | "q" | "question_mark" | "f1" | "enter":
                self.dismiss(None)
            case "ctrl+c":
                self.dismiss("interrupt")
            case "down" | "j":
                self.top += 1
            case "up" | "k":
                self.top -= 1
            case "pagedown" | "space":
                self.top += max(1, self.size.height - 4)
            case "pageup":
                self.top -= max(1, self.size.height - 4)
            case "home" | "g":
                self.top = 0
            case "end" | "G":
                self.top = 1 << 30


class HelpDialog(Dialog):
    """All keys from the key table, and what healthy values are."""

    def __init__(self, context: Context, palette: Palette, glyphs: Glyphs) -> None:
        super().__init__("Help", palette, glyphs, hint="esc closes")
        self._situation = context

    def body(self, width: int) -> list[Row]:
        rows: list[Row] = []
        for group, keys in help_groups(self._situation):
            here = [key for key in keys if not key.panes or self._situation.pane in key.panes]
            rows.append(((group, "strong"), ("" if here else "  (in other panes)", "faint")))
            for key in keys:
                rows += _pair(self._ascii(key.label), key.help, width)
            rows.append(())
        if self._situation.screen == "dump":
            return rows + self._dump_rows(width)
        if not self._situation.control:
            rows += [
                ((line, "dim"),)
                for line in wrap("This viewer is read-only: start with --control to act on the run.", width)
            ]
            rows.append(())
        if self._situation.screen == "engines":
            return rows + self._engine_rows(width)
        if self._situation.screen == "bisect":
            return rows + self._bisect_rows(width)
        rows.append((("What healthy looks like", "strong"),))
        for spec in CHARTS:
            rows += _pair(spec.title, spec.healthy, width)
        rows.append(())
        rows.append((("Statuses", "strong"),))
        for status, text in (
            ("fail", "wrong"),
            ("warn", "probably wrong, or cannot last"),
            ("info", "worth knowing, nothing to do"),
            ("pass", "tested and fine"),
            ("skip", "not tested; the cause says why"),
        ):
            rows += _pair(f"{self._glyphs.status(status)} {status}", text, width)
        return rows

    def _engine_rows(self, width: int) -> list[Row]:
        glyphs = self._glyphs
        rows: list[Row] = [(("Signals (column PHGTL: a tick is well, the letter is not, a dot is unknown)", "strong"),)]
        for letter, name, meaning in SIGNALS:
            rows += _pair(f"{letter} {name}", meaning, width)
        rows += [(), (("Toggles", "strong"),)]
        for mark, text in (
            (glyphs.ok, "in effect, seen in the running engine"),
            (glyphs.skip, "asked for; what is in effect cannot be seen"),
            (glyphs.warn, "asked for something else than what is in effect"),
            (glyphs.fail, "the engine ignores what it was asked for"),
            ("(choice)", "cannot be had now: go there and it says why"),
        ):
            rows += _pair(mark, text, width)
        return rows

    def _bisect_rows(self, width: int) -> list[Row]:
        glyphs = self._glyphs
        rows: list[Row] = [(("Trials: a row each, a column per toggle (its letter is at the right)", "strong"),)]
        for mark, text in (
            (glyphs.full, "the toggle was on"),
            (glyphs.dot, "the toggle was off"),
            (f"{glyphs.fail} crashed", "as the crash that is hunted; a grey one does not count"),
            (f"{glyphs.ok} quiet", "under traffic for `time`, without a crash"),
            ("it takes", "the crash needs all of these on; how sure that is"),
        ):
            rows += _pair(mark, text, width)
        return rows

    def _dump_rows(self, width: int) -> list[Row]:
        rows: list[Row] = [(("Colours (c): the stronger, the farther from what it should be", "strong"),)]
        for name, meaning in (
            ("log-prob", "how unlikely the engine held the token that it drew"),
            ("gap", "|train - rollout|: what the trainer and the engine make of the same token"),
            ("advantage", "bold: the loss makes it likelier; underlined: less likely"),
            ("", "a token in faint characters is masked: not in the loss"),
        ):
            rows += _pair(name, meaning, width)
        rows += [(), (("Filter (/)", "strong"),)]
        for name, meaning in (
            ("words", "all occur in prompt, response, label or status"),
            ("reward<0.5", "also index, group, length, gap, status, label, version; = != < <= > >="),
            ("status=trunc", "words by their start"),
        ):
            rows += _pair(name, meaning, width)
        return rows

    def _ascii(self, label: str) -> str:
        if not self._glyphs.ascii_only:
            return label
        for arrow, word in (("↑", "up"), ("↓", "down"), ("←", "left"), ("→", "right")):
            label = label.replace(arrow, word)
        return label


def _pair(left: str, right: str, width: int) -> list[Row]:
    head = 17
    rows: list[Row] = []
    for line in wrap(right, max(10, width - head)):
        rows.append(((f" {left}".ljust(head), "accent"), (line, "text")))
        left = ""
    return rows


class Choice(Struct, frozen=True):
    """One line of the palette. `value` is handed back when it is chosen."""

    value: str
    text: str
    keys: str = ""


def choices(keys: Sequence[Key], extra: Sequence[Choice]) -> list[Choice]:
    """Palette lines of actions, then `extra`."""
    return [Choice(f"do:{key.action}", key.help, key.label) for key in keys if key.palette] + list(extra)


class PaletteDialog(Dialog):
    """Type to narrow, Enter to do. Dismissed with the chosen value."""

    def __init__(self, offered: Sequence[Choice], palette: Palette, glyphs: Glyphs, title: str = "Commands") -> None:
        super().__init__(title, palette, glyphs, hint="type to narrow, enter does it, esc closes", widest=68)
        self._offered = offered
        self._typed = ""
        self._at = 0

    def body(self, width: int) -> list[Row]:
        found = self._found()
        self._at = max(0, min(self._at, len(found) - 1))
        rows: list[Row] = [(("> ", "accent+b"), (self._typed, "strong"), (self._glyphs.half, "accent")), ()]
        room = max(1, self.size.height - 6)
        first = max(0, self._at - room + 1)
        for index, choice in list(enumerate(found))[first : first + room]:
            row: tuple[Span, ...] = ((f" {choice.text}", "text"),)
            missing = width - row_cells(row) - len(choice.keys) - 1
            row = (*row, (" " * max(1, missing), "text"), (choice.keys, "dim"), (" ", "text"))
            rows.append(restyle(extend(row, width), "+sel") if index == self._at else row)
        if not found:
            rows.append((("  no such command", "dim"),))
        return rows

    def _found(self) -> list[Choice]:
        return [choice for choice in self._offered if matches(choice.text, self._typed)]

    def press(self, key: str, character: str | None) -> None:
        match key:
            case "escape":
                self.dismiss(None)
            case "ctrl+c":
                self.dismiss("do:interrupt")
            case "enter":
                found = self._found()
                self.dismiss(found[self._at].value if found else None)
            case "down" | "ctrl+n" | "tab":
                self._at += 1
            case "up" | "ctrl+p" | "shift+tab":
                self._at -= 1
            case "backspace":
                self._typed = self._typed[:-1]
            case "ctrl+u":
                self._typed = ""
            case _ if character is not None and character.isprintable():
                self._typed += character
                self._at = 0


class ConfirmDialog(Dialog):
    """Names the target and waits for `y`. Everything else means no. Dismissed with `yes` or None."""

    def __init__(self, question: str, details: Sequence[str], palette: Palette, glyphs: Glyphs) -> None:
        super().__init__("Are you sure?", palette, glyphs, hint="y does it, any other key does not", widest=64)
        self._question, self._details = question, details

    def body(self, width: int) -> list[Row]:
        rows: list[Row] = [((line, "warn+b"),) for line in wrap(self._question, width)]
        rows.append(())
        rows += [((line, "text"),) for detail in self._details for line in wrap(detail, width)]
        return rows

    def press(self, key: str, character: str | None) -> None:
        self.dismiss("yes" if key == "y" else None)
