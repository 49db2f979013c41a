"""Tidying up after dead runs: the quota over all of them, and what killed processes left in the temporary directory.

Failure policy: what is not provably dead stays. What cannot be removed is said and left. Whatever goes is named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rltop.daemon.engines_left import left_engines
from rltop.daemon.trainer_job import adopt_trainer, read_record
from rltop.errors import RltopError
from rltop.runs import RunInfo, list_runs
from rltop.runs.leftovers import Leftover, clean, find_leftovers, temporary_places
from rltop.runs.prune import Doomed, plan, remove_hidden, remove_run, weigh
from rltop.settings import Settings


@dataclass(slots=True)
class Pruned:
    """What went, or (dry) would go."""

    runs: list[Doomed] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    left_bytes: int = 0
    """Of all runs, afterwards."""


def is_orphaned(run: RunInfo) -> bool:
    """Whether the run's trainer, or an engine, outlived its daemon."""
    record = read_record(run.path)
    trainer = record is not None and adopt_trainer(record, run.path) is not None
    return trainer or bool(left_engines(run.path))


def prune(settings: Settings, runs: Sequence[RunInfo], *, dry_run: bool, spare: Path | None = None) -> Pruned:
    """Apply the quota to `runs` and remove leftovers. spare: a run directory that stays whatever it is."""
    weighed = [weigh(run, orphaned=run.path == spare or is_orphaned(run)) for run in runs]
    found = Pruned(left_bytes=sum(run.bytes for run in weighed))
    now = time.time()
    for doomed in plan(weighed, most_bytes=settings.runs_bytes, age_s=settings.runs_age_s, now=now):
        try:
            if not dry_run:
                remove_run(doomed.weighed.run)
        except RltopError as error:  # somebody took it up in this moment, or the disk does not let go of it
            found.problems.append(f"{doomed.weighed.run.name}: {error.what} ({error.why})")
            continue
        found.runs.append(doomed)
        found.left_bytes -= doomed.weighed.bytes
    if not dry_run:
        remove_hidden({run.path.parent for run in runs})
    found.leftovers = find_leftovers(temporary_places(), now=now) if dry_run else clean(now=now)
    return found


def tidy(settings: Settings, run_dir: Path) -> list[str]:
    """What a daemon does at its start; sentences about what went. The quota only when the user asked for that."""
    if settings.auto_prune:
        found = prune(settings, list_runs(), dry_run=False, spare=run_dir.resolve())
    else:
        found = Pruned(leftovers=clean())
    said = [
        f"removed the dead run {doomed.weighed.run.name} ({doomed.weighed.bytes / 1e6:.0f} MB): {doomed.why}"
        for doomed in found.runs
    ]
    said += [f"removed {leftover.path}, left over by a killed run" for leftover in found.leftovers]
    return said + [f"could not remove a dead run: {problem}" for problem in found.problems]
