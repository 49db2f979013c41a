"""Where the panes go: a pure function of the size of the terminal, what is in the panes, and what was chosen."""

from __future__ import annotations

from msgspec import Struct

from rltop.tui.keytable import PANES

LEAST = (40, 12)
"""Smallest terminal, columns x rows, in which anything is shown."""
_WIDE = (100, 30)
_TALL = 38


class Box(Struct, frozen=True):
    """A rectangle in cells."""

    x: int
    y: int
    width: int
    height: int


class Place(Struct, frozen=True):
    """A rectangle and the panes that share it; `shown` is the one on top."""

    box: Box
    panes: tuple[str, ...]
    shown: str


def fits(width: int, height: int) -> bool:
    """The terminal is large enough for a picture."""
    return width >= LEAST[0] and height >= LEAST[1]


def arrange(
    width: int, height: int, header: int, engines: int, active: str, low_tab: str, *, full: bool
) -> list[Place]:
    """Places for all panes below a header of `header` rows and above the footer row.

    engines: number of engines; active: the pane with the keyboard; low_tab: which of events, rollouts, run is on top.
    """
    body = Box(0, header, width, height - header - 1)
    if full or not fits(width, height):
        return [Place(body, PANES, active)]
    low = ("events", "rollouts", "run")
    shown = active if active in low else low_tab
    if width >= _WIDE[0] and height >= _WIDE[1]:
        table = min(max(1, engines) + 2, max(5, body.height * 3 // 10))
        rest = body.height - table
        upper = rest * 64 // 100
        left = min(76, width * 46 // 100)
        top = body.y + upper
        return [
            Place(Box(0, body.y, left, upper), ("checks",), "checks"),
            Place(Box(left + 1, body.y, width - left - 1, upper), ("charts",), "charts"),
            Place(Box(0, top, width, table), ("engines",), "engines"),
            Place(Box(0, top + table, width, rest - upper), low, shown),
        ]
    if height >= _TALL:
        third = body.height // 3
        under = ("engines", *low)
        shown = active if active in under else low_tab
        return [
            Place(Box(0, body.y, width, third), ("checks",), "checks"),
            Place(Box(0, body.y + third, width, third), ("charts",), "charts"),
            Place(Box(0, body.y + 2 * third, width, body.height - 2 * third), under, shown),
        ]
    return [Place(body, PANES, active)]
