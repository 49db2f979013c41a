"""The parent of a trainer: starts it, waits, and writes down how it ended. It also keeps room for its log.

Only a parent learns an exit code, and the daemon may be killed and started again while the trainer runs. So a process
that is too simple to die stands between them. It writes `trainer.json` twice: who the trainer is (marker, pid, birth)
as soon as it lives, so that every later daemon of the run can find it, and its exit code at the end.

Started by path as `python -I -S keeper.py REPORT_FD RECORD MARKER COMMAND…` and imports nothing of rltop: that is some
20 ms. The first record also goes to REPORT_FD, for the daemon that waits. TERM, INT and HUP are ignored here: they are
for the trainer, which leads a session of its own. A disk that takes no record costs the exit code, not the trainer.

A program that prints dies when its log's disk is full, and the log is rltop's idea. So some MiB behind the end of the
log are always reserved while there is room: a disk that somebody else fills up then leaves hours of output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

MARKER = "RLTOP_JOB"
RESERVES = (8 << 20, 1 << 20, 1 << 18)
"""Bytes of room for the log, the most that the disk gives."""
LOOK_S = 1.0
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    """Keep one trainer; returns 0 whatever became of it."""
    report, record, marker, command = int(argv[0]), argv[1], argv[2], argv[3:]
    os.set_inheritable(report, False)
    reset = [number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in _ASKING:
        signal.signal(number, signal.SIG_IGN)
    found: dict[str, object] = {"marker": marker}  # not the command: it may hold secrets
    try:
        pid = os.posix_spawnp(
            command[0],
            command,
            {**os.environ, MARKER: marker},
            setsid=True,
            setsigdef=[*reset, signal.SIGPIPE, signal.SIGXFSZ],
        )
    except (OSError, ValueError) as error:
        found["error"] = getattr(error, "strerror", None) or str(error)
        _write(record, found)
        _tell(report, found)
        return 0
    found |= {"pid": pid, "birth": birth(pid)}
    _write(record, found)
    _tell(report, found)
    room = Room(os.dup(1))
    with open(os.devnull, "r+b") as nothing:  # the log belongs to the trainer
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        room.reserve()
        signal.sigtimedwait([signal.SIGCHLD], LOOK_S)
    status = ended[1]
    room.give_back()
    _write(record, {**found, "code": os.waitstatus_to_exitcode(status), "ended": time.time()})
    return 0


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
