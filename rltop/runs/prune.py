"""The quota over all runs of a user: which dead runs go, the oldest first, and how one is removed.

A living run never goes, nor one whose trainer or engines outlived its daemon. A run is removed under its own lock, so
no daemon can take it up meanwhile: it is first renamed out of sight, then deleted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rltop.errors import RltopError
from rltop.runs.disk import disk_bytes
from rltop.runs.leftovers import temporary_places
from rltop.runs.lock import acquire_lock
from rltop.runs.places import dir_digest, registry_dir
from rltop.runs.registry import RunInfo

HIDDEN = ".pruned-"


@dataclass(frozen=True, slots=True)
class Weighed:
    """A run, and what the quota wants to know of it."""

    run: RunInfo
    bytes: int
    touched: float
    """Wall clock of the last change of its journal or `run.json`."""
    removable: bool
    """Nothing of it lives."""


@dataclass(frozen=True, slots=True)
class Doomed:
    """A run that is to go, and why."""

    weighed: Weighed
    why: str


def weigh(run: RunInfo, *, orphaned: bool) -> Weighed:
    """Measure a run. orphaned: its daemon is gone, its trainer or engines still run."""
    touched = run.started
    for name in ("journal.sqlite", "journal.sqlite-wal", "run.json", "trainer.log"):
        with contextlib.suppress(OSError):
            touched = max(touched, (run.path / name).stat().st_mtime)
    return Weighed(run, disk_bytes(run.path), touched, not run.alive and not orphaned)


def plan(runs: Sequence[Weighed], *, most_bytes: int, age_s: float | None, now: float) -> list[Doomed]:
    """Which runs go: those that are too old, then the oldest until all runs together fit into `most_bytes`. Pure."""
    doomed: list[Doomed] = []
    left = sum(weighed.bytes for weighed in runs)
    for weighed in sorted(runs, key=lambda weighed: weighed.touched):
        if not weighed.removable:
            continue
        if age_s is not None and now - weighed.touched > age_s:
            why = f"older than {age_s / 86400:g} days"
        elif left > most_bytes:
            why = f"all runs together are over {most_bytes / 1e9:g} GB"
        else:
            continue
        left -= weighed.bytes
        doomed.append(Doomed(weighed, why))
    return doomed


def remove_run(run: RunInfo) -> None:
    """Delete a dead run, its link in the registry and its socket folder. Raises RltopError when a daemon holds it, or
    when it cannot be removed."""
    lock = acquire_lock(run.path)
    try:
        hidden = run.path.with_name(f"{HIDDEN}{run.name}-{secrets.token_hex(4)}")
        try:
            run.path.rename(hidden)
        except OSError as error:
            raise RltopError("cannot remove the run", where=str(run.path), why=str(error), exit_code=1) from error
        shutil.rmtree(hidden, ignore_errors=True)
        if hidden.exists():
            raise RltopError(
                "the run could not be removed whole", where=str(hidden), do="remove it by hand", exit_code=1
            )
    finally:
        os.close(lock)
    with contextlib.suppress(OSError, RltopError):
        (registry_dir() / dir_digest(run.path)).unlink()
    for temp in temporary_places():
        shutil.rmtree(temp / f"rltop-{os.getuid()}" / dir_digest(run.path), ignore_errors=True)


def remove_hidden(roots: Iterable[Path]) -> None:
    """Finish removals that were cut short: what lies in `roots` under a hidden name was given up already."""
    for root in roots:
        for entry in root.glob(f"{HIDDEN}*"):
            shutil.rmtree(entry, ignore_errors=True)
