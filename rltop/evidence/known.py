"""Reads tables of known crashes: the one that ships with rltop, and the user's.

A user's entry replaces the shipped one of the same issue. A table that can not be read is one clear error with file and
key; it never makes a check fail half-way.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

from rltop.checks.known import KnownCrash
from rltop.errors import RltopError
from rltop.evidence.user_table import read_text

SHIPPED = "known_crashes.toml"
_TEXTS = ("issue", "title", "since", "until", "fix", "toggle")
_LISTS = ("fingerprints", "kernels", "text", "phases", "flags")


def shipped() -> tuple[KnownCrash, ...]:
    """The table that ships with rltop."""
    source = resources.files("rltop.evidence").joinpath(SHIPPED)
    return parse(source.read_text(encoding="utf-8"), where=SHIPPED)


def with_table(path: Path | None) -> tuple[KnownCrash, ...]:
    """The shipped table, with the entries of a user's file on top. Raises RltopError."""
    if path is None:
        return shipped()
    text = read_text(path)
    own = parse(text, where=str(path), source=str(path))
    mine = {crash.issue for crash in own}
    return (*own, *(crash for crash in shipped() if crash.issue not in mine))


def table_path(checks: object, base: Path, *, where: str) -> Path | None:
    """The file that `known_crashes` in the table `[checks]` names, seen from `base`; None without one.

    Raises RltopError for a value that is no file name. where: the configuration, for the error.
    """
    name = checks.get("known_crashes") if isinstance(checks, dict) else None
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise RltopError("known_crashes must name a file", where=where, do='known_crashes = "mine.toml"')
    return base / name


def parse(text: str, *, where: str, source: str = "shipped") -> tuple[KnownCrash, ...]:
    """Entries of a table. Raises RltopError: no TOML, an unknown key, a value of a wrong type, nothing to match by."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RltopError("is no TOML", where=where, why=str(error)) from None
    entries = document.get("crash", [])
    if not isinstance(entries, list) or set(document) - {"crash"}:
        raise RltopError("must hold [[crash]] entries only", where=where, do='[[crash]]\nissue = "owner/name#1"')
    return tuple(_entry(entry, f"{where} [[crash]] {number}", source) for number, entry in enumerate(entries, 1))


def _entry(entry: object, where: str, source: str) -> KnownCrash:
    if not isinstance(entry, dict):
        raise RltopError("must be a table", where=where)
    if unknown := sorted(set(entry) - {*_TEXTS, *_LISTS}):
        raise RltopError(f"unknown key {unknown[0]!r}", where=where, do=f"one of {', '.join((*_TEXTS, *_LISTS))}")
    texts = {name: entry.get(name, "") for name in _TEXTS}
    lists = {name: entry.get(name, []) for name in _LISTS}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise RltopError(f"{name} must be a text", where=where, why=f"got {value!r}")
    for name, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise RltopError(f"{name} must be a list of texts", where=where, why=f"got {value!r}")
    if not texts["issue"] or not texts["title"]:
        raise RltopError("issue and title must be given", where=where)
    if not (lists["fingerprints"] or lists["kernels"] or lists["text"] or len(lists["flags"]) > 1):
        raise RltopError(
            "nothing to match by",
            where=where,
            why="a phase or one flag fits far too many crashes",
            do="give fingerprints, kernels, text, or two flags",
        )
    return KnownCrash(
        issue=texts["issue"],
        title=texts["title"],
        fingerprints=tuple(lists["fingerprints"]),
        kernels=tuple(lists["kernels"]),
        text=tuple(lists["text"]),
        phases=tuple(lists["phases"]),
        flags=tuple(lists["flags"]),
        since=texts["since"],
        until=texts["until"],
        fix=texts["fix"],
        toggle=texts["toggle"],
        source=source,
    )
