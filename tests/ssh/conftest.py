"""A run behind a real sshd."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.router import SpecDaemon, spec_daemon
from tests.ssh.sshd import SSHD, Sshd, running_sshd

if SSHD is None:
    warnings.warn("no sshd on this machine: the tests of attach over SSH do not run", stacklevel=1)


@pytest.fixture
def runs_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """RLTOP_DIR of this side and of the other, with a short path because unix sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as name:
        monkeypatch.setenv("RLTOP_DIR", name)
        yield Path(name)


@pytest.fixture
def daemon(runs_dir: Path) -> Iterator[SpecDaemon]:
    """A living run `cedar-1` on the other side."""
    with spec_daemon() as (running, _):
        yield running


@pytest.fixture
def sshd(tmp_path: Path, runs_dir: Path) -> Iterator[Sshd]:
    """The server; its logins see the runs of `runs_dir`."""
    if SSHD is None:
        pytest.skip("NO SSHD ON THIS MACHINE: apt-get install openssh-server; attach over SSH is NOT tested here")
    with running_sshd(tmp_path, remote_env={"RLTOP_DIR": str(runs_dir)}) as server:
        yield server
