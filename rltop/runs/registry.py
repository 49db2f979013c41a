"""The runs of this user: `run.json`, the registry of links, and how a run is found by its name.

A run is a directory, mode 0700, with `run.json` (mode 0600, written by its daemon once its sockets are bound) and
`lock`. Every daemon also leaves a link to it in one registry per user, so that it is found whatever the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.errors import RltopError
from rltop.runs import places
from rltop.runs.lock import lock_holder, unwritable
from rltop.runs.names import check_name
from rltop.runs.places import dir_digest, registry_dir

REHEARSAL = "rehearsal"
"""Empty file in the directory of a run that a drill started."""


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run, alive or dead, as its `run.json` and its lock describe it."""

    name: str
    path: Path
    """The run directory."""
    pid: int
    """Process id of the daemon; of the last one when `alive` is false."""
    started: float
    """Wall clock, seconds since the epoch."""
    alive: bool
    """A daemon holds the lock right now."""
    sockets: dict[str, str]
    """`ingest`, `view`, `ctl` -> `ipc://…`. Empty while the daemon is still starting."""
    command: list[str]
    """The trainer's argv when the daemon started it, else the daemon's own."""
    version: str
    host: str = ""


def register(run_dir: Path) -> None:
    """Leave a link to `run_dir` in the registry. Idempotent.

    Raises RltopError when the registry cannot be made, OSError when the link cannot.
    """
    link = registry_dir() / dir_digest(run_dir)
    with contextlib.suppress(FileExistsError):
        link.symlink_to(run_dir.absolute(), target_is_directory=True)


def write_run_json(run_dir: Path, fields: Mapping[str, Any]) -> None:
    """Write `run.json` atomically, mode 0600. Raises RltopError when the disk does not take it."""
    temporary = run_dir / "run.json.tmp"
    try:
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(dict(fields), file, indent=1, ensure_ascii=False)
            file.write("\n")
        temporary.replace(run_dir / "run.json")
    except OSError as error:
        raise unwritable(run_dir / "run.json", error) from error


def read_run(run_dir: Path) -> RunInfo | None:
    """What is known about the run in `run_dir`; None when no daemon ever got as far as writing `run.json`."""
    try:
        raw = (run_dir / "run.json").read_text(encoding="utf-8")
        changed = (run_dir / "run.json").stat().st_mtime
    except OSError:
        return None
    try:
        fields = json.loads(raw)
    except ValueError:
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    holder = lock_holder(run_dir)
    sockets = fields.get("sockets")
    command = fields.get("command")
    return RunInfo(
        name=run_dir.name,
        path=run_dir,
        pid=holder or int(_number(fields.get("pid"), 0)),
        started=_number(fields.get("started"), changed),
        alive=holder is not None,
        sockets={str(k): str(v) for k, v in sockets.items()} if isinstance(sockets, dict) else {},
        command=[str(word) for word in command] if isinstance(command, list) else [],
        version=str(fields.get("version", "")),
        host=str(fields.get("host", "")),
    )


def _number(value: object, default: float) -> float:
    return value if isinstance(value, (int, float)) else default


def list_runs(*, everywhere: bool = False) -> list[RunInfo]:
    """All runs of this user on this machine, newest first, dead ones too.

    With RLTOP_DIR set only the runs in it, unless `everywhere`; otherwise those in the default places and in the
    registry, whatever environment they were started with. Links to directories that are gone leave the registry.
    """
    folders: dict[Path, None] = {}
    for base in places.candidates():
        with contextlib.suppress(OSError):
            folders.update(dict.fromkeys(entry.resolve() for entry in (base / "runs").iterdir() if _is_run(entry)))
    if everywhere or not os.environ.get("RLTOP_DIR"):
        folders.update(dict.fromkeys(_registered()))
    found = [run for folder in folders if (run := read_run(folder)) is not None]
    return sorted(found, key=lambda run: run.started, reverse=True)


def _is_run(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()


def _registered() -> list[Path]:
    try:
        links = list(registry_dir().iterdir())
    except (RltopError, OSError):
        return []  # no registry on this machine: then there is nothing in it
    found = []
    for link in links:
        target = link.resolve()
        try:
            ours = target.is_dir() and target.stat().st_uid == os.getuid()
        except OSError:
            ours = False
        if ours:
            found.append(target)
        else:
            with contextlib.suppress(OSError):
                link.unlink()
    return found


def find_run(name: str | None = None) -> RunInfo:
    """The run called `name`, alive or dead (a living one wins over a dead namesake); None: the newest living run.

    RLTOP_DIR is where is looked first. A name that is not there is found wherever it lies: a run started by a batch
    job with another RLTOP_DIR is still this user's.
    Raises RltopError that names the candidates, or the host on which the run's daemon lives.
    """
    return _on_this_machine(_newest_living() if name is None else _named(name))


def mark_rehearsal(run: RunInfo) -> None:
    """While another run lives, commands that name none do not mean this one. Raises OSError."""
    (run.path / REHEARSAL).touch()


def _newest_living() -> RunInfo:
    runs = list_runs()
    living = [run for run in runs if run.alive]
    if living:
        return next((run for run in living if not (run.path / REHEARSAL).exists()), living[0])
    dead = ", ".join(run.name for run in runs[:5])
    why = f"dead ones: {dead}" if dead else "no run was ever started here by this user"
    do = f"rltop attach {runs[0].name} shows what it left; rltop demo, or rltop up CONFIG, starts one" if dead else ""
    if scope := os.environ.get("RLTOP_DIR"):
        elsewhere = [run.name for run in list_runs(everywhere=True) if run.alive]
        why = f"in RLTOP_DIR={scope}: {why}" + (f"; alive elsewhere: {', '.join(elsewhere[:5])}" if elsewhere else "")
    raise RltopError("no run is alive", why=why, do=do or "rltop demo, or rltop up CONFIG")


def _named(name: str) -> RunInfo:
    check_name(name)
    runs = list_runs()
    for candidates in (runs, list_runs(everywhere=True) if os.environ.get("RLTOP_DIR") else []):
        matching = sorted((run for run in candidates if run.name == name), key=lambda run: not run.alive)
        if matching:
            return matching[0]
    known = ", ".join(f"{run.name} ({'alive' if run.alive else 'dead'})" for run in runs[:8])
    raise RltopError(f"there is no run {name!r}", why=f"known: {known}" if known else "no run is known", do="rltop ps")


def _on_this_machine(found: RunInfo) -> RunInfo:
    here = socket.gethostname()
    if found.alive and found.host and found.host != here:
        raise RltopError(
            f"run {found.name!r} lives on another machine",
            where=str(found.path),
            why=f"its daemon is on {found.host}, this is {here}; unix sockets do not cross machines",
            do=f"rltop attach ssh://{found.host}/{found.name}",
        )
    return found
