"""A bisection as everybody is shown it: the cell `bisect` (docs/protocol.md) as values, and its words.

The dashboard, the command line and the export all look at a bisection through this, so that they say the same of it.
`rltop.bisect.story_of` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

ENDED = frozenset({"found", "none", "not-separable", "budget", "stopped", "failed"})
HEADLINES: Mapping[str, str] = {
    "running": "searching",
    "paused": "paused: no traffic, its engines stay reserved",
    "found": "found",
    "none": "none of these toggles",
    "not-separable": "no set of up to three toggles explains it (two bugs at once?)",
    "budget": "the budget is spent",
    "stopped": "stopped",
    "failed": "failed",
}
OUTCOMES: Mapping[str, str] = {
    "running": "running",
    "crashed": "crashed",
    "quiet": "quiet",
    "lost": "lost: the engine never ran, or its node went",
    "aborted": "aborted",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialStory:
    """One trial. None: unknown."""

    n: int
    engine: str
    generation: int | None
    on: tuple[str, ...]
    off: tuple[str, ...]
    outcome: str
    minutes: float
    """Exposure."""
    planned: float | None
    started: float | None
    ended: float | None
    ready: bool
    why: str
    counts: bool
    fingerprint: str
    kernel: str
    log: str
    note: str
    requests: int | None
    argv: tuple[str, ...]
    """`- --flag`, `+ --flag`, `+ NAME=value`: against the arm with everything on."""

    @property
    def runs(self) -> bool:
        """It has no outcome yet."""
        return self.outcome == "running"

    def words(self) -> str:
        """`without deepep`, `only cuda_graph, speculative`: whichever is shorter."""
        return arm_words(self.on, self.off)


@dataclass(frozen=True, slots=True)
class Suspect:
    """One culprit and what is believed of it."""

    culprit: tuple[str, ...]
    words: str
    p: float


@dataclass(frozen=True, slots=True)
class FactStory:
    """What the crash itself said, and by how much that moved the belief in which toggles."""

    text: str
    source: str
    moves: tuple[tuple[tuple[str, ...], float], ...]

    def moved(self) -> str:
        """`cuda_graph x0.3, speculative x12`; empty: nothing."""
        return ", ".join(f"{' x '.join(names)} x{factor:g}" for names, factor in self.moves)


@dataclass(frozen=True, slots=True)
class NextStory:
    """A trial that comes."""

    engine: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    minutes: float | None
    crash: float | None
    bits: float | None
    why: str


@dataclass(frozen=True, slots=True)
class VerdictStory:
    """How it ended."""

    state: str
    culprit: tuple[str, ...] | None
    words: str
    p: float
    text: str
    left: tuple[tuple[tuple[str, ...], float], ...]


@dataclass(frozen=True, slots=True)
class KernelStory:
    """Where the GPU faulted. Empty: not known."""

    name: str
    block: str
    source: str
    weaker: bool
    place: str = ""
    """`file.py:9`."""
    exception: str = ""

    def where(self) -> str:
        """`sampler.py:9, block (0,0,0), thread (64,0,0): Warp Illegal Address`."""
        told = ", ".join([*([self.place] if self.place else []), *([f"block {self.block}"] if self.block else [])])
        return f"{told}: {self.exception}" if told and self.exception else told or self.exception

    def words(self) -> str:
        """In a line."""
        where = f", {self.where()}" if self.where() else ""
        weaker = ": weaker, it tells the launch and not the fault" if self.weaker else ""
        return f"{self.name}{where} ({self.source}{weaker})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraRun:
    """A run for the kernel's sake, after the verdict: no trial, nothing is concluded from it but the name."""

    engine: str
    generation: int | None
    why: str
    outcome: str
    minutes: float
    started: float | None
    ended: float | None
    log: str
    note: str
    limit_min: float | None = None
    """It is ended after so many minutes."""

    def words(self) -> str:
        """In a line."""
        told = f"engine {self.engine}: {self.why}"
        most = f" for at most {minutes_text(self.limit_min)}" if self.limit_min is not None else ""
        state = f"running{most}" if self.outcome == "running" else f"{self.outcome} after {minutes_text(self.minutes)}"
        return f"{told}: {state}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True)
class OutsideStory:
    """A crash of the hunted kind of an engine that served meanwhile, with the same arguments: evidence, no trial."""

    engine: str
    generation: int | None
    minutes: float | None
    fingerprint: str
    at: float | None

    def words(self) -> str:
        """In a line."""
        after = f" after {minutes_text(self.minutes)}" if self.minutes is not None else ""
        return f"engine {self.engine}, which was not on trial, crashed{after} with everything on: {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class CrashStory:
    """The crash that is hunted."""

    engine: str = ""
    generation: int | None = None
    fingerprint: str = ""
    cause: str = ""
    kernel: str = ""
    phase: str = ""
    weight_version: str = ""
    injected: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """The whole of it."""

    id: str = ""
    state: str = ""
    mode: str = ""
    engines: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    toggles: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    minutes: float = 0.0
    budget_min: float | None = None
    time_scale: float = 1.0
    left_min: tuple[float, float] | None = None
    error: str = ""
    crash: CrashStory = CrashStory()
    facts: tuple[FactStory, ...] = ()
    traffic: str = ""
    requests: int | None = None
    concurrency: int | None = None
    posterior: tuple[Suspect, ...] = ()
    involved: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[TrialStory, ...] = ()
    next: tuple[NextStory, ...] = ()
    verdict: VerdictStory | None = None
    kernel: KernelStory | None = None
    kernel_stage: str = ""
    """What the search for the kernel is at."""
    kernel_runs: tuple[ExtraRun, ...] = ()
    unwritten: str = ""
    """Why its record on disk is not what is shown here: it goes on in memory."""
    unserved: str = ""
    """No engine serves the run now, and why."""
    outside: tuple[OutsideStory, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    """Trials by outcome, as the daemon counts them (the cell has the newest trials only); empty: it does not say."""
    cut_off: bool = False
    """The run went down in the middle: it can be gone on with."""
    restored: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""
    who: str = ""

    @property
    def over(self) -> bool:
        """It has its result; its engines may be on their way back still."""
        return self.state in ENDED

    @property
    def phase(self) -> str:
        """`running`, `paused`, `ending` (it has its result, its engines are not back), `cut`; empty: it is over."""
        if self.cut_off:
            return "cut"
        return "" if self.ended is not None else "ending" if self.over else self.state

    @property
    def rehearsal(self) -> str:
        """What of it is no real thing; empty: nothing."""
        told = []
        if self.crash.injected:
            told.append(f"the fault {self.crash.injected} was injected into a stand-in engine")
        if self.time_scale != 1.0:
            told.append(f"one second of clock counted as {self.time_scale:g} seconds of exposure")
        return "; ".join(told)

    def headline(self) -> str:
        """The result or where it stands, in a line."""
        verdict = self.verdict
        if self.state == "found" and verdict is not None:
            return f"found: {verdict.words or ' x '.join(verdict.culprit or ())} ({percent(verdict.p)})"
        words = HEADLINES.get(self.state, self.state or "unknown")
        if self.cut_off:
            words = "cut off: the run went down in the middle"
        if not self.over and self.posterior:
            words += f"; so far {self.posterior[0].words} ({percent(self.posterior[0].p)})"
        return words

    def explained(self) -> str:
        """The verdict's own words without the culprit, which the headline has."""
        if self.verdict is None:
            return ""
        text, words = self.verdict.text, self.verdict.words
        for said in (words, HEADLINES.get(self.state, "")):
            if said and text.startswith((f"{said}: ", f"{said}; ")):
                return text[len(said) + 2 :]
        more = "hunt one fingerprint at a time (bisect start --engine), or turn off what is likeliest and begin anew"
        return f"{text}; what to do: {more}" if self.state == "not-separable" else text

    def counts(self) -> str:
        """`9 trials: 4 crashed, 4 quiet, 1 running`; a crash that does not count is `of another kind`."""
        found = dict(self.counted) or self._counted()
        total = found.pop("trials", 0)
        if not total:
            return "no trial yet"
        words = {name: name for name in OUTCOMES} | {"other": "crashed of another kind"}
        told = ", ".join(f"{found[name]} {word}" for name, word in words.items() if found.get(name))
        return f"{total} trial{'s' * (total != 1)}: {told}"

    def _counted(self) -> dict[str, int]:
        found = {"trials": len(self.trials)}
        for trial in self.trials:
            name = "other" if trial.outcome == "crashed" and not trial.counts else trial.outcome
            found[name] = found.get(name, 0) + 1
        return found

    def uncounted(self) -> str:
        """`2 not counted: 1 lost (no port was free), 1 another crash (oom/serve/1a2b3c)`; empty: all count.

        Those that were ended before they began tell nothing: they are only in the list.
        """
        rows = [trial for trial in self.trials if not trial.counts and trial.outcome not in ("running", "aborted")]
        if not rows:
            return ""
        told: dict[str, int] = {}
        for trial in rows:
            named = trial.fingerprint and not same_fault(trial.fingerprint, self.crash.fingerprint)
            other = trial.outcome == "crashed" and named
            why = trial.fingerprint if other else trial.note
            words = f"{'another crash' if other else trial.outcome}{f' ({why})' if why else ''}"
            told[words] = told.get(words, 0) + 1
        return f"{len(rows)} not counted: {', '.join(f'{count} {words}' for words, count in told.items())}"

    def traffic_words(self) -> str:
        """`crash dump of engine 0, generation 1, 57 requests, 13 at once`; empty: not known."""
        told = [self.traffic] if self.traffic else []
        told += [f"{self.requests} request{'s' * (self.requests != 1)}"] if self.requests else []
        told += [f"{self.concurrency} at once"] if self.concurrency and self.concurrency > 1 else []
        return ", ".join(told)

    def engines_words(self) -> str:
        """`0, 1 (in-fleet): 1 of 2 back on their own flags`."""
        told = f"{', '.join(self.engines) or '-'} ({self.mode})" if self.mode else ", ".join(self.engines) or "-"
        if not self.restored:
            return told if self.ended is not None else f"{told}: out of the rotation until it ends"
        back, total = sum(why == "original" for why in self.restored.values()), len(self.engines)
        own = "its own flags" if total == 1 else "their own flags"
        return f"{told}: " + (f"back on {own}" if back == total else f"{back} of {total} back on their own flags")

    def time_left(self) -> str:
        """`2 to 8 min left`; empty: it is over, or nobody knows."""
        if self.over or self.left_min is None:
            return ""
        low, high = (minutes_text(value) for value in self.left_min)
        if self.left_min[1] - self.left_min[0] < 0.5 or low == high:
            return f"{high} left"
        (least, unit), (_, most) = low.split(" "), high.split(" ")
        return f"{least if unit == most else low} to {high} left"

    def wrong(self) -> list[str]:
        """Engines that are not as they were, and why."""
        return [f"engine {name}: {why}" for name, why in self.restored.items() if why != "original"]


def same_fault(one: str, other: str) -> bool:
    """Two fingerprints of one fault, by class and hash: the phase is where the host stood, and that changes."""
    kind, _, rest = one.partition("/")
    return (kind, rest.rpartition("/")[2]) == (other.partition("/")[0], other.rpartition("/")[2])


def arm_words(on: Collection[str], off: Collection[str]) -> str:
    """`everything on`, `without deepep`, `only cuda_graph, speculative`, `everything off`: as the planner says it."""
    if not off:
        return "everything on"
    if not on:
        return "everything off"
    return f"only {', '.join(on)}" if len(on) < len(off) else f"without {', '.join(off)}"


def percent(p: float) -> str:
    """`97%`; certainty is never claimed by rounding: `>99%`, `<1%`."""
    if 0.0 < p < 0.01:
        return "<1%"
    if 0.99 < p < 1.0:
        return ">99%"
    return f"{p:.0%}"


def minutes_text(minutes: float) -> str:
    """Exposure in few characters: `40 s`, `3.2 min`, `48 min`, `5.2 h`."""
    if not math.isfinite(minutes):
        return "?"
    if minutes < 1.0:
        return f"{max(0.0, minutes) * 60:.0f} s"
    if minutes < 9.95:
        return f"{minutes:.1f} min"
    return (
        f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h" if minutes < 600 else f"{minutes / 60:.0f} h"
    )
