"""The user's settings, `rltop.toml`: how much is kept on this machine. Every key has a default.

    [keep]
    runs_bytes = "20 GB"       # all runs together: `rltop ps --prune` removes the oldest dead ones above it
    runs_age = "90 d"          # and dead ones older than this (default: however old)
    auto_prune = false         # true: at the start of every run too; what went is said in its events

    [keep.journal.events]      # also: verdicts, operations, clients, series, records.run, records.samples, …
    rows = 200000
    age = "30 d"
    bytes = "256 MB"

It lies in `$RLTOP_CONFIG`, else `$XDG_CONFIG_HOME/rltop/rltop.toml`, else `~/.config/rltop/rltop.toml`.
Every error names the line.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltop.config import Place
from rltop.errors import RltopError

RUNS_BYTES = 20_000_000_000
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_JOURNAL = ("events", "verdicts", "operations", "clients", "series", "records")
_RECORDS = ("run", "weights", "engine", "samples")
_LIMIT = ("rows", "age", "bytes")


@dataclass(frozen=True, slots=True)
class JournalLimit:
    """What is kept of one table of every run's journal; None: no limit of that sort."""

    rows: int | None = None
    age_s: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """What the file says, defaults filled in."""

    runs_bytes: int = RUNS_BYTES
    runs_age_s: float | None = None
    auto_prune: bool = False
    journal: Mapping[str, JournalLimit] = field(default_factory=dict)
    """Table of the journal, or `records:<kind>` -> limit, only those that are set."""


def settings_path() -> Path | None:
    """Where the file is looked for; None when there is no home directory."""
    if explicit := os.environ.get("RLTOP_CONFIG"):
        return Path(explicit).expanduser()
    if config := os.environ.get("XDG_CONFIG_HOME"):
        return Path(config) / "rltop" / "rltop.toml"
    try:
        return Path.home() / ".config" / "rltop" / "rltop.toml"
    except RuntimeError:
        return None


def priors_path() -> Path | None:
    """`bisect-priors.toml` beside the settings, if there is one: what a bisection believes beforehand."""
    return _beside("bisect-priors.toml")


def names_path() -> Path | None:
    """`metric_names.toml` beside the settings, if there is one: what other trainers call a metric."""
    return _beside("metric_names.toml")


def _beside(name: str) -> Path | None:
    path = settings_path()
    own = None if path is None else path.with_name(name)
    return own if own is not None and own.is_file() else None


def load_settings() -> Settings:
    """Read the file; defaults where there is none. Raises RltopError with `file:line`."""
    path = settings_path()
    if path is None:
        return Settings()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("RLTOP_CONFIG"):
            raise RltopError("there is no settings file", where=str(path), why="RLTOP_CONFIG names it") from None
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise RltopError("cannot read the settings", where=str(path), why=str(error)) from None
    return parse_settings(text, where=str(path))


def parse_settings(text: str, *, where: str) -> Settings:
    """Settings from TOML. Raises RltopError with `file:line`: not TOML, an unknown key, a value of a wrong type."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = int(at[1]) if at else max(1, len(text.splitlines()))  # "at end of document"
        raise RltopError("not TOML", where=f"{where}:{line}", why=str(error)) from None
    place = Place(where, text)
    for name, table in tables.items():
        if name != "keep" or not isinstance(table, dict):
            raise place.unknown("", name, ("keep",), "there is the table [keep]")
    keep = tables.get("keep", {})
    place.only("keep", keep, ("runs_bytes", "runs_age", "auto_prune", "journal"))
    auto = keep.get("auto_prune", False)
    if not isinstance(auto, bool):
        raise place.wrong("keep", "auto_prune", "true or false")
    return Settings(
        runs_bytes=_bytes(keep.get("runs_bytes", RUNS_BYTES), place, "keep", "runs_bytes"),
        runs_age_s=_seconds(keep["runs_age"], place, "keep", "runs_age") if "runs_age" in keep else None,
        auto_prune=auto,
        journal=_journal(keep.get("journal", {}), place),
    )


def _journal(tables: Any, place: Place) -> dict[str, JournalLimit]:
    if not isinstance(tables, dict):
        raise place.wrong("keep", "journal", "a table: [keep.journal.events]")
    place.only("keep.journal", tables, _JOURNAL)
    found = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise place.wrong("keep.journal", name, f"a table: [keep.journal.{name}]")
        if name != "records":
            found[name] = _limit(f"keep.journal.{name}", table, place)
            continue
        place.only("keep.journal.records", table, _RECORDS)
        for kind, limits in table.items():
            if not isinstance(limits, dict):
                raise place.wrong("keep.journal.records", kind, f"a table: [keep.journal.records.{kind}]")
            found[f"records:{kind}"] = _limit(f"keep.journal.records.{kind}", limits, place)
    return found


def _limit(where: str, table: Mapping[str, Any], place: Place) -> JournalLimit:
    place.only(where, table, _LIMIT)
    rows = table.get("rows")
    if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
        raise place.wrong(where, "rows", "a whole number from 1")
    return JournalLimit(
        rows,
        _seconds(table["age"], place, where, "age") if "age" in table else None,
        _bytes(table["bytes"], place, where, "bytes") if "bytes" in table else None,
    )


def _bytes(value: Any, place: Place, table: str, key: str) -> int:
    """A number of bytes, or text like `20 GB`, `512MiB`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", value, re.IGNORECASE) if isinstance(value, str) else None
    if found is None:
        raise place.wrong(table, key, 'a size: "20 GB", "512 MiB", or a number of bytes')
    return int(float(found[1]) * _BYTES[found[2].upper()])


def _seconds(value: Any, place: Place, table: str, key: str) -> float:
    """Text like `12 h`, `30 d`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value) if isinstance(value, str) else None
    if found is None:
        raise place.wrong(table, key, 'a time: "90 m", "12 h", "30 d", "4 w"')
    return float(found[1]) * _SECONDS[found[2]]
