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
    sign, style = {
        "crashed": (glyphs.fail, "bad"),
        "quiet": (glyphs.ok, "ok"),
        "running": (glyphs.wait, "accent"),
        "starting": (glyphs.wait, "accent"),
        "lost": (glyphs.warn, "warn"),
    }.get(words, (glyphs.skip, "dim"))
    return f"{sign} {words}", style if trial.counts else "dim"


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
        letters = gap.join(letter(at) for at in range(len(story.toggles)))
        head: Row = ((f"{'#':>4} eng  {'outcome':<10} {'time':>7} {'age':>3} ", "faint"), (letters, "accent"))
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
        told = f"{letter(at)} {name}" + (" (never off)" if name in story.fixed else "")
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
    budget = f" of {minutes_text(story.budget_min)}" if story.budget_min is not None else ""
    told = f"{minutes_text(story.minutes)}{budget}"
    told += f", {story.time_left()}" if story.time_left() else ""
    told += f" {glyphs.dot} {story.counts()}"
    rows.append(((f"   {fit(frame.safe(told), max(1, width - 4), mark=glyphs.cut)}", "text"),))
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
    for label, text, style in told:
        for piece in wrap(frame.safe(text), max(10, width - _LABEL - 3)):
            rows.append(((f" {label:<{_LABEL}} ", "dim"), (piece, style)))
            label = ""
    return rows


def _told(story: Story) -> Iterator[tuple[str, str, str]]:
    if story.error:
        yield "error", story.error, "bad"
    if told := story.explained():
        yield "verdict", told, "strong"
    if story.verdict is not None and story.verdict.culprit is None and story.verdict.left:
        left = ", ".join(f"{' x '.join(names) or 'none'} {percent(p)}" for names, p in story.verdict.left)
        yield "left", left, "text"
    for one in () if story.over else story.next:
        cost = f" ({minutes_text(one.minutes)} on engine {one.engine})" if one.minutes is not None else ""
        yield "next", one.why + cost, "strong"
    if story.rehearsal:
        yield "rehearsal", story.rehearsal, "accent"
    crash = story.crash
    yield "hunts", f"{crash.fingerprint} of engine {crash.engine}, generation {crash.generation}", "text"
    if story.kernel is not None:
        block = f", block {story.kernel.block}" if story.kernel.block else ""
        weaker = ": weaker, it tells the launch and not the fault" if story.kernel.weaker else ""
        yield "kernel", f"{story.kernel.name}{block} ({story.kernel.source}{weaker})", "text"
    for fact in story.facts:
        yield "fact", fact.text + (f": {fact.moved()}" if fact.moves else ": moves nothing"), "text"
    traffic = [story.traffic] if story.traffic else []
    traffic += [f"{story.requests} requests"] if story.requests else []
    traffic += [f"{story.concurrency} at once"] if story.concurrency else []
    if traffic:
        yield "traffic", ", ".join(traffic), "text"
    back = sum(why == "original" for why in story.restored.values())
    where = f"; {back} of {len(story.engines)} back on their own flags" if story.restored else ""
    yield "engines", f"{', '.join(story.engines) or '-'} ({story.mode}){where}", "text"
    for name, others in story.aliases.items():
        yield "along", f"{name} off takes {', '.join(others)} with it", "text"
    for name, why in story.dropped.items():
        yield "left out", f"engine {name}: {why}", "warn"
    for note in story.notes:
        yield "note", note, "warn"
    if story.who:
        who = story.who.partition(" (")[0]
        yield "begun by", who + (f": {story.reason}" if story.reason else ""), "dim"


def evidence_rows(trial: TrialStory, frame: Frame, width: int) -> list[Row]:
    """Everything of one trial but its log."""
    words, style = outcome_cell(trial, frame.glyphs)
    told = f"{words} after {minutes_text(trial.minutes)} under traffic"
    told += "" if trial.counts else ", not counted"
    facts = [
        ("outcome", told, style),
        ("note", trial.note, "warn"),
        ("crash", trial.fingerprint, "text"),
        ("kernel", trial.kernel, "text"),
        ("engine", f"{trial.engine}, generation {trial.generation}", "text"),
        ("toggles", trial.words(), "strong"),
        ("why", trial.why, "text"),
        ("requests", "" if trial.requests is None else str(trial.requests), "text"),
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
