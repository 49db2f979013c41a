"""A folder whose files have the names of modules that rltop and its libraries import."""

from __future__ import annotations

import sys
from pathlib import Path

OTHERS = ("rltop", "ray", "torch", "numpy", "httpx", "megatron", "uvicorn")


def hostile(folder: Path) -> Path:
    """Whoever imports one of them from there ends with exit code 3 and says so."""
    for name in [*sys.stdlib_module_names, *OTHERS]:
        text = f'import os\nos.write(2, b"{name} of the current directory\\n")\nos._exit(3)\n'
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(text)
    return folder
