"""The charts: reward, KL, grad_norm, response length, log-prob gap, entropy; one cursor and one time range for all."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct, field

from rltop.tui.history import Bucket, History
from rltop.tui.picture import CHARTS, ChartSpec, chart_key, check_status, threshold
from rltop.tui.plot import Plot, draw, headroom
from rltop.tui.rows import Row, Span, columns, extend, row_cells, split
from rltop.tui.text import fit, num, pad
from rltop.tui.theme import status_style
from rltop.tui.view import Frame

_LABEL_CELLS = 7
_GAP = "  "
_ROOMY = 44
"""From this width on a chart's title has room for more than its value."""
MAX_ZOOM = 12


class ChartsView(Struct):
    """A grid of line charts. `cursor` is a share (0..1) of the time range, so it means the same step in every chart."""

    name: str = "charts"
    title: str = "Charts"
    filter: str = ""
    selected: int = 0
    single: bool = False
    """One chart fills the pane."""
    log: set[str] = field(default_factory=set)
    """Titles of charts with a logarithmic axis."""
    zoom: int = 0
    """The time range is 1 / 2**zoom of the run."""
    end: float = 1.0
    """Right end of the time range as a share of the run; 1 follows the newest."""
    cursor: float | None = None
    plot_cells: int = 40
    """Width of one plot as last drawn: the step of the cursor, and how many buckets are worth asking for."""
    cell_map: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(x, y, width, height, chart) of each chart as last drawn, for clicks."""

    def uses(self, key: str) -> bool:
        return key.startswith(("metric/", "check/"))

    def badge(self, frame: Frame) -> Row:
        bad = sum(frame.histories[key].bad for key in self._keys(frame) if key in frame.histories)
        return ((f"{frame.glyphs.fail}{num(bad)}", "bad"),) if bad else ()

    def _keys(self, frame: Frame) -> list[str]:
        return [key for spec in CHARTS if (key := chart_key(spec, frame.state)) is not None]

    def range_of(self, history: History) -> tuple[float, float] | None:
        """Steps at the left and right edge of this metric's chart."""
        span = history.span
        if span is None:
            return None
        length = headroom(span[1] - span[0])
        width = length / 2**self.zoom
        right = span[0] + length * self.end
        if self.zoom and self.end >= 1.0:
            right = span[1]  # zoomed to the newest: no empty room
        return (right - width, right)

    def summary(self, frame: Frame) -> Row:
        """The time range, once it is not the whole run: a number that moves with every step is bytes without news."""
        key = next((key for key in self._keys(frame) if key in frame.histories), "")
        span = self.range_of(frame.histories[key]) if key else None
        if span is None:
            return ()
        if not self.zoom:
            return (("whole run", "dim"),)
        axis = "step" if key.startswith("train/") else "rollout"
        share = f"1/{2**self.zoom} of the run"
        return ((share, "accent"), (f"  {axis}s {_step(span[0])}-{_step(span[1])}", "dim"))

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        if self.single:
            self.cell_map = [(0, 0, width, height, self.selected)]
            return self._chart(CHARTS[self.selected], frame, width, height, focused=False)
        across = 3 if width >= 130 and height < 24 else 2 if width >= 52 else 1
        down = -(-len(CHARTS) // across)
        size = (width - len(_GAP) * (across - 1)) // across
        spare = max(0, height - 2 * down)
        out: list[Row] = []
        self.cell_map = []
        for line in range(down):
            tall = 2 + spare // down + (line < spare % down)
            cells = list(range(line * across, min(len(CHARTS), (line + 1) * across)))
            parts = [self._chart(CHARTS[i], frame, size, tall, focused=focused and i == self.selected) for i in cells]
            for place, index in enumerate(cells):
                self.cell_map.append((place * (size + len(_GAP)), len(out), size, tall, index))
            for y in range(tall):
                out.append(columns([part[y] for part in parts], [size] * len(parts), _GAP))
        return out

    def _chart(self, spec: ChartSpec, frame: Frame, width: int, height: int, *, focused: bool) -> list[Row]:
        key = chart_key(spec, frame.state)
        history = frame.histories.get(key) if key is not None else None
        span = self.range_of(history) if history is not None else None
        if key is None or history is None or span is None:
            blank: Row = ((" " * width, "text"),)
            title = split(
                ((f" {spec.title}", "strong" if focused else "dim"),), (("not reported yet ", "faint"),), width
            )
            return [_select(title, focused), *[blank] * (height - 1)]
        log = spec.title in self.log
        limit = threshold(spec, frame.state)
        self.plot_cells = max(4, width - _LABEL_CELLS - 1)
        axis_line = height >= 9
        plot = draw(
            history.between(*span),
            self.plot_cells,
            height - 1 - axis_line,
            span,
            log=log,
            limit=limit,
            ascii_only=frame.glyphs.ascii_only,
            mark=frame.glyphs.fail,
        )
        title = _select(self._title(spec, key, history, plot, limit, span, frame, width, focused), focused)
        rows = [title, *self._plot_rows(plot, frame, width)]
        if axis_line:
            rows.append(_x_axis(span, key, width))
        return rows

    def _title(
        self,
        spec: ChartSpec,
        key: str,
        history: History,
        plot: Plot,
        limit: float | None,
        span: tuple[float, float],
        frame: Frame,
        width: int,
        focused: bool,
    ) -> Row:
        status = check_status(spec, frame.state)
        mark = f"{frame.glyphs.status(status)} " if status in ("fail", "warn") else " "
        name = f"KL ({key.rsplit('/', 1)[1]})" if spec.title == "KL" else spec.title
        left: list[Span] = [(mark, status_style(status)), (name, "strong")]
        notes: list[Span] = []
        if history.bad:
            notes.append((f" NaN{frame.glyphs.times}{num(history.bad)}", "bad"))
        if spec.title in self.log:
            notes.append((" log" + (f", {plot.below} at or below 0" if plot.below else ""), "accent"))
        if limit is not None and plot.limit is None and width > _ROOMY:
            notes.append((f" limit {num(limit)}", "faint"))
        bucket = self._under_cursor(history, span)
        unit = f" {spec.unit}" if spec.unit else ""
        if bucket is not None:
            value = num(bucket.last, steady=True) if bucket.finite else "NaN"
            spread = (
                f" {num(bucket.lo)}..{num(bucket.hi)}"
                if bucket.finite and bucket.lo != bucket.hi and width > 44
                else ""
            )
            right: Row = ((f"@{_step(bucket.step)}", "dim"), (spread, "dim"), (f" {value}{unit} ", "accent+b"))
        else:
            newest = frame.state.get(f"metric/{key}")
            number = newest.get("value") if isinstance(newest, Mapping) else None
            bad = isinstance(number, float) and not math.isfinite(number)
            right = ((f"{num(number, steady=True)}{unit} ", "bad" if bad else "strong"),)
        for note in notes:  # whole notes or none: half a number would lie
            if row_cells((*left, note, *right)) < width:
                left.append(note)
        return split(tuple(left), right, width)

    def _under_cursor(self, history: History, span: tuple[float, float]) -> Bucket | None:
        if self.cursor is None:
            return None
        step = span[0] + (span[1] - span[0]) * self.cursor
        inside = history.between(*span)
        return min(inside, key=lambda bucket: abs(bucket.step - step)) if inside else None

    def _plot_rows(self, plot: Plot, frame: Frame, width: int) -> list[Row]:
        labels = plot.axis.labels if plot.axis else ("", "")
        at = None if self.cursor is None else round(self.cursor * (self.plot_cells - 1))
        out: list[Row] = []
        last = len(plot.rows) - 1
        for y, text in enumerate(plot.rows):
            label = labels[0] if y == 0 else labels[1] if y == last else ""
            side = f"{pad(label, _LABEL_CELLS, right=True)} "
            out.append(((side, "faint"), *_plot_spans(plot, y, text, at, frame)))
        return out

    def act(self, action: str, frame: Frame) -> bool:
        match action:
            case "up" | "down" | "previous-tab" | "next-tab":
                jump = (
                    1
                    if action in ("next-tab", "previous-tab") or self.single or self._across() == 1
                    else self._across()
                )
                step = -jump if action in ("up", "previous-tab") else jump
                self.selected = (self.selected + step) % len(CHARTS)
            case "left" | "right":
                self._move(-1 if action == "left" else 1, frame)
            case "home":
                self._pan(0.0)
            case "end":
                self._pan(1.0)
            case "page-up" | "page-down":
                self._pan(self.end + (-0.5 if action == "page-up" else 0.5) / 2**self.zoom)
            case "log-y":
                self.log ^= {CHARTS[self.selected].title}
            case "open":
                self.single = not self.single
            case "zoom-in" if self.zoom < MAX_ZOOM:
                self._zoom(self.zoom + 1)
            case "zoom-out" if self.zoom > 0:
                self._zoom(self.zoom - 1)
            case "back" if self.cursor is not None or self.single:
                self.cursor, self.single = None, self.single and self.cursor is not None
            case _:
                return False
        return True

    def _across(self) -> int:
        return sum(1 for box in self.cell_map if box[1] == 0) or 1

    def _newest_share(self, frame: Frame) -> float:
        """Where the newest point of the selected chart lies in the time range, 0..1."""
        key = chart_key(CHARTS[self.selected], frame.state)
        history = frame.histories.get(key) if key is not None else None
        span = self.range_of(history) if history is not None else None
        if history is None or span is None or span[1] <= span[0]:
            return 1.0
        return min(1.0, max(0.0, (history.buckets[-1].step - span[0]) / (span[1] - span[0])))

    def _move(self, step: int, frame: Frame) -> None:
        """The cursor starts at the newest point and drags the time range along at its edges."""
        if self.cursor is None:
            self.cursor = self._newest_share(frame)
            return
        moved = self.cursor + step / max(1, self.plot_cells - 1)
        if not 0.0 <= moved <= 1.0 and self.zoom:
            self._pan(self.end + step * 0.25 / 2**self.zoom)
        self.cursor = min(1.0, max(0.0, moved))

    def show_step(self, chart: int, key: str, step: float, frame: Frame) -> None:
        """Put the cursor on a step of one chart, over the whole run."""
        self.selected, self.single, self.zoom, self.end = chart, True, 0, 1.0
        history = frame.histories.get(key)
        span = self.range_of(history) if history is not None else None
        if span is not None and span[1] > span[0]:
            self.cursor = min(1.0, max(0.0, (step - span[0]) / (span[1] - span[0])))

    def _zoom(self, zoom: int) -> None:
        """Around the cursor, or to the newest end."""
        share = 1.0 if self.cursor is None else self.cursor
        left = self.end - 1 / 2**self.zoom
        focus = left + share / 2**self.zoom
        self.zoom = zoom
        self._pan(1.0 if self.cursor is None and self.end >= 1.0 else focus + (1 - share) / 2**zoom)

    def _pan(self, end: float) -> None:
        self.end = min(1.0, max(1 / 2**self.zoom, end))

    def click(self, x: int, y: int, frame: Frame) -> None:
        for left, top, width, height, index in self.cell_map:
            if left <= x < left + width and top <= y < top + height:
                self.selected = index
                if x >= left + _LABEL_CELLS + 1 and y > top:
                    self.cursor = min(1.0, (x - left - _LABEL_CELLS - 1) / max(1, self.plot_cells - 1))

    def deep(self) -> bool:
        return self.cursor is not None or self.single

    def has_selection(self) -> bool:
        return bool(self.cell_map)

    def selection(self, frame: Frame) -> str:
        lines = []
        for key in self._keys(frame):
            history = frame.histories.get(key)
            span = self.range_of(history) if history is not None else None
            if history is None or span is None:
                continue
            bucket = self._under_cursor(history, span) or history.buckets[-1]
            lines.append(f"{key}\t{_step(bucket.step)}\t{bucket.last!r}\t{bucket.lo!r}\t{bucket.hi!r}\t{bucket.nan}")
        return "\n".join(["metric\tstep\tlast\tmin\tmax\tnan", *lines]) if lines else ""


def _select(row: Row, focused: bool) -> Row:
    return tuple((text, f"{style}+sel") for text, style in row) if focused else row


def _step(step: float) -> str:
    return str(round(step))


def _x_axis(span: tuple[float, float], key: str, width: int) -> Row:
    axis = "step" if key.startswith("train/") else "rollout"
    left: Row = ((" " * (_LABEL_CELLS + 1), "text"), (f"{axis} {_step(span[0])}", "faint"))
    return split(left, ((fit(_step(span[1]), 10), "faint"),), width)


def _plot_spans(plot: Plot, y: int, text: str, cursor: int | None, frame: Frame) -> Row:
    """One plot line: data, NaN marks, the threshold line where no data is, the cursor line likewise."""
    spans: list[Span] = []
    run, run_style = "", ""
    for x, char in enumerate(text):
        style = "data"
        if (y, x) in plot.marks:
            style = "bad"
        elif x == cursor:
            char, style = (frame.glyphs.cursor, "accent") if char == " " else (char, "strong")
        elif char == " ":
            char, style = (frame.glyphs.limit, "limit") if y == plot.limit else (" ", run_style or "data")
        if style != run_style:
            if run:
                spans.append((run, run_style))
            run, run_style = "", style
        run += char
    spans.append((run, run_style))
    return extend(tuple(spans), len(text)) if not spans[-1][0] else tuple(spans)
