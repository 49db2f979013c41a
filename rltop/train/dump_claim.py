"""Whose dumps a path holds: one living run writes them, and what an earlier one left there is told before it goes.

The claim is a lock on a hidden file beside the dumps. The kernel gives it up however the run dies. Failure policy: only
a living other run ends the start; a file system without locks, or without room, costs the claim and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from rltop.errors import RltopError
from rltop.evidence.dump_find import as_glob, filled
from rltop.train.arguments import TrainConfig

ROLLOUT, TRAIN = "--save-debug-rollout-data", "--save-debug-train-data"
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def claimed(config: TrainConfig, run: str) -> Iterator[None]:
    """Hold the dump paths of this run as long as the context. Raises RltopError (exit code 2) if another run does."""
    with contextlib.ExitStack() as stack:
        for flag, pattern in _patterns(config):
            fd = _lock(flag, pattern, run)
            if fd is not None:
                stack.callback(_release, fd, _place(pattern))
        yield


def earlier(config: TrainConfig, first: int) -> list[str]:
    """One sentence per path of which the rollouts from `first` on will replace files that are there already."""
    found = []
    for flag, pattern in _patterns(config):
        there = {os.path.normpath(path) for path in glob.glob(as_glob(pattern))}
        ids = range(first, config.num_rollout) if there else ()
        count = sum(os.path.normpath(filled(pattern, rollout_id)) in there for rollout_id in ids)
        if count:
            files = "1 file of an earlier run is" if count == 1 else f"{count} files of an earlier run are"
            found.append(f"{flag} {pattern}: {files} there and will be replaced, rollout by rollout")
    return found


def _patterns(config: TrainConfig) -> Iterable[tuple[str, str]]:
    paths = ((ROLLOUT, config.rollout_dumps), (TRAIN, config.train_dumps))
    return [(flag, pattern) for flag, pattern in paths if pattern is not None]


def _place(pattern: str) -> Path:
    """The lock's file: in the last directory that all dumps of the pattern share."""
    whole = os.path.abspath(pattern)
    head, brace, _ = whole.partition("{")
    name = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return (Path(head + "x" if brace else whole)).parent / f".rltop-dumps-{name}.lock"


def _lock(flag: str, pattern: str, run: str) -> int | None:
    path = _place(pattern)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(fd, path):  # its owner took it away after we opened it
                os.close(fd)
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"run {run}, process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as error:
            if error.errno not in _BUSY:
                os.close(fd)
                return None
            holder = os.pread(fd, 300, 0).decode(errors="replace").strip()
            os.close(fd)
            raise RltopError(
                "another run is writing these dumps",
                where=f"{flag} {pattern}",
                why=f"{holder or 'a process that has not said its name'} lives and would replace this run's files",
                do="another path, or end that run first",
            ) from error
        return fd


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _release(fd: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(fd)
