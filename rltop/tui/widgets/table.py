"""The engine table. Unwell engines first; columns that do not fit are left out whole and named in the title."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from rltop.tui.fleet import EngineView, natural, required_weights
from rltop.tui.lenient import as_map, as_text
from rltop.tui.rows import Row, Span, extend, restyle
from rltop.tui.text import age, coarse_age, fit_middle, num, pad, wrap
from rltop.tui.view import Frame, Picker, matches
from rltop.tui.widgets.engine_cells import (
    STATE_CELLS,
    kind_cell,
    said,
    signals_cell,
    state_cell,
    version_text,
    weights_cell,
)

_BAR = 6


class Column(Struct, frozen=True):
    """One column. rank: kept longest when 0. widest: grows up to this on wide screens. load: what it carries now, which
    gives way to the phrase on an engine that is not well."""

    head: str
    width: int
    rank: int
    cell: Callable[[EngineView, Frame, int], Span]
    right: bool = False
    widest: int = 0
    load: bool = False


def _kv(view: EngineView, frame: Frame, width: int) -> Span:
    if view.kv is None:
        return "-", "text"
    share = min(1.0, max(0.0, view.kv))
    style = "warn" if share > 0.9 else "text"
    text = f"{share * 100:3.0f}%"
    if width < 5 + _BAR:
        return text, style
    full = round(share * _BAR)
    return f"{text} {frame.glyphs.full * full}{frame.glyphs.empty * (_BAR - full)}", style


def _count(value: float | None) -> Span:
    return num(value), "text"


def _queued(view: EngineView, frame: Frame, width: int) -> Span:
    text, style = _count(view.queued)
    return text, "warn" if view.queued and view.running and view.queued > 4 * view.running else style


def _graph(view: EngineView, frame: Frame, width: int) -> Span:
    return ("-", "dim") if view.graph is None else ("on", "dim") if view.graph else ("off", "text")


def _age(view: EngineView, frame: Frame, width: int) -> Span:
    since = frame.since(view.seen)
    if since is None:
        return "-", "dim"
    return coarse_age(since), "warn" if since > 30 else "text" if since > 3 else "dim"


def _accept(view: EngineView, frame: Frame, width: int) -> Span:
    return "-" if view.accept is None else f"{view.accept:.2f}", "text"


def _restarts(view: EngineView, frame: Frame, width: int) -> Span:
    return (f"{view.restarts}{frame.glyphs.times}", "text") if view.restarts else ("-", "dim")


def _ends(text: str, frame: Frame, width: int, style: str) -> Span:
    """Ids and hosts differ at both ends."""
    return fit_middle(frame.safe(text) or "-", width, mark=frame.glyphs.cut), style


# What changes with every scrape stands left of what hardly ever changes, and neighbours share a style: both save bytes.
COLUMNS: tuple[Column, ...] = (
    Column("id", 4, 0, lambda view, frame, width: _ends(view.id, frame, width, "text"), widest=16),
    Column("state", STATE_CELLS, 0, state_cell),
    Column("weights", 9, 0, weights_cell, widest=16),
    Column("run", 4, 0, lambda view, frame, width: _count(view.running), right=True, load=True),
    Column("queue", 5, 0, _queued, right=True, load=True),
    Column("tok/s", 6, 0, lambda view, frame, width: _count(view.tokens_per_s), right=True, load=True),
    Column("KV", 4, 0, _kv, right=True, widest=5 + _BAR, load=True),
    Column("accept", 6, 3, _accept, right=True, load=True),
    Column("seen", 4, 2, _age, right=True, load=True),
    Column("PHGTL", 5, 0, signals_cell),
    Column("kind", 10, 1, kind_cell, widest=18),
    Column("graph", 5, 3, _graph),
    Column("gen", 3, 4, lambda view, frame, width: ("-" if view.generation is None else str(view.generation), "dim")),
    Column("restarts", 8, 4, _restarts),
    Column("host", 8, 5, lambda view, frame, width: _ends(view.host, frame, width, "dim"), widest=24),
    Column("version", 8, 6, lambda view, frame, width: _ends(view.version, frame, width, "dim"), widest=14),
)
SORTS: tuple[tuple[str, Callable[[EngineView], tuple[object, ...]]], ...] = (
    ("worst first", lambda view: (view.trouble, natural(view.id))),
    ("id", lambda view: (natural(view.id),)),
    ("tok/s", lambda view: (-(view.tokens_per_s or 0.0), natural(view.id))),
    ("KV", lambda view: (-(view.kv or 0.0), natural(view.id))),
    ("queue", lambda view: (-(view.queued or 0.0), natural(view.id))),
    ("seen", lambda view: (view.seen if view.seen is not None else 0.0, natural(view.id))),
)
_SEP = "  "


def fit_columns(width: int) -> list[tuple[Column, int]]:
    """The columns that fit into `width` cells, in their order, with their widths; the least ranked go first."""
    chosen = list(COLUMNS)

    def need() -> int:
        return 1 + sum(column.width for column in chosen) + len(_SEP) * (len(chosen) - 1)

    while need() > width and len(chosen) > 1:
        last = max(chosen, key=lambda column: (column.rank, COLUMNS.index(column)))
        chosen.remove(last)
    spare = width - need()
    out: list[tuple[Column, int]] = []
    for column in chosen:
        more = min(spare, max(0, column.widest - column.width))
        spare -= more
        out.append((column, column.width + more))
    return out


class EnginesView(Struct):
    """Rows of engines; the selected one can be opened for everything else that is known of it."""

    name: str = "engines"
    title: str = "Engines"
    filter: str = ""
    picker: Picker = field(default_factory=Picker)
    sort: int = 0
    opened: str | None = None
    hidden: tuple[str, ...] = ()
    """Heads of the columns that did not fit when last drawn."""

    def uses(self, key: str) -> bool:
        return key.startswith("engine/") or key in ("weights", "fleet")

    def badge(self, frame: Frame) -> Row:
        unwell = sum(view.trouble == 0 for view in frame.engines())
        return ((f"{frame.glyphs.fail}{unwell}", "bad"),) if unwell else ()

    def summary(self, frame: Frame) -> Row:
        views = frame.engines()
        if not views:
            return ()
        dot = f" {frame.glyphs.dot} "
        healthy = sum(view.state == "HEALTHY" and not view.paused for view in views)
        row: list[Span] = [(f"{healthy}/{len(views)} healthy", "ok" if healthy == len(views) else "warn")]
        rates = [view.tokens_per_s for view in views if view.tokens_per_s is not None]
        if rates:
            row.append((f"{dot}{num(sum(rates))} tok/s", "text"))
        if required := required_weights(frame.state):
            old = sum(view.old for view in views)
            told = fit_middle(version_text(frame.safe(required)), 12, mark=frame.glyphs.cut)
            row.append((f"{dot}weights {told}" + (f", {old} old" if old else ""), "warn" if old else "dim"))
        if self.sort:
            row.append((f"{dot}by {SORTS[self.sort][0]}", "accent"))
        if self.hidden:
            row.append((f"{dot}+{len(self.hidden)} columns: enter", "faint"))
        position = self.picker.position(len(self._views(frame)))
        return (*row, (f"{dot}{position}", "dim")) if position else tuple(row)

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        self.picker.lines = []
        views = self._views(frame)
        if not views:
            return [((("  no engine matches the filter" if self.filter else _none(frame)), "dim"),)]
        fitted = fit_columns(width)
        used = [column for column, _ in fitted]
        self.hidden = tuple(column.head for column in COLUMNS if column not in used and column.rank < 5)
        head: Row = ((" ", "faint"), *_line([(column.head, "faint") for column in used], fitted))
        keys = [view.id for view in views]

        def rows(index: int, selected: bool) -> list[Row]:
            view = views[index]
            row: Row = ((" ", "text"), *_cells(view, frame, fitted))
            if selected and focused:
                row = restyle(extend(row, width), "+sel")
            return [row, *self._detail(view, frame, width)]

        return [
            head,
            *self.picker.draw(keys, height - 1, lambda i: 1 + len(self._detail(views[i], frame, width)), rows),
        ]

    def _detail(self, view: EngineView, frame: Frame, width: int) -> list[Row]:
        if view.id != self.opened:
            return []
        facts = {
            "error": view.error,
            "cause": view.cause,
            "kind": view.kind + (" (a stand-in, not SGLang)" if view.stand_in else ""),
            "address": view.url,
            "process": f"{view.process}, generation {view.generation or '?'}",
            "version": view.version,
            "model": view.model_path,
            "CUDA graph": "" if view.graph is None else "on" if view.graph else "off",
            "accept len": "" if view.accept is None else num(view.accept),
            "log": view.log,
            "last seen": age(since) + " ago" if (since := frame.since(view.seen)) is not None else "never",
        }
        out: list[Row] = []
        for label, text in facts.items():
            for piece in wrap(frame.safe(text), max(10, width - 15)) if text else ():
                out.append(((f"{label:>13}  ", "faint"), (piece, "warn" if label == "error" else "text")))
                label = ""
        return out

    def act(self, action: str, frame: Frame) -> bool:
        keys = [view.id for view in self._views(frame)]
        match action:
            case "back" if self.opened is not None:
                self.opened = None
            case "sort":
                self.sort = (self.sort + 1) % len(SORTS)
                self.picker.key = None
            case "open" if keys:
                key = self.picker.key = keys[self.picker.index(keys)]
                self.opened = None if self.opened == key else key
            case _:
                return self.picker.move(action, keys)
        return True

    def click(self, x: int, y: int, frame: Frame) -> None:
        self.picker.click(y - 1, [view.id for view in self._views(frame)])

    def deep(self) -> bool:
        return self.opened is not None

    def has_selection(self) -> bool:
        return bool(self.picker.lines)

    def selection(self, frame: Frame) -> str:
        views = self._views(frame)
        if not views:
            return ""
        view = views[self.picker.index([item.id for item in views])]
        cells_of = [f"{column.head}={column.cell(view, frame, 40)[0].strip()}" for column in COLUMNS]
        lines = [" ".join(cells_of), f"url={view.url} pid={view.pid} log={view.log}", view.error]
        return "\n".join(frame.safe(line) for line in lines if line)

    def cursor(self, frame: Frame) -> str | None:
        """Id of the engine under the cursor."""
        views = self._views(frame)
        return views[self.picker.index([view.id for view in views])].id if views else None

    def _views(self, frame: Frame) -> list[EngineView]:
        views = frame.engines()
        if self.filter:
            views = [
                v
                for v in views
                if matches(
                    f"{v.id} {v.kind} {v.state} {v.host} {v.weights} {'old' * v.old} {v.owner} {v.cause}", self.filter
                )
            ]
        return sorted(views, key=SORTS[self.sort][1])


def _cells(view: EngineView, frame: Frame, fitted: Sequence[tuple[Column, int]]) -> list[Span]:
    """The row of an engine; where there is something to say about it, it stands in place of its load."""
    phrase = said(view, frame)
    load = [index for index, (column, _) in enumerate(fitted) if column.load]
    texts = [column.cell(view, frame, size) for column, size in fitted]
    if not phrase or not load:
        return _line(texts, fitted)
    first, last = load[0], load[-1] + 1
    room = sum(size for _, size in fitted[first:last]) + len(_SEP) * (last - first - 1)
    left, right = _line(texts[:first], fitted[:first]), _line(texts[last:], fitted[last:])
    return [*left, (_SEP, "text"), *extend(phrase, room), (_SEP, "text"), *right]


def _line(texts: Sequence[Span], fitted: Sequence[tuple[Column, int]]) -> list[Span]:
    """Cells in their widths. Neighbours of one style share a span: fewer bytes to paint."""
    out: list[Span] = []
    for index, ((text, style), (column, width)) in enumerate(zip(texts, fitted, strict=True)):
        piece = pad(text, width, right=column.right)
        if index:
            piece = _SEP + piece
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + piece, style)
        else:
            out.append((piece, style))
    return out


def _none(frame: Frame) -> str:
    """Why the table is empty."""
    alone = as_text(as_map(frame.state.get("run")).get("mode")) == "train-only"
    return "  train-only: no engine is started" if alone else "  no engines yet"
