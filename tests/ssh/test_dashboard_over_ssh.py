"""`rltop attach ssh://…` as a person runs it: in a terminal, with plain `ssh` from the PATH."""

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

from tests.cli.conftest import rltop
from tests.client.router import SpecDaemon
from tests.ssh.sshd import Sshd

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


def test_the_dashboard_is_painted_survives_a_cut_and_leaves_with_q(sshd: Sshd, daemon: SpecDaemon) -> None:
    argv = ("attach", "ssh://node7/cedar-1", "--remote-rltop", sshd.rltop)
    with terminal(*argv, env={"PATH": sshd.path_with_ssh}) as screen:
        screen.read_until("cedar-1", "live", "train.nan")
        assert "Welcome to node7" not in screen.text, "the remote profile must not reach the screen"
        sshd.cut()
        here = len(screen.text)
        screen.read_until("lost", behind=here)
        screen.read_until("live", behind=len(screen.text))
        screen.type("q")
        assert screen.end() == 0
    assert "\x1b[?1049l" in screen.raw, "the terminal is given back"


def test_a_mistake_is_a_line_in_the_terminal_and_no_dashboard(sshd: Sshd, daemon: SpecDaemon) -> None:
    with terminal("attach", "ssh://node7/cedar-1", env={"PATH": sshd.path_with_ssh}) as screen:
        assert screen.end() == 1
    assert "rltop: node7: rltop is not on the remote PATH: use --remote-rltop PATH" in screen.text
    assert "\x1b[?1049h" not in screen.raw


def test_one_shot_commands_work_over_ssh(sshd: Sshd, daemon: SpecDaemon) -> None:
    env = {"PATH": sshd.path_with_ssh}
    once = rltop("attach", "--once", "ssh://node7", "--remote-rltop", sshd.rltop, env=env)
    assert (once.returncode, once.stderr) == (0, "")
    assert once.stdout.startswith("run cedar-1  running")
    got = rltop("get", "metrics", "--run", "ssh://node7/cedar-1", "--remote-rltop", sshd.rltop, env=env)
    assert got.returncode == 0
    assert "rollout/raw_reward" in got.stdout
