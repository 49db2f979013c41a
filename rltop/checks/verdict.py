"""Verdicts and the report: the JSON schema 1 of `rltop check --json` and of the state keys `check/<id>`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["pass", "info", "warn", "fail", "skip"]
Confidence = Literal["low", "medium", "high"]


class Evidence(msgspec.Struct, frozen=True):
    """Where a verdict comes from: a line of a file, or a metric at a step of a live run."""

    source: str
    """Path relative to what was checked; live: the metric (`train/grad_norm`) or record kind."""
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
