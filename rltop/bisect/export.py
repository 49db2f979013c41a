"""A bisection as a page for a bug report (Markdown) and as data (JSON schema 1). Pure: text in, text out.

Nothing in it was not seen: the matrix has every trial, also those that did not count, with its exposure; the confidence
is the posterior after all of them. Keys and paths are the caller's to scrub before (`rltop.runs.masks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltop.bisect.belief import Belief, Trial
from rltop.bisect.facts import Moved
from rltop.bisect.planner import Verdict
from rltop.bisect.space import OTHER

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is known at the end, or so far."""

    title: str
    """`IMA on engine 1 of run birch-14`."""
    verdict: Verdict
    belief: Belief
    trials: Sequence[Trial]
    moved: Sequence[Moved] = ()
    kernel: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    log: Sequence[str] = ()
    """The lines around the first fault."""
    minutes: float = 0.0
    """Wall time so far."""
    stand_in: str = ""
    """What was not the real thing: the CPU engine, an injected fault."""


def as_json(report: Report) -> dict[str, Any]:
    """Schema 1; masks as lists of names."""
    space = report.belief.space
    verdict = report.verdict
    return {
        "schema": SCHEMA,
        "title": report.title,
        "state": verdict.state,
        "culprit": None if verdict.culprit in (None, OTHER) else list(space.names(verdict.culprit)),
        "probability": round(verdict.probability, 4),
        "text": verdict.text,
        "kernel": report.kernel or None,
        "stand_in": report.stand_in or None,
        "minutes": round(report.minutes, 2),
        "toggles": list(space.toggles),
        "left": [{"culprit": space.words(c), "probability": round(p, 4)} for c, p in verdict.left],
        "involved": {name: round(chance, 4) for name, chance in report.belief.involved().items()},
        "facts": [{"fact": one.fact, "factors": dict(one.factors)} for one in report.moved],
        "trials": [
            {
                "on": list(space.names(trial.arm)),
                "minutes": round(trial.minutes, 3),
                "outcome": _outcome(trial),
                "counts": trial.counts,
            }
            for trial in report.trials
        ],
        "versions": dict(report.versions),
        "argv": list(report.argv),
        "env": dict(report.env),
        "log": list(report.log),
    }


def as_markdown(report: Report) -> str:
    """The page."""
    space, verdict = report.belief.space, report.verdict
    lines = [f"# {report.title}", "", f"**{_headline(report)}**", ""]
    if report.stand_in:
        lines += [f"> Not the real thing: {report.stand_in}.", ""]
    if report.kernel:
        lines += [f"Kernel: `{report.kernel}`", ""]
    lines += [f"{len(report.trials)} trials in {report.minutes:.0f} minutes.", "", "## Trials", ""]
    lines += ["| # | " + " | ".join(space.toggles) + " | outcome | exposure |"]
    lines += ["|---|" + "---|" * (len(space.toggles) + 2)]
    for number, trial in enumerate(report.trials, start=1):
        cells = ["on" if trial.arm >> at & 1 else "**off**" for at in range(len(space.toggles))]
        lines.append(f"| {number} | {' | '.join(cells)} | {_outcome(trial)} | {trial.minutes:.1f} min |")
    lines += ["", "## Confidence", "", "| culprit | probability |", "|---|---|"]
    lines += [f"| {space.words(culprit)} | {chance:.1%} |" for culprit, chance in report.belief.ranking(0.005)]
    if report.moved:
        lines += ["", "## What the crash itself said", "", *(f"- {one.text()}" for one in report.moved)]
    if verdict.left and verdict.culprit is None:
        lines += ["", "Not told apart: " + ", ".join(f"{space.words(c)} ({p:.0%})" for c, p in verdict.left) + "."]
    if report.versions:
        lines += ["", "## Versions", "", *(f"- {name} {version}" for name, version in report.versions.items())]
    if report.argv:
        env = [f"{name}={value}" for name, value in report.env.items()]
        lines += ["", "## Command", "", "```sh", " ".join([*env, *report.argv]), "```"]
    if report.log:
        lines += ["", "## Log", "", "```", *report.log, "```"]
    return "\n".join(lines) + "\n"


def _headline(report: Report) -> str:
    verdict, space = report.verdict, report.belief.space
    match verdict.state:
        case "found" if verdict.culprit is not None:
            return f"{space.words(verdict.culprit)} ({verdict.probability:.0%}): {verdict.text.partition(': ')[2]}"
        case "open":
            return f"not finished; so far {verdict.text}"
        case _:
            return verdict.text


def _outcome(trial: Trial) -> str:
    told = "crashed" if trial.crashed else "quiet"
    return told if trial.counts else f"{told}, not counted"
