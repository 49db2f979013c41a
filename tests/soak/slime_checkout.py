"""Where the tester's checkouts of slime are, and the Python that runs its code.

RLTOP_SLIME names them (`DIR[:DIR…]`), RLTOP_SLIME_PYTHON another interpreter than the one that runs the tests. A test
that was asked for and cannot run fails with one sentence: what is missing, and the line that brings it.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest

CHECKOUTS = [one for one in os.environ.get("RLTOP_SLIME", "").split(os.pathsep) if one]
PYTHON = os.environ.get("RLTOP_SLIME_PYTHON") or sys.executable
_NONE = pytest.mark.skip("NO SLIME HERE (RLTOP_SLIME=DIR of a checkout of github.com/THUDM/slime): it is NOT tested")
everywhere = pytest.mark.parametrize("checkout", CHECKOUTS or [pytest.param("", marks=_NONE)])

BASE = ("torch", "numpy", "ray", "transformers", "yaml", "requests", "msgpack", "zmq")
"""What slime's own imports need, and rltop's hooks in it; `rltop[train]` and the development tools bring it."""
ROLLOUT = (*BASE, "PIL", "aiohttp", "pylatexenc")
"""The same for slime's rollout functions."""
_PACKAGES = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq"}
_MISSING = "import importlib.util, sys\nprint(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
_UNKNOWN = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def needs(*modules: str) -> None:
    """Fail the test, in one sentence, where the Python that runs slime lacks some of these modules."""
    if missing := _missing(modules):
        pytest.fail(lacks(missing), pytrace=False)


@functools.cache
def _missing(modules: tuple[str, ...]) -> tuple[str, ...]:
    argv = [PYTHON, "-c", _MISSING, *modules]
    return tuple(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())


def lacks(modules: tuple[str, ...]) -> str:
    """What to do about modules that are not there."""
    packages = " ".join(_PACKAGES.get(module, module) for module in modules)
    return (
        f"slime's code needs packages that {PYTHON} does not have: {PYTHON} -m pip install {packages} "
        "(or RLTOP_SLIME_PYTHON=another Python that has them and rltop's own)"
    )


def explained(stderr: str) -> str:
    """What a process of slime's said as it failed; first, in one sentence, the module that it lacks if that is why."""
    found = _UNKNOWN.search(stderr)
    return f"{lacks((found[1].partition('.')[0],))}\n{stderr}" if found else stderr
