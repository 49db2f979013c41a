"""The command in a terminal, as a person runs it: a pseudo-terminal of 120x40 and what was painted on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[P_^][^\x1b]*\x1b\\|.)", re.DOTALL)


class Terminal:
    """A process in a terminal of 120x40."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self.raw = ""

    @property
    def text(self) -> str:
        """All that was painted so far, without escape sequences."""
        return ESCAPES.sub("", self.raw)

    def read_until(self, *words: str, behind: int = 0) -> None:
        """Read until all `words` were painted, at or behind that place of `text`."""
        while not all(word in self.text[behind:] for word in words):
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"it ended before it painted {words}; it painted {self.text[-2000:]!r}"
            self.raw += data.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        with pytest.raises(AssertionError):
            self.read_until("\0never")
        return self.process.wait()


@contextmanager
def terminal(*argv: str, env: dict[str, str]) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "rltop", *argv]
    full = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **env}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=full, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            process.kill()
            os.close(master)
