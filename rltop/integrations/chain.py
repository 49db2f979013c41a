"""A hook of the user's own behind one of ours: a trainer takes one function by path, and ours may be it."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


def chained(framework: str, name: str, settings: Any, *args: Any, none: Any = None) -> Any:
    """Call the user's own hook, if there is one, and give back what it returns. What it raises passes.

    It is named by `rltop_<name>_path` in the trainer's arguments (`settings`) or by RLTOP_<FRAMEWORK>_<NAME>_PATH.
    """
    path = getattr(settings, f"rltop_{name}_path", None) or os.environ.get(f"RLTOP_{framework}_{name}_PATH".upper())
    return load(path)(*args) if isinstance(path, str) and path else none


@functools.cache
def load(path: str) -> Any:
    """`module.attribute`, imported."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
