"""The header: who is watched, where the run is, how the connection is. Two lines, a third when names need it."""

from __future__ import annotations

from rltop.tui.picture import SLOW_PHASE, Link, PhaseView, RunView, newest_rollout, phase_view, run_view
from rltop.tui.rows import Row, crop, restyle, row_cells, split
from rltop.tui.text import age, whole_age
from rltop.tui.theme import Glyphs
from rltop.tui.view import Frame

_RUN_STYLE = {"running": "ok", "failed": "bad", "lost": "bad", "interrupted": "warn", "done": "accent"}
_BAR = 8
_LEAST_NAME = 8
"""Cells of the run's name that stay."""


def header_rows(frame: Frame, width: int) -> list[Row]:
    """All lines of the header for this width."""
    run = run_view(frame.state, frame.run_name)
    link = link_row(frame.link, frame.glyphs, control=frame.control)
    first = split(_who(run, frame, width - row_cells(link) - 1), link, width)
    left = _stale(_where(run, phase_view(frame.state, frame.server_now), frame), frame)
    loud, calm = _loud(run, frame), _stand_ins(run, frame)
    room = width - row_cells(left) - 2
    together = _join((loud, calm), frame)
    if row_cells(together) <= room:
        return [first, split(left, together, width)]
    if row_cells(calm) <= room:
        return [first, split(left, calm, width), crop((*loud, (" ", "text")), width)]
    if row_cells(together) <= width:
        return [first, split(left, (), width), together]
    return [first, split(left, (), width), *(crop(row, width) for row in (loud, calm) if row)]


def _stale(row: Row, frame: Frame) -> Row:
    """What was true before the connection was lost is grey."""
    return restyle(row, "+grey") if frame.link.lost else row


def _who(run: RunView, frame: Frame, room: int) -> Row:
    """Product, run, framework and mode, state. When it gets narrow the framework gives way, then the mode; but a run of
    one side alone says so at any width: half of the screen is empty on purpose."""
    name: Row = ((" rltop ", "accent+b"), (frame.safe(run.name) or "no run yet", "strong"))
    state = _stale(_state(run, frame), frame)
    one_side = run.mode and run.mode != "full"
    for shown in ((run.framework, run.mode), (run.mode,), (run.mode,) if one_side else ()):
        facts = f" {frame.glyphs.dot} ".join(frame.safe(item) for item in shown if item)
        row = (*name, *(((f"  {facts}", "warn" if one_side else "dim"),) if facts else ()), *state)
        if row_cells(row) <= room:
            return row
    over = row_cells(row) - room
    if one_side and over > 0:  # the run's own name is cut before what it is
        keep = max(_LEAST_NAME, row_cells((name[1],)) - over)
        return (name[0], *crop((name[1],), keep), *row[2:])
    return row


def _state(run: RunView, frame: Frame) -> Row:
    if not run.state:
        return ()
    was = "was " if frame.link.lost and run.ended is None else ""
    row: Row = (
        (f"  {_state_glyph(run.state, frame.glyphs)} {was}{frame.safe(run.state)}", _RUN_STYLE.get(run.state, "dim")),
    )
    over = frame.since(run.ended)
    return row if over is None else (*row, (f" {whole_age(over)} ago", "dim"))


def _state_glyph(state: str, glyphs: Glyphs) -> str:
    match state:
        case "running":
            return glyphs.live
        case "done":
            return glyphs.ok
        case "failed" | "lost":
            return glyphs.fail
        case "interrupted":
            return glyphs.warn
        case _:
            return glyphs.wait


def link_row(link: Link, glyphs: Glyphs, *, control: bool) -> Row:
    """Connection state, its age, other viewers, and whether this viewer may act."""
    role = ("CONTROL ", "warn+b") if control else ("read-only ", "dim")
    dot = f" {glyphs.dot} "
    row: list[tuple[str, str]] = []
    if link.paused_s is not None:
        row += [(f"{glyphs.paused} paused {whole_age(link.paused_s)}", "warn+b"), (dot, "faint")]
    if link.lost:
        row.append((f"{glyphs.lost} lost, picture is {age(link.age_s)} old", "bad"))
    elif link.status == "connecting":
        row.append((f"{glyphs.wait} connecting", "warn"))
    elif link.archive:
        row.append((f"{glyphs.skip} no daemon, from its journal", "accent"))
    elif link.quiet:
        row.append((f"{glyphs.live} live", "ok"))
        row.append((f", run quiet for {age(link.quiet_s or 0.0)}", "warn"))
    else:
        row.append((f"{glyphs.live} live", "ok"))
        if link.age_s > 2:
            row.append((f" {age(link.age_s)}", "dim"))
        if link.lag_ms > 500:
            row.append((f", daemon lags {link.lag_ms / 1000:.1f}s", "warn"))
    if link.viewers > 1 and not link.lost:
        row += [(dot, "faint"), (f"{link.viewers} viewers", "dim")]
    return (*row, (dot, "faint"), role)


def _where(run: RunView, phase: PhaseView | None, frame: Frame) -> Row:
    row: list[tuple[str, str]] = [(" ", "text")]
    rollout = newest_rollout(frame.state) if phase is None or phase.rollout is None else phase.rollout
    if rollout is not None:
        of = f"/{run.num_rollout}" if run.num_rollout else ""
        row += [("rollout ", "dim"), (f"{rollout}", "strong"), (of, "dim"), ("  ", "text")]
    if phase is None:
        if run.state == "waiting":
            alone = frame.state.get("trainer") is None and any(key.startswith("engine/") for key in frame.state)
            return (*row, ("engines alone, no record yet" if alone else "waiting for the first record", "dim"))
        # A trainer that reports no phases has none to be between.
        between = run.state == "running" and frame.state.get("phase") is not None
        return (*row, ("between two phases", "dim")) if between else tuple(row)
    row.append((frame.safe(phase.name), "accent"))
    times = phase.times_median
    slow = times is not None and times >= SLOW_PHASE
    if phase.elapsed_s is not None:
        row.append((f" {age(phase.elapsed_s)}", "warn" if slow else "text"))
    if phase.median_s is not None:
        row.append((f", usually {age(phase.median_s)} ", "dim"))
        row += _bar(times or 0.0, frame.glyphs)
    if slow:
        row.append((f" {times:.0f}{frame.glyphs.times} its median", "warn"))
    if phase.also:
        row.append((f"  also {', '.join(map(frame.safe, phase.also))}", "dim"))
    return tuple(row)


def _bar(share: float, glyphs: Glyphs) -> list[tuple[str, str]]:
    full = min(_BAR, round(share * _BAR))
    return [
        (glyphs.rule_focus * full, "warn" if share >= SLOW_PHASE else "accent"),
        (glyphs.rule * (_BAR - full), "faint"),
    ]


def _loud(run: RunView, frame: Frame) -> Row:
    """What everybody must know before believing a number: why the connection or the run is gone, injected faults."""
    problem: Row = ()
    if frame.link.problem and (frame.link.lost or frame.link.status == "connecting"):
        problem = ((f" {frame.safe(frame.link.problem)}", "warn"),)
    elif run.text and (run.state == "done" or (frame.link.archive and run.state in ("failed", "lost", "interrupted"))):
        problem = ((f" {frame.safe(run.text)}", "warn"),)
    elif (journal := (frame.state.get("daemon") or {}).get("journal", "ok")) != "ok":
        problem = ((f" history is in memory only: {frame.safe(str(journal))}", "bad"),)
    faults: Row = ()
    if run.faults:
        count = f"{len(run.faults)} " if len(run.faults) > 1 else ""
        faults = ((f" {frame.glyphs.warn} {count}injected: {', '.join(map(frame.safe, run.faults))}", "warn+b"),)
    return _join((problem, faults), frame)


def _stand_ins(run: RunView, frame: Frame) -> Row:
    return ((f" stand-in: {', '.join(map(frame.safe, run.stand_ins))} ", "dim"),) if run.stand_ins else ()


def _join(parts: tuple[Row, Row], frame: Frame) -> Row:
    first, second = parts
    return (*first, (f" {frame.glyphs.dot}", "faint"), *second) if first and second else first or second
