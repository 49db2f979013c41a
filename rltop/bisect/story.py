"""A bisection as everybody is shown it: the cell `bisect` (docs/protocol.md) read without trust, and its words.

The dashboard, the command line and the export all look at a bisection through this, so that they say the same of it.

Failure policy: what is missing or has another type counts as unknown; nothing is invented, nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ENDED = frozenset({"found", "none", "not-separable", "budget", "stopped", "failed"})
HEADLINES: Mapping[str, str] = {
    "running": "searching",
    "paused": "paused: no traffic, its engines stay reserved",
    "found": "found",
    "none": "none of these toggles",
    "not-separable": "these cannot be told apart",
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
    on: frozenset[str]
    off: frozenset[str]
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
    on: frozenset[str]
    off: frozenset[str]
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
    """Where the GPU faulted."""

    name: str
    block: str
    source: str
    weaker: bool


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
    restored: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""
    who: str = ""

    @property
    def over(self) -> bool:
        """It has its result; its engines may be on their way back still."""
        return self.state in ENDED

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
        if not self.over and self.posterior:
            words += f"; so far {self.posterior[0].words} ({percent(self.posterior[0].p)})"
        return words

    def explained(self) -> str:
        """The verdict's own words without the culprit, which the headline has."""
        if self.verdict is None:
            return ""
        text, words = self.verdict.text, self.verdict.words
        return text[len(words) + 2 :] if words and text.startswith(f"{words}: ") else text

    def counts(self) -> str:
        """`9 trials: 4 crashed, 4 quiet, 1 running`."""
        if not self.trials:
            return "no trial yet"
        found = {name: sum(trial.outcome == name for trial in self.trials) for name in OUTCOMES}
        told = ", ".join(f"{count} {name}" for name, count in found.items() if count)
        return f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}: {told}"

    def time_left(self) -> str:
        """`2 to 8 min left`; empty: it is over, or nobody knows."""
        if self.over or self.left_min is None:
            return ""
        low, high = self.left_min
        return (
            f"{minutes_text(low)} to {minutes_text(high)} left" if high - low >= 0.5 else f"{minutes_text(high)} left"
        )

    def wrong(self) -> list[str]:
        """Engines that are not as they were, and why."""
        return [f"engine {name}: {why}" for name, why in self.restored.items() if why != "original"]


def arm_words(on: Collection[str], off: Collection[str]) -> str:
    """`everything on`, `without deepep`, `only cuda_graph, speculative`, `everything off`."""
    if not off:
        return "everything on"
    if not on:
        return "everything off"
    return f"only {', '.join(sorted(on))}" if len(on) < len(off) else f"without {', '.join(sorted(off))}"


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
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


# ---------------------------------------------------------------------- reading


def story_of(cell: Any) -> Story | None:
    """The value of the cell; None where it is none."""
    if not isinstance(cell, Mapping) or not cell:
        return None
    traffic, verdict, kernel = _map(cell.get("traffic")), cell.get("verdict"), cell.get("kernel")
    left = [value for value in map(_number, _list(cell.get("left_min"))) if value is not None]
    scale = _number(cell.get("time_scale"))
    return Story(
        id=_text(cell.get("id")),
        state=_text(cell.get("state")),
        mode=_text(cell.get("mode")),
        engines=_names(cell.get("engines")),
        dropped=_texts(cell.get("dropped")),
        toggles=_names(cell.get("toggles")),
        fixed=_names(cell.get("fixed")),
        aliases={_text(name): _names(others) for name, others in _map(cell.get("aliases")).items()},
        started=_number(cell.get("started")),
        ended=_number(cell.get("ended")),
        minutes=_number(cell.get("minutes")) or 0.0,
        budget_min=_number(cell.get("budget_min")),
        time_scale=1.0 if scale is None else scale,
        left_min=(left[0], left[1]) if len(left) == 2 else None,
        error=_text(cell.get("error")),
        crash=_crash(_map(cell.get("crash"))),
        facts=tuple(map(_fact, map(_map, _list(cell.get("facts"))))),
        traffic=_text(traffic.get("source")),
        requests=_whole(traffic.get("requests")),
        concurrency=_whole(traffic.get("concurrency")),
        posterior=tuple(map(_suspect, map(_map, _list(cell.get("posterior"))))),
        involved={_text(name): _number(p) or 0.0 for name, p in _map(cell.get("involved")).items()},
        trials=tuple(map(_trial, map(_map, _list(cell.get("trials"))))),
        next=tuple(map(_next, map(_map, _list(cell.get("next"))))),
        verdict=_verdict(verdict) if isinstance(verdict, Mapping) else None,
        kernel=_kernel(kernel) if isinstance(kernel, Mapping) and kernel.get("name") else None,
        restored=_texts(cell.get("restored")),
        notes=_names(cell.get("notes")),
        reason=_text(cell.get("reason")),
        who=_text(cell.get("who")),
    )


def _crash(value: Mapping[str, Any]) -> CrashStory:
    names = ("fingerprint", "cause", "kernel", "phase", "weight_version", "injected")
    told = {name: _text(value.get(name)) for name in names}
    return CrashStory(engine=_text(value.get("engine")), generation=_whole(value.get("generation")), **told)


def _fact(value: Mapping[str, Any]) -> FactStory:
    return FactStory(_text(value.get("text")), _text(value.get("source")), _weighed(value.get("moves")))


def _suspect(value: Mapping[str, Any]) -> Suspect:
    culprit = _names(value.get("culprit"))
    return Suspect(culprit, _text(value.get("words")) or " x ".join(culprit), _number(value.get("p")) or 0.0)


def _trial(value: Mapping[str, Any]) -> TrialStory:
    return TrialStory(
        n=_whole(value.get("n")) or 0,
        engine=_text(value.get("engine")),
        generation=_whole(value.get("generation")),
        on=frozenset(_names(value.get("on"))),
        off=frozenset(_names(value.get("off"))),
        outcome=_text(value.get("outcome")),
        minutes=_number(value.get("minutes")) or 0.0,
        planned=_number(value.get("planned")),
        started=_number(value.get("started")),
        ended=_number(value.get("ended")),
        ready=value.get("ready") is True,
        why=_text(value.get("why")),
        counts=value.get("counts") is not False,
        fingerprint=_text(value.get("fingerprint")),
        kernel=_text(value.get("kernel")),
        log=_text(value.get("log")),
        note=_text(value.get("note")),
        requests=_whole(value.get("requests")),
        argv=_names(value.get("argv")),
    )


def _next(value: Mapping[str, Any]) -> NextStory:
    return NextStory(
        _text(value.get("engine")),
        frozenset(_names(value.get("on"))),
        frozenset(_names(value.get("off"))),
        _number(value.get("minutes")),
        _number(value.get("crash")),
        _number(value.get("bits")),
        _text(value.get("why")),
    )


def _verdict(value: Mapping[str, Any]) -> VerdictStory:
    culprit = value.get("culprit")
    return VerdictStory(
        _text(value.get("state")),
        None if culprit is None else _names(culprit),
        _text(value.get("words")),
        _number(value.get("p")) or 0.0,
        _text(value.get("text")),
        _weighed(value.get("left")),
    )


def _kernel(value: Mapping[str, Any]) -> KernelStory:
    block = value.get("block")
    told = ", ".join(map(str, block)) if isinstance(block, list | tuple) else _text(block)
    return KernelStory(_text(value.get("name")), told, _text(value.get("source")), value.get("weaker") is True)


def _weighed(value: Any) -> tuple[tuple[tuple[str, ...], float], ...]:
    """`[[names], number]` each."""
    rows: list[tuple[tuple[str, ...], float]] = []
    for item in map(_list, _list(value)):
        if len(item) == 2 and (number := _number(item[1])) is not None:
            rows.append((_names(item[0]), number))
    return tuple(rows)


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, _list(value)))


def _texts(value: Any) -> dict[str, str]:
    return {_text(name): _text(item) for name, item in _map(value).items()}
