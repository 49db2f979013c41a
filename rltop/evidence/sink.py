"""Where readers put what they found, and what a reader is.

A reader gets one `Source` and the `Sink` and never raises for odd input: what it can not read becomes a `Problem`, and
it goes on with the rest. It is bounded: it streams, and keeps facts instead of contents. It never follows a path out of
what was checked, imports nothing that a file names, and unpickles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rltop.checks.found import (
    Document,
    Dump,
    HfCheckpoint,
    HttpCall,
    LogEvent,
    LogSource,
    MegatronCheckpoint,
    Problem,
    RaySnapshot,
    Row,
)
from rltop.checks.observe import (
    Args,
    EngineFact,
    MetricRow,
    PhaseEvent,
    Sample,
    SyncEvent,
    TextLine,
    Where,
)
from rltop.evidence.metric_names import Names, shipped

Kind = Literal[
    "args",
    "script",
    "env",
    "log",
    "metrics",
    "samples",
    "http",
    "document",
    "rows",
    "ray",
    "hf",
    "megatron",
    "dump",
    "note",
]


@dataclass(frozen=True, slots=True)
class Source:
    """One file or directory to read."""

    path: Path
    name: str
    """Path relative to what was checked, with `/`: the `source` of the evidence."""


@dataclass(slots=True)
class Sink:
    """Collects the observations of all readers; `collect.py` makes `Observations` of it."""

    metrics: list[MetricRow] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    syncs: list[SyncEvent] = field(default_factory=list)
    phases: list[PhaseEvent] = field(default_factory=list)
    engines: list[EngineFact] = field(default_factory=list)
    lines: list[TextLine] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    logs: list[LogSource] = field(default_factory=list)
    http: list[HttpCall] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    ray: list[RaySnapshot] = field(default_factory=list)
    checkpoints: list[HfCheckpoint] = field(default_factory=list)
    megatron: list[MegatronCheckpoint] = field(default_factory=list)
    dumps: list[Dump] = field(default_factory=list)
    args: list[Args] = field(default_factory=list)
    scripts: list[Args] = field(default_factory=list)
    """What the launch scripts would start: they count where the run itself left no arguments."""
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Sources that were recognised and of which something could be used."""
    names: Names = field(default_factory=shipped)
    """What metrics of other frameworks are here."""

    def problem(self, source: Source, kind: str, why: str, *, line: int | None = None, whole: bool = False) -> None:
        """A piece of `source` could not be read; `whole`: nothing of it can be used."""
        self.problems.append(Problem(Where(source.name, line), kind, why, whole=whole))


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one kind of evidence."""

    kind: Kind
    names: tuple[str, ...]
    """Glob patterns of file (or directory) names, lower case; the first reader with a match is asked first."""
    read: Callable[[Source, Sink], None]
    sniff: Callable[[Source, bytes], bool] | None = None
    """Recognises a file of any name by its first 4 KiB."""
    directory: bool = False
    """Takes a directory as a whole; the files that it claims (`claims`) are not offered to other readers."""
    claims: Callable[[Source], tuple[str, ...]] | None = None
