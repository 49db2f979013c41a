"""Cells of one engine in few characters, the same in the table and on the engine screen.

A healthy engine is plain text: what is coloured is what wants to be looked at, and a row of one colour is few bytes.
"""

from __future__ import annotations

from rltop.tui.fleet import EngineView, Signal
from rltop.tui.rows import Row, Span
from rltop.tui.text import cells, coarse_age, fit_middle, whole_age
from rltop.tui.theme import Glyphs
from rltop.tui.view import Frame

STATE_CELLS = 16
"""The longest state with its glyph and age: `✗ QUARANTINED 2m`."""


def state_cell(view: EngineView, frame: Frame, width: int) -> Span:
    """Glyph, state and how long it has been in it."""
    glyphs = frame.glyphs
    word = frame.safe(view.state) or "unknown"
    since = frame.since(view.since)
    lasts = f" {coarse_age(since)}" if since is not None else ""
    match view.trouble:
        case 0:
            return f"{glyphs.fail} {word}{lasts}", "bad"
        case 1:
            return f"{glyphs.wait} {word}{lasts}", "warn"
        case 2 if view.error or view.paused:
            return f"{glyphs.warn} {word}{lasts}", "warn"
        case _ if view.state == "HEALTHY":
            return f"{glyphs.live} {word.lower()}{lasts}", "text"
        case _:
            return f"{glyphs.dot} {word.lower()}{lasts}", "text"


def version_text(version: str) -> str:
    """`v6` for a number, any other name as it is."""
    return f"v{version}" if version.isdecimal() else version


def weights_cell(view: EngineView, frame: Frame, width: int) -> Span:
    """The version held; `v6 of 7` (`481/482` where that is too long) where another one is required."""
    cut = frame.glyphs.cut
    held = version_text(frame.safe(view.weights))
    if view.required and (view.old or (view.word == "STALE" and view.weights != view.required)):
        required = frame.safe(view.required)
        bare = frame.safe(view.weights) or "none"
        for told in (f"{held or 'none'} of {required}", f"{bare} of {required}", f"{bare}/{required}"):
            if cells(told) <= width:
                return told, "warn"
        room = max(2, width - 1)
        required = fit_middle(required, max(1, room // 2), mark=cut)
        return f"{fit_middle(bare, room - cells(required), mark=cut)}/{required}", "warn"
    return fit_middle(held or "-", width, mark=cut), "text"


def signals_cell(view: EngineView, frame: Frame, width: int) -> Span:
    """One character per signal: a tick, the letter of one that is not well, a dot for unknown. The column's head names
    the letters."""
    if not view.signals or view.word == "STOPPED":  # nothing is wrong with what nobody wants to run
        return "-", "dim"
    told = "".join(signal_mark(signal, frame.glyphs) for signal in view.signals)
    return told, "bad" if any(signal.ok is False for signal in view.signals) else "text"


def signal_mark(signal: Signal, glyphs: Glyphs) -> str:
    """What stands for one signal."""
    return glyphs.ok if signal.ok else signal.letter if signal.ok is False else glyphs.dot


def kind_cell(view: EngineView, frame: Frame, width: int) -> Span:
    """What it is; `other`: somebody else's, rltop only watches it."""
    kind = frame.safe(view.kind) or "-"
    if view.owner == "other":
        kind = f"{kind} (other)" if len(kind) + 8 <= width else f"other {kind.split()[0]}" if view.stand_in else "other"
    return kind, "dim" if view.kind == "SGLang" and view.owner != "other" else "accent"


def said(view: EngineView, frame: Frame) -> Row:
    """One phrase on an engine that is not simply well: what is being done to it, else why it is as it is."""
    if view.stage:
        return ((frame.safe(view.stage), "accent"),)
    if view.pending:
        return ((f"waits: {frame.safe(view.pending)}", "accent"),)
    if view.paused:
        since = frame.since(view.paused_at)
        lasts = f" since {whole_age(since)}" if since is not None else ""
        return ((f"paused by {frame.safe(view.paused)}{lasts}", "warn"),)
    if view.word in ("HEALTHY", "") and not view.error:
        return ()
    why = frame.safe(view.cause or view.error)
    style = "bad" if view.trouble == 0 else "warn"
    left = frame.since(view.backoff_until)
    if view.word == "BACKOFF" and view.backoff_until is not None and left is not None and frame.server_now is not None:
        again = max(0.0, view.backoff_until - frame.server_now)
        return ((f"again in {whole_age(again)}", style), (f": {why}" if why else "", style))
    return ((why, style),) if why else ()
