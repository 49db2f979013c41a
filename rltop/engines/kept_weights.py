"""Weight versions that a slime run keeps on a disk: `weight_vNNNNNN` under its `--update-weight-disk-dir`.

slime writes them in place, so a directory counts only when it is whole: every file that its index names is there and
none ends before its last tensor. Without `--update-weight-disk-keep-files` slime deletes each one after the sync.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rltop.evidence.hf import header_of

MOST_INDEX = 64 << 20
_NAME = re.compile(r"weight_v(\d{1,12})")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Kept:
    """One version on the disk."""

    version: str
    """As slime labels it: `7` for `weight_v000007`."""
    path: Path
    written: float
    """When an entry of the directory last changed, Unix seconds of the disk's clock."""
    problem: str = ""
    """Why it cannot be loaded; empty: it is whole."""


class KeptWeights:
    """What a directory keeps. A version once found whole is not read again while its directory does not change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[Path, float] = {}

    def scan(self) -> list[Kept]:
        """Every version, the newest written first: versions begin at 1 again with each slime run.

        Touches the disk, which may be slow: not for an event loop. Raises OSError: the folder cannot be listed.
        """
        found = []
        for path in self.folder.iterdir():
            if (name := _NAME.fullmatch(path.name)) is None:
                continue
            try:
                if not path.is_dir():
                    continue
                written = path.stat().st_mtime
                problem = "" if self._whole.get(path) == written else incomplete(path)
            except FileNotFoundError:
                continue  # slime deletes one after each sync
            except OSError as error:
                written, problem = 0.0, f"it cannot be read: {error.strerror or error}"
            if problem:
                self._whole.pop(path, None)
            else:
                self._whole[path] = written
            found.append(Kept(str(int(name[1])), path, written, problem))
        return sorted(found, key=lambda one: (one.written, int(one.version)), reverse=True)


def incomplete(folder: Path) -> str:
    """Why the checkpoint in this folder cannot be loaded; empty: its weights are whole."""
    index = folder / _INDEX
    if index.exists():
        try:
            if index.stat().st_size > MOST_INDEX:
                return f"{_INDEX} is too large"
            told = json.loads(index.read_text(encoding="utf-8"))
            names = set(told["weight_map"].values())
            about = told.get("metadata")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{_INDEX} names no files"
        if isinstance(about, dict) and "base_version" in about:
            return f"it is a difference to version {about['base_version']} (--update-weight-mode delta)"
        files = sorted(str(name) for name in names)
    else:
        files = [_SINGLE]
    for name in files:
        if Path(name).name != name:
            return f"{_INDEX} names {name[:80]!r}, which is no plain name"
        if why := _cut_off(folder / name):
            return why
    return "" if files else f"{_INDEX} names no files"


def _cut_off(file: Path) -> str:
    if not file.exists():
        return f"there is no {file.name}"
    try:
        header, base, size = header_of(file)
    except ValueError as error:
        return f"{file.name}: {error}"
    ends = (one["data_offsets"][1] for one in header.values())
    return f"{file.name} is cut off" if base + max(ends, default=0) > size else ""
