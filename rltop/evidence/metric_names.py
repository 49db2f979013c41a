"""Which metric of another trainer is which of rltop's: the table that ships with rltop, and the user's on top.

`metric_names.toml` beside this module says what the table means. A user's file of the same shape lies beside
`rltop.toml` (`rltop.settings.names_path`).

One question is asked of it for every value of every record: what is this name here? So a `View`, the table as one
framework needs it, answers from a dict and remembers what beginnings of names (`val-core/`) gave.

Failure policy: a table that can not be used is one clear error with file and line, before anything is read. A name
that two frameworks use for different things means nothing as long as the framework is unknown: it keeps its own name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, Literal, TypeVar

from rltop.checks.observe import Axis
from rltop.errors import RltopError
from rltop.evidence.user_table import read_text

SHIPPED = "metric_names.toml"
MOST_REMEMBERED = 8_192
"""Names of a run that a view remembers; more are looked up each time."""
LONGEST = 200
"""Characters of a name, as the daemon takes them."""
_T = TypeVar("_T")
_TOP = ("version", "map")
_MAP = ("framework", "source", "checked", "prefix", "train", "rollout", "names")
_ROW = ("to", "scale")


@dataclass(frozen=True, slots=True)
class Rename:
    """`theirs` is `ours` here."""

    framework: str
    """As `normal` writes it; "": any."""
    theirs: str
    """A name; the beginning of names when it ends in `/` or `_`."""
    ours: str
    """rltop's name. "": it keeps its own (a user's table took it out)."""
    scale: float = 1.0
    """ours = theirs * scale."""
    source: str = ""
    """File or page of that project where the name is written."""
    checked: str = ""
    """Commit that was read; "": from memory, not verified."""

    @property
    def axis(self) -> Literal["rollout", "train", "eval"]:
        """What its steps count: optimizer steps, rollouts, or the rollouts at which an evaluation ran."""
        if self.ours.startswith("eval/"):
            return "eval"
        return "train" if self.ours.startswith("train/") else "rollout"

    @property
    def clock(self) -> Axis:
        """The axis of its series: an evaluation is placed by rollout."""
        return "train" if self.axis == "train" else "rollout"

    @property
    def begins(self) -> bool:
        """All names that begin so are meant."""
        return self.theirs.endswith(("/", "_"))


@dataclass(frozen=True, slots=True)
class Part:
    """One `[[map]]` of a table."""

    framework: str
    rows: tuple[Rename, ...]
    axes: Mapping[str, Axis]
    """Beginning of names -> what their steps count."""


class View:
    """The table as the metrics of one framework need it. Asked in the daemon's loop: it answers from dicts."""

    __slots__ = ("_axes", "_beginnings", "_exact", "_remembered")

    def __init__(self, rows: Mapping[str, tuple[Rename, ...]], axes: Mapping[str, Axis]) -> None:
        self._exact = {name: found for name, found in rows.items() if not found[0].begins}
        self._beginnings = _longest_first({name: found for name, found in rows.items() if found[0].begins})
        self._axes = _longest_first(axes)
        self._remembered: dict[str, tuple[tuple[Rename, ...], Axis | None]] = {}

    def find(self, name: str, side: Axis | None = None) -> Rename | None:
        """What `name` is here; None when it keeps its own name.

        side: what the step of its record counts, where that is known: it decides between two meanings.
        """
        found = (self._remembered.get(name) or self._look(name))[0]
        if not found:
            return None
        return next((row for row in found if row.clock == side), found[0]) if len(found) > 1 else found[0]

    def axis(self, name: str) -> Axis | None:
        """What the steps of a name count that has no equal here; None when the table does not say."""
        return (self._remembered.get(name) or self._look(name))[1]

    def _look(self, name: str) -> tuple[tuple[Rename, ...], Axis | None]:
        found = self._exact.get(name)
        if found is None:
            begun = next(((start, rows) for start, rows in self._beginnings if name.startswith(start)), None)
            start, rows = begun or ("", ())
            found = tuple(replace(row, theirs=name, ours=row.ours and row.ours + name[len(start) :]) for row in rows)
        found = tuple(row for row in found if row.ours and (row.ours != name or row.scale != 1.0))
        axis = next((axis for start, axis in self._axes if name.startswith(start)), None)
        if len(self._remembered) < MOST_REMEMBERED:
            self._remembered[name] = found, axis
        return found, axis


class Names:
    """The whole table."""

    __slots__ = ("_views", "parts")

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)
        """Later ones count more: the user's come last."""
        self._views: dict[str, View] = {}

    @property
    def frameworks(self) -> list[str]:
        """Those that the table knows."""
        return sorted({part.framework for part in self.parts} - {""})

    def of(self, framework: str = "") -> View:
        """The view for a framework, however it is spelled; one that the table does not know gets what all agree on."""
        name = normal(framework)
        name = name if name in self.frameworks else ""
        if name not in self._views:
            self._views[name] = self._view(name)
        return self._views[name]

    def _view(self, framework: str) -> View:
        rows: dict[str, dict[str, tuple[Rename, ...]]] = {}
        """Their name -> framework -> what it is there."""
        axes: dict[str, Axis] = {}
        for part in self.parts:
            if framework and part.framework not in ("", framework):
                continue
            axes.update(part.axes)
            meant: dict[str, tuple[Rename, ...]] = {}
            for row in part.rows:
                meant[row.theirs] = (*meant.get(row.theirs, ()), row)
            for name, found in meant.items():
                if part.framework == "":
                    rows[name] = {"": found}  # every framework's word before is replaced
                else:
                    rows.setdefault(name, {})[part.framework] = found
        agreed = {}
        for name, by in rows.items():
            found = by.get(framework) or by.get("") or next(iter(by.values()))
            said = {tuple((row.ours, row.scale) for row in one) for one in by.values()}
            if framework or len(said) == 1:
                agreed[name] = found
        return View(agreed, axes)


def normal(framework: str) -> str:
    """`NeMo_RL` -> `nemo-rl`."""
    return re.sub(r"[\s_]+", "-", framework.strip().lower())


@cache
def shipped() -> Names:
    """The table that comes with rltop."""
    text = resources.files("rltop.evidence").joinpath(SHIPPED).read_text(encoding="utf-8")
    return Names(parse(text, where=SHIPPED))


def load(path: Path | None) -> Names:
    """The shipped table, with a user's file on top. Raises RltopError with `file:line`."""
    if path is None:
        return shipped()
    text = read_text(path)
    return Names((*shipped().parts, *parse(text, where=str(path))))


def parse(text: str, *, where: str) -> list[Part]:
    """The maps of a table. Raises RltopError with `file:line`: not TOML, an unknown key, a name that can not be."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = int(at[1]) if at else max(1, len(text.splitlines()))
        raise RltopError("is no TOML", where=f"{where}:{line}", why=str(error)) from None
    place = _Place(where, text)
    for key in document:
        if key not in _TOP:
            raise place.error(0, key, f"unknown key {key!r}", do='[[map]], framework = "…", then [map.names]')
    if document.get("version", 1) != 1:
        raise place.error(0, "version", f"version must be 1, not {document['version']!r}")
    maps = document.get("map", [])
    if not isinstance(maps, list) or not all(isinstance(one, dict) for one in maps):
        raise place.error(0, "map", "map must be a list of tables", do="[[map]]")
    return [_part(one, number, place) for number, one in enumerate(maps, 1)]


def _part(fields: Mapping[str, Any], number: int, place: _Place) -> Part:
    for key in fields:
        if key not in _MAP:
            raise place.error(number, key, f"unknown key {key!r} in [[map]]", do=f"one of {', '.join(_MAP)}")
    texts = {key: fields.get(key, "") for key in ("framework", "source", "checked", "prefix")}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise place.error(number, key, f"{key} must be a text, not {value!r}")
    axes: dict[str, Axis] = {}
    for axis in ("train", "rollout"):
        beginnings = fields.get(axis, [])
        if not isinstance(beginnings, list) or not all(isinstance(one, str) and one for one in beginnings):
            raise place.error(number, axis, f"{axis} must be a list of beginnings of names", do=f'{axis} = ["actor/"]')
        axes |= dict.fromkeys(beginnings, "train" if axis == "train" else "rollout")
    names = fields.get("names", {})
    if not isinstance(names, dict):
        raise place.error(number, "names", "names must be a table", do='[map.names], then "their name" = "our name"')
    framework, rows = normal(texts["framework"]), []
    for theirs, value in names.items():
        for ours, scale in _meanings(theirs, value, number, place):
            row = Rename(framework, theirs, ours, scale, texts["source"], texts["checked"])
            rows.append(row)
            if texts["prefix"]:
                rows.append(replace(row, theirs=texts["prefix"] + theirs))
    return Part(framework, tuple(rows), axes)


def _meanings(theirs: str, value: object, number: int, place: _Place) -> list[tuple[str, float]]:
    """What a row says: our name and the scale, or two of them, one for each axis."""
    if not 0 < len(theirs) <= LONGEST:
        raise place.error(number, theirs, f"a name has 1 to {LONGEST} characters")
    found = []
    for one in value if isinstance(value, list) and value else [value]:
        ours, scale = one, 1.0
        if isinstance(one, dict):
            for key in one:
                if key not in _ROW:
                    raise place.error(number, theirs, f"unknown key {key!r} of {theirs!r}", do="{ to, scale }")
            ours, scale = one.get("to"), one.get("scale", 1.0)
        if not isinstance(ours, str) or len(ours) > LONGEST:
            do = f'"{theirs}" = "train/…", or {{ to = "…", scale = 0.001 }}, or "" to leave it alone'
            raise place.error(number, theirs, f"{theirs!r} needs one of rltop's names", why=f"got {one!r}", do=do)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not isfinite(scale) or scale == 0:
            raise place.error(
                number, theirs, f"scale of {theirs!r} must be a number other than 0", why=f"got {scale!r}"
            )
        if ours and theirs.endswith(("/", "_")) != ours.endswith(("/", "_")):
            why = f"{theirs!r} and {ours!r}: either both are beginnings of names (ending in / or _), or neither"
            raise place.error(number, theirs, "a beginning is renamed to a beginning", why=why)
        found.append((ours, float(scale)))
    clocks = [Rename("", theirs, ours).clock for ours, _ in found]
    if len(set(clocks)) != len(clocks):
        why = f"{' and '.join(repr(ours) for ours, _ in found)} count the same steps, so nothing decides between them"
        raise place.error(number, theirs, f"{theirs!r} has two meanings on one axis", why=why)
    return found


@dataclass(frozen=True, slots=True)
class _Place:
    """The file, for errors."""

    where: str
    text: str

    def error(self, number: int, key: str, what: str, *, why: str = "", do: str = "") -> RltopError:
        return RltopError(what, where=f"{self.where}:{self._line(number, key)}", why=why, do=do)

    def _line(self, number: int, key: str) -> int:
        """Line of `key` in the `number`-th map (0: before the first); of the map's header when it is not found."""
        pattern = re.compile(rf"""\s*(\[\[?\s*(map\s*\.\s*)?)?(["']?){re.escape(key)}\3\s*[=.\]]""")
        seen, header = 0, 1
        for line_number, line in enumerate(self.text.splitlines(), 1):
            if re.match(r"\s*\[\[\s*map\s*\]\]", line):
                seen += 1
                header = line_number if seen == number else header
            if (seen == number or number == 0) and pattern.match(line):
                return line_number
        return header


def _longest_first(table: Mapping[str, _T]) -> list[tuple[str, _T]]:
    return sorted(table.items(), key=lambda item: len(item[0]), reverse=True)
