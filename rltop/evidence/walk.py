"""Finds the evidence under a path: which file goes to which reader.

Bounded and harmless: at most `MOST_FILES` files, no symbolic link is followed out of what was given, a directory is
visited once, devices and sockets are not opened.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from rltop.evidence.pieces import is_binary
from rltop.evidence.sink import Reader, Sink, Source

MOST_FILES = 200_000
"""Files that are looked at; more are counted."""
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
    """Files beyond `MOST_FILES`."""
    seen: int = 0


def walk(roots: Sequence[Path], readers: Sequence[Reader], sink: Sink) -> Found:
    """Files and directories under `roots` with their readers. Names are relative to their root; with several roots
    they begin with the root's name."""
    found = Found()
    several = len(roots) > 1
    for root in roots:
        lead = root.name + "/" if several else ""
        if root.is_dir():
            _directory(root, lead, readers, sink, found)
        else:
            _file(root, lead if several else "", root.name, readers, sink, found, given=True)
    return found


def _directory(root: Path, lead: str, readers: Sequence[Reader], sink: Sink, found: Found) -> None:
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
            entries = _entries(path, found)
        except OSError as error:
            sink.problem(Source(path, lead + (relative or ".")), "directory", f"can not be read: {error.strerror}")
            continue
        claimed = _claim(path, lead, relative, readers, found)
        below = []
        for name in entries:
            inner = f"{relative}/{name}" if relative else name
            child = path / name
            try:
                mode = child.lstat().st_mode
                if stat.S_ISLNK(mode):
                    if not _inside(child, top):
                        continue
                    mode = child.stat().st_mode
            except OSError:
                continue
            if stat.S_ISDIR(mode):
                if name not in _IGNORED and depth < MOST_DEPTH and not _within(inner, claimed):
                    below.append((child, inner, depth + 1))
            elif stat.S_ISREG(mode) and not _within(inner, claimed):
                _file(child, lead, inner, readers, sink, found)
        waiting += reversed(below)


def _entries(path: Path, found: Found) -> list[str]:
    """Names in a directory, sorted naturally; never more than the budget allows."""
    names: list[str] = []
    with os.scandir(path) as entries:
        for entry in entries:
            if found.seen + len(names) >= MOST_FILES:
                found.more += 1
                continue
            names.append(entry.name)
    return sorted(names, key=natural)


@lru_cache(maxsize=4096)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts `x2` before `x10`."""
    parts = re.split(r"(\d{1,18})", name)
    return tuple((1, int(part), "") if part.isdigit() and part.isascii() else (0, 0, part) for part in parts)


def _inside(path: Path, top: Path) -> bool:
    try:
        return path.resolve().is_relative_to(top)
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


def _file(
    path: Path,
    lead: str,
    inner: str,
    readers: Sequence[Reader],
    sink: Sink,
    found: Found,
    *,
    given: bool = False,
) -> None:
    found.seen += 1
    source = Source(path, lead + inner)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        sink.problem(source, "file", f"can not be read: {error.strerror or error}", whole=True)
        return
    reader = _reader(source, head, readers)
    if reader is None:
        (found.strange if head else found.empty).append(source.name)
    elif not head:
        found.empty.append(source.name)
        sink.problem(source, reader.kind, "the file is empty", whole=True)
    else:
        found.work.append((source, reader))


_BINARY_KINDS = frozenset({"dump", "hf", "megatron"})


def _reader(source: Source, head: bytes, readers: Sequence[Reader]) -> Reader | None:
    """By name, then by content. A text reader is not asked about a binary file that only its name fits."""
    files = [reader for reader in readers if not reader.directory]
    for reader in files:
        if _named(reader, source.name):
            return reader
    binary = is_binary(head)
    for reader in files:
        if reader.sniff is not None and (not binary or reader.kind in _BINARY_KINDS) and reader.sniff(source, head):
            return reader
    return None


def _named(reader: Reader, name: str) -> bool:
    low = name.lower()
    base = low.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(low if "/" in pattern else base, pattern) for pattern in reader.names)


def _takes(reader: Reader, source: Source, head: bytes) -> bool:
    return _named(reader, source.name) or (reader.sniff is not None and reader.sniff(source, head))


def texts(found: Found) -> Iterator[str]:
    """What could not be used, for one sentence."""
    yield from found.strange
