"""A Megatron checkpoint directory: tracker and listing. Payload files are never opened."""

from __future__ import annotations

import re
from pathlib import Path

from rltop.checks.found import Iteration, MegatronCheckpoint
from rltop.evidence.sink import Reader, Sink, Source

TRACKER = "latest_checkpointed_iteration.txt"
MOST_FILES = 100_000
_ITERATION = re.compile(r"iter_(\d{1,9})$")
_STATE = re.compile(r"global_dataset_state_dict_(\d{1,9})\.pt$")
_PAYLOAD = re.compile(r".*\.distcp$|common\.pt$|metadata\.json$|\.metadata$|mp_rank_\d+.*")


def claims(source: Source) -> tuple[str, ...]:
    """Entries of the directory that belong to a checkpoint, directories among them; empty where it holds none."""
    names = _names(source.path)
    if is_iteration(source.path, names):
        return tuple(names)
    found = [name for name in names if name == TRACKER or _ITERATION.match(name)]
    if "release" in names and (found or _is_payload(_names(source.path / "release"))):
        found.append("release")
    return tuple(found)


def read(source: Source, sink: Sink) -> None:
    """The directory as one checkpoint."""
    names = _names(source.path)
    itself = is_iteration(source.path, names)
    listed = [source.path] if itself else [source.path / n for n in names if _ITERATION.match(n) or n == "release"]
    iterations = tuple(_iteration(path) for path in listed if path.is_dir())
    tracker = _tracker(source.path / TRACKER)
    if not iterations and tracker is None:
        return
    states = [_STATE.search(name) for name in _names(source.path / "rollout")]
    sink.megatron.append(
        MegatronCheckpoint(
            source.name, tracker, iterations, tuple(sorted(int(found[1]) for found in states if found)), itself
        )
    )
    sink.files.append(source.name if source.name not in ("", ".") else TRACKER)


def is_iteration(path: Path, names: list[str]) -> bool:
    """The directory is one iteration's own."""
    return bool(_ITERATION.match(path.name)) and _is_payload(names)


def _is_payload(names: list[str]) -> bool:
    return any(_PAYLOAD.match(name) for name in names)


def _iteration(path: Path) -> Iteration:
    names = _names(path)
    found = _ITERATION.match(path.name)
    complete = ".metadata" in names or any(name.startswith("mp_rank_") for name in names)
    return Iteration(path.name, int(found[1]) if found else None, len(names), complete)


def _tracker(path: Path) -> str | None:
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as stream:
            return stream.read(200).decode("utf-8", "replace").strip()
    except OSError:
        return None


def _names(path: Path) -> list[str]:
    try:
        if path.is_symlink():
            return []
        return sorted(entry.name for entry, _ in zip(path.iterdir(), range(MOST_FILES), strict=False))
    except OSError:
        return []


READERS: tuple[Reader, ...] = (Reader("megatron", ("*",), read, directory=True, claims=claims),)
