"""Finds the evidence under a path: which file goes to which reader.

Bounded and harmless: a file whose name says nothing is opened only among the first `MOST_UNKNOWN`, no symbolic link is
followed out of what was given, a directory is visited once, devices and pipes are not opened.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from rltop.checks.rules.input_parse import LINK
from rltop.evidence.pieces import is_binary
from rltop.evidence.sink import Reader, Sink, Source

MOST_FILES = 100_000
"""Files with a known name that are read; more are counted."""
MOST_UNKNOWN = 5_000
"""Files with an unknown name whose content is looked at."""
MOST_DEPTH = 32
HEAD = 4096
_IGNORED = frozenset({".git", "__pycache__", "node_modules", ".venv", ".cache"})


@dataclass(slots=True)
class Found:
    """What lies under the paths."""

    work: list[tuple[Source, Reader]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    """Files that no reader knows."""
    more: int = 0
    """Files with a known name beyond `MOST_FILES`."""
    known: int = 0
    unknown: int = 0
    links: list[Source] = field(default_factory=list)
    """Links that lead out of what was given, or nowhere: not followed."""


def walk(roots: Sequence[Path], readers: Sequence[Reader], sink: Sink) -> Found:
    """Files and directories under `roots` with their readers. Names are relative to their root; with several roots
    they begin with the folder's name."""
    found = Found()
    names = _Names.of(readers)
    for root, lead in zip(roots, _leads(roots), strict=True):
        if root.is_dir():
            _directory(root, lead, names, sink, found)
        else:
            _file(root, lead, root.name, names, sink, found)
    if found.more:
        why = f"{found.more} files with a known name beyond the first {MOST_FILES} were not read"
        sink.problem(Source(roots[0], "."), "a folder of a sensible size", why)
    for link in found.links[:MOST_LINKS]:
        sink.problem(link, LINK, _target(link.path))
    if (rest := len(found.links) - MOST_LINKS) > 0:
        sink.problem(found.links[MOST_LINKS], LINK, f"and {rest} more links")
    return found


MOST_LINKS = 64
"""Links that are named."""


def _target(link: Path) -> str:
    """Where a link points, as it is written."""
    try:
        return os.readlink(link)
    except OSError as error:
        return error.strerror or str(error)


def _leads(roots: Sequence[Path]) -> list[str]:
    """What the names under each root begin with: nothing for one root; else the folder's name, or where two have the
    same one, its path."""
    if len(roots) == 1:
        return [""]
    folders = [root if root.is_dir() else root.parent for root in roots]
    kinds = {folder.name: {f for f in folders if f.name == folder.name} for folder in folders}
    return [(f.name if len(kinds[f.name]) == 1 else f.as_posix().lstrip("/")) + "/" if f.name else "" for f in folders]


def _directory(root: Path, lead: str, names: _Names, sink: Sink, found: Found) -> None:
    top = root.resolve()
    seen: set[tuple[int, int]] = set()
    waiting: list[tuple[Path, str, int]] = [(root, "", 0)]
    while waiting:
        path, relative, depth = waiting.pop()
        try:
            info = path.stat()
            if (info.st_dev, info.st_ino) in seen:
                continue
            seen.add((info.st_dev, info.st_ino))
            entries = _entries(path, names, found)
        except OSError as error:
            sink.problem(Source(path, lead + (relative or ".")), "directory", f"can not be read: {error.strerror}")
            continue
        claimed = _claim(path, lead, relative, names.directories, found)
        below = []
        for name in entries:
            inner = f"{relative}/{name}" if relative else name
            child = path / name
            try:
                mode = child.lstat().st_mode
                if stat.S_ISLNK(mode):
                    if _within(inner, claimed):
                        continue  # its directory's reader knows what it may follow
                    if name not in _IGNORED and not _leads_inside(child, top):
                        found.links.append(Source(child, lead + inner))
                        continue
                    mode = child.stat().st_mode
            except OSError:
                continue
            if stat.S_ISDIR(mode):
                if name not in _IGNORED and depth < MOST_DEPTH and not _within(inner, claimed):
                    below.append((child, inner, depth + 1))
            elif stat.S_ISREG(mode) and not _within(inner, claimed):
                _file(child, lead, inner, names, sink, found)
        waiting += reversed(below)


@dataclass(frozen=True, slots=True)
class _Names:
    """The readers, and one pattern that every file name must fit that one of them asks for."""

    files: tuple[Reader, ...]
    directories: tuple[Reader, ...]
    known: re.Pattern[str]

    @staticmethod
    def of(readers: Sequence[Reader]) -> _Names:
        files = tuple(reader for reader in readers if not reader.directory)
        patterns = [pattern.rsplit("/", 1)[-1] for reader in files for pattern in reader.names]
        known = re.compile("|".join(map(fnmatch.translate, patterns)) or r"(?!)")
        return _Names(files, tuple(reader for reader in readers if reader.directory), known)


def _entries(path: Path, names: _Names, found: Found) -> list[str]:
    """Names in a directory, sorted naturally: all with a known name, and of the others (directories among them) as many
    as the budget allows."""
    kept: list[str] = []
    unknown = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if names.known.match(entry.name.lower()):
                if found.known + len(kept) - unknown < MOST_FILES:
                    kept.append(entry.name)
                else:
                    found.more += 1
            elif found.unknown + unknown < MOST_UNKNOWN or entry.is_dir(follow_symlinks=False):
                unknown += 1
                kept.append(entry.name)
    return sorted(kept, key=natural)


@lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts `x2` before `x10`."""
    parts = re.split(r"(\d{1,18})", name)
    return tuple((1, int(part), "") if part.isdigit() and part.isascii() else (0, 0, part) for part in parts)


def _leads_inside(path: Path, top: Path) -> bool:
    """The link leads to something below `top`."""
    try:
        return path.resolve().is_relative_to(top) and path.exists()
    except (OSError, RuntimeError):  # a loop of links
        return False


def _within(inner: str, claimed: frozenset[str]) -> bool:
    return inner in claimed or any(inner.startswith(one + "/") for one in claimed) if claimed else False


def _claim(path: Path, lead: str, relative: str, readers: Sequence[Reader], found: Found) -> frozenset[str]:
    """Directory readers that take this directory, and the paths below it that are then theirs."""
    source = Source(path, (lead + relative).rstrip("/") or lead.rstrip("/") or ".")
    claimed: set[str] = set()
    for reader in readers:
        if not reader.directory or not _takes(reader, source, b""):
            continue
        found.work.append((source, reader))
        if reader.claims is not None:
            names = (one.strip("/") for one in reader.claims(source))
            claimed |= {f"{relative}/{name}" if relative else name for name in names}
    return frozenset(claimed)


def _file(path: Path, lead: str, inner: str, names: _Names, sink: Sink, found: Found) -> None:
    source = Source(path, lead + inner)
    reader = next((reader for reader in names.files if _named(reader, source.name)), None)
    try:
        size = path.stat().st_size
        if reader is None:
            found.unknown += 1
            with path.open("rb") as file:
                reader = _by_content(source, file.read(HEAD), names.files)
        else:
            found.known += 1
    except OSError as error:
        sink.problem(source, "a readable file", error.strerror or str(error), whole=True)
        return
    if size == 0:
        found.empty.append(source.name)
        if reader is not None and reader.kind not in _GROWING:
            sink.problem(source, reader.kind, "the file is empty", whole=True)
    elif reader is None:
        found.strange.append(source.name)
        plain, _, packed = source.name.rpartition(".")
        if (tool := _UNPACK.get(packed.lower())) and (
            meant := next((r for r in names.files if _named(r, plain)), None)
        ):
            sink.problem(source, meant.kind, f"it is packed: {tool} it first", whole=True)
    else:
        found.work.append((source, reader))


_UNPACK = {"gz": "gunzip", "zst": "unzstd", "xz": "unxz", "bz2": "bunzip2"}
"""Ending of a packed file -> what unpacks it."""
_GROWING = frozenset({"log", "metrics", "samples", "http", "rows"})
"""Kinds whose files a run creates empty and fills later."""
_BINARY = frozenset({"dump", "hf", "megatron"})


def _by_content(source: Source, head: bytes, readers: Sequence[Reader]) -> Reader | None:
    """A text reader is not asked about a binary file."""
    if not head:
        return None
    binary = is_binary(head)
    for reader in readers:
        if reader.sniff is not None and (not binary or reader.kind in _BINARY) and reader.sniff(source, head):
            return reader
    return None


def _named(reader: Reader, name: str) -> bool:
    low = name.lower()
    base = low.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(low if "/" in pattern else base, pattern) for pattern in reader.names)


def _takes(reader: Reader, source: Source, head: bytes) -> bool:
    return _named(reader, source.name) or (reader.sniff is not None and reader.sniff(source, head))
