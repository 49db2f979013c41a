"""What a bare `pip install rltop` can not do, said with the command that changes it."""

from __future__ import annotations

import importlib.util
import sys

from rltop.errors import RltopError

TRAIN = ("torch", "ray", "transformers", "tokenizers", "megatron.core", "starlette", "uvicorn")
"""Modules of the extra `train`, which the trainer and the CPU engine can not do without."""


def require_train(command: str) -> None:
    """Raise RltopError when packages of the train extra are missing. command: the one that needs them."""
    if missing := [name for name in TRAIN if not _installed(name)]:
        raise RltopError(
            "this installation can watch, but not train",
            where=command,
            why=f"not installed: {', '.join(missing)}",
            do=f'{sys.executable} -m pip install "rltop[train]"',
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package
        return False
