"""Asks an interpreter, before anything starts, whether it has the module of an engine's server.

It is started as an engine would be (its variables, its options before `-m`) and imports nothing of the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rltop.engines.launcher import Kind, server_argv

PATIENCE_S = 30.0
"""One that takes longer is not judged here: the start of an engine has a patience of its own."""
_FOUND, _ABSENT = "rltop-module-found", "rltop-module-absent"
_ASK = f"""
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
parts, place = sys.argv[1].split("."), None
for at in range(len(parts)):
    name = ".".join(parts[:at + 1])
    found = PathFinder.find_spec(name, list(place or ())) if at else find_spec(name)
    if found is None:
        print("\\n{_ABSENT}", name, "%d.%d" % sys.version_info[:2])
        break
    place = found.submodule_search_locations
else:
    print("\\n{_FOUND}")
"""
"""For any Python 3. Parents are not imported: SGLang's takes seconds and wants a GPU."""


class Unfit(NamedTuple):
    """Why no engine can be started with an interpreter."""

    what: str
    why: str
    module: str = ""
    """The one that is missing; "": it is no Python that starts."""


def unfit(kind: Kind, python: str, env: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> Unfit | None:
    """What is wrong with `python` for an engine of `kind`; None: nothing that can be told.

    env: the whole environment that the engine would get; its PATH finds a `python` without a `/`.
    """
    _, *options = server_argv(kind, python, (), Path(os.devnull), env)
    at = options.index("-m")
    module = options[at + 1]
    try:
        process = subprocess.Popen(
            [python, *options[:at], "-c", _ASK, module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
    except OSError as error:
        return Unfit("it can not be started", error.strerror or str(error))
    with process:
        try:
            out, err = process.communicate(timeout=patience_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # a wrapper's child too; it is not reaped, so it is ours
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
    return _judged(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode, module)


def _judged(out: str, err: str, status: int, module: str) -> Unfit | None:
    said = [line.split() for line in out.splitlines() if line.startswith((_FOUND, _ABSENT))]
    if not said:
        last = next((f": {line.strip()[:300]}" for line in reversed(err.splitlines()) if line.strip()), "")
        return Unfit(
            "no Python that starts",
            f"asked whether it has the module {module}, it gave no answer and exit status {status}{last}",
        )
    if said[-1][0] == _FOUND:
        return None
    _, absent, version = said[-1]
    return Unfit(f"no module {absent}", f"this Python {version} has no module {absent}", absent)
