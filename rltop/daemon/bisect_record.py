"""What is known of a bisection, on disk: `<run>/bisect/<id>/record.json`, replaced whole before anything is done.

It is the truth for a runner that is resumed (under the next daemon, after any death) and for the export of a finished
one. Times are wall clock seconds; minutes are exposure minutes (clock minutes times `time_scale`).

Failure policy: a record that cannot be written raises `RltopError`, and the bisection ends with that as its result. A
damaged one is named and left alone: nobody resumes what cannot be read. One of a newer rltop is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rltop.engines.ground import Ground
from rltop.engines.requests import Required
from rltop.engines.trials import Subject
from rltop.errors import RltopError

SCHEMA = 1
FOLDER = "bisect"
FILE = "record.json"
State = Literal["running", "paused", "found", "none", "not-separable", "budget", "stopped", "failed"]
ENDED = frozenset({"found", "none", "not-separable", "budget", "stopped", "failed"})
Outcome = Literal["running", "crashed", "quiet", "lost", "aborted"]


class TrialRow(msgspec.Struct, kw_only=True):
    """One trial: one engine, one arm."""

    n: int
    engine: str
    generation: int = 0
    asked_on: tuple[str, ...]
    """Toggles that were to be on."""
    on: tuple[str, ...] | None = None
    """In effect; None: it was not seen."""
    outcome: Outcome = "running"
    minutes: float = 0.0
    """Exposure: under traffic, from ready to the crash or to now."""
    planned: float = 0.0
    """Minutes after which the planner is asked again."""
    started: float
    ready: bool = False
    """It answered and traffic began."""
    ended: float | None = None
    counts: bool = True
    why: str = ""
    crash: float = 0.0
    """Chance of a crash that the planner saw in it."""
    bits: float = 0.0
    fingerprint: str = ""
    kernel: str = ""
    log: str = ""
    note: str = ""
    requests: int = 0
    """Answered."""
    failed: int = 0
    """Refused, or cut off."""
    tokens: int = 0


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """The crash that is hunted."""

    engine: str
    generation: int
    fingerprint: str
    kind: str
    """Class of error."""
    phase: str
    cause: str = ""
    kernel: str = ""
    rank: int | None = None
    minutes: float | None = None
    """It had requests for so long; None: not known."""
    weight_version: str = ""
    injected: str = ""
    """A rehearsal: the fault that a stand-in was told to have."""
    at_start: bool = False
    """Before it answered anything."""


class Outside(msgspec.Struct, frozen=True, kw_only=True):
    """A crash of the hunted kind that was no trial's: an engine with the same arguments, which served meanwhile."""

    engine: str
    generation: int
    fingerprint: str
    minutes: float
    """It had requests for so long; clock minutes, as `Crash.minutes`."""
    t: float


class KernelRun(msgspec.Struct, kw_only=True):
    """A run for the kernel's name, after the verdict: no trial, nothing else is concluded from it."""

    engine: str
    generation: int
    why: str
    limit_min: float
    """It is ended after so many minutes without a crash."""
    started: float
    ended: float | None = None
    outcome: Literal["running", "crashed", "quiet", "lost", "aborted"] = "running"
    minutes: float = 0.0
    log: str = ""
    note: str = ""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict."""

    state: str
    culprit: tuple[str, ...] | None
    words: str
    p: float
    text: str
    left: tuple[tuple[tuple[str, ...], float], ...] = ()


class Record(msgspec.Struct, kw_only=True):
    """Everything."""

    schema: int = SCHEMA
    id: str
    state: State = "running"
    mode: Literal["in-fleet", "exclusive"]
    engines: tuple[str, ...]
    subject: Subject
    """The engine as it was; all arms have its arguments."""
    ground: Ground
    crash: Crash
    earlier: tuple[tuple[str, float], ...] = ()
    """Other crashes of that kind with the same arguments: engine, and minutes in which it had requests."""
    outside: list[Outside] = []
    """Such crashes since it began."""
    weights: Required
    """That every engine on trial holds."""
    factors: Mapping[str, float] = {}
    facts: tuple[Mapping[str, Any], ...] = ()
    kernel: str = ""
    """That a core dump of a trial named, where the hunted crash had none."""
    traffic: Mapping[str, Any] = {}
    cycle: str = ""
    """Between waves of traffic: `sleep`, `sync`, or "" (load alone)."""
    located: Mapping[str, Any] | None = None
    """What the kernel stage found (`rltop.engines.gdb.Kernel.cell`)."""
    kernel_stage: str = ""
    """What the kernel stage does now."""
    kernel_runs: list[KernelRun] = []
    started: float
    ended: float | None = None
    minutes: float = 0.0
    """Wall time so far, pauses left out."""
    budget_min: float
    sure: float = 0.0
    """A culprit is not named below this belief, where that is more than the planner asks for."""
    time_scale: float = 1.0
    restart_min: float
    """What a change of arm took so far, on average."""
    seed: int = 0
    reason: str = ""
    who: str = ""
    trials: list[TrialRow] = []
    barred: list[tuple[str, ...]] = []
    """Arms that cannot be, by the toggles that are on."""
    stuck: dict[str, str] = {}
    """Toggle -> why it is not turned off any more: its flag has no effect."""
    goes_with: dict[str, tuple[str, ...]] = {}
    """Toggle -> others that were seen to go off with it."""
    dropped: dict[str, str] = {}
    """Engine -> why it takes no part any more."""
    verdict: Ending | None = None
    restored: dict[str, str] = {}
    unserved: str = ""
    """Why no engine serves the run now; "": one does."""
    cut_off: bool = False
    """Its engines were stopped under it (the run went down): it can be gone on with."""
    error: str = ""
    notes: list[str] = []


class Records:
    """The records of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / FOLDER

    @property
    def run_dir(self) -> Path:
        """Of the run."""
        return self._root.parent

    def next_id(self) -> str:
        """The next free number."""
        numbers = [int(path.name) for path in self._root.glob("*") if path.name.isdecimal()]
        return str(max(numbers, default=0) + 1)

    def write(self, record: Record) -> None:
        """Replace the file. Raises RltopError."""
        file = self._root / record.id / FILE
        staging = file.with_name(f".{FILE}.{os.getpid()}")
        data = msgspec.json.format(msgspec.json.encode(record))
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The environment of an engine may hold keys.
            with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as written:
                written.write(data)
            os.replace(staging, file)
        except OSError as error:
            with contextlib.suppress(OSError):
                staging.unlink()
            raise RltopError(
                "the bisection's record cannot be written",
                where=str(file),
                why=error.strerror or str(error),
                do="make room on the disk of the run directory",
                exit_code=1,
            ) from error

    def read_all(self) -> tuple[list[Record], list[str]]:
        """Every record, oldest first, and a sentence for each that cannot be read."""
        found, problems = [], []
        folders = [path for path in self._root.glob("*") if path.name.isdecimal() and (path / FILE).exists()]
        for folder in sorted(folders, key=lambda path: int(path.name)):
            try:
                found.append(_read(folder / FILE))
            except (OSError, ValueError) as error:
                problems.append(f"{folder / FILE}: it cannot be read ({error}); the bisection is not gone on with")
        return found, problems


def _read(file: Path) -> Record:
    """Raises OSError, ValueError (msgspec's errors are such)."""
    data = file.read_bytes()
    schema = msgspec.json.decode(data, type=_Schema).schema
    if schema > SCHEMA:
        raise ValueError(f"its schema version is {schema}, this build reads up to {SCHEMA}")
    return msgspec.json.decode(data, type=Record)


class _Schema(msgspec.Struct):
    schema: int = 1
