"""The list of samples: virtual, so that a million of them cost what is in sight. It knows places, never the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from rltop.protocol.messages import DumpPageAnswer
from rltop.tui.rows import Row, Span, extend, restyle
from rltop.tui.text import clean, fit, num, pad
from rltop.tui.theme import Glyphs

KEPT = 4_000
"""Rows that are kept; more are dropped from the far end."""
AHEAD = 40
"""Rows that are fetched beyond what is in sight."""
LAST = 1 << 60
"""A place behind every end."""
STATUS_STYLE = {"completed": "dim", "truncated": "warn", "aborted": "warn", "failed": "bad", "pending": "warn"}


class Column(Struct, frozen=True):
    """One column; `rank` 0 stays longest."""

    head: str
    width: int
    rank: int = 0
    right: bool = True


COLUMNS = (
    Column("index", 7),
    Column("group", 6, 2),
    Column("reward", 7),
    Column("status", 9, 4, right=False),
    Column("", 1, 0),
    Column("tokens", 6, 1),
    Column("gap", 7, 1),
)


class DumpList(Struct):
    """Cursor, window and the rows that have come."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    count: int = 0
    ended: bool = False
    indexed: int = 0
    cursor: int = 0
    top: int = 0
    page: int = 1
    why: str = ""
    """Why there is nothing."""
    broken: str = ""
    """Why there is no more than this."""
    asked_end: bool = False
    """To the end, wherever it is."""
    busy: bool = False
    """The newest answer was not complete."""

    def reset(self, cursor: int = 0) -> None:
        """Another file, filter or order."""
        self.rows.clear()
        self.count, self.ended, self.indexed, self.why, self.broken = 0, False, 0, "", ""
        self.cursor, self.top, self.asked_end, self.busy = cursor, max(0, cursor - self.page // 2), False, True

    @property
    def current(self) -> dict[str, Any] | None:
        """The row under the cursor, if it has come."""
        return self.rows.get(self.cursor)

    def wanted(self) -> tuple[int, int] | None:
        """(from, to) of rows in sight that are missing; None: all are there."""
        if self.asked_end:
            return LAST, LAST + self.page + AHEAD
        stop = self.top + self.page if not self.ended else min(self.top + self.page, self.count)
        missing = [place for place in range(self.top, stop) if place not in self.rows]
        if not missing or (self.ended and not self.count):
            return None
        back = AHEAD if missing[0] == self.top and self.top else 0
        return max(0, missing[0] - back), missing[-1] + 1 + AHEAD

    def take(self, answer: DumpPageAnswer) -> None:
        """Rows that came."""
        if answer.why and not answer.count:  # no answer at all: what is here stays
            self.why, self.broken = ("", answer.why) if self.rows else (answer.why, "")
            self.busy = self.asked_end = False
            return
        self.count, self.indexed = answer.count, answer.indexed
        self.why, self.broken = "", answer.why
        self.ended, self.busy = answer.ended, not answer.done
        if len(self.rows) > KEPT:
            near = range(self.top - KEPT // 4, self.top + KEPT // 4)
            self.rows = {place: row for place, row in self.rows.items() if place in near}
        self.rows.update(enumerate(answer.rows, answer.start))
        if self.asked_end and answer.done:
            self.asked_end = False
            self.go(self.count - 1)
        elif self.ended and self.cursor >= self.count:
            self.go(self.count - 1)

    def go(self, place: int) -> None:
        """Put the cursor on a place."""
        self.cursor = max(0, min(place, self.count - 1) if self.ended else place)
        self.top = max(0, min(self.top, self.cursor))
        self.top = max(self.top, self.cursor - self.page + 1)

    def move(self, action: str) -> bool:
        """Take `up`, `down`, `page-up`, `page-down`, `home` or `end`."""
        step = {"up": -1, "down": 1, "page-up": -max(1, self.page - 1), "page-down": max(1, self.page - 1)}
        # Nobody gets further than a page ahead of what has come.
        limit = self.count - 1 if self.ended else self.count + self.page
        match action:
            case "home":
                self.asked_end = False
                self.go(0)
            case "end" if self.ended:
                self.go(self.count - 1)
            case "end":
                self.asked_end = True
            case _ if action in step:
                self.asked_end = False
                self.go(min(self.cursor + step[action], max(0, limit)))
            case _:
                return False
        return True

    def click(self, y: int) -> None:
        """Select the row that was drawn at body row `y`."""
        if y >= 1 and self.top + y - 1 in self.rows:
            self.go(self.top + y - 1)

    def position(self) -> str:
        """Where the cursor is: `17/1000`, with `+` where the end is not known."""
        if not self.count:
            return ""
        return f"{self.cursor + 1}/{self.count}{'' if self.ended else '+'}"

    def body(self, glyphs: Glyphs, width: int, height: int, *, focused: bool) -> list[Row]:
        """A line of heads, then the rows in sight."""
        self.page = max(1, height - 1)
        self.go(self.cursor)
        if self.why:
            return [((line, "warn"),) for line in _words(clean(self.why, ascii_only=glyphs.ascii_only), width)]
        if self.ended and not self.count:
            return [((" no sample fits", "dim"),)]
        columns = fit_columns(width - 1)
        text = width - 1 - sum(one.width + 1 for one in columns)
        head = " ".join(pad(one.head, one.width, right=one.right) for one in columns)
        out: list[Row] = [((f" {head}" + (" response" if text > 9 else ""), "faint"),)]
        stop = min(self.top + self.page, self.count) if self.ended else self.top + self.page
        for place in range(self.top, stop):
            row = self.rows.get(place)
            if row is None:
                shown: Row = ((f" {glyphs.cut if not self.ended or self.busy else ''}", "faint"),)
            else:
                shown = tuple(_cells(row, columns, glyphs, text))
            if place == self.cursor:
                shown = restyle(extend(shown, width), "+sel" if focused else "+b")
            out.append(shown)
        return out


def fit_columns(width: int) -> list[Column]:
    """The columns that fit, in their order."""
    chosen = list(COLUMNS)
    while sum(one.width + 1 for one in chosen) > width and len(chosen) > 1:
        last = max(chosen, key=lambda one: (one.rank, COLUMNS.index(one)))
        if not last.rank:
            break
        chosen.remove(last)
    return chosen


def _cells(row: dict[str, Any], columns: list[Column], glyphs: Glyphs, text: int) -> Iterator[Span]:
    status = clean(row.get("status") or "", ascii_only=glyphs.ascii_only)
    style = STATUS_STYLE.get(status, "text")
    reward, gap = row.get("reward"), row.get("gap")
    index = row.get("index") if row.get("index") is not None else row.get("at")
    cells: dict[str, Span] = {
        "index": (str(index), "text"),
        "group": (str(row["group_index"]) if row.get("group_index") is not None else "-", "dim"),
        "reward": (num(reward), "ok" if isinstance(reward, int | float) and reward > 0 else "text"),
        "status": (status or "-", style),
        "": (status_glyph(status, glyphs), style),
        "tokens": (num(row.get("length")), "dim"),
        "gap": (num(gap), "warn" if isinstance(gap, int | float) and not gap < 0.1 else "dim"),
    }
    yield " ", "text"
    for column in columns:
        cell, style = cells[column.head]
        yield pad(cell, column.width, right=column.right, mark=glyphs.cut) + " ", style
    if text > 9:
        shown = clean(str(row.get("text") or "")[: 4 * text], ascii_only=glyphs.ascii_only, newline=glyphs.newline)
        yield fit(shown, text, mark=glyphs.cut), "dim"


def status_glyph(status: str, glyphs: Glyphs) -> str:
    """One character for a status of slime."""
    match status:
        case "completed":
            return glyphs.ok
        case "truncated":
            return glyphs.warn
        case "aborted" | "failed":
            return glyphs.fail
        case _:
            return glyphs.skip


def _words(text: str, width: int) -> list[str]:
    from rltop.tui.text import wrap

    return wrap(text[:2_000], max(10, width - 1))
