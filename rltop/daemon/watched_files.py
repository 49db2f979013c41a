"""Which files `rltop watch --log` follows: files, glob patterns whose files may come later, directories.

Of a directory of Ray (`session_latest/logs`) the output of workers and the logs of jobs are followed, not those of
Ray's own daemons; of any other one the files that are called like logs. Names are what evidence calls a log by: the
file's own name, with more of its path where another log has it already. They never change while the daemon lives.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_LOGS = 256
"""Logs that are followed at a time; each costs a file descriptor."""
MOST_ENTRIES = 20_000
"""Entries of one pattern or directory that are looked at."""
RAY = ("job-driver-*.log", "worker-*.err", "worker-*.out")
LOGS = ("*.log", "*.err", "*.out", "*log*.txt")
_MAGIC = frozenset("*?[")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    """What `rltop watch` follows: key `watch` of a daemon's configuration."""

    logs: tuple[str, ...] = ()
    """Absolute paths of files or directories, and patterns."""
    from_end: bool = False
    """Files that are there at the start are followed from their end."""
    ray: str = ""
    """URL of Ray's dashboard (`http://host:8265`), or path of a file with the output of `ray status`."""
    args: str = ""
    """Path of a launch script, a list of arguments or a runtime environment."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> WatchOptions:
        """From a daemon's configuration; what is not there is not watched."""
        found = config.get("watch")
        found = found if isinstance(found, dict) else {}
        logs = found.get("logs")
        return WatchOptions(
            logs=tuple(map(str, logs)) if isinstance(logs, list) else (),
            from_end=found.get("from") == "end",
            ray=str(found.get("ray") or ""),
            args=str(found.get("args") or ""),
        )


def is_pattern(text: str) -> bool:
    """It has a character that only a pattern has, and no file is called so."""
    return bool(_MAGIC & set(text)) and not os.path.exists(text)


def logs_in(directory: Path) -> list[Path]:
    """Logs that lie in a directory now, newest first. Raises OSError where it cannot be listed."""
    names = [entry.name for _, entry in zip(range(MOST_ENTRIES), os.scandir(directory), strict=False)]
    patterns = RAY if is_ray(names) else LOGS
    return _newest_first(directory / name for name in names if any(Path(name).match(one) for one in patterns))


def is_ray(names: Sequence[str]) -> bool:
    """The entries are those of Ray's directory of logs."""
    return any(name.startswith(("raylet.", "gcs_server.", "job-driver-raysubmit_")) for name in names)


def _newest_first(paths: Iterator[Path] | Sequence[Path]) -> list[Path]:
    timed: list[tuple[float, str, Path]] = []
    for path in paths:
        try:
            info = path.stat()
        except OSError:
            continue
        if path.is_file():
            timed.append((-info.st_mtime, path.name, path))
    return [path for _, _, path in sorted(timed)]


class LogFiles:
    """Finds the files. `find` is called again and again: what it gave once keeps its name."""

    def __init__(self, logs: Sequence[str], *, most: int = MOST_LOGS) -> None:
        self._logs = tuple(logs)
        self._most = most
        self._names: dict[Path, str] = {}
        self.left_out = 0
        """Files that are there and not followed, because there are too many."""
        self.without_files: tuple[str, ...] = ()
        """Patterns and directories for which there is no file yet."""

    @property
    def paths(self) -> dict[str, Path]:
        """All files that were found so far, by name."""
        return {name: path for path, name in self._names.items()}

    def find(self) -> dict[str, Path]:
        """Name -> path of every file that is to be followed; also of a file that is not there yet."""
        found: dict[Path, None] = {}
        empty = []
        for text in self._logs:
            paths = self._of(text)
            empty += [] if paths else [text]
            for path in paths:
                found.setdefault(path)
        self.without_files = tuple(empty)
        new = [path for path in found if path not in self._names]
        room = max(0, self._most - len(self._names))
        for path in new[:room]:
            self._names[path] = self._name(path)
        self.left_out = len(new) - len(new[:room])
        return self.paths

    def _of(self, text: str) -> list[Path]:
        path = Path(text)
        if is_pattern(text):
            matches = zip(range(MOST_ENTRIES), glob.iglob(text, recursive=True), strict=False)
            return _newest_first([Path(match) for _, match in matches])
        if path.is_dir():
            try:
                return logs_in(path)
            except OSError:
                return []
        return [path]

    def _name(self, path: Path) -> str:
        taken = set(self._names.values())
        parts = path.parts
        for count in range(1, len(parts)):
            name = "/".join(parts[-count:])
            if name not in taken:
                return name
        return str(path)
