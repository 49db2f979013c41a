"""Processes as engines need them: named by birth, seen in one pass over the process table, killed without a race.

A pid alone names nobody: it is given away again. `Ident` is a pid with the moment of birth (`keeper.birth`), and
`send` compares the two through a handle (pidfd) that cannot be given away in between. Processes that are gone, or that
this user may not look at, are left out and never an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from rltop.engines.keeper import birth

_LINUX = Path("/proc/self/stat").exists()
YOUNG_S, EXEC_S = 10.0, 0.5
"""A process that shows no environment, and is not older, may be in its `exec`; how long it is waited for."""
KTHREADD = 2
"""Parent of the kernel's threads, which have none ever."""


class Ident(NamedTuple):
    """One process for ever."""

    pid: int
    birth: str
    """Of `keeper.birth`; never equal to another process's that had the same pid."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the process table."""

    ident: Ident
    parent: int
    session: int
    zombie: bool
    name: str


Table = Mapping[int, Row]
"""By pid."""


def ident(pid: int) -> Ident | None:
    """The process that has this number now; None when nobody has."""
    born = birth(pid)
    return Ident(pid, born) if born else None


def alive(process: Ident) -> bool:
    """Exactly this process exists and is not a zombie."""
    row = _row(process.pid, _boot()) if _LINUX else _row_elsewhere(process.pid)
    return row is not None and row.ident == process and not row.zombie


def name(pid: int) -> str:
    """What people call a process; "" when it cannot be seen."""
    try:
        process = psutil.Process(pid)
        words = process.cmdline()
        # SGLang's children call themselves `sglang::scheduler_TP0`; of anything else the program says most.
        return " ".join(words).strip()[:80] if any(words) else str(process.name())
    except psutil.Error:
        return ""


def table() -> Table:
    """Every process. Some 20 us each."""
    if not _LINUX:
        return {pid: row for pid in psutil.pids() if (row := _row_elsewhere(pid)) is not None}
    boot = _boot()
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return {pid: row for pid in pids if (row := _row(pid, boot)) is not None}


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _row(pid: int, boot: str) -> Row | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        return Row(
            Ident(pid, f"{boot} {fields[19]}"),
            parent=int(fields[1]),
            session=int(fields[3]),
            zombie=fields[0] in "ZX",
            name=head.partition("(")[2],
        )
    except (OSError, ValueError, IndexError):
        return None


def _row_elsewhere(pid: int) -> Row | None:
    try:
        process = psutil.Process(pid)
        return Row(
            Ident(pid, birth(pid)),
            parent=process.ppid() or 0,
            session=os.getsid(pid),
            zombie=process.status() == psutil.STATUS_ZOMBIE,
            name=process.name(),
        )
    except (psutil.Error, OSError):
        return None


def below(rows: Table, roots: Iterable[int]) -> set[int]:
    """Pids of all living descendants of `roots`, those themselves left out."""
    children: dict[int, list[int]] = {}
    for pid, row in rows.items():
        children.setdefault(row.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return {pid for pid in found if not rows[pid].zombie}


def marked(marks: Mapping[str, str]) -> set[Ident]:
    """Every process of this user with all these environment variables. Reads all of them: not for every tick."""
    return set(carrying(lambda environ: all(environ.get(name) == value for name, value in marks.items())))


def carrying(ours: Callable[[Mapping[str, str]], bool]) -> dict[Ident, Mapping[str, str]]:
    """Every process of this user with such an environment, and that. Reads all of them: not for every tick.

    A process in the middle of its `exec` shows no environment for a moment, on a busy machine a long one, though who
    started it goes on already: the young ones without any are looked at again.
    """
    found: dict[Ident, Mapping[str, str]] = {}
    unread: list[psutil.Process] = []

    def look(process: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            if not environ and time.time() - process.create_time() < YOUNG_S and process.ppid() != KTHREADD:
                unread.append(process)
            elif ours(environ) and (one := ident(process.pid)) is not None and alive(one):
                found[one] = environ

    for process in psutil.process_iter():
        look(process)
    deadline = time.monotonic() + EXEC_S
    while unread and time.monotonic() < deadline:
        time.sleep(EXEC_S / 50)
        again, unread = unread, []
        for process in again:
            look(process)
    return found


def send(process: Ident, number: signal.Signals) -> bool:
    """Send a signal to exactly this process. False when it is gone, or not ours to signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except AttributeError:  # not Linux: the pid may be given away between the two lines
        handle = -1
    except OSError:
        return False
    try:
        if birth(process.pid) != process.birth:
            return False
        if handle < 0:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def locked(path: Path) -> bool:
    """Whether somebody holds an flock on the file. No file, no lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def holders(path: Path) -> list[int]:
    """Pids of the processes of this user that have the file open. Empty where that cannot be seen."""
    try:
        wanted = os.stat(path)
    except OSError:
        return []
    found = []
    for entry in os.listdir("/proc") if _LINUX else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if any(_same(f"/proc/{entry}/fd/{descriptor}", wanted) for descriptor in os.listdir(f"/proc/{entry}/fd")):
                found.append(int(entry))
    return found


def named_holders(path: Path) -> tuple[tuple[int, str], ...]:
    """(pid, name) of who holds a lock that is held; pid 0: somebody who cannot be seen."""
    found = tuple((pid, name(pid)) for pid in holders(path))
    return found or ((0, "a process that cannot be seen"),)


def _same(path: str, wanted: os.stat_result) -> bool:
    try:
        seen = os.stat(path)
    except OSError:
        return False
    return (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino)
