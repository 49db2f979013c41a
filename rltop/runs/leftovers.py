"""What killed processes leave in the temporary directory, and how it is known that nobody needs it any more.

A temporary directory that rltop makes is *owned*: its maker holds a lock on a file in it, and the kernel lets go of the
lock however the maker ends. It is a leftover when that lock is free and no process of this machine names the directory
in its command line, environment or working directory (Ray's processes do, and may outlive a driver that was killed).
A socket folder is a leftover when nobody listens on any of its sockets. What cannot be proven stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PREFIXES = ("rltop-ray-", "rltop-train-", "rltop-past-", "rltop-view-")
OWNER = ".rltop-owner"
"""File in an owned directory that its maker holds locked."""
YOUNG_S = 120.0
"""Younger ones are left alone: their maker may be between making and locking."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory that nobody needs any more."""

    path: Path
    bytes: int


@contextlib.contextmanager
def owned_dir(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new temporary directory, locked by this process while the block runs, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def temporary_places() -> list[Path]:
    """Where owned directories may lie: the temporary directory, and /tmp, which Ray's short paths need."""
    return list(dict.fromkeys((Path(tempfile.gettempdir()), Path("/tmp"))))


def find_leftovers(places: Iterable[Path], *, now: float, commands: Sequence[str] | None = None) -> list[Leftover]:
    """Leftovers below `places`. now: wall clock. commands: command lines of all processes, default: this machine's."""
    from rltop.runs.disk import disk_bytes

    candidates = [
        entry
        for place in places
        for entry in _entries(place)
        if entry.name.startswith(PREFIXES) and _is_ours(entry, now) and not _owner_lives(entry)
    ]
    if candidates:
        said = _all_commands() if commands is None else commands
        candidates = [entry for entry in candidates if not any(str(entry) in command for command in said)]
    for place in places:
        for entry in _entries(place / f"rltop-{os.getuid()}"):
            if _is_ours(entry, now) and _is_socket_folder(entry) and not _anybody_listens(entry):
                candidates.append(entry)
    return [Leftover(entry, disk_bytes(entry)) for entry in candidates]


def remove(leftover: Leftover) -> None:
    """Remove it. What cannot be removed stays, for the next time."""
    shutil.rmtree(leftover.path, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_ours(entry: Path, now: float) -> bool:
    try:
        info = entry.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and now - info.st_mtime > YOUNG_S


def _owner_lives(folder: Path) -> bool:
    """Whether somebody holds its lock, or that cannot be told: without a lock file nothing is proven."""
    try:
        fd = os.open(folder / OWNER, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _all_commands() -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found.append(" ".join(process.cmdline()))
            with contextlib.suppress(psutil.Error, OSError):
                found.append(process.cwd())
                found += [f"{name}={value}" for name, value in process.environ().items()]
    return found


def _is_socket_folder(folder: Path) -> bool:
    entries = _entries(folder)
    return all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries)


def _anybody_listens(folder: Path) -> bool:
    for entry in _entries(folder):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(entry))
            except (ConnectionRefusedError, FileNotFoundError):
                continue
            except OSError:
                return True  # busy, or not ours to say
            return True
    return False


def clean(*, now: float | None = None) -> list[Leftover]:
    """Remove every leftover on this machine; returns what went."""
    found = find_leftovers(temporary_places(), now=time.time() if now is None else now)
    for leftover in found:
        remove(leftover)
    return [leftover for leftover in found if not leftover.path.exists()]
