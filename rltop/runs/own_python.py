"""How a Python process of rltop's own is started: not with what lies in the current directory.

`python -m` and `python -c` put that directory first on the path of imports. A folder `rltop` there (a clone) would hide
an editable install, and a file `queue.py` the standard library. Programs of others are started as they are given.
"""

from __future__ import annotations

import sys


def own_python(module: str) -> list[str]:
    """The first words of the command that runs a module of rltop in this interpreter."""
    return [sys.executable, "-P", "-m", module]
