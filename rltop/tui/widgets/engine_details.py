"""What is known of one engine, and of an A/B run, as rows: state, operation, signals, weights, process, log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rltop.tui.fleet import AbView, EngineView, FleetView, Signal
from rltop.tui.operations import OpView
from rltop.tui.rows import Row, Span, row_cells, split
from rltop.tui.staging import changes_text
from rltop.tui.text import age, cells, coarse_age, head, num, pad, whole_age, wrap
from rltop.tui.view import Frame
from rltop.tui.widgets.engine_cells import state_cell, version_text

_LABEL = 11
_NEWS_S = 60.0


def _pair(label: str, text: str, width: int, style: str = "text") -> Iterator[Row]:
    """A labelled text, wrapped; nothing without a text."""
    for piece in wrap(text, max(10, width - _LABEL - 2)) if text else ():
        yield ((f" {label:<{_LABEL}} ", "dim"), (piece, style))
        label = ""


def status_rows(
    view: EngineView, frame: Frame, fleet: FleetView | None, op: OpView | None, width: int
) -> Iterator[Row]:
    """Everything but toggles and log."""
    state, style = state_cell(view, frame, width)
    since = frame.since(view.since)
    row: list[Span] = [(f" {state.rsplit(' ', 1)[0] if since is not None else state}", style)]
    if since is not None:
        row.append((f" for {whole_age(since)}", "text"))
    if view.deadline is not None and frame.server_now is not None:
        left = view.deadline - frame.server_now
        row.append(
            (f", at most {whole_age(left)} more" if left > 0 else ", over its time", "dim" if left > 0 else "warn")
        )
    yield tuple(row)
    if view.word == "BACKOFF" and view.backoff_until is not None and frame.server_now is not None:
        yield from _pair("started", f"again in {whole_age(view.backoff_until - frame.server_now)}", width, "warn")
    bad = "bad" if view.trouble == 0 else "warn" if view.trouble == 1 else "text"
    if view.word != "HEALTHY":
        yield from _pair("cause", frame.safe(view.cause), width, bad)
    yield from _pair("error", frame.safe(view.error), width, "warn")
    if view.paused:
        since = frame.since(view.paused_at)
        lasts = f" since {whole_age(since)}" if since is not None else ""
        yield from _pair("paused", f"by {frame.safe(view.paused)}{lasts}: it answers no request", width, "warn")
    yield from _pair("waits for", frame.safe(view.pending), width, "accent")
    if op is not None and (op.runs or op.name != "engines-start" or op.state == "failed"):
        yield from op_rows(op, frame, width)
    for signal in view.signals:
        yield from _signal_rows(signal, frame, width)
    if not view.signals:
        yield ((" no signals: nobody judges its health", "dim"),)
    yield from _weights(view, frame, fleet, width)
    yield from _facts(view, frame, width)


def _ago(seconds: float) -> str:
    told = coarse_age(seconds)
    return told if told == "now" else f"{told} ago"


def _signal_rows(signal: Signal, frame: Frame, width: int) -> Iterator[Row]:
    """One line; of what is wrong no word is cut off."""
    mark, style = (
        (frame.glyphs.ok, "ok") if signal.ok else (frame.glyphs.fail, "bad") if signal.ok is False else ("?", "dim")
    )
    text = frame.safe(signal.text) or (signal.meaning if signal.ok else "unknown" if signal.ok is None else "")
    since = frame.since(signal.t) if signal.ok is not None else None
    start: Row = ((f" {signal.letter} ", "strong"), (f"{mark} ", style), (f"{signal.name:<9} ", "dim"))
    told: Row = ((coarse_age(since) if since is not None else "", "dim"), (" ", "text"))
    indent = row_cells(start)
    pieces = wrap(text, max(10, width - indent - 5)) if signal.ok is False else [text]
    for piece in pieces:
        yield split((*start, (piece, "bad" if signal.ok is False else "text")), told, width)
        start, told = ((" " * indent, "text"),), ()


def op_rows(op: OpView, frame: Frame, width: int) -> Iterator[Row]:
    """An operation: who, why, its stages with their seconds."""
    ago = frame.since(op.ended if op.ended is not None else op.t)
    style = {"failed": "bad", "cancelled": "warn", "done": "text"}.get(op.state, "accent")
    words = f"{op.name} {op.state}" + (f" {whole_age(ago)} ago" if op.ended is not None and ago is not None else "")
    words += f", by {op.who}" if op.who else ""
    words += f": {op.reason}" if op.reason else ""
    yield from _pair("operation", frame.safe(words), width, style)
    stages = op.timed(frame.server_now)
    for words, seconds in stages[-8:] if op.runs else ():
        took = age(seconds) if seconds is not None else ""
        yield from _pair("", f"{took:>6}  {frame.safe(_newest(words))}", width, "text")
    # Of what went well long ago the stages are old news; they are in the events.
    if op.state != "done" or (ago is not None and ago < _NEWS_S):
        yield from _pair("", frame.safe(op.text), width, style)


def _newest(stage: str) -> str:
    """`engine 0: reclaiming` of `engine 0: drained 0.3 s, stopped 6.0 s, reclaiming`: the rest has lines of its own."""
    who, colon, what = stage.partition(": ")
    return f"{who}: {what.rsplit(', ', 1)[-1]}" if colon else stage


def _weights(view: EngineView, frame: Frame, fleet: FleetView | None, width: int) -> Iterator[Row]:
    held = version_text(frame.safe(view.weights)) or "none"
    wrong = view.old or (view.word == "STALE" and view.weights != view.required)
    if wrong:
        source = {"trainer": "the trainer pushes it", "disk": "read from disk", "base": "the base checkpoint"}
        where = source.get(fleet.source, "") if fleet is not None else ""
        held += f", required is {version_text(frame.safe(view.required))}" + (f": {where}" if where else "")
    digest = f", digest {frame.safe(view.digest)[:16]}" if view.digest else ""
    yield from _pair("weights", held + digest, width, "warn" if wrong else "text")


def _facts(view: EngineView, frame: Frame, width: int) -> Iterator[Row]:
    generation = "?" if view.generation is None else str(view.generation)
    before = f", before it {view.previous}" if view.previous is not None else ""
    again = f", restarted {view.restarts}{frame.glyphs.times}" if view.restarts else ""
    yield from _pair("generation", f"{generation}{before}{again}", width)
    # It stays until a person starts the engine: of one that runs again it is old news, and of a hang it tells nothing.
    ended = view.word in ("CRASHED", "BACKOFF", "QUARANTINED")
    yield from _pair(
        "fingerprint" if ended else "last crash", frame.safe(view.fingerprint), width, "warn" if ended else "dim"
    )
    if view.hunted and view.owned:
        yield from _pair("bisect", "B: which toggles does that crash take?", width, "accent")
    owner = {"rltop": "rltop", "other": "somebody else: rltop only watches it"}.get(view.owner, view.owner)
    yield from _pair("owner", frame.safe(owner + (f", launcher {view.launcher}" if view.launcher else "")), width)
    kind = f"{view.kind} {view.version}" + (" (a stand-in, not SGLang)" if view.stand_in else "")
    yield from _pair("kind", frame.safe(kind), width, "accent" if view.stand_in else "text")
    yield from _pair("process", frame.safe(f"{view.process}{view.url and ', '}{view.url}"), width)
    yield from _pair("load", _load(view), width)
    seen = frame.since(view.seen)
    yield from _pair("seen", _ago(seen) if seen is not None else "", width)
    yield from _pair("model", frame.safe(view.model_path), width)
    yield from _pair("log", frame.safe(view.log), width)


def _load(view: EngineView) -> str:
    """What it carries, as far as it is known."""
    words = [
        f"{num(value)} {name}"
        for value, name in ((view.running, "running"), (view.queued, "queued"), (view.tokens_per_s, "tok/s"))
        if value is not None
    ]
    words += [f"KV {view.kv * 100:.0f}%"] if view.kv is not None else []
    words += [f"accepts {view.accept:.2f}"] if view.accept is not None else []
    return ", ".join(words)


def log_rows(lines: Sequence[str], why: str, frame: Frame, width: int) -> list[Row]:
    """The last lines of a log, wrapped: of a traceback no character may be missing. why: of an answer without lines."""
    if not lines:
        return [
            ((f" {piece}", "dim"),) for piece in wrap(frame.safe(why or "asking the daemon ..."), max(10, width - 2))
        ]
    out: list[Row] = []
    for line in lines:
        rest = frame.safe(line.expandtabs(4))
        style = _log_style(line)
        while True:
            piece = head(rest, max(8, width - 2)) or rest[:1]
            out.append(((f" {piece}", style),))
            rest = rest[len(piece) :]
            if not rest:
                break
    return out


def _log_style(line: str) -> str:
    words = line[:200].lower()
    if "error" in words or "exception" in words or "traceback" in words or "fatal" in words:
        return "bad"
    return "warn" if "warn" in words else "text"


def ab_rows(ab: AbView, engines: Sequence[EngineView], frame: Frame, width: int) -> Iterator[Row]:
    """The table of differences, each with its interval."""
    arms = {arm: [view.id for view in engines if view.arm == arm] for arm in ("A", "B")}
    since = frame.since(ab.since)
    lasts = f" for {whole_age(since)}" if since is not None else ""
    yield from _pair("A", f"engines {', '.join(map(frame.safe, arms['A'])) or '-'}: as before", width)
    told = f"engines {', '.join(map(frame.safe, arms['B'])) or '-'}: {frame.safe(changes_text(ab.changes))}{lasts}"
    yield from _pair("B", told, width, "accent")
    first = max([12, *(cells(frame.safe(row.name)) for row in ab.rows)])
    first = min(first, max(8, width - 40))
    yield ((f" {pad('', first)}  {'A':>7} {'B':>7}  {'B - A':>7}  95 % interval     n", "faint"),)
    for row in ab.rows:
        name = pad(frame.safe(row.name), first, mark=frame.glyphs.cut)
        interval = "-" if row.low is None or row.high is None else f"{num(row.low)} to {num(row.high)}"
        yield (
            (f" {name}  {num(row.a):>7} {num(row.b):>7}  ", "text"),
            (f"{num(row.diff):>7}", "strong" if row.sure else "dim"),
            (f"  {interval:<16}", "text"),
            (f" {'' if row.n is None else row.n}", "dim"),
            ("  sure" if row.sure else "", "accent"),
        )
    yield from _pair("so far", frame.safe(ab.verdict), width, "strong")
