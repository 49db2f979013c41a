"""A real sshd on loopback, as the current user, with its own keys and configuration in a folder of the test.

Logins get a chatty profile (it prints text and a NUL to stdout, as real ones do) and a PATH without rltop.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin")
STARTS = 5
"""Ports to try: one that was free a moment ago may be taken by the time sshd binds it."""


@dataclass(frozen=True, slots=True)
class Sshd:
    """A running server and how to log in."""

    folder: Path
    process: subprocess.Popen[str]
    port: int

    @property
    def ssh(self) -> tuple[str, ...]:
        """The client with its configuration; the host is called `node7` there."""
        return ("ssh", "-F", str(self.folder / "ssh_config"))

    @property
    def path_with_ssh(self) -> str:
        """A PATH whose `ssh` reads the test's configuration, for processes that run plain `ssh`."""
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    @property
    def rltop(self) -> str:
        """The rltop on the other side, by its path."""
        return str(self.folder / "venv" / "rltop")

    def sessions(self) -> list[psutil.Process]:
        """The server's processes for living connections."""
        return psutil.Process(self.process.pid).children()

    def cut(self) -> None:
        """Kill every connection, as a reboot of a gateway does."""
        for session in self.sessions():
            for process in (*session.children(recursive=True), session):
                if process.name() == "sshd" or process == session:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Every connection is cut, and nobody gets a new one until this is left: a login then waits for its answer."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            self.cut()
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running_sshd(folder: Path, *, remote_env: dict[str, str]) -> Iterator[Sshd]:
    """Start it, stop it. remote_env: environment of logins, beside a bare PATH."""
    _write_keys(folder)
    _write_login(folder, remote_env)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # privilege separation of a root sshd; its place is compiled in
    process, port = _start(folder)
    (folder / "ssh_config").write_text(
        f"Host node7\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n IdentityFile {folder / 'user'}\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {folder / 'known_hosts'}\n StrictHostKeyChecking accept-new\n"
        " LogLevel ERROR\n LocalForward 127.0.0.1:1 127.0.0.1:1\n RemoteCommand echo never\n"
    )
    _script(folder / "bin" / "ssh", f'exec {shutil.which("ssh")} -F {shlex.quote(str(folder / "ssh_config"))} "$@"')
    sshd = Sshd(folder, process, port)
    try:
        yield sshd
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            sshd.cut()
        process.terminate()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _write_keys(folder: Path) -> None:
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")


def _write_login(folder: Path, remote_env: dict[str, str]) -> None:
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in remote_env.items())
    _script(
        folder / "login",
        "printf 'Welcome to node7\\nModules loaded: cuda\\000nccl\\n'\n"
        "echo 'quota: 93% used' >&2\n"
        f'{exports}export PATH=/usr/bin:/bin\nexec /bin/sh -c "$SSH_ORIGINAL_COMMAND"',
    )
    _script(folder / "venv" / "rltop", f'exec {shlex.quote(sys.executable)} -m rltop "$@"')


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _start(folder: Path) -> tuple[subprocess.Popen[str], int]:
    assert SSHD is not None
    said = ""
    for _ in range(STARTS):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        (folder / "sshd_config").write_text("\n".join(_settings(folder, port)) + "\n")
        process = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            said += line
            if "Server listening" in line:
                return process, port
        process.wait()
        process.stderr.close()
    raise RuntimeError(f"sshd does not start:\n{said}")


def _settings(folder: Path, port: int) -> list[str]:
    return [
        f"ListenAddress 127.0.0.1:{port}",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        f"ForceCommand {folder / 'login'}",
        "PidFile none",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "PrintMotd no",
    ]
