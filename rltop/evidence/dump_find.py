"""Which dumps a pattern means: a file, a directory, a glob, or a path with `{rollout_id}`.

Files are told apart by what they hold, not by their names; only their first bytes are read. A train dump is put beside
the rollout dump of the same id. Failure policy: RltopError (exit code 2) where there is nothing to read; a file among
others that can not be read stays in the list, with its `problem`.
"""

from __future__ import annotations

import glob
import re
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rltop.errors import RltopError
from rltop.evidence.dump_file import DumpFile
from rltop.evidence.dump_sample import DumpKind

SUFFIXES = (".pt", ".pkl", ".pickle", ".jsonl")
FOLDERS = ("", "rollout_data", "train_data", "rollout_result/train", "rollout_result/eval", "dumps")
"""Where dumps lie below a directory: `--dump-details DIR` makes the second and third, Relax the next two."""
MOST_HOLES = 10_000
_FILLED = frozenset({"rollout_id", "rank"})


@dataclass(frozen=True, slots=True)
class DumpRef:
    """One dump, not opened."""

    path: Path
    kind: DumpKind | None
    """None where it can not be read."""
    rollout_id: int | None
    is_eval: bool = False
    bytes: int = 0
    train: tuple[Path, ...] = ()
    """Train dumps of the same rollout, found beside it; joined by `rollout_position`."""
    problem: str = ""
    """Why it can not be read."""
    damage: str = ""
    """What is wrong with a file of which samples can be read all the same, as far as it shows when it is opened."""
    instead: str = ""
    """What a file is that has no samples."""


Known = dict[Path, tuple[tuple[int, int, int], DumpRef]]
"""What was found in files before, with (inode, size, time of change): files that did not change are not opened."""


def find_dumps(pattern: str, known: Known | None = None) -> list[DumpRef]:
    """Dumps of `pattern`, by rollout id, training before eval. Train dumps are listed only where nothing else is.

    known: kept by whoever asks again and again. Raises RltopError where nothing fits, or where nothing that fits can be
    read.
    """
    paths = _paths(pattern)
    refs = [_ref(path, known) for path in paths]
    readable = [one for one in refs if one.kind not in (None, "other", "state")]
    if not readable:
        first = next((one for one in refs if one.problem or one.instead), None)
        raise RltopError(
            "not a dump" if len(refs) == 1 else f"none of {len(refs)} files is a dump",
            where=str(first.path if first else paths[0]),
            why=(first.problem or first.instead) if first else "it has no samples",
            do="give what --save-debug-rollout-data or --save-debug-train-data wrote, or a --dump-details directory",
        )
    listed = [one for one in readable if one.kind in ("rollout", "samples")]
    trains = [one for one in readable if one.kind not in ("rollout", "samples")]
    if listed:
        have = set(paths)
        trains += [_ref(path, known) for path in _beside(one.path for one in listed) if path not in have]
        listed = joined(listed, trains)
    broken = [one for one in refs if one.problem]
    return sorted([*(listed or trains), *broken], key=order)


def holes(refs: Sequence[DumpRef]) -> list[int]:
    """Rollout ids between the first and the last that have no dump."""
    have = {one.rollout_id for one in refs if one.rollout_id is not None and not one.is_eval}
    if not have or max(have) - min(have) > MOST_HOLES:
        return []
    return [at for at in range(min(have), max(have)) if at not in have]


def order(ref: DumpRef) -> tuple[bool, int, bool, str]:
    """By rollout id, training before eval, those without an id last."""
    return ref.rollout_id is None, ref.rollout_id or 0, ref.is_eval, str(ref.path)


def _paths(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        folders = (*FOLDERS, "train", "eval") if path.name == "rollout_result" else FOLDERS
        found = sorted(one for folder in folders for one in (path / folder).glob("*") if _is_named(one))
        if not found:
            raise RltopError(
                "no dumps in this directory",
                where=pattern,
                why=f"no {', '.join(SUFFIXES)} in it, nor in {', '.join(FOLDERS[1:])}",
                do="give the directory of --dump-details, or the path of --save-debug-rollout-data",
            )
        return found
    found = sorted({Path(one) for one in glob.glob(str(Path(as_glob(pattern)).expanduser())) if Path(one).is_file()})
    if not found:
        raise RltopError(
            "no such dump",
            where=pattern,
            why="no file fits"
            if any(mark in pattern for mark in "*?[{")
            else "there is no file or directory of this name",
            do="give a file, a directory, a glob in quotes, or a path with {rollout_id}",
        )
    return found


def fields_of(pattern: str) -> set[str]:
    """Names in braces of a path that `str.format` fills in, also those with a format (`{rollout_id:03d}`)."""
    try:
        return {name for _, name, _, _ in string.Formatter().parse(pattern) if name}
    except ValueError:  # a single brace: it is part of a name
        return set()


def filled(pattern: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """The path of one rollout's dump. An evaluation's has slime's prefix `eval_`, whatever the format."""
    return Path(pattern.format(rollout_id=_EvalId(rollout_id) if evaluation else rollout_id, rank=0))


class _EvalId(int):
    """A rollout id that is written as `eval_17`."""

    def __format__(self, spec: str) -> str:
        return "eval_" + format(int(self), spec)


def as_glob(pattern: str) -> str:
    """The glob for a path in which `rollout_id` or `rank` is filled in; any other pattern is one."""
    if not fields_of(pattern) & _FILLED:
        return pattern
    parts = []
    for text, name, spec, _ in string.Formatter().parse(pattern):
        parts.append(glob.escape(text))
        if name is not None:
            parts.append("*" if name in _FILLED else glob.escape(f"{{{name}{':' if spec else ''}{spec}}}"))
    return "".join(parts)


def _is_named(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _ref(path: Path, known: Known | None) -> DumpRef:
    try:
        stat = path.stat()
    except OSError as error:
        return DumpRef(path, None, None, problem=error.strerror or str(error))
    stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    if known is None:
        return _looked(path, stat.st_size)
    if path not in known or known[path][0] != stamp:
        known[path] = (stamp, _looked(path, stat.st_size))
    return known[path][1]


def _looked(path: Path, size: int) -> DumpRef:
    try:
        with DumpFile.open(path) as dump:
            instead = dump.instead if dump.kind in ("other", "state") else ""
            return DumpRef(path, dump.kind, dump.rollout_id, dump.is_eval, size, damage=dump.damage, instead=instead)
    except OSError as error:
        return DumpRef(path, None, None, problem=error.strerror or str(error))
    except RltopError as error:
        return DumpRef(path, None, None, problem=error.why or error.what)


def joined(refs: Iterable[DumpRef], trains: Iterable[DumpRef]) -> list[DumpRef]:
    """The dumps, each with the train dumps of its rollout among `trains` added to those that it has."""
    by_id: dict[int, list[Path]] = {}
    for one in trains:
        if (one.kind or "").startswith("train") and one.rollout_id is not None:
            by_id.setdefault(one.rollout_id, []).append(one.path)
    out = []
    for one in refs:
        same = by_id.get(one.rollout_id, []) if one.rollout_id is not None and not one.is_eval else []
        out.append(replace(one, train=tuple(dict.fromkeys([*one.train, *same]))))
    return out


def _beside(paths: Iterable[Path]) -> list[Path]:
    """Train dumps of `--dump-details`: `../train_data/` beside `rollout_data/`, of the same rollouts."""
    stems: dict[Path, set[str]] = {}
    for path in paths:
        if path.parent.name == "rollout_data":
            stems.setdefault(path.parent.parent / "train_data", set()).add(path.stem)
    return sorted(
        one
        for folder, wanted in stems.items()
        for one in folder.glob("*.pt")
        if one.stem in wanted or re.sub(r"_\d+$", "", one.stem) in wanted
    )
