"""What the tests of the command line share: a private place for runs, and the command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest


@pytest.fixture
def runs_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """RLTOP_DIR, with a short path because unix sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as name:
        monkeypatch.setenv("RLTOP_DIR", name)
        yield Path(name)


def rltop(*args: str, env: Mapping[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "rltop", *args],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=60,
        check=False,
    )
