"""The parent of one engine or one trainer: starts it, waits, and writes down how it ended. It keeps room for its log.

Only a parent learns an exit code, and the daemon may be killed and started again while its processes run. So a process
that is too simple to die stands between them. It writes its record twice: who the process is (marker, pid, birth) as
soon as it lives, so that every later daemon of the run can find it, and its exit code at the end.

Started by path as `python -I -S keeper.py REPORT_FD SPEC COMMAND…` and imports nothing of rltop: that is some 20 ms.
SPEC is JSON (`Spec`). The first record also goes to REPORT_FD, for whoever waits. TERM, INT and HUP are ignored here:
they are for the process, which leads a session of its own. A disk that takes no record costs the exit code, not the
process.

With a lock it is the keeper of a whole tree: it holds the lock, declares itself a subreaper, so that a process whose
parent died comes to it instead of to init, and stays until the last one is gone. So a free lock means that nothing is
left. The process inherits the descriptor, for the case that its keeper is killed.

A program that prints dies when its log's disk is full, and the log is rltop's idea. So some MiB behind the end of the
log are always reserved while there is room: a disk that somebody else fills up then leaves hours of output.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

RESERVES = (8 << 20, 1 << 20, 1 << 18)
"""Bytes of room for the log, the most that the disk gives."""
LOOK_S = 1.0
LOCK_PATIENCE_S = 1.0
"""Whoever looks whether the lock is free holds it for an instant; a tree that is just ending lets it go."""
TETHER_TERM_S = 20.0
"""From TERM to KILL when the process that this one is tied to is gone: SGLang needs up to 20 s to end well."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_PR_SET_CHILD_SUBREAPER = 36
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Spec = dict[str, Any]
"""record: path. variable, marker: of the environment. Optional: lock: path; detach: fork first, so that nobody who ends
takes the keeper along or has to reap it; tether: [pid, birth] of a process, after whose end everything here is ended;
extra: further fields of the record."""


def birth(pid: int) -> str:
    """When a process began, in words that no clock change moves: with its pid they name one process for ever.

    Linux: the boot's id and the start in clock ticks since that boot. Elsewhere what `ps` says. "" when it is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            ticks = stat.read().rpartition(")")[2].split()[19]
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()} {ticks}"
    except (OSError, IndexError):
        if os.path.exists("/proc/self/stat"):
            return ""
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return told.stdout.strip()


def main(argv: list[str]) -> int:
    """Keep one process, or with a lock one tree; returns 0 whatever became of it."""
    report, spec, command = int(argv[0]), json.loads(argv[1]), argv[2:]
    os.set_inheritable(report, False)
    if spec.get("detach"):
        if os.fork():
            os._exit(0)
        # Whoever started this may be a Ray worker: its sockets must not live on here.
        os.closerange(max([2, report, *spec.get("hold", ())]) + 1, os.sysconf("SC_OPEN_MAX"))
    reset = [number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
    found: dict[str, object] = {"marker": spec["marker"], **spec.get("extra", {})}  # not the command: it holds secrets
    for descriptor in spec.get("hold", ()):
        os.set_inheritable(descriptor, False)
    lock = None
    try:
        lock = _take(spec["lock"]) if spec.get("lock") else None
        if lock == -1:
            _tell(report, {**found, "held": True})  # the record, if there is one, is somebody else's
            return 0
        pid = os.posix_spawnp(
            command[0],
            command,
            {**os.environ, spec["variable"]: spec["marker"]},
            setsid=True,
            setsigdef=[*reset, signal.SIGPIPE, signal.SIGXFSZ],
        )
    except (OSError, ValueError) as error:
        found["error"] = getattr(error, "strerror", None) or str(error)
        found["file"] = getattr(error, "filename", None) or ""
        _write(spec["record"], found)
        if lock is not None:
            os.close(lock)  # before whoever waits may try again
        _tell(report, found)
        return 0
    found |= {"pid": pid, "birth": birth(pid), "keeper": os.getpid(), "keeper_birth": birth(os.getpid())}
    found["started"] = time.time()
    _write(spec["record"], found)
    _tell(report, found)
    room = Room(os.dup(1))
    with open(os.devnull, "r+b") as nothing:  # the log belongs to the process
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    _wait(spec, found, pid, room)
    room.give_back()
    return 0


def _take(path: str) -> int:
    """Hold the lock from now on, let the process inherit it, and collect orphans. -1: somebody else has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() > deadline:
            os.close(lock)
            return -1
        time.sleep(0.01)
    os.set_inheritable(lock, True)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return lock


def _wait(spec: Spec, found: dict[str, object], leader: int, room: Room) -> None:
    """Reap until the leader has ended or, with a lock, until nobody is left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    whole, tether, told = bool(spec.get("lock")), spec.get("tether"), 0.0
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid and pid == leader:
            _write(spec["record"], {**found, "code": os.waitstatus_to_exitcode(status), "ended": time.time()})
            leader = 0
            if not whole:
                return
        if pid:
            continue
        if tether and birth(tether[0]) != tether[1]:
            if leader and not told:
                os.kill(leader, signal.SIGTERM)
            told = told or time.monotonic()
            if not leader or time.monotonic() - told > TETHER_TERM_S:
                _kill_children()
        room.reserve()
        signal.sigtimedwait([signal.SIGCHLD], LOOK_S)


def _kill_children() -> None:
    """KILL to every child. Those that were not waited for keep their numbers."""
    for pid in _children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Own children. Orphans of killed ones become children too, so who repeats this gets them all."""
    own, found = str(os.getpid()), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        with contextlib.suppress(OSError, IndexError):
            if name.isdigit():
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                    if stat.read().rpartition(")")[2].split()[1] == own:
                        found.append(int(name))
    return found


class Room:
    """Disk blocks behind the end of a log (Linux; elsewhere, and on disks that cannot, there is none)."""

    def __init__(self, log: int) -> None:
        self._log = log
        self._until = 0
        self._fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
        if self._fallocate is not None:
            self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

    def reserve(self) -> None:
        """Reserve again when half of the room is used."""
        if self._fallocate is None:
            return
        try:
            size = os.fstat(self._log).st_size
        except OSError:
            return
        for room in RESERVES:
            if size + room // 2 < self._until:
                return
            if self._fallocate(self._log, _KEEP_SIZE, size, room) == 0:
                self._until = size + room
                return

    def give_back(self) -> None:
        """Free what was reserved and not used."""
        if self._until:
            with contextlib.suppress(OSError):
                os.ftruncate(self._log, os.fstat(self._log).st_size)


def _write(record: str, found: dict[str, object]) -> None:
    temporary = f"{record}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(found, file)
        os.replace(temporary, record)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _tell(report: int, found: dict[str, object]) -> None:
    with contextlib.suppress(OSError), open(report, "w", encoding="utf-8") as pipe:
        json.dump(found, pipe)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
