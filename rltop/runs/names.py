"""What a run may be called, the names that it gets by itself, and its directory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from rltop.errors import RltopError
from rltop.runs.places import private_dir, runs_root

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade", "kelp", "lark")


def check_name(name: str) -> str:
    """`name` if it can be a run's name (a file name, a word in `ssh://host/name`); raises RltopError otherwise."""
    if not _NAME.fullmatch(name):
        raise RltopError(
            f"{name!r} cannot be the name of a run",
            why="a name has 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
            do="--name qwen3-4b-try2",
        )
    return name


def new_name(taken: Iterable[str]) -> str:
    """A name like `cedar-3`; the number grows by one from run to run and picks the word."""
    numbers = [int(found[1]) for name in taken if (found := re.fullmatch(r"[a-z]+-(\d{1,9})", name))]
    number = max(numbers, default=0) + 1
    return f"{_WORDS[(number - 1) % len(_WORDS)]}-{number}"


def make_run_dir(name: str | None, root: Path | None = None) -> Path:
    """The directory of run `name`, made if need be (an existing one is continued); None makes a new one."""
    root = root or runs_root()
    if name is not None:
        return private_dir(root / check_name(name))
    while True:
        path = root / new_name(entry.name for entry in root.iterdir())
        with contextlib.suppress(FileExistsError):  # somebody else took the name just now
            path.mkdir(mode=0o700)
            return path
