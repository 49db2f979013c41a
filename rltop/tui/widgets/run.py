"""Everything else that is known of the run: facts, weight sync, sources and their losses, operations, arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, field

from rltop.tui.picture import run_view, under
from rltop.tui.rows import Row, extend, restyle
from rltop.tui.text import age, plain, wrap
from rltop.tui.view import Frame, Picker, matches
from rltop.tui.widgets.watched import watched_facts

_LABEL_CELLS = 22
_Fact = tuple[str, str, str]
"""(label, text, style)"""


class RunFactsView(Struct):
    """A list of labelled facts."""

    name: str = "run"
    title: str = "Run"
    filter: str = ""
    picker: Picker = field(default_factory=Picker)

    def uses(self, key: str) -> bool:
        mine = ("run", "previous", "weights", "trainer", "ingest", "cluster", "gpus")
        return key in mine or key.startswith(("source/", "sources/", "log/", "op/", "metric/perf/"))

    def badge(self, frame: Frame) -> Row:
        lost = sum(_losses(value) for value in _counted(frame))
        return ((f"{frame.glyphs.warn}{lost}", "warn"),) if lost else ()

    def summary(self, frame: Frame) -> Row:
        count = len(self._facts(frame))
        return ((self.picker.position(count) or f"{count} facts", "dim"),)

    def body(self, frame: Frame, width: int, height: int, focused: bool) -> list[Row]:
        self.picker.lines = []
        facts = self._facts(frame)
        if not facts:
            return [(("  nothing matches the filter" if self.filter else "  nothing is known yet", "dim"),)]
        lines = [_lines(fact, width) for fact in facts]

        def rows(index: int, selected: bool) -> list[Row]:
            if selected and focused and self.picker.key is not None:
                return [restyle(extend(row, width), "+sel") for row in lines[index]]
            return lines[index]

        return self.picker.draw(_keys(facts), height, lambda index: len(lines[index]), rows)

    def act(self, action: str, frame: Frame) -> bool:
        return self.picker.move(action, _keys(self._facts(frame)))

    def click(self, x: int, y: int, frame: Frame) -> None:
        self.picker.click(y, _keys(self._facts(frame)))

    def deep(self) -> bool:
        return False

    def has_selection(self) -> bool:
        return bool(self.picker.lines)

    def selection(self, frame: Frame) -> str:
        facts = self._facts(frame)
        return "\t".join(facts[self.picker.index(_keys(facts))][:2]) if facts else ""

    def _facts(self, frame: Frame) -> list[_Fact]:
        facts = [(frame.safe(label), frame.safe(text), style) for label, text, style in _all(frame) if text]
        return [fact for fact in facts if matches(f"{fact[0]} {fact[1]}", self.filter)] if self.filter else facts


def _keys(facts: list[_Fact]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for label, _, _ in facts:
        seen[label] = seen.get(label, 0) + 1
        out.append(f"{label}#{seen[label]}")
    return out


def _lines(fact: _Fact, width: int) -> list[Row]:
    label, text, style = fact
    pieces = wrap(text, max(10, width - _LABEL_CELLS - 2))
    heads = [f" {label[: _LABEL_CELLS - 1]:<{_LABEL_CELLS}} "] + [" " * (_LABEL_CELLS + 2)] * (len(pieces) - 1)
    return [((head, "dim"), (piece, style)) for head, piece in zip(heads, pieces, strict=True)]


def _losses(source: Mapping[str, Any]) -> int:
    # What a producer dropped is a hole in its sequence too: the larger number holds the other.
    return max((int(source[name]) for name in ("lost", "dropped") if isinstance(source.get(name), int)), default=0)


def _all(frame: Frame) -> Iterator[_Fact]:
    """Most wanted first."""
    run = frame.state.get("run")
    run = run if isinstance(run, Mapping) else {}
    known = run_view(frame.state)
    for name in known.faults:
        yield "injected fault", name, "warn"
    for name in known.stand_ins:
        yield "stand-in", name, "accent"
    if isinstance(run.get("attempt"), int) and run["attempt"] > 1:
        yield "attempt", plain(run["attempt"]), "text"
        previous = frame.state.get("previous")
        if isinstance(previous, Mapping):
            told = [plain(previous.get("state")), plain(previous.get("text"))]
            told += [f"rollout {plain(previous['rollout'])}"] if previous.get("rollout") is not None else []
            told += [f"failed: {', '.join(map(str, causes))}"] if (causes := previous.get("root_causes")) else []
            yield "attempt before", ", ".join(word for word in told if word), "text"
    for label, key in (
        ("backend", "backend"),
        ("ended with", "text"),
        ("rollouts", "num_rollout"),
        ("first rollout", "start_rollout_id"),
    ):
        if run.get(key) not in (None, ""):
            yield label, plain(run[key]), "text"
    if "fresh_start" in run:
        yield "fresh start", plain(run["fresh_start"]), "text"
    yield from watched_facts(frame)
    yield from _times(frame)
    yield from _weights(frame)
    yield from _sources(frame)
    yield from _ingest(frame)
    for _, op in under(frame.state, "op/"):
        words = [op.get(name) for name in ("name", "target", "state", "stage", "text")] + ["by", op.get("who")]
        told = [str(word) for word in words if word]
        yield "operation", " ".join(told), "warn" if op.get("state") == "failed" else "text"
    trainer = frame.state.get("trainer")
    if isinstance(trainer, Mapping):
        # `birth` tells the process from another with its pid; it says nothing to people.
        facts = {key: value for key, value in trainer.items() if value not in (None, "") and key != "birth"}
        yield "trainer process", plain(facts), "text"
    args = run.get("args")
    if isinstance(args, Mapping):
        for key in sorted(args, key=str):
            yield f"--{str(key).replace('_', '-')}", plain(args[key]), "text"


def _times(frame: Frame) -> Iterator[_Fact]:
    """Where a step's time goes."""
    parts = []
    for key, value in under(frame.state, "metric/perf/"):
        number = value.get("value")
        if isinstance(number, int | float):
            parts.append(f"{key.removesuffix('_time')} {age(number) if key.endswith('_time') else plain(number)}")
    if parts:
        yield "last step", ", ".join(parts), "text"


def _weights(frame: Frame) -> Iterator[_Fact]:
    weights = frame.state.get("weights")
    if not isinstance(weights, Mapping):
        return
    ok = weights.get("ok") is not False
    elapsed = weights.get("elapsed_s")
    told = [f"version {weights.get('version')}", "ok" if ok else "FAILED"]
    told += [f"over {weights.get('transport')}"] if weights.get("transport") else []
    told += [f"in {age(elapsed)}"] if isinstance(elapsed, int | float) else []
    told += [f"digest {str(weights.get('digest'))[:16]}"] if weights.get("digest") else []
    yield "weight sync", ", ".join(told), "text" if ok else "bad"
    engines = weights.get("engines")
    for name, answer in engines.items() if isinstance(engines, Mapping) else ():
        if isinstance(answer, Mapping) and not answer.get("ok", True):
            yield f"  engine {name}", f"not synced: {answer.get('message', '')}", "bad"


def _ingest(frame: Frame) -> Iterator[_Fact]:
    ingest = frame.state.get("ingest")
    if isinstance(ingest, Mapping):
        refused = ingest.get("refused")
        text = f"{plain(ingest.get('address'))}, {plain(ingest.get('connections'))} connected"
        text += f", {refused} refused" if refused else ", none refused"
        yield "ingest over TCP", text, "warn" if refused else "text"


def _counted(frame: Frame) -> list[Mapping[str, Any]]:
    """Cells that account for every source once: of a fleet those of its roles."""
    folded = [value for _, value in under(frame.state, "sources/")]
    return folded or [value for _, value in under(frame.state, "source/")]


def _sources(frame: Frame) -> Iterator[_Fact]:
    """Of a fleet one fact for each role, and beside it the sources that lose something."""
    fleet = list(under(frame.state, "sources/"))
    for role, cell in fleet:
        lost, oldest = _losses(cell), cell.get("oldest_last")
        text = f"{plain(cell.get('count'))} on {plain(cell.get('hosts'))} hosts, {plain(cell.get('records'))} records"
        text += f", {lost} lost by {plain(cell.get('troubled'))} of them" if lost else ", none lost"
        text += f", {cell.get('left')} said goodbye" if cell.get("left") else ""
        since = frame.since(float(oldest)) if isinstance(oldest, int | float) else None
        text += f", the quietest {plain(cell.get('oldest'))}: {age(since)} ago" if since is not None else ""
        yield f"sources {role}", text, "warn" if lost else "text"
    for name, source in under(frame.state, "source/"):
        if fleet and not _losses(source):
            continue
        last = source.get("last")
        since = frame.since(float(last)) if isinstance(last, int | float) else None
        lost = _losses(source)
        text = f"{plain(source.get('records'))} records" + (f", {lost} lost" if lost else ", none lost")
        dropped = source.get("dropped")
        text += f" ({dropped} dropped by it)" if isinstance(dropped, int) and dropped else ""
        text += f", key {source.get('key')}" if source.get("key") else ""
        text += f", last {age(since)} ago" if since is not None else ""
        text += f", pid {source.get('pid')} on {source.get('host')}" if source.get("pid") else ""
        yield f"source {name}", text, "warn" if lost else "text"
