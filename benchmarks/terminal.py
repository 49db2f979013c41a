"""Run a program on a pseudo-terminal and time what it paints: used by the benchmarks and the terminal tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Terminal:
    """A child on a pty of `columns` x `rows`. `output`: everything it wrote so far. Use as a context manager."""

    argv: Sequence[str]
    columns: int = 120
    rows: int = 40
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables on top of this process's; None removes one."""
    output: bytes = b""
    pid: int = 0
    started: float = 0.0
    """`time.perf_counter()` just before the fork."""
    _fd: int = -1
    _code: int | None = None

    def __enter__(self) -> Terminal:
        wanted = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **self.env}
        environment = {name: value for name, value in wanted.items() if value is not None}
        self.started = time.perf_counter()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:  # the child
            with contextlib.suppress(OSError):
                os.execvpe(self.argv[0], list(self.argv), environment)
            os._exit(127)
        self.resize(self.columns, self.rows)
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(5.0)
        os.close(self._fd)

    def resize(self, columns: int, rows: int) -> None:
        """Another size, as when the window is dragged."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._fd, keys)

    def until(self, done: Callable[[bytes], bool], timeout_s: float) -> float | None:
        """Read until `done(output)`. Returns seconds since the start, None when the time is over or the child ended."""
        deadline = time.perf_counter() + timeout_s
        while not done(self.output):
            left = deadline - time.perf_counter()
            if left <= 0 or not self._read(left):
                return time.perf_counter() - self.started if done(self.output) else None
        return time.perf_counter() - self.started

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the child closed its side
            return False
        self.output += data
        return bool(data)

    def cpu_s(self) -> float:
        """CPU seconds of the child so far, user and system, children not counted. Linux only; in steps of 10 ms."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, timeout_s: float) -> int | None:
        """Exit code (negative: signal), None when it is still there. Goes on reading, so that the child can write."""
        deadline = time.perf_counter() + timeout_s
        while self._code is None and time.perf_counter() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif not self._read(0.02):
                time.sleep(0.005)
        return self._code
