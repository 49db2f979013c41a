"""A few responses of the newest rollout, to be read: the first of all step-1 checks is whether they are language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from rltop.tui.rows import Row, Span, extend, restyle
from rltop.tui.text import cells, clean_lines, head, num, wrap
from rltop.tui.view import Frame, Picker, matches

_PROMPT_CELLS = 24
_STATUS_STYLE = {"truncated": "warn", "aborted": "warn", "failed": "bad"}


class RolloutsView(Struct):
    """One line per sample; the selected one opens to prompt, response and label."""

    name: str = "rollouts"
    title: str = "Rollouts"
    filter: str = ""
    picker: Picker = field(default_factory=Picker)
    opened: bool | None = None
    """Whether the selected sample is told in full; None: as soon as there is room."""
    _shown_open: bool = False

    def uses(self, key: str) -> bool:
        return key == "samples"

    def badge(self, frame: Frame) -> Row:
        return ()

    def summary(self, frame: Frame) -> Row:
        data = frame.state.get("samples")
        if not isinstance(data, Mapping):
            return ()
        shown = len(self._samples(frame))
        return ((f"rollout {data.get('rollout_id')}: {shown} of {data.get('total') or shown} samples", "dim"),)

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        self.picker.lines = []
        samples = self._samples(frame)
        if not samples:
            return [(("  no sample matches the filter" if self.filter else "  no rollout yet", "dim"),)]
        keys = [_key(index) for index in range(len(samples))]
        titles: Row = ((f" {'reward':>7} {'tokens':>6}  {'status':<10} prompt and response", "faint"),)

        opened = height >= len(samples) + 8 if self.opened is None else self.opened
        self._shown_open = opened

        def detail(index: int) -> list[Row]:
            return _detail(samples[index], frame, width) if opened and index == self.picker.index(keys) else []

        def rows(index: int, selected: bool) -> list[Row]:
            row = _line(samples[index], frame)
            if selected and focused:
                row = restyle(extend(row, width), "+sel")
            return [row, *detail(index)]

        return [titles, *self.picker.draw(keys, height - 1, lambda index: 1 + len(detail(index)), rows)]

    def act(self, action: str, frame: Frame) -> bool:
        if action == "open":
            self.opened = not self._shown_open
            return True
        if action == "back" and self.opened:
            self.opened = False
            return True
        return self.picker.move(action, [_key(index) for index in range(len(self._samples(frame)))])

    def click(self, x: int, y: int, frame: Frame) -> None:
        self.picker.click(y - 1, [_key(index) for index in range(len(self._samples(frame)))])

    def deep(self) -> bool:
        return self.opened is True

    def has_selection(self) -> bool:
        return bool(self.picker.lines)

    def selection(self, frame: Frame) -> str:
        samples = self._samples(frame)
        if not samples:
            return ""
        sample = samples[self.picker.index([_key(index) for index in range(len(samples))])]
        parts = (
            f"{label}: " + "\n".join(clean_lines(_flat(sample.get(label))))
            for label in ("prompt", "response", "label", "reward")
        )
        return "\n".join(parts)

    def _samples(self, frame: Frame) -> list[Mapping[str, Any]]:
        data = frame.state.get("samples")
        found = data.get("samples") if isinstance(data, Mapping) else None
        samples = [item for item in found if isinstance(item, Mapping)] if isinstance(found, list | tuple) else []
        if not self.filter:
            return samples
        return [
            s
            for s in samples
            if matches(f"{s.get('status')} {_flat(s.get('prompt'))} {_flat(s.get('response'))}", self.filter)
        ]


def _key(index: int) -> str:
    return str(index)


def _flat(value: Any) -> str:
    """A prompt may be text or chat messages."""
    if isinstance(value, list | tuple):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, Mapping) else str(m) for m in value)
    return "" if value is None else str(value)


def _line(sample: Mapping[str, Any], frame: Frame) -> Row:
    reward, length = sample.get("reward"), sample.get("response_length")
    status = frame.safe(sample.get("status") or "-")
    good = isinstance(reward, int | float) and reward > 0
    return (
        (f" {num(reward if isinstance(reward, int | float) else None):>7}", "ok" if good else "text"),
        (f" {num(length if isinstance(length, int | float) else None):>6}  ", "dim"),
        (f"{status[:10]:<10} ", _STATUS_STYLE.get(status, "dim")),
        (f"{_prompt_end(sample, frame)} {frame.glyphs.arrow} ", "dim"),
        (frame.safe(_flat(sample.get("response"))) or "(empty)", "text"),
    )


def _prompt_end(sample: Mapping[str, Any], frame: Frame) -> str:
    """The end of the prompt tells prompts apart; their start is the template."""
    text = frame.safe(_flat(sample.get("prompt")))
    return text if cells(text) <= _PROMPT_CELLS else frame.glyphs.cut + head(text[::-1], _PROMPT_CELLS - 1)[::-1]


def _detail(sample: Mapping[str, Any], frame: Frame, width: int) -> list[Row]:
    out: list[Row] = []
    room = max(10, width - 15)
    facts = " ".join(
        f"{name}={frame.safe(sample[name])}"
        for name in ("index", "group_index", "engine", "weight_version", "finish_reason")
        if sample.get(name) is not None
    )
    blocks = [
        (label, _flat(sample.get(label)), style)
        for label, style in (("prompt", "dim"), ("response", "text"), ("label", "accent"))
    ]
    for label, text, style in [*blocks, ("facts", facts, "faint")]:
        span: list[Span] = []
        for line in clean_lines(text, ascii_only=frame.glyphs.ascii_only)[:60] if text else ():
            for piece in wrap(line, room):
                span = [(f"{label:>13}  ", "faint"), (piece, style)]
                out.append(tuple(span))
                label = ""
    return out
