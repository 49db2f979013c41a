"""One line of input in place of a footer, for whichever screen needs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.screen import Screen

if TYPE_CHECKING:
    from textual.widgets import Input


class AskLine:
    """Opens a line of input at the bottom of `screen`; `done` gets the text, or None after Esc."""

    def __init__(self, screen: Screen[None], painted: Callable[[], None]) -> None:
        self._screen, self._painted = screen, painted
        self._input: Input | None = None
        self._done: Callable[[str | None], None] | None = None
        self._live: Callable[[str], None] | None = None
        self.label = ""
        """What is asked for; empty: nothing."""

    def open(
        self,
        label: str,
        done: Callable[[str | None], None],
        *,
        text: str = "",
        live: Callable[[str], None] | None = None,
    ) -> None:
        """Ask. `live` is told each change while it is typed."""
        from textual.widgets import Input  # only when somebody types: saves its import at start

        if self._input is not None:
            return
        box = Input(text, select_on_focus=False, compact=True)
        self._input, self._done, self._live, self.label = box, done, live, label.rstrip()
        self.place()
        self._screen.mount(box)
        box.focus()

    def place(self) -> None:
        """Put the line at the bottom, behind its label."""
        if self._input is not None:
            start = len(self.label) + 3
            self._input.styles.offset = (start, self._screen.size.height - 1)
            self._input.styles.width = max(4, self._screen.size.width - start - 9)

    def changed(self, event: Input.Changed) -> None:
        """A character was typed or removed."""
        if self._live is not None and event.input is self._input:
            self._live(event.value)

    def close(self, value: str | None) -> None:
        """The answer is complete; None: taken back."""
        box, done = self._input, self._done
        self._input = self._done = self._live = None
        self.label = ""
        if box is not None:
            box.remove()
        if done is not None:
            done(value)
        self._painted()

    @property
    def asking(self) -> bool:
        """A line of input is open."""
        return self._input is not None
