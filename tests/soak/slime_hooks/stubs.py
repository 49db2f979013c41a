"""Stand-ins for what a CPU lacks (SGLang, Megatron's training package, the memory saver), so that slime imports.

A missing module under one of these names becomes an empty one whose attributes are mocks. What slime itself does with
them is not tested by this: the tests drive slime's own functions and give them what they compute with.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = ("sglang", "sglang_router", "megatron.training", "torch_memory_saver", "wandb", "mbridge", "ring_flash_attn")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[:1].isupper() and not name.isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds them, after everything else has failed to."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for one of `NAMES` or what lies below."""
        wanted = any(fullname == name or fullname.startswith(name + ".") for name in NAMES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty one."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """For this process."""
    sys.meta_path.append(Stubs())
