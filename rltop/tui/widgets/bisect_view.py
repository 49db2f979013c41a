"""The parts of the Bisect screen as rows: what was tried, what is believed, the story in words. Pure.

A cell of the matrix is a sign and never a colour alone; a toggle has a letter, which the list of toggles explains.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator

from msgspec import Struct, field

from rltop.bisect.story import Story, TrialStory, minutes_text, percent
from rltop.tui.rows import Row, Span, extend, restyle
from rltop.tui.text import cells, coarse_age, fit, pad, wrap
from rltop.tui.theme import Glyphs
from rltop.tui.view import Frame, Picker

_FIXED = 32
"""Cells of a trial before its toggles."""
_LABEL = 9
LEAST = 0.005
"""Culprits believed less than this are not shown."""


_WHAT = (
    "One finds out which toggles a crash takes: some engines leave the rotation and get the traffic of the crash with "
    "toggles off, until it is clear; then they go back to their own flags. The run goes on with the others."
)


def letter(at: int) -> str:
    """Of a toggle, by its place."""
    return string.ascii_letters[at] if at < len(string.ascii_letters) else "?"


def matrix_width(story: Story, room: int) -> int:
    """Cells of the matrix: two for a toggle where there is room, else one."""
    wide = _FIXED + 2 * len(story.toggles) + 1
    return wide if wide <= room else min(room, _FIXED + len(story.toggles) + 1)


def outcome_cell(trial: TrialStory, glyphs: Glyphs) -> Span:
    """A sign and a word."""
    words, ready = trial.outcome, trial.ready
    if trial.runs and not ready:
        words = "starting"
    if trial.outcome == "crashed" and not trial.counts:
        words = "other"
    sign, style = {
        "other": (glyphs.warn, "warn"),
        "crashed": (glyphs.fail, "bad"),
        "quiet": (glyphs.ok, "ok"),
        "running": (glyphs.wait, "accent"),
        "starting": (glyphs.wait, "accent"),
        "lost": (glyphs.warn, "warn"),
    }.get(words, (glyphs.skip, "dim"))
    return f"{sign} {words}", style if trial.counts or style == "warn" else "dim"


class Matrix(Struct):
    """The trials, the newest last and in sight until somebody looks at another."""

    picker: Picker = field(default_factory=lambda: Picker(tail=True))

    def cursor(self, story: Story) -> TrialStory | None:
        """The trial under the cursor."""
        return story.trials[self.picker.index(_keys(story))] if story.trials else None

    def move(self, action: str, story: Story) -> None:
        """A movement of the cursor."""
        self.picker.move(action, _keys(story))

    def click(self, y: int, story: Story) -> None:
        """A click on a row; row 0 is the head."""
        self.picker.click(y - 1, _keys(story))

    def position(self, story: Story) -> str:
        """`3-14/60` when not all are in sight."""
        return self.picker.position(len(story.trials))

    def rows(self, story: Story, frame: Frame, width: int, height: int, *, focused: bool) -> list[Row]:
        """At most `height` rows, the first one the head."""
        gap = " " if _FIXED + 2 * len(story.toggles) + 1 <= width else ""
        likely = [story.involved.get(name, 0.0) >= 0.5 for name in story.toggles]
        letters = [((gap if at else "") + letter(at), "warn+b" if one else "accent") for at, one in enumerate(likely)]
        head: Row = ((f"{'#':>4} eng  {'outcome':<10} {'time':>7} {'age':>3} ", "faint"), *letters)
        if not story.trials:
            return [head, ((" no trial yet", "dim"),)][:height]

        def rows(index: int, here: bool) -> list[Row]:
            row = _trial_row(story.trials[index], story, frame, gap)
            return [restyle(extend(row, width), "+sel" if focused else "+b") if here else row]

        return [head, *self.picker.draw(_keys(story), max(1, height - 1), lambda index: 1, rows)][:height]


def _keys(story: Story) -> list[str]:
    return [str(trial.n) for trial in story.trials]


def _trial_row(trial: TrialStory, story: Story, frame: Frame, gap: str) -> Row:
    glyphs = frame.glyphs
    words, style = outcome_cell(trial, glyphs)
    if trial.runs and story.state == "paused":
        words, style = f"{glyphs.paused} paused", "warn"
    since = frame.since(trial.ended if trial.ended is not None else trial.started)
    exposure = minutes_text(trial.minutes).replace(" min", "m").replace(" s", "s").replace(" h", "h")
    row: list[Span] = [
        (f"{trial.n:>4} {pad(frame.safe(trial.engine), 4, mark=glyphs.cut)} ", "text"),
        (f"{pad(frame.safe(words), 10, mark=glyphs.cut)} ", style),
        (f"{exposure:>7} ", "text"),
        (f"{coarse_age(since) if since is not None else '':>3} ", "dim"),
    ]
    for at, name in enumerate(story.toggles):
        on = name in trial.on
        row.append(((gap if at else "") + (glyphs.full if on else glyphs.dot), "strong" if on else "dim"))
    return tuple(row)


# ---------------------------------------------------------------- what is believed


def belief_rows(story: Story, frame: Frame, width: int) -> list[Row]:
    """A bar for every toggle, then for every culprit that is believed in."""
    rows: list[Row] = []
    for at, name in enumerate(story.toggles):
        p = story.involved.get(name)
        told = f"{letter(at)} {name}"
        if name in story.fixed:  # that comes first where there is no room: the list of facts has the words
            told = whole if cells(whole := f"{told} (never off)") <= _name_cells(width) else f"{letter(at)}!{name}"
        rows.append(_bar(told, p, frame, width))
    rows.append((("it takes", "faint"),))
    shown = [one for one in story.posterior if one.p >= LEAST]
    for at, one in enumerate(shown):
        words = one.words
        if cells(words) > _name_cells(width):  # cut off, two culprits would look alike: by their letters, then
            words = lettered(words, story)
        rows.append(_bar(words, one.p, frame, width, strong=not at))
    if not shown:
        rows.append((("nothing is believed yet", "dim"),))
    return rows


def lettered(words: str, story: Story) -> str:
    """`b, alone or with a` of `cuda_graph_padding, alone or with cuda_graph`."""
    names = {name: letter(at) for at, name in enumerate(story.toggles) if name}
    return re.sub(r"\w+", lambda match: names.get(match[0], match[0]), words)


def _bar_cells(width: int) -> int:
    return 5 if width < 36 else 8 if width < 46 else 16


def _name_cells(width: int) -> int:
    return max(6, width - _bar_cells(width) - 7)


def _bar(words: str, p: float | None, frame: Frame, width: int, *, strong: bool = False) -> Row:
    glyphs = frame.glyphs
    size, name = _bar_cells(width), _name_cells(width)
    told = pad(frame.safe(words), name, mark=glyphs.cut)
    if p is None:
        return ((told, "text"), (f" {'?':>4}", "dim"))
    filled = round(max(0.0, min(1.0, p)) * size)
    style = "warn" if p >= 0.5 else "data"
    return (
        (told, "strong" if strong else "text"),
        (f" {percent(p):>4} ", "strong" if p >= 0.5 else "dim"),
        (glyphs.full * filled, style),
        (glyphs.empty * (size - filled), "faint"),
    )


# ---------------------------------------------------------------- in words


def headline_rows(story: Story, frame: Frame, width: int) -> list[Row]:
    """The state, in two or three lines."""
    glyphs = frame.glyphs
    sign, style = {
        "running": (glyphs.wait, "accent+b"),
        "paused": (glyphs.paused, "warn+b"),
        "found": (glyphs.ok, "ok+b"),
        "failed": (glyphs.fail, "bad"),
        "stopped": (glyphs.skip, "strong"),
    }.get(story.state, (glyphs.warn, "warn+b"))
    rows: list[Row] = []
    for at, piece in enumerate(wrap(frame.safe(f"bisection {story.id}: {story.headline()}"), max(10, width - 4))[:2]):
        rows.append(((f" {sign} " if not at else "   ", style), (piece, style)))
    if story.unserved:
        rows.append(((f" {glyphs.warn} {fit(frame.safe(story.unserved), width - 4, mark=glyphs.cut)}", "warn+b"),))
    budget = f" of {minutes_text(story.budget_min)}" if story.budget_min is not None else ""
    told = f"{minutes_text(story.minutes)}{budget}"
    told += f", {story.time_left()}" if story.time_left() else ""
    both = f"{told} {glyphs.dot} {story.counts()}"
    pieces = [both] if cells(both) <= width - 4 else [told, story.counts()]
    rows += [((f"   {fit(frame.safe(one), max(1, width - 4), mark=glyphs.cut)}", "text"),) for one in pieces]
    for wrong in story.wrong():
        for piece in wrap(frame.safe(f"not as it was: {wrong}"), max(10, width - 4)):
            rows.append(((f" {glyphs.fail} {piece}", "bad"),))
    return rows


def story_rows(story: Story, frame: Frame, width: int, *, believed: bool = False) -> list[Row]:
    """What comes next and why, verdict, kernel, facts, traffic, engines, notes.

    believed: the culprits too, because the bars of some have no room.
    """
    rows: list[Row] = []
    told = list(_told(story))
    if believed and story.posterior:
        shown = ", ".join(f"{one.words} {percent(one.p)}" for one in story.posterior if one.p >= LEAST)
        told.insert(1, ("it takes", shown, "text"))
    if cells(frame.safe(story.unserved)) > width - 4:  # the headline has it cut
        told.insert(1, ("serves", story.unserved, "warn"))
    for label, text, style in told:
        for piece in wrap(frame.safe(text), max(10, width - _LABEL - 3)):
            rows.append(((f" {label:<{_LABEL}} ", "dim"), (piece, style)))
            label = ""
    return rows


def _told(story: Story) -> Iterator[tuple[str, str, str]]:
    explained = story.explained()
    if story.error and story.error != explained:
        yield "error", story.error, "bad"
    if explained:
        yield "verdict", explained, "strong"
    if story.verdict is not None and story.verdict.culprit is None and story.verdict.left:
        left = ", ".join(f"{' x '.join(names) or 'none'} {percent(p)}" for names, p in story.verdict.left)
        yield "left", left, "text"
    yield from _coming(story)
    yield from _kernel(story)
    if story.rehearsal:
        yield "rehearsal", story.rehearsal, "accent"
    crash = story.crash
    yield "hunts", f"{crash.fingerprint} of engine {crash.engine}, generation {crash.generation}", "text"
    for fact in story.facts:
        yield "fact", fact.text + (f": {fact.moved()}" if fact.moves else ": moves nothing"), "text"
    for other in story.outside:
        yield "meanwhile", other.words(), "text"
    if uncounted := story.uncounted():
        yield "beside", uncounted, "warn"
    if traffic := story.traffic_words():
        yield "traffic", traffic, "text"
    yield "engines", story.engines_words(), "text"
    for name in story.fixed:
        yield "never off", name, "text"
    for name, others in story.aliases.items():
        yield "along", f"{name} off takes {', '.join(others)} with it", "text"
    for name, why in story.dropped.items():
        yield "left out", f"engine {name}: {why}", "warn"
    for note in story.notes:
        yield "note", note, "warn"
    if story.who:
        who = story.who.partition(" (")[0]
        yield "begun by", who + (f": {story.reason}" if story.reason else ""), "dim"


def _coming(story: Story) -> Iterator[tuple[str, str, str]]:
    """The trials that come, one line for those that are alike; of a bisection that is over, what to do with it."""
    if story.cut_off:
        yield "to do", "p goes on with it (rltop bisect resume)", "strong"
    elif story.phase == "" and story.over:
        yield "to do", "rltop bisect export writes it as a bug report, with what to turn off", "strong"
    alike: dict[tuple[str, float | None], list[str]] = {}
    for one in () if story.over else story.next:
        alike.setdefault((one.why, one.minutes), []).append(one.engine)
    for (why, minutes), engines in alike.items():
        where = f"engine {', '.join(engines)}"
        yield (
            "next",
            why + (f" ({minutes_text(minutes)} on {where})" if minutes is not None else f" ({where})"),
            "strong",
        )


def _kernel(story: Story) -> Iterator[tuple[str, str, str]]:
    """What is known of it, and what is done to find it out."""
    if story.kernel is not None:
        yield "kernel", story.kernel.words(), "text"
    if story.kernel_stage and story.phase:
        yield "kernel", story.kernel_stage, "accent"
    for one in story.kernel_runs:
        yield "no trial", f"for the kernel, {one.words()}", "text"


def empty_rows(frame: Frame, width: int, engine: str) -> list[Row]:
    """No bisection yet: what one does, what there is to hunt, and what to do now. engine: whose crash; "": any."""
    rows: list[Row] = [()]
    for at, (text, style) in enumerate(_empty(frame, engine)):
        rows += [((f"  {piece}", style),) for piece in wrap(frame.safe(text), max(10, width - 4))]
        rows += [()] if not at else []
    return rows


def _empty(frame: Frame, engine: str) -> Iterator[tuple[str, str]]:
    yield "No bisection in this run.", "strong"
    yield (
        "One finds out which toggles a crash takes: some engines leave the rotation and get the traffic of the crash",
        "dim",
    )
    yield (
        "with toggles off, until it is clear; then they go back to their own flags. The run goes on with the others.",
        "dim",
    )
    if not list(frame.engines()):
        yield "No engine is known yet.", "text"
        return
    if not any(view.owned for view in frame.engines()):
        yield "rltop owns none of its engines: it cannot restart them with a toggle off.", "strong"
        yield "Start them by rltop ([engines] in a file, rltop up), or give rltop check their logs.", "text"
        return
    found = [view for view in frame.engines() if view.owned and view.hunted and engine in ("", view.id)]
    for view in found:
        yield f"Engine {view.id} died: {view.fingerprint}", "warn"
    if not found:
        died = f"Engine {engine} is not known to have died" if engine else "No engine is known to have died"
        yield f"{died} of an illegal access: there may be nothing to hunt.", "text"
        yield "rltop drill ima rehearses one; rltop bisect simulate shows how it thinks.", "text"
    if frame.control:
        yield "s shows the plan and begins after a reason and a yes.", "strong"
    else:
        yield "Begin it with rltop bisect start, or attach with --control and press s.", "strong"


def evidence_rows(trial: TrialStory, frame: Frame, width: int) -> list[Row]:
    """Everything of one trial but its log."""
    words, style = outcome_cell(trial, frame.glyphs)
    if words.endswith(" other"):
        words = f"{words[:-6]} crashed of another kind"
    told = f"{words} after {minutes_text(trial.minutes)} under traffic"
    told += "" if trial.counts or trial.runs else ", not counted"
    facts = [
        ("outcome", told, style),
        ("note", trial.note, "warn"),
        ("crash", trial.fingerprint, "text"),
        ("kernel", trial.kernel, "text"),
        ("engine", f"{trial.engine}, generation {trial.generation}", "text"),
        ("toggles", trial.words(), "strong"),
        ("why", trial.why, "text"),
        ("requests", "" if trial.requests is None else f"{trial.requests} answered", "text"),
    ]
    rows: list[Row] = []
    for label, text, look in facts:
        for piece in wrap(frame.safe(text), max(10, width - _LABEL - 1)) if text else ():
            rows.append(((f"{label:<{_LABEL}} ", "dim"), (piece, look)))
            label = ""
    rows += [(), (("arguments, against everything on", "strong"),)]
    for line in trial.argv:
        look = "bad" if line.startswith("- ") else "ok" if line.startswith("+ ") else "text"
        rows += [((piece, look),) for piece in wrap(frame.safe(line), width)]
    if not trial.argv:
        rows.append((("the same" if not trial.off else "not known", "dim"),))
    return rows
