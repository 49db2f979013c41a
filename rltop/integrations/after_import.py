"""Changes modules right after they are imported, without importing them.

A finder at the head of `sys.meta_path` knows the names of a few modules. It lets the finders behind it find such a
module, and wraps only the step that executes it. Everything else costs one look into a dictionary per import.

Failure policy: nothing here raises into an import. A patch that fails is counted in `failed` and the module stays as it
is; what the module itself raises passes through.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs a patch for each of some modules. `patches`: full name of a module -> what is done to it, once.

    tell: hears of one that failed; must not raise.
    """

    def __init__(self, patches: Mapping[str, Patch], tell: Callable[[str], None] = lambda text: None) -> None:
        self._patches = dict(patches)
        self._tell = tell
        self.done: list[str] = []
        """Modules that were patched."""
        self.failed: dict[str, str] = {}
        """Modules that could not be, and why."""

    def install(self) -> None:
        """Patch what is there already, and the rest when it comes."""
        for name in list(self._patches):
            module = sys.modules.get(name)
            # One that is half-way through its own import has no functions yet; it is not loaded through us any more.
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self.apply(name, module)
        if self._patches and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def apply(self, name: str, module: ModuleType) -> None:
        """Patch one module, once."""
        patch = self._patches.pop(name, None)
        if patch is None:
            return
        try:
            patch(module)
            self.done.append(name)
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            self._tell(f"{name} is not as it was known and is left alone: {self.failed[name]}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that patches it; None for every other module."""
        if fullname not in self._patches:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _PatchingLoader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class _PatchingLoader:
    """Stands for a module's loader until the module is executed, then puts that loader back."""

    def __init__(self, loader: Any, finder: AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.apply(module.__name__, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
