"""Verdicts and the report: the JSON schema 1 of `rltop check --json` and of the state keys `check/<id>`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec

Status = Literal["pass", "info", "warn", "fail", "skip"]
Confidence = Literal["low", "medium", "high"]

STATUSES: tuple[Status, ...] = get_args(Status)
"""All statuses, in the order of the summary."""
FIRING: tuple[Status, ...] = ("fail", "warn")
"""Statuses that ask for attention, the worst first."""


class Evidence(msgspec.Struct, frozen=True):
    """Where a verdict comes from: a line of a file, or a metric at a step of a live run."""

    source: str
    """Path relative to what was checked; live: `metric@step` (`train/grad_norm@3`) or the record kind."""
    line: int | None
    """From 1; None for binary files and live evidence."""
    text: str


class Verdict(msgspec.Struct, frozen=True):
    """What one check says about one subject (run, engine, rank)."""

    id: str
    status: Status
    rollout: int | None = None
    step: int | None = None
    engine: int | str | None = None
    rank: int | None = None
    value: Any = None
    """What was measured. NaN and Inf are the strings "NaN", "Infinity", "-Infinity": JSON has no others."""
    threshold: Any = None
    evidence: tuple[Evidence, ...] = ()
    cause: str = ""
    """One sentence naming mechanism and subject; for `skip` what is missing or why the rule does not apply."""
    advice: tuple[str, ...] = ()
    """Things to do, one command, flag or file per item, fit to be pasted."""
    confidence: Confidence = "high"
    consequence_of: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """All verdicts of one evaluation; every id of the catalogue occurs at least once."""

    verdicts: tuple[Verdict, ...]
    root_causes: tuple[str, ...]
    summary: dict[str, int]
    schema: int = 1


def report_from_state(checks: Iterable[Mapping[str, Any]], root_causes: Iterable[str]) -> Report:
    """Report from the state keys `check/<id>` and `checks.root_causes` of a daemon (unknown keys are ignored).

    Raises msgspec.ValidationError when a value is no verdict.
    """
    verdicts = tuple(msgspec.convert(dict(check), Verdict) for check in checks)
    summary: dict[str, int] = {status: sum(v.status == status for v in verdicts) for status in STATUSES}
    return Report(verdicts=verdicts, root_causes=tuple(root_causes), summary=summary)
