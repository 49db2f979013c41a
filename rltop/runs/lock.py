"""The lock by which a run's daemon is known to live.

`lock` is held with flock by the daemon for as long as it lives: the kernel releases it however the daemon dies, so
liveness is never guessed from a process id, which may have been given to somebody else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from rltop.errors import RltopError


def acquire_lock(run_dir: Path) -> int:
    """Take the run's lock for this process; returns the file descriptor, which must stay open. Its content is our pid.

    Raises RltopError when a daemon holds it or the disk takes nothing.
    """
    path = run_dir / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise RltopError("cannot lock the run directory", where=str(path), why=str(error)) from error
        raise RltopError(
            f"a daemon is already running for run {run_dir.name!r}",
            where=str(run_dir),
            why=f"process {holder or 'unknown'} holds {path.name}",
            do=f"rltop attach {run_dir.name}, or rltop down {run_dir.name} first",
        ) from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(fd)
        raise unwritable(path, error) from error
    return fd


def show_life(run_dir: Path) -> None:
    """The daemon lives at this moment: its lock's time of change is the last sign of life of one that is killed."""
    with contextlib.suppress(OSError):
        os.utime(run_dir / "lock")


def last_sign(run_dir: Path) -> float | None:
    """When a daemon was last known to live, wall clock; None where none ever was."""
    try:
        return (run_dir / "lock").stat().st_mtime
    except OSError:
        return None


def unwritable(path: Path, error: OSError) -> RltopError:
    return RltopError(
        "cannot write in the run directory",
        where=str(path),
        why=error.strerror or str(error),
        do="make room on that disk, or set RLTOP_DIR elsewhere",
    )


def lock_holder(run_dir: Path) -> int | None:
    """Pid of the living daemon of a run; None when there is none. 0: alive, but it has not yet said its pid."""
    try:
        fd = os.open(run_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(fd, 32, 0).strip()
        return int(text) if text.isdigit() else 0
    else:
        return None
    finally:
        os.close(fd)
