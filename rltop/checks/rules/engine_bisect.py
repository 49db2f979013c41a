"""`engine.bisect`: what a set of runs with different switches proves about a fault.

A clean run counts only if it lasted longer than a fault takes. With a failure rate p per run, n = ceil(ln 0.05 /
ln(1 - p)) clean runs leave 5 % for luck (p = 0.2 needs 14).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rltop.checks.facts import fires
from rltop.checks.found import Row
from rltop.checks.observe import Observations
from rltop.checks.phrase import count, missing, num, of_place
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Confidence, Evidence, Verdict

ID = "engine.bisect"
_MOST_SECONDS = 1e9
"""Longer ran no run; a damaged row may say so."""
_NO_TOGGLES = frozenset(
    [
        "run",
        "id",
        "n",
        "outcome",
        "result",
        "phase",
        "t_s",
        "t",
        "duration",
        "duration_s",
        "seconds",
        "time",
        "started",
        "ended",
        "launch_blocking",
        "note",
        "notes",
        "comment",
        "error",
        "message",
        "free",
        "free_gb",
        "free_mem",
        "free_memory",
        "free_memory_gb",
        "avail_mem",
        "avail_mem_gb",
        "memory_free_gb",
        "engine",
        "rank",
        "node",
        "pid",
        "seed",
        "date",
        "commit",
        "log",
        "exit_code",
        "signal",
        "kernel",
        "repeats",
        "requests",
    ]
)
_CLEAN = ("ok", "clean", "pass", "passed", "survived", "success")
_SAME = {"illegal memory access": "ima", "cuda error": "ima", "out of memory": "oom", "crash": "ima"}
MOST_TOGGLES = 20

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    toggles: dict[str, Value]
    outcome: str
    seconds: float | None
    blocking: bool
    row: Row


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known about one toggle."""

    toggle: str
    start: Value
    to: Value
    fails: int
    runs: int
    clean: int
    needed: int

    @property
    def proved(self) -> bool:
        return self.clean >= self.needed


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict."""
    runs = [run for row in obs.rows if row.kind == "bisect" and (run := _run(row))]
    if not runs:
        return [Verdict(ID, "skip", cause=missing(obs, "a set of runs with their switches and outcomes"))]
    if owners := fires(obs, "engine.resume-order", "train.ima"):
        cause = f"{owners[0].id} explains the fault; switches of the engine have no part in it."
        return [Verdict(ID, "skip", cause=cause)]
    faults = Counter(run.outcome for run in runs if run.outcome != "ok")
    if not faults:
        cause = f"None of {len(runs)} runs failed: there is nothing to bisect."
        return [Verdict(ID, "info", value={"runs": len(runs), "fails": 0}, cause=cause, confidence="medium")]
    fault = faults.most_common(1)[0][0]
    findings, cleared, rate = _judge(runs, fault, t)
    proved = [one for one in findings if one.proved]
    if proved:
        return [_implicated(runs, fault, proved, cleared, rate)]
    return [_open(runs, fault, findings, cleared, rate)]


def _run(row: Row) -> Run | None:
    fields = row.fields
    outcome = str(fields.get("outcome", fields.get("result", ""))).strip().lower()
    if not outcome:
        return None
    toggles = {
        key: value
        for key, value in list(fields.items())[:100]
        if key.lower() not in _NO_TOGGLES and (value is None or isinstance(value, str | int | float | bool))
    }
    seconds = next((fields[key] for key in ("t_s", "duration_s", "seconds", "t") if key in fields), None)
    counts = isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < _MOST_SECONDS
    known = float(seconds) if counts and isinstance(seconds, int | float) else None
    outcome = "ok" if outcome in _CLEAN else _SAME.get(outcome, outcome)
    return Run(toggles, outcome, known, bool(fields.get("launch_blocking")), row)


def needed_runs(rate: float, t: Thresholds) -> int:
    """Clean runs that rule luck out at a failure rate per run."""
    if rate >= 1:
        return 1
    return math.ceil(math.log(t.bisect_luck) / math.log1p(-rate))


def _judge(runs: list[Run], fault: str, t: Thresholds) -> tuple[list[Finding], list[str], float]:
    """(findings per toggle, toggles that are cleared, failure rate of the failing setting)."""
    failing = [run for run in runs if run.outcome == fault]
    longest = max((run.seconds for run in failing if run.seconds is not None), default=0.0)
    clean = [
        run
        for run in runs
        if run.outcome == "ok" and not run.blocking and (run.seconds is None or run.seconds >= t.bisect_soak * longest)
    ]
    settings = Counter(_setting(run) for run in failing)
    setting = settings.most_common(1)[0][0]
    same = [run for run in runs if _setting(run) == setting and (run.outcome in (fault, "ok"))]
    fails = settings[setting]
    rate = fails / max(1, len(same))
    names = sorted({name for run in runs for name in run.toggles})[:MOST_TOGGLES]
    cleared = [name for name in names if len({run.toggles.get(name) for run in failing}) > 1]
    findings = []
    for name in names:
        if name in cleared:
            continue
        start = failing[0].toggles.get(name)
        for to in sorted({run.toggles.get(name) for run in runs} - {start}, key=str):
            alike = [run for run in clean if run.toggles.get(name) == to and _only(name, run, failing)]
            if alike or any(run.toggles.get(name) == to and _only(name, run, failing) for run in runs):
                findings.append(Finding(name, start, to, fails, len(same), len(alike), needed_runs(rate, t)))
    return findings, cleared, rate


def _setting(run: Run) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(run.toggles.items()))


def _only(name: str, run: Run, failing: list[Run]) -> bool:
    """The run differs from some failing one in this toggle alone."""
    return any(
        all(run.toggles.get(key) == one.toggles.get(key) for key in {*run.toggles, *one.toggles} - {name})
        for one in failing
    )


def _show(value: Value) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _implicated(runs: list[Run], fault: str, proved: list[Finding], cleared: list[str], rate: float) -> Verdict:
    parts = [f"{one.toggle} {_show(one.start)} -> {_show(one.to)} ({count(one.clean, 'clean run')})" for one in proved]
    together = " and ".join(parts)
    first = proved[0]
    sure = first.fails >= 3
    confidence: Confidence = "high" if sure else "medium"
    cause = f"The fault ({fault}) goes away with {together}, after {count(first.fails, 'failure')} in "
    cause += f"{count(first.runs, 'run')} of the failing setting (rate {num(rate)}, which takes "
    cause += f"{count(first.needed, 'clean run')})"
    if len(proved) > 1:
        cause += "; each of them clears it, which is an interaction of them until the pairs have been run"
    cause += f". No part in it: {', '.join(cleared)}." if cleared else "."
    if fixed := _off_in_all(runs, fault):
        cause += f" It happens with {', '.join(fixed)} off."
    listed = [
        {
            "toggle": one.toggle,
            "from": one.start,
            "to": one.to,
            "fails": one.fails,
            "runs": one.runs,
            "clean": one.clean,
            "needed": one.needed,
        }
        for one in proved
    ]
    value: dict[str, object] = {**listed[0], "cleared": cleared, "rate": rate}
    if len(proved) > 1:
        value["interaction"] = listed
    return Verdict(
        ID,
        "warn",
        value=value,
        threshold={"clean": first.needed},
        evidence=_evidence(runs, fault),
        cause=cause,
        advice=(
            *(f"keep {one.toggle}={_show(one.to)}" for one in proved),
            *(("run the pairs, to tell which of them it takes",) if len(proved) > 1 else ()),
            "check the effective settings with /server_info after the start: one switch may move others",
        ),
        confidence=confidence,
    )


def _open(runs: list[Run], fault: str, findings: list[Finding], cleared: list[str], rate: float) -> Verdict:
    parts = [
        f"{one.toggle}={_show(one.to)} has {one.clean} of {count(one.needed, 'clean run')} "
        f"({one.needed - one.clean} missing)"
        for one in findings
    ]
    fails = sum(run.outcome == fault for run in runs)
    cause = f"{fails} of {len(runs)} runs failed ({fault}, rate {num(rate)}), which proves nothing yet"
    cause += f": {'; '.join(parts[:6])}." if parts else ": no clean run differs from a failing one in a single switch."
    cause += f" No part in it: {', '.join(cleared)}." if cleared else ""
    best = max(findings, key=lambda one: one.clean / one.needed, default=None)
    return Verdict(
        ID,
        "info",
        value={
            "missing": {one.toggle: one.needed - one.clean for one in findings},
            "cleared": cleared,
            "rate": rate,
            "fails": fails,
            "runs": len(runs),
        },
        evidence=_evidence(runs, fault),
        cause=cause,
        advice=(
            (f"{count(best.needed - best.clean, 'more clean run')} with {best.toggle}={_show(best.to)}",)
            if best
            else ("a run that differs from the failing one in one switch",)
        ),
        confidence="medium",
    )


def _off_in_all(runs: list[Run], fault: str) -> list[str]:
    failing = [run for run in runs if run.outcome == fault]
    return sorted(name for name in failing[0].toggles if all(run.toggles.get(name) is False for run in failing))


def _evidence(runs: list[Run], fault: str) -> tuple[Evidence, ...]:
    failing = [run for run in runs if run.outcome == fault][:3]
    clean = [run for run in runs if run.outcome == "ok"][:3]
    return tuple(of_place(run.row.where) for run in (*failing, *clean))
