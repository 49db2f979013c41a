"""What changed since the last good run: the state key `changed` as a box over the Live screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rltop.tui.rows import Row
from rltop.tui.screens.dialogs import Dialog
from rltop.tui.text import plain, wrap
from rltop.tui.theme import Glyphs, Palette
from rltop.tui.view import Frame


class ChangedDialog(Dialog):
    """A list to scroll, the likeliest culprit first."""

    def __init__(self, frame: Frame, palette: Palette, glyphs: Glyphs) -> None:
        super().__init__("What changed", palette, glyphs, hint="esc closes", widest=100)
        self._frame = frame

    def body(self, width: int) -> list[Row]:
        found = self._frame.state.get("changed")
        return (
            list(changed_rows(found, self._frame, width))
            if isinstance(found, Mapping)
            else [(("  not compared yet: it comes some seconds after the start of the run", "dim"),)]
        )


def changed_rows(found: Mapping[str, Any], frame: Frame, width: int) -> Iterator[Row]:
    """Lines of the answer."""

    def lines(text: str, style: str, indent: int = 0) -> Iterator[Row]:
        for line in wrap(frame.safe(text), max(10, width - indent)):
            yield ((" " * indent, "text"), (line, style))

    if not found.get("before"):
        yield from lines(plain(found.get("why")), "dim")
        return
    yield (
        (frame.safe(str(found["before"])), "strong"),
        (f" {frame.glyphs.arrow} ", "dim"),
        (frame.safe(str(found.get("after"))), "strong"),
    )
    yield from lines(f"{found['before']} is {found.get('why')}", "dim")
    changes = found.get("changes") or []
    if not changes:
        yield from ((), (("nothing that is known of both runs differs", "ok"),))
    for place, change in enumerate(changes, 1):
        name = str(change.get("name"))
        kind = str(change.get("kind"))
        shown = f"--{name.replace('_', '-')}" if kind == "argument" else f"{kind} {name}"
        yield ()
        yield ((f"{place:>2}  ", "dim"), (frame.safe(shown), "warn+b" if place == 1 else "strong"))
        yield from lines(f"- {_value(change.get('before'))}", "text", 4)
        yield from lines(f"+ {_value(change.get('after'))}", "text", 4)
        yield from lines(plain(change.get("why")), "dim", 4)
    if found.get("more"):
        yield from (
            (),
            ((f"{found['more']} less likely ones: rltop changed {frame.safe(str(found['after']))} --all", "dim"),),
        )
    unknown = found.get("unknown") or []
    if unknown:
        yield from ((), (("not known", "strong"),))
        for text in unknown:
            yield from lines(str(text), "dim", 2)


def _value(value: Any) -> str:
    return "(not there)" if value is None else "set" if value is True else plain(value)
