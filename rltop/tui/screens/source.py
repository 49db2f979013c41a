"""The log around a piece of evidence, as a box over the Live screen: what the daemon answered, its line marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rltop.protocol.messages import LinesAnswer
from rltop.tui.evidence import LinePlace
from rltop.tui.rows import Row
from rltop.tui.screens.dialogs import Dialog
from rltop.tui.text import cells, clean, fit_middle, head, wrap
from rltop.tui.theme import Glyphs, Palette


class SourceDialog(Dialog):
    """Scrolls; `tab` goes to the next piece of evidence. `ask(number)` has the daemon asked, `take` gets the answer."""

    def __init__(
        self, places: Sequence[LinePlace], palette: Palette, glyphs: Glyphs, ask: Callable[[SourceDialog, int], None]
    ) -> None:
        super().__init__("Evidence", palette, glyphs, hint="esc closes", widest=160)
        self.places = list(places)
        self.at = 0
        self._ask = ask
        self._answers: dict[int, LinesAnswer] = {}
        self._to_mark = True
        """The next picture starts near the marked line."""

    def on_mount(self) -> None:
        self._show(0)

    def _show(self, number: int) -> None:
        self.at = number % len(self.places)
        self._to_mark = True
        if self.at not in self._answers:
            self._ask(self, self.at)

    def take(self, number: int, answer: LinesAnswer) -> None:
        """The daemon's answer for one piece of evidence."""
        self._answers[number] = answer
        if self.is_mounted:
            self.paint()

    def press(self, key: str, character: str | None) -> None:
        match key:
            case "tab" | "n" if len(self.places) > 1:
                self._show(self.at + 1)
            case "shift+tab" | "p" if len(self.places) > 1:
                self._show(self.at - 1)
            case "o":
                self.dismiss(None)
            case _:
                super().press(key, character)

    def body(self, width: int) -> list[Row]:
        place, answer = self.places[self.at], self._answers.get(self.at)
        which = f" {self.at + 1}/{len(self.places)}" if len(self.places) > 1 else ""
        tail = f":{place.line}{which}"
        self._title = fit_middle(self._clean(place.source), max(4, width - len(tail) - 2), mark=self._glyphs.cut) + tail
        self._hint = f"tab next {self._glyphs.dot} esc closes" if which else "esc closes"
        rows: list[Row] = []
        if answer is None:
            return [(("asking the daemon ...", "dim"),)]
        if not answer.lines:
            why = f"cannot be shown: {self._clean(answer.why)}"
            rows += [((line, "warn"),) for line in wrap(why, width)]
            if place.text:
                rows += [(), *(((line, "text"),) for line in wrap(self._clean(place.text), width))]
            return rows
        gutter = len(str(answer.first + len(answer.lines) - 1))
        mark = 0
        for line, text in enumerate(answer.lines, answer.first):
            here = line == place.line
            mark = len(rows) if here else mark
            label = f"{'>' if here else ' '}{line:>{gutter}} "
            for piece in _pieces(self._clean(text.expandtabs(4)), max(8, width - len(label))):
                rows.append(((label, "accent+b" if here else "faint"), (piece, "warn+b" if here else "text")))
                label = " " * len(label)
        if self._to_mark:
            self._to_mark = False
            self.top = max(0, mark - max(1, self.size.height - 2) // 3)
        return rows

    def _clean(self, text: str) -> str:
        return clean(text, ascii_only=self._glyphs.ascii_only, newline=self._glyphs.newline)


def _pieces(text: str, width: int) -> list[str]:
    """The text in pieces of at most `width` cells; nothing of it is lost, as its indentation tells something."""
    out = []
    while cells(text) > width:
        piece = head(text, width) or text[0]
        out.append(piece)
        text = text[len(piece) :]
    return [*out, text]
