"""The event feed: newest at the bottom, followed unless the operator moves up; gaps are shown, not hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from rltop.tui.rows import Row, Span, extend, restyle
from rltop.tui.text import clean_lines, wrap
from rltop.tui.theme import status_style
from rltop.tui.view import Frame, Picker, matches

LEVELS = ("debug", "info", "warn", "error")


class _Item(Struct, frozen=True):
    """An event, or a gap of `missing` events before it."""

    key: str
    event: Mapping[str, Any]
    missing: tuple[int, int] | None = None


class EventsView(Struct):
    """The log. `level`: index of the least level shown."""

    name: str = "events"
    title: str = "Events"
    filter: str = ""
    level: int = 1
    picker: Picker = field(default_factory=lambda: Picker(tail=True))
    opened: str | None = None

    def uses(self, key: str) -> bool:
        return False

    def badge(self, frame: Frame) -> Row:
        return ()

    def summary(self, frame: Frame) -> Row:
        missed = sum(hi - lo + 1 for lo, hi in frame.gaps)
        row: list[Span] = []
        if missed:
            row += [(f"{missed} missed", "warn"), ("  ", "text")]
        if self.level != 1:
            row += [(f"{LEVELS[self.level]} and worse", "accent"), ("  ", "text")]
        if self.picker.key is not None:
            items = self._items(frame)
            row += [("not following, G follows", "accent"), ("  ", "text")]
            row.append((self.picker.position(len(items)), "dim"))
        return tuple(row)

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        self.picker.lines = []
        items = self._items(frame)
        if not items:
            hidden = len(frame.events)
            what = f"  none of {hidden} events passes the filter and level" if hidden else "  no events yet"
            return [((what, "dim"),)]
        keys = [item.key for item in items]

        def rows(index: int, selected: bool) -> list[Row]:
            item = items[index]
            first = _gap_row(item, frame, width) if item.missing else _event_row(item.event, frame)
            # A followed log has no cursor to look at.
            if selected and focused and self.picker.key is not None:
                first = restyle(extend(first, width), "+sel")
            return [first, *self._detail(item, frame, width)]

        def size(index: int) -> int:
            return 1 + (len(self._detail(items[index], frame, width)) if keys[index] == self.opened else 0)

        return self.picker.draw(keys, height, size, rows)

    def _detail(self, item: _Item, frame: Frame, width: int) -> list[Row]:
        if item.key != self.opened or item.missing:
            return []
        room = max(10, width - 12)
        out: list[Row] = []
        for line in clean_lines(item.event.get("text", ""), ascii_only=frame.glyphs.ascii_only)[:40]:
            out += [((" " * 11, "text"), (piece, "text")) for piece in wrap(line, room)]
        rest = {key: value for key, value in item.event.items() if key not in ("text", "t", "level", "kind")}
        facts = "  ".join(f"{frame.safe(key)}={frame.safe(value)}" for key, value in rest.items())
        return out + [((" " * 11, "text"), (piece, "dim")) for piece in wrap(facts, room)]

    def act(self, action: str, frame: Frame) -> bool:
        keys = [item.key for item in self._items(frame)]
        match action:
            case "back" if self.deep():
                if self.opened is None:
                    self.picker.key = None
                self.opened = None
            case "level":
                self.level = (self.level + 1) % len(LEVELS)
            case "open" if keys:
                key = self.picker.key = keys[self.picker.index(keys)]
                self.opened = None if self.opened == key else key
            case _:
                return self.picker.move(action, keys)
        return True

    @property
    def at_start(self) -> bool:
        """The oldest event is in sight and wanted: time to ask for older ones."""
        return self.picker.key is not None and self.picker.top == 0

    def click(self, x: int, y: int, frame: Frame) -> None:
        self.picker.click(y, [item.key for item in self._items(frame)])

    def deep(self) -> bool:
        return self.opened is not None or self.picker.key is not None

    def has_selection(self) -> bool:
        return bool(self.picker.lines)

    def selection(self, frame: Frame) -> str:
        items = self._items(frame)
        if not items:
            return ""
        event = items[self.picker.index([item.key for item in items])].event
        when = event.get("t")
        stamp = frame.stamp(when)
        lines = clean_lines(event.get("text", ""), ascii_only=frame.glyphs.ascii_only)
        return f"{stamp} {frame.safe(event.get('level', ''))} {frame.safe(event.get('kind', ''))} " + "\n".join(lines)

    def _items(self, frame: Frame) -> list[_Item]:
        floor = self.level
        out: list[_Item] = []
        gaps = sorted(frame.gaps)
        for event in frame.events:
            seq = _seq(event)
            while gaps and gaps[0][1] < seq:
                out.append(_Item(f"gap{gaps[0][0]}", {}, gaps.pop(0)))
            level = event.get("level")
            if (LEVELS.index(level) if level in LEVELS else 1) < floor:
                continue
            if self.filter and not matches(
                f"{level} {event.get('kind')} {event.get('source')} {event.get('text')}", self.filter
            ):
                continue
            out.append(_Item(str(seq), event))
        return out + [_Item(f"gap{lo}", {}, (lo, hi)) for lo, hi in gaps]


def _seq(event: Mapping[str, Any]) -> int:
    seq = event.get("eseq")
    return seq if isinstance(seq, int) else 0


def _gap_row(item: _Item, frame: Frame, width: int) -> Row:
    lo, hi = item.missing or (0, 0)
    text = f" {hi - lo + 1} events missed ({lo} to {hi}) "
    side = frame.glyphs.rule * max(2, (width - len(text) - 2) // 2)
    return ((f" {side}{text}{side}", "warn"),)


def _event_row(event: Mapping[str, Any], frame: Frame) -> Row:
    level = str(event.get("level", "info"))
    style = status_style(level) if level in ("warn", "error") else "faint" if level == "debug" else "note"
    when = event.get("t")
    stamp = frame.stamp(when)
    word = f"{level.upper()} " if level == "error" else f"{level} " if level == "warn" else ""
    kind, text = frame.safe(event.get("kind", "")), _headline(event, frame)
    told = kind == "log" or text.lower().startswith(kind)
    return (
        (f" {stamp} ", "faint" if level != "info" else style),
        (f"{frame.glyphs.level(level)} {word}", style),
        ("" if told else f"{kind} ", "dim"),
        (text, style),
    )


def _headline(event: Mapping[str, Any], frame: Frame) -> str:
    """The text; a verdict or engine event without one is told from its fields."""
    text = frame.safe(event.get("text", ""))
    if text:
        return text
    if event.get("from") is not None or event.get("to") is not None:
        return frame.safe(
            f"{event.get('id', '')}: {event.get('from', '?')} {frame.glyphs.arrow} {event.get('to', '?')}"
        )
    return ""


def oldest_seq(events: Sequence[Mapping[str, Any]]) -> int | None:
    """Sequence of the oldest event, None without events."""
    return _seq(events[0]) if events else None
