"""One sample to be read: prompt, response with coloured tokens, label; fields; what the cursor over the tokens is on.

Lines are made as far as they are looked at: a response of 100,000 tokens opens like a short one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from rltop.tui.rows import Row, Span, row_cells
from rltop.tui.text import clean, clean_lines, fit, head, num, wrap
from rltop.tui.theme import Glyphs
from rltop.tui.widgets.dump_colours import Tokens, legend, number, style_of, tokens_of
from rltop.tui.widgets.dump_flow import NO_TOKEN, Run, flow, pieces, visible

MOST_LINES = 2_000_000
_LABEL = 11


class Line(Struct, frozen=True):
    """One line as it was laid out: runs of one block, or a heading."""

    runs: tuple[Run, ...]
    style: str = "text"
    heading: bool = False


class SampleText(Struct):
    """Scroll position and cursor over one sample."""

    sample: dict[str, Any]
    glyphs: Glyphs
    tokens: Tokens = field(default_factory=Tokens)
    top: int = -1
    """First line in sight; -1: where the response begins."""
    cursor: int = 0
    """Token."""
    page: int = 1
    _width: int = 0
    _lines: list[Line] = field(default_factory=list)
    _first: dict[int, int] = field(default_factory=dict)
    """token -> its first line."""
    _response: int = 0
    """Line of the heading of the response."""
    _more: Iterator[Line] | None = None

    @classmethod
    def of(cls, sample: dict[str, Any], glyphs: Glyphs) -> SampleText:
        """From `samples[0]` of a `dump-page`."""
        return cls(sample, glyphs, tokens_of(sample))

    # -------------------------------------------------------------- laying out

    def _lay_out(self, width: int) -> None:
        if width != self._width:
            keep = self.top >= 0
            self._width, self._lines, self._first = width, [], {}
            self._more = self._blocks(width)
            if keep:
                self.top = -2  # the cursor is brought into sight

    def _blocks(self, width: int) -> Iterator[Line]:
        sample, tokens = self.sample, self.tokens
        if sample.get("prompt") is not None:
            count = sample.get("prompt_tokens")
            yield self._heading("prompt" + (f", {count} tokens" if isinstance(count, int) else ""))
            yield from self._flowed(pieces(str(sample["prompt"])), "dim")
        yield self._heading(self._response_words())
        response = sample.get("response")
        if tokens.texts:
            yield from self._flowed(((text, at) for at, text in enumerate(tokens.texts)), "token")
        elif response is not None:
            yield from self._flowed(pieces(str(response)), "text")
        if not tokens.texts and tokens.count:
            yield self._heading("token ids" if tokens.ids else "tokens by number")
            shown = tokens.ids or range(tokens.count)
            yield from self._flowed(((f"{one} ", at) for at, one in enumerate(shown)), "token")
        if sample.get("label") is not None:
            yield self._heading("label")
            yield from self._flowed(pieces(str(sample["label"])), "accent")
        for cut in sample.get("cut") or ():
            yield Line(((f"left out: {cut}", NO_TOKEN),), "warn")

    def _response_words(self) -> str:
        if self.sample.get("response") is None and not self.tokens.texts:
            return "the dump has no response text"
        source = clean(str(self.sample.get("texts_from") or ""), ascii_only=self.glyphs.ascii_only)
        if self.tokens.texts:
            return f"response, tokens by {source}" if source else "response"
        return f"response ({source}: tokens below)" if self.tokens.count and source else "response"

    def _heading(self, words: str) -> Line:
        return Line(((words, NO_TOKEN),), "strong", heading=True)

    def _flowed(self, parts: Iterator[Run], style: str) -> Iterator[Line]:
        for runs in flow(parts, self._width, self.glyphs):
            yield Line(tuple(runs), style)

    def _until(self, count: int) -> bool:
        """Make lines until there are `count`; False: there are fewer."""
        while len(self._lines) < count and self._more is not None:
            self._next()
        return len(self._lines) >= count

    def _next(self) -> None:
        line = next(self._more, None) if self._more is not None and len(self._lines) < MOST_LINES else None
        if line is None:
            self._more = None
            return
        if line.heading and line.runs[0][0].startswith(("response", "the dump has no response")):
            self._response = len(self._lines)
        for _, token in line.runs:
            if token != NO_TOKEN:
                self._first.setdefault(token, len(self._lines))
        self._lines.append(line)

    def _line_of(self, token: int) -> int | None:
        while token not in self._first and self._more is not None:
            self._next()
        return self._first.get(token)

    # -------------------------------------------------------------- moving

    def move(self, action: str) -> bool:
        """Take `up`, `down`, `page-up`, `page-down`, `home`, `end`, `token-left` or `token-right`."""
        count = self.tokens.count
        match action:
            case "token-left" | "token-right":
                self.cursor = max(0, min(self.cursor + (1 if action == "token-right" else -1), count - 1))
                self._into_sight()
            case "home":
                self.top, self.cursor = 0, 0
            case "end":
                while self._more is not None:
                    self._next()
                self.top = max(0, len(self._lines) - self.page)
                self.cursor = max(0, count - 1)
            case "up" | "down":
                self._vertical(1 if action == "down" else -1)
            case "page-up" | "page-down":
                self._scroll((self.page - 1 or 1) * (1 if action == "page-down" else -1))
                self._cursor_into_sight()
            case _:
                return False
        return True

    def to_token(self, token: int) -> None:
        """Put the cursor on a token."""
        self.cursor = max(0, min(token, self.tokens.count - 1))
        self._into_sight()

    def find(self, text: str) -> None:
        """Bring the first line with the text into sight."""
        low = text.casefold()
        at = 0
        while self._until(at + 1):
            line = self._lines[at]
            if not line.heading and low in "".join(part for part, _ in line.runs).casefold():
                self.top = max(0, at - self.page // 3)
                token = next((owner for _, owner in line.runs if owner != NO_TOKEN), None)
                self.cursor = self.cursor if token is None else token
                return
            at += 1

    def _vertical(self, step: int) -> None:
        line = self._first.get(self.cursor)
        x = self._column(self.cursor) if line is not None else 0
        at = line if line is not None and self.top <= line < self.top + self.page else None
        while at is not None and 0 <= at + step < self.top + self.page + 1 and self._until(at + step + 1):
            at += step
            if (token := self._token_at(at, x)) is not None:
                self.cursor = token
                self._into_sight()
                return
        self._scroll(step)
        self._cursor_into_sight()

    def _column(self, token: int) -> int:
        line = self._lines[self._first[token]]
        used = 0
        for text, owner in line.runs:
            if owner == token:
                return used
            used += row_cells(((text, ""),))
        return 0

    def _token_at(self, line: int, x: int) -> int | None:
        used, found = 0, None
        for text, owner in self._lines[line].runs:
            if owner != NO_TOKEN and self._first.get(owner) == line and (found is None or used <= x):
                found = owner
            used += row_cells(((text, ""),))
        return found

    def _scroll(self, step: int) -> None:
        self._until(self.top + step + self.page)
        self.top = max(0, min(self.top + step, len(self._lines) - self.page))

    def _into_sight(self) -> None:
        line = self._line_of(self.cursor)
        if line is not None and not self.top <= line < self.top + self.page:
            below = line >= self.top + self.page
            self.top = max(0, line - self.page + 1 if below else line)

    def _cursor_into_sight(self) -> None:
        """The cursor follows the window."""
        line = self._first.get(self.cursor)
        if line is None or self.top <= line < self.top + self.page:
            return
        order = range(self.top, self.top + self.page)
        for at in order if line < self.top else reversed(order):
            if at < len(self._lines) and (token := self._token_at(at, 0)) is not None:
                self.cursor = token
                return

    # -------------------------------------------------------------- painting

    def body(self, mode: str, width: int, height: int, *, focused: bool, hit: str = "") -> list[Row]:
        """The lines in sight. hit: a text that is marked."""
        self.page = max(1, height)
        self._lay_out(width)
        if self.top == -1:
            while self._more is not None and not any(line.heading for line in self._lines[1:]):
                self._next()
            self.top = max(0, self._response - height // 3)
        elif self.top == -2:
            self.top = 0
            self._into_sight()
        self._until(self.top + height)
        self.top = max(0, min(self.top, len(self._lines) - height))
        shown = self._lines[self.top : self.top + height]
        return [self._row(line, mode, width, focused=focused, hit=hit) for line in shown]

    def _row(self, line: Line, mode: str, width: int, *, focused: bool, hit: str) -> Row:
        if line.heading:
            words = fit(line.runs[0][0], max(1, width - 4), mark=self.glyphs.cut)
            fill = self.glyphs.rule * max(0, width - row_cells(((words, ""),)) - 4)
            return ((self.glyphs.rule * 2 + " ", "rule"), (words, "dim"), (f" {fill}", "rule"))
        out: list[Span] = []
        for text, token in line.runs:
            if token == NO_TOKEN:
                out += _marked(text, line.style, hit)
                continue
            style = style_of(mode, self.tokens, token)
            if token == self.cursor and "+cur" not in style:
                style += "+cur" if focused else "+b"
            out.append((text, style))
        return tuple(out)

    def position(self) -> str:
        """Which token the cursor is on."""
        count = self.tokens.count
        return f"token {self.cursor + 1}/{count}" if count else ""

    def facts(self, width: int) -> list[Row]:
        """Reward, status and numbers of the sample, in as many lines as they need."""
        sample, group, gaps = self.sample, self.sample.get("group") or {}, self.sample.get("gaps") or {}
        safe = self._safe
        facts: list[tuple[str, str, str]] = [
            ("reward", num(sample.get("reward")) + self._from_key(), "strong"),
            ("status", safe(sample.get("status") or "-"), "text"),
            ("tokens", str(sample.get("length")) if sample.get("length") is not None else "-", "text"),
        ]
        if group:
            without = group.get("missing") or 0
            told = f"{num(group.get('mean'))} of {group.get('n', 0) - without}, std {num(group.get('std'))}"
            told += f"; {without} without a reward left out" if without else ""
            odd = without or not math.isfinite(group.get("mean") or 0.0)
            facts.append(("group mean", told, "warn" if odd else "text"))
        if gaps:
            loud = "text" if isinstance(gaps.get("max"), int | float) and gaps["max"] < 0.1 else "warn"
            facts.append(
                ("gap", f"{num(gaps.get('mean'))}, max {num(gaps.get('max'))} at {gaps.get('at', 0) + 1}", loud)
            )
        versions = sample.get("weight_versions") or []
        if versions:
            facts.append(("weights", safe(", ".join(map(str, dict.fromkeys(versions)))), "text"))
        if sample.get("refused"):
            facts.append(("not read", safe(", ".join(map(str, sample["refused"]))), "warn"))
        if sample.get("remarks"):
            facts.append(("odd", safe(", ".join(map(str, sample["remarks"]))), "warn"))
        return told_facts(facts, width, self.glyphs)

    def _from_key(self) -> str:
        """Which of several rewards that is."""
        key = self.sample.get("reward_key")
        return "" if key is None else f" ({self._safe(str(key))})"

    def token_rows(self, mode: str, width: int) -> list[Row]:
        """What the cursor is on, and what the colours mean."""
        tokens, at = self.tokens, self.cursor
        rows: list[Row] = []
        if tokens.count:
            name = number(tokens.ids, at)
            text = tokens.texts[at] if at < len(tokens.texts) else None
            facts = [(f"token {at + 1}", "" if text is None else _quoted(text, self.glyphs), "strong")]
            if name is not None:
                facts.append(("id", str(name), "text"))
            for label, values in (("rollout", tokens.rollout), ("train", tokens.train), ("ref", tokens.ref)):
                value = number(values, at)
                if value is not None:
                    facts.append((label, f"{value:.4f}", "text"))
            drawn = number(tokens.rollout, at)
            if drawn is not None and math.isfinite(drawn):
                facts.append(("p", num(math.exp(min(drawn, 0.0))), "text"))
            gap, advantage = tokens.gap(at), tokens.advantage(at)
            if gap is not None:
                facts.append(("gap", f"{gap:.4g}", "text" if gap < 0.1 else "warn"))
            if advantage is not None:
                facts.append(("advantage", f"{advantage:+.4g}" if advantage else "0", "text"))
            if tokens.masked(at):
                facts.append(("", "masked: not in the loss", "dim"))
            rows += told_facts(facts, width, self.glyphs)
        rows.append(legend(mode, tokens))
        return rows

    def field_rows(self, width: int) -> list[Row]:
        """Metadata and every field that is not shown elsewhere."""
        out: list[Row] = []
        for name, value in self.sample.get("fields") or ():
            label = fit(self._safe(name), max(8, width), mark=self.glyphs.cut)
            room = max(8, width - 2)
            lines = [
                piece for one in clean_lines(value, ascii_only=self.glyphs.ascii_only) for piece in wrap(one, room)
            ]
            if len(lines) == 1 and row_cells(((label + lines[0], ""),)) + 3 <= width:
                out.append(((f"{label} ", "accent"), (lines[0], "text")))
                continue
            out.append(((label, "accent"),))
            out += [((f"  {line}", "text"),) for line in lines]
        return out or [((" this sample has no metadata and no other fields", "dim"),)]

    def copied(self) -> str:
        """For the clipboard: everything that is shown, clean."""
        sample = self.sample
        parts = [f"{name}: {num(sample.get(name))}" for name in ("index", "group_index", "reward", "length", "gap")]
        parts.append(f"status: {self._safe(sample.get('status') or '-')}")
        for name in ("prompt", "response", "label"):
            if sample.get(name) is not None:
                parts.append(f"{name}: " + "\n".join(clean_lines(sample[name])))
        return "\n".join(parts)

    def _safe(self, value: object) -> str:
        return clean(value, ascii_only=self.glyphs.ascii_only, newline=self.glyphs.newline)


def told_facts(facts: list[tuple[str, str, str]], width: int, glyphs: Glyphs) -> list[Row]:
    """(label, value, style) one after another, in lines of a width; a fact is never broken."""
    rows: list[list[Span]] = [[]]
    used = 0
    for label, value, style in facts:
        value = head(value, max(4, width - len(label) - 2))
        spans: list[Span] = [(f" {label} " if label else " ", "faint"), (f"{value} ", style)]
        size = row_cells(tuple(spans))
        if used and used + size > width:
            rows.append([])
            used = 0
        rows[-1] += spans
        used += size
    return [tuple(row) for row in rows]


def _quoted(text: str, glyphs: Glyphs) -> str:
    shown = visible(text[:80], glyphs).replace("\n", "")
    return f"'{shown}'"


def _marked(text: str, style: str, hit: str) -> Iterator[Span]:
    """The text with every place of `hit` marked."""
    low, wanted = text.casefold(), hit.casefold()
    at = 0
    # Only where case folding keeps lengths do places of the one fit the other.
    while wanted and len(low) == len(text) and (found := low.find(wanted, at)) >= 0:
        if found > at:
            yield text[at:found], style
        yield text[found : found + len(hit)], "warn+b+cur"
        at = found + len(hit)
    if at < len(text) or not text:
        yield text[at:], style
