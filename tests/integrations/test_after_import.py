"""Patching what is imported later."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rltop.integrations.after_import import AfterImport


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def _seven(module: ModuleType) -> None:
    module.value = 7  # type: ignore[attr-defined]


def test_a_module_is_patched_before_others_take_from_it(folder: Path) -> None:
    (folder / "later_a.py").write_text("value = 1\n")
    (folder / "later_b.py").write_text("from later_a import value\n")
    finder = AfterImport({"later_a": _seven})
    finder.install()
    assert importlib.import_module("later_b").value == 7
    module = sys.modules["later_a"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert finder.done == ["later_a"]


def test_one_that_is_there_is_patched_at_once_and_never_again(folder: Path) -> None:
    (folder / "there.py").write_text("value = 1\n")
    module: Any = importlib.import_module("there")
    finder = AfterImport({"there": _seven})
    finder.install()
    assert module.value == 7
    module.value = 1
    finder.install()
    importlib.reload(module)
    assert module.value == 1


def test_what_a_module_raises_passes_and_a_patch_that_fails_costs_only_itself(folder: Path) -> None:
    (folder / "odd_a.py").write_text("raise LookupError('mine')\n")
    (folder / "odd_b.py").write_text("value = 1\n")

    def broken(module: ModuleType) -> None:
        raise KeyError("no such function")

    told: list[str] = []
    finder = AfterImport({"odd_a": _seven, "odd_b": broken, "odd_c": _seven}, told.append)
    finder.install()
    with pytest.raises(LookupError, match="mine"):
        importlib.import_module("odd_a")
    assert importlib.import_module("odd_b").value == 1
    assert finder.failed == {"odd_b": "KeyError: 'no such function'"}
    assert told == ["odd_b is not as it was known and is left alone: KeyError: 'no such function'"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("odd_c")
    assert finder.find_spec("json", None) is None
