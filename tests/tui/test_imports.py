"""The dashboard is light, and nothing else pays for it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(code: str) -> set[str]:
    """Modules that a fresh interpreter has after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


def test_the_dashboard_imports_no_heavy_package_and_no_widget_that_it_does_not_show() -> None:
    modules = loaded("import rltop.tui.app")
    heavy = {"torch", "ray", "numpy", "transformers", "megatron", "sglang", "httpx", "zmq", "sqlite3", "pygments"}
    assert not modules & heavy
    lazy = {"textual.widgets._data_table", "textual.widgets._rich_log", "textual.widgets._footer"}
    assert not modules & (lazy | {"rltop.tui.screens.dialogs"})
    assert not {name for name in modules if name.startswith(("rltop.daemon", "rltop.train", "rltop.engines"))}


@pytest.mark.parametrize("args", [["--help"], ["attach", "--help"]])
def test_help_does_not_import_the_dashboard(args: list[str]) -> None:
    code = f"from rltop.cli.main import main\nmain({args!r})"
    assert not {name for name in loaded(code) if name.startswith(("textual", "rltop.tui"))}
