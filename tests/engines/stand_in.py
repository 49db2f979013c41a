"""A shell script in the place of the interpreter: an engine's processes without an engine. For tests of launchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltop.engines.launcher import LaunchSpec

PATIENCE_S = 20.0


def script(path: Path, body: str) -> str:
    """An executable that ignores its arguments and runs `body` in the shell."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


# "ready" is the last that each of them writes before it is told to end: whoever saw it finds files that rest.
SERVES = "sleep 600 & echo child $!; echo ready; wait"
"""Like SGLang's main process with one scheduler."""
ESCAPES = "setsid env -i sleep 600 & echo child $!; echo ready; wait"
"""Its child has a session of its own and an empty environment: only its parents lead to it."""
ENDS_WELL = "trap 'echo bye; exit 0' TERM; setsid sleep 600 & echo child $!; echo ready; wait"
"""Ends with 0 when asked, and leaves its child behind."""


def spec(tmp_path: Path, body: str = SERVES, *, generation: int = 1, **fields: Any) -> LaunchSpec:
    """A generation of engine 0. The run's name is the test's own: a test run beside this one has other markers."""
    values: dict[str, Any] = {
        "run": tmp_path.name + "-" + str(abs(hash(str(tmp_path)))),
        "engine_id": "0",
        "generation": generation,
        "kind": "sglang",
        "model_path": str(tmp_path),
        "directory": str(tmp_path / "engines" / "0" / str(generation)),
        "lock": str(tmp_path / "engines" / "0" / "lock"),
    }
    if "python" not in fields:
        values["python"] = script(tmp_path / f"python-{generation}", body)
    return LaunchSpec(**(values | fields))


def until(what: Callable[[], Any], why: str = "") -> Any:
    """The first true result of `what`, within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < deadline, why or "it never happened"
        time.sleep(0.01)
    return found
