"""`rltop bisect status`: where a bisection stands, in words; and its lines as they come with `--follow`."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rltop.bisect.story import Story, TrialStory, minutes_text, percent
from rltop.bisect.story_of import story_of
from rltop.cli.bisect_find import WANT, Found, find
from rltop.cli.connect import Place, running
from rltop.cli.output import age, clean, note, print_json, table
from rltop.client import Client
from rltop.errors import RltopError

WIDTH = 120
"""Cells of a line that goes into a file or to another program."""
LOST_S = 60.0
"""A bisection is followed over the loss of its daemon for so long; the next daemon goes on with it."""
BAR = 20
LABEL = 10
LEAST_SHOWN = 0.005
MOST_SUSPECTS = 8


def status(place: Place, bisection: str, *, follow: bool, as_json: bool) -> int:
    """Print. Exit code 1: it failed, or an engine is not as it was. Raises RltopError: there is none."""
    found = find(place, bisection)
    if follow and not found.gone and not (found.story.over and found.story.ended is not None):
        return asyncio.run(_attached(place, found.story.id, as_json=as_json))
    if follow and found.gone:
        note(f"nothing to follow: {found.gone}")
    show(found, as_json=as_json)
    return exit_code(found.story)


def show(found: Found, *, as_json: bool) -> None:
    """The whole of it."""
    if as_json:
        print_json({"run": found.run, "bisect": found.cell})
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
        run = found.run + (f" ({found.chosen})" if found.chosen else "")
        print("\n".join(lines(found.story, run, found.now, width, gone=found.gone)))


def exit_code(story: Story) -> int:
    """1 when it failed, or an engine is not as it was."""
    return 1 if story.state == "failed" or story.wrong() else 0


# ---------------------------------------------------------------------- in words


def lines(story: Story, run: str, now: float, width: int, *, gone: str = "") -> list[str]:
    """Head, facts, trials, what is believed, what comes next. Pure. gone: why nobody goes on with it."""
    out = wrapped(f"bisection {story.id} of run {run}: {story.headline()}", width, "  ")
    out += wrapped(f"  NOT GOING ON: {gone}", width, "  ") if gone else []
    if told := story.explained():
        out += wrapped(f"  {told}", width, "  ")
    for label, text in _labelled(story, now):
        out += wrapped(f"  {label:<{LABEL}} {text}", width, " " * (LABEL + 3)) if text else []
    if story.trials:
        out += ["", *_trials(story, now, width)]
    if story.posterior:
        out += ["", *(_cut(line, width) for line in _suspects(story))]
    coming = [] if story.over else [f"next, engine {one.engine}: {one.why}" for one in story.next]
    out += ["", *(line for one in coming for line in wrapped(one, width, "  "))] if coming else []
    return out


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """One line, or as many as it takes: nothing of a sentence is lost in a narrow terminal."""
    text = clean(text)
    if len(text) <= width:
        return [text]
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(),
        max(40, width),
        initial_indent=lead,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _labelled(story: Story, now: float) -> Iterator[tuple[str, str]]:
    crash = story.crash
    yield "rehearsal", story.rehearsal
    yield "error", story.error
    yield "NO SERVICE", story.unserved
    yield "NOT SAVED", f"it goes on in memory: {story.unwritten}" if story.unwritten else ""
    yield "crash", f"{crash.fingerprint} of engine {crash.engine}, generation {crash.generation}"
    yield "kernel", story.kernel.words() if story.kernel is not None else crash.kernel
    if not story.over or story.ended is None:
        yield "kernel now", story.kernel_stage
    for one in story.kernel_runs:
        yield "kernel run", f"{one.words()}; no trial"
    yield "engines", story.engines_words()
    yield "time", _time(story, now)
    yield "traffic", story.traffic_words()
    for fact in story.facts:
        yield "fact", fact.text + (f": {fact.moved()}" if fact.moves else "")
    for other in story.outside:
        yield "meanwhile", other.words()
    for name in story.fixed:
        yield "never off", name
    for name, others in story.aliases.items():
        yield "goes along", f"{name} off takes {', '.join(others)} with it"
    for name, why in story.dropped.items():
        yield "left out", f"engine {name}: {why}"
    for name, why in story.restored.items():
        if why != "original":
            mend = f"once that is mended: rltop engine start --engine {name}"
            yield "NOT BACK", f"engine {name}: {why.rstrip('.')}; {mend}"
    for text in story.notes:
        yield "note", text
    yield "uncounted", story.uncounted()


def _time(story: Story, now: float) -> str:
    budget = f" of at most {minutes_text(story.budget_min)}" if story.budget_min is not None else ""
    since = f", begun {age(now - story.started)} ago" if story.started is not None else ""
    left = f"; {story.time_left()}" if story.time_left() else ""
    return f"{minutes_text(story.minutes)}{budget}{since}{left}"


def _trials(story: Story, now: float, width: int) -> list[str]:
    """A row each, and below it what is remarkable of it, whole."""
    head = ("trial", "engine", "outcome", "exposure", "age", "with")
    rows = []
    for trial in story.trials:
        last = trial.ended if trial.ended is not None else trial.started
        rows.append(
            (
                trial.n,
                trial.engine,
                trial.outcome + ("" if trial.counts else " (not counted)"),
                minutes_text(trial.minutes),
                None if last is None else age(now - last),
                trial.words(),
            )
        )
    first, *told = table(head, rows, indent="  ")
    out = [story.counts(), _cut(first, width)]
    for trial, line in zip(story.trials, told, strict=True):
        out.append(_cut(line, width))
        out += wrapped(f"      {trial.note}", width, "      ") if trial.note else []
    return out


def _suspects(story: Story) -> Iterator[str]:
    shown = [one for one in story.posterior if one.p >= LEAST_SHOWN][:MOST_SUSPECTS]
    width = max(len(one.words) for one in shown) if shown else 0
    yield "what it takes to crash, and how sure that is"
    for one in shown:
        yield f"  {one.words:<{width}}  {percent(one.p):>4}  {'#' * round(one.p * BAR)}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


# ---------------------------------------------------------------------- as it goes


class Narrator:
    """What became new from one picture to the next, a line each."""

    def __init__(self) -> None:
        self._trials: dict[int, tuple[str, bool]] = {}
        self._state = ""
        self._restored: Mapping[str, str] = {}
        self._told: set[str] = set()
        self._unserved = False

    def news(self, story: Story) -> list[str]:
        """Lines since the last call. What was over before the first is told by its end, with the time of that."""
        out: list[str] = []
        past: list[str] = []
        late = not self._state
        for trial in story.trials:
            was = self._trials.get(trial.n)
            is_now = (trial.outcome, trial.ready)
            if was == is_now:
                continue
            self._trials[trial.n] = is_now
            if late and not trial.runs:
                past += [_stamp(_minute_of(trial, story)) + line for line in _trial_news(trial, fresh=False)]
                continue
            if was is None or (not trial.runs and was[0] == "running"):
                out += _trial_news(trial, fresh=was is None)
        if story.state != self._state:
            before, self._state = self._state, story.state
            if before or story.over or story.state == "paused":
                told = story.explained()
                out.append(story.headline() + (f": {told}" if told else ""))
        out += self._new(story)
        for name, why in story.restored.items():
            if self._restored.get(name) != why:
                back = "back on its own flags" if why == "original" else f"NOT as it was: {why}"
                out.append(f"engine {name}: {back}")
        self._restored = story.restored
        lead = story.posterior[0] if story.posterior else None
        so_far = f" (so far {lead.words} {percent(lead.p)})" if lead is not None and not story.over else ""
        lines = [f"{_stamp(story.minutes)}{line}{so_far if line is out[-1] else ''}" for line in out]
        return [clean(line) for line in (*past, *lines)]

    def _new(self, story: Story) -> Iterator[str]:
        """What is told once, each time that it begins."""
        now = {f"engine {name} takes no part any more: {why}" for name, why in story.dropped.items()}
        now |= {f"for the kernel, no trial: {one.words()}" for one in story.kernel_runs}
        now |= {one.words() for one in story.outside}
        now |= {text for text in (story.kernel_stage,) if text}
        fresh, self._told = sorted(now - self._told), now
        yield from fresh
        before, self._unserved = self._unserved, bool(story.unserved)
        if self._unserved and not before:  # which state the engines are in changes every second
            yield story.unserved
        elif before and not self._unserved and not story.over:
            yield "an engine serves the run again"


def _stamp(minutes: float) -> str:
    return f"{minutes:7.1f} min  "


def _minute_of(trial: TrialStory, story: Story) -> float:
    """When it ended, in minutes of the bisection (pauses are in it)."""
    if trial.ended is None or story.started is None:
        return story.minutes
    return max(0.0, min(story.minutes, (trial.ended - story.started) / 60 * story.time_scale))


def _trial_news(trial: TrialStory, *, fresh: bool) -> Iterator[str]:
    where = f"trial {trial.n} on engine {trial.engine}"
    if fresh:
        yield f"{where}: {trial.why or trial.words()}"
    if not trial.runs:
        told = f"{where}: {trial.outcome} after {minutes_text(trial.minutes)}, {trial.words()}"
        told += f", {trial.fingerprint}" if trial.fingerprint else ""
        told += f", {trial.kernel}" if trial.kernel else ""
        told += "" if trial.counts else ", not counted"
        yield told + (f" ({trial.note})" if trial.note else "")


async def _attached(place: Place, bisection: str, *, as_json: bool) -> int:
    client = place.client(want=WANT, fps=5.0)
    async with running(client):
        await client.wait_live(place.patience_s)
        return await followed(client, bisection, as_json=as_json)


async def followed(client: Client, bisection: str, *, as_json: bool) -> int:
    """Until the engines are back. Raises RltopError: its daemon is gone for long."""
    narrator = Narrator()
    mirror = client.mirror
    while True:
        cell: Any = mirror.state.get("bisect") or {}
        story = story_of(cell)
        if story is not None and story.id == bisection:
            for line in narrator.news(story):
                # With --json stdout has one object, and what happens meanwhile is narration.
                note(line) if as_json else print(line, flush=True)
            if story.over and story.ended is not None:
                found = Found(mirror.run, cell, story, mirror.server_time)
                if not as_json:
                    print()
                show(found, as_json=as_json)
                return exit_code(story)
        elif story is not None and narrator is not None and int_of(story.id) > int_of(bisection):
            raise RltopError(f"bisection {bisection} is over, another one runs", where="bisect", exit_code=1)
        try:
            async with asyncio.timeout(LOST_S):
                await client.wait_change()
                while client.status != "live":
                    await client.wait_change()
        except TimeoutError:
            if client.status != "live":
                raise RltopError(
                    f"the daemon is gone; bisection {bisection} is not over",
                    why=client.problem,
                    do="rltop up under the same name goes on with it",
                    exit_code=1,
                ) from None


def int_of(bisection: str) -> int:
    """Ids are numbers that grow; anything else is none."""
    with contextlib.suppress(ValueError):
        return int(bisection)
    return 0
