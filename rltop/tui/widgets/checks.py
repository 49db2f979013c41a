"""The step-1 checks: worst thing first, consequences folded under their cause, the selected one told in full below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from rltop.tui.picture import FIRST_STEP, CheckView, check_counts, check_views
from rltop.tui.rows import Row, Span, extend, restyle, row_cells, split
from rltop.tui.text import cells, clean_lines, coarse_age, fit, num, plain, wrap
from rltop.tui.theme import Glyphs, status_style
from rltop.tui.view import Frame, Picker, matches

OTHERS = "others"
"""Id of the line that stands for all checks that were not tested."""
_ID_CELLS = 22
_VALUE_CELLS = 18
_LABEL_CELLS = 9
_STORY_ROWS = 6
"""Least rows for a story with its divider."""


def counts_row(views: Sequence[CheckView], glyphs: Glyphs, *, words: bool) -> Row:
    """`✗ 1 fail  ▲ 2 warn  ✓ 5 pass`, or only glyphs and counts of what is wrong."""
    row: list[Span] = []
    for status, count in check_counts(views).items():
        if not words and status not in ("fail", "warn"):
            continue
        text = f"{glyphs.status(status)}{count}" + (f" {status}" if words else "")
        row += [(text, status_style(status)), ("  " if words else " ", "text")]
    return tuple(row[:-1])


def _value(view: CheckView, frame: Frame) -> str:
    """Value and limit in one breath: `0.23 > 0.05`, `0.412 · warn 10`. A skipped check has measured nothing."""
    if view.status == "skip" or view.value is None:
        return ""
    value, limit = view.value, view.threshold
    if _is_number(value) and _is_number(limit):
        sign = "=" if value == limit else ">" if value > limit else "<"
        return f"{num(value)} {sign} {num(limit)}"
    # Several numbers may have several units: they are put beside the limit, not compared with it.
    shown = fit(frame.safe(_short(value)), _VALUE_CELLS - 4, mark=frame.glyphs.cut)
    name, number = _limit(limit)
    return f"{shown} {frame.glyphs.dot} {name}{num(number)}" if number is not None else shown


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    """The leading part of a value: `3 of 4`, or the first thing that is there."""
    if isinstance(value, Mapping):
        if value.get("bad") is not None and value.get("of") is not None:
            return f"{plain(value['bad'])} of {plain(value['of'])}"
        return next((plain(item) for item in value.values() if item is not None), "")
    return plain(value)


def _limit(limit: object) -> tuple[str, float | None]:
    """(name with a space, number) of the first limit that a value meets on its way up."""
    if isinstance(limit, Mapping):
        for name in ("equal", "warn", "fail", *limit):
            if _is_number(limit.get(name)):
                return f"{name} ", limit[name]
    return "limit ", float(limit) if isinstance(limit, int | float) and _is_number(limit) else None


class ChecksView(Struct):
    """List of verdicts above the whole story of the selected one; `story` gives the story all the room."""

    name: str = "checks"
    title: str = "Checks"
    filter: str = ""
    picker: Picker = field(default_factory=Picker)
    story: bool = False
    unfolded: bool = False
    """Checks that were not tested and do not belong to the first step are listed too."""

    def uses(self, key: str) -> bool:
        return key.startswith("check")

    def badge(self, frame: Frame) -> Row:
        return counts_row(check_views(frame.state), frame.glyphs, words=False)

    def summary(self, frame: Frame) -> Row:
        position = self.picker.position(len(self._views(frame)))
        views = check_views(frame.state)
        row = counts_row(views, frame.glyphs, words=True)
        if muted := sum(bool(view.muted) for view in views):
            row = (*row, (f"  {muted} muted", "dim"))
        return (*row, (f"  {position}", "dim")) if position else row

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        self.picker.lines = []
        views = self._views(frame)
        if not views:
            return _nothing(self.filter)
        keys = [_key(view) for view in views]
        at = self.picker.index(keys)
        room = list_height(len(views), height, story=self.story)

        def rows(index: int, selected: bool) -> list[Row]:
            head = _head(views[index], frame, width)
            if selected:
                head = restyle(extend(head, width), "+sel" if focused else "")
            return [head]

        out = self.picker.draw(keys, room, lambda index: 1, rows)
        left = height - len(out) - 1
        if left > 1:
            out.append(_divider(views[at], frame, width))
            out += _cut(_story(views[at], frame, width), left, frame)
        return out

    def act(self, action: str, frame: Frame) -> bool:
        views = self._views(frame)
        if action == "open" and views:
            if views[self.picker.index([_key(view) for view in views])].id == OTHERS:
                self.unfolded = not self.unfolded
                self.picker.key = f"{OTHERS} "
            else:
                self.story = not self.story
            return True
        if action == "back" and self.story:
            self.story = False
            return True
        return self.picker.move(action, [_key(view) for view in views])

    def click(self, x: int, y: int, frame: Frame) -> None:
        self.picker.click(y, [_key(view) for view in self._views(frame)])

    def deep(self) -> bool:
        return self.story

    def has_selection(self) -> bool:
        return bool(self.picker.lines)

    def selection(self, frame: Frame) -> str:
        views = self._views(frame)
        if not views:
            return ""
        view = views[self.picker.index([_key(item) for item in views])]
        lines = [
            frame.safe(f"{view.status.upper()} {view.id} {view.subject} {view.where}".rstrip()),
            f"value: {_value(view, frame) or '-'}",
        ]
        lines += [f"cause: {frame.safe(view.cause)}"] if view.cause else []
        lines += [f"evidence: {_evidence(item, frame)}" for item in view.evidence]
        lines += [f"do: {frame.safe(item)}" for item in view.advice]
        lines += [f"consequence of: {', '.join(map(frame.safe, view.consequence_of))}"] if view.consequence_of else []
        return "\n".join(lines)

    def chosen(self, frame: Frame) -> CheckView | None:
        """The check that is selected; None where the line stands for several."""
        views = self._views(frame)
        view = views[self.picker.index([_key(item) for item in views])] if views else None
        return view if view is not None and view.id != OTHERS else None

    def _views(self, frame: Frame) -> list[CheckView]:
        """What is listed: what was tested, and the first-step checks; all others are one line that can be opened."""
        views = check_views(frame.state)
        if self.filter:
            return [v for v in views if matches(f"{v.status} {v.id} {v.subject} {v.cause}", self.filter)]
        shown = [view for view in views if view.status != "skip" or view.id in FIRST_STEP]
        rest = [view for view in views if view.status == "skip" and view.id not in FIRST_STEP]
        if not rest:
            return shown
        what = f"{len(rest)} checks were not tested: enter {'hides' if self.unfolded else 'lists'} them"
        return [*shown, CheckView(id=OTHERS, status="skip", cause=what), *(rest if self.unfolded else ())]


def _key(view: CheckView) -> str:
    return f"{view.id} {view.subject}"


def _nothing(needle: str) -> list[Row]:
    if needle:
        return [(("  no check matches the filter", "dim"),)]
    return [(("  no verdicts yet", "dim"),), (("  They come with the first training step.", "faint"),)]


def _head(view: CheckView, frame: Frame, width: int) -> Row:
    """One line: glyph, word, id, value against threshold, start of the cause."""
    glyphs = frame.glyphs
    style = "dim" if view.muted else status_style(view.status)
    name = frame.safe(view.id) + (f" {frame.safe(view.subject)}" if view.subject else "")
    if view.depth:
        name = f"{glyphs.elbow} {name}"
    loud = view.status in ("fail", "warn") and not view.muted
    word = view.status.upper() if view.status == "fail" else view.status
    row: list[Span] = [
        (f" {glyphs.status(view.status)} {word:<4} ", style),
        (
            name.ljust(_ID_CELLS - (cells(name) - len(name))),
            "strong" if loud and not view.depth else "text" if view.status != "skip" else "dim",
        ),
    ]
    value = _value(view, frame)
    room = _VALUE_CELLS if width >= 60 else 0
    row.append((f" {value}" + " " * (room - cells(value)), style if loud else "text"))
    if view.muted:
        row.append(("  muted", "warn" if view.status in ("fail", "warn") else "dim"))
    if view.cause:
        row.append((f"  {frame.safe(view.cause)}", "dim"))
    return tuple(row)


def _evidence(item: object, frame: Frame) -> str:
    data = item if isinstance(item, Mapping) else {}
    line = data.get("line")
    place = frame.safe(data.get("source", "")) + (f":{line}" if line is not None else "")
    return f"{place}  {frame.safe(data.get('text', ''))}".strip()


def list_height(count: int, height: int, *, story: bool) -> int:
    """Rows for the list: it stays where it is whatever is selected. The rest is for the story, if that is worth it."""
    if story:
        return min(count, 3)
    return min(count, height - _STORY_ROWS) if height >= 2 * _STORY_ROWS else height


def _divider(view: CheckView, frame: Frame, width: int) -> Row:
    name: Row = ((f"{frame.glyphs.rule * 2} ", "rule"), (frame.safe(view.id), "strong"), (" ", "rule"))
    held = frame.since(view.since)
    facts = [frame.safe(view.where)] if view.where else []
    if held is not None:
        facts.append(f"{view.status} for {coarse_age(held)}" if held >= 10 else f"{view.status} just now")
    while facts and row_cells(name) + cells(_joined(facts, frame)) + 4 > width:
        facts.pop(0)
    right: Row = ((f" {_joined(facts, frame)} ", "dim"),) if facts else ()
    return split(name, right, width, gap=frame.glyphs.rule, style="rule")


def _joined(facts: Sequence[str], frame: Frame) -> str:
    return f" {frame.glyphs.dot} ".join(facts)


def _cut(rows: list[Row], height: int, frame: Frame) -> list[Row]:
    """`rows` if they fit, else as many as do and a line that says so."""
    if len(rows) <= height:
        return rows
    return [
        *rows[: height - 1],
        ((f"{'':>{_LABEL_CELLS}}  {frame.glyphs.more} {len(rows) - height + 1} more lines: enter", "accent"),),
    ]


def _story(view: CheckView, frame: Frame, width: int) -> list[Row]:
    """Cause, what it follows from, evidence, what to do, references; labels at the left."""
    room = max(10, width - _LABEL_CELLS - 3)
    ascii_only = frame.glyphs.ascii_only
    out: list[Row] = []

    def block(label: str, lines: Sequence[str], style: str) -> None:
        for line in lines:
            for piece in wrap(line, room):
                out.append(((f"{label:>{_LABEL_CELLS}}  ", "faint"), (piece, style)))
                label = ""

    block("muted", [frame.safe(view.muted)] if view.muted else (), "warn")
    block("cause", clean_lines(view.cause, ascii_only=ascii_only) if view.cause else (), "text")
    if isinstance(view.value, Mapping):
        block("value", [frame.safe(plain({key: item for key, item in view.value.items() if item is not None}))], "text")
    if isinstance(view.threshold, Mapping):
        block("limit", [frame.safe(plain(view.threshold))], "dim")
    block("from", [", ".join(map(frame.safe, view.consequence_of))] if view.consequence_of else (), "warn")
    block("do", [frame.safe(item) for item in view.advice], "accent")
    block("evidence", [_evidence(item, frame) for item in view.evidence], "dim")
    sure = [f"confidence {frame.safe(view.confidence)}"] if view.confidence and view.status in ("fail", "warn") else []
    refs = [f"refs {' '.join(map(frame.safe, view.refs))}"] if view.refs else []
    block("", [_joined([*sure, *refs], frame)] if sure or refs else (), "faint")
    return out
