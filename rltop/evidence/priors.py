"""Reads what a bisection believes beforehand: the table that ships with rltop, and the user's on top.

A user's file (`bisect-priors.toml` beside `rltop.toml`, see `rltop.settings.priors_path`) has the shape of
`rltop/bisect/priors.toml` and replaces what it names: a key of [prior], a toggle, a pair, a family of kernels, a phase,
a sign. The rest stays.

Failure policy: a table that can not be used is one clear error with file and key, before anything is restarted.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any

from rltop.bisect.facts import SIGNS, Family, Tables
from rltop.bisect.space import Priors
from rltop.errors import RltopError
from rltop.evidence.user_table import read_text

SHIPPED = "priors.toml"
_TOP = ("version", "prior", "toggles", "together", "kernels", "phases", "signs")
_SHARES = ("none", "other", "pairs", "triples", "default_weight")


def load(path: Path | None = None) -> Tables:
    """The shipped table, with a user's file on top. Raises RltopError."""
    shipped = resources.files("rltop.bisect").joinpath(SHIPPED).read_text(encoding="utf-8")
    found = parse(shipped, where=SHIPPED)
    if path is None:
        return found
    text = read_text(path)
    return parse(text, where=str(path), base=found)


def parse(text: str, *, where: str, base: Tables | None = None) -> Tables:
    """The tables of a file, what it does not name taken from `base`. Raises RltopError with file, table and key."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RltopError("is no TOML", where=where, why=str(error)) from None
    _only(document, _TOP, where)
    if document.get("version", 1) != 1:
        raise RltopError("version must be 1", where=where, why=f"got {document['version']!r}")
    base = base or Tables(Priors(weights={}))
    sources = dict(base.sources)
    toggles = _toggles(document, where, sources)
    pairs = _pairs(document, where, sources)
    families = _families(document, where, sources)
    named = {family.name for family in families}
    kept = [family for family in base.families if family.name not in named]
    phases = _rows(document, "phases", where)
    signs = _rows(document, "signs", where)
    _only(signs, SIGNS, f"{where} [signs]")
    return Tables(
        Priors(
            weights={**base.priors.weights, **toggles},
            affinity={**(base.priors.affinity or {}), **pairs},
            **_shares(document, where, base.priors),
        ),
        (*families, *kept),
        {**base.phases, **phases},
        {**base.signs, **signs},
        sources,
    )


def _shares(document: Mapping[str, Any], where: str, base: Priors) -> dict[str, float]:
    table = _table(document, "prior", where)
    at = f"{where} [prior]"
    _only(table, _SHARES, at)
    found = {name: _number(table.get(name, getattr(base, name)), name, at) for name in _SHARES}
    for one, two in (("none", "other"), ("pairs", "triples")):
        if found[one] + found[two] >= 1.0:
            raise RltopError(f"{one} and {two} must be less than 1 together", where=at)
    return found


def _toggles(document: Mapping[str, Any], where: str, sources: dict[str, str]) -> dict[str, float]:
    found = {}
    for name, row in _table(document, "toggles", where).items():
        at = f"{where} [toggles.{name}]"
        if not isinstance(row, dict):
            raise RltopError("must be a table", where=at, do="weight = 0.1")
        _only(row, ("weight", "source", "off"), at)
        found[name] = _number(row.get("weight"), "weight", at)
        sources[f"toggles.{name}"] = _text(row, "source", at)
    return found


def _pairs(document: Mapping[str, Any], where: str, sources: dict[str, str]) -> dict[frozenset[str], float]:
    found = {}
    for number, row in enumerate(_list(document, "together", where), 1):
        at = f"{where} [[together]] {number}"
        _only(row, ("toggles", "factor", "source"), at)
        names = row.get("toggles")
        if not isinstance(names, list) or len(set(map(str, names))) != 2 or not all(isinstance(n, str) for n in names):
            raise RltopError("toggles must be two names", where=at, do='toggles = ["cuda_graph", "speculative"]')
        found[frozenset(names)] = _number(row.get("factor"), "factor", at)
        sources["together." + "+".join(sorted(names))] = _text(row, "source", at)
    return found


def _families(document: Mapping[str, Any], where: str, sources: dict[str, str]) -> list[Family]:
    found = []
    for number, row in enumerate(_list(document, "kernels", where), 1):
        at = f"{where} [[kernels]] {number}"
        _only(row, ("family", "pattern", "factors", "source"), at)
        name, pattern = _text(row, "family", at), _text(row, "pattern", at)
        if not name or not pattern:
            raise RltopError("family and pattern must be given", where=at)
        try:
            re.compile(pattern)
        except re.error as error:
            raise RltopError("pattern is no regular expression", where=at, why=str(error)) from None
        found.append(Family(name, pattern, _factors(row.get("factors"), at)))
        sources[f"kernels.{name}"] = _text(row, "source", at)
    return found


def _rows(document: Mapping[str, Any], key: str, where: str) -> dict[str, dict[str, float]]:
    table = _table(document, key, where)
    return {name: _factors(row, f"{where} [{key}] {name}") for name, row in table.items()}


def _factors(row: object, at: str) -> dict[str, float]:
    if not isinstance(row, dict):
        raise RltopError("must be factors of toggles", where=at, do="{ cuda_graph = 3.0 }")
    return {name: _number(value, name, at) for name, value in row.items()}


def _number(value: object, name: str, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise RltopError(f"{name} must be a number above 0", where=at, why=f"got {value!r}")
    return float(value)


def _text(row: Mapping[str, Any], name: str, at: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise RltopError(f"{name} must be a text", where=at, why=f"got {value!r}")
    return value


def _table(document: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = document.get(key, {})
    if not isinstance(value, dict):
        raise RltopError(f"{key} must be a table", where=where, do=f"[{key}]")
    return value


def _list(document: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = document.get(key, [])
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise RltopError(f"{key} must be a list of tables", where=where, do=f"[[{key}]]")
    return value


def _only(table: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise RltopError(f"unknown key {unknown[0]!r}", where=at, do=f"one of {', '.join(known)}")
