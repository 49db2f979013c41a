"""SGLang's command line as data: every option of a release, and what its values may be.

`arguments/<version>.json` lists spellings, destination, kind, type, choices, default, and whether an option is
deprecated. The lists are printed by SGLang itself (`tests/soak/sglang_arguments/table.py`).

Failure policy: a version without a list is served by the nearest one, and `Table.note` says so. A value that SGLang
would not take raises `ValueError` with argparse's words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any, Literal

VERSIONS = ("0.5.14", "0.5.23")
"""Releases with a list of their own, oldest first."""

Kind = Literal["store", "true", "const", "on_off", "paths", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of SGLang's command line."""

    spellings: tuple[str, ...]
    dest: str
    """Field of ServerArgs, and the name in `/server_info`."""
    kind: Kind
    """store: takes values; true: a switch; const: an old switch that stores a fixed value; on_off: also `--no-…`."""
    nargs: str | int | None = None
    """As in argparse. None: exactly one value; 0: none."""
    type: str = "str"
    choices: tuple[str | int, ...] | None = None
    default: Any = None
    has_default: bool = True
    const: Any = None
    deprecated: str | None = None
    """What to use instead ("" where there is nothing); None: not deprecated."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Of `--cuda-graph-config`: the settings of each phase."""
    error: str = ""
    """A removed option that is recognised only to say what replaced it."""

    @property
    def takes_values(self) -> bool:
        """False for switches."""
        return self.nargs != 0


@dataclass(frozen=True, slots=True)
class Table:
    """The options of one release."""

    version: str
    options: tuple[Option, ...]
    by_spelling: dict[str, Option]
    defaults: Mapping[str, Any]
    """Field -> default. Of several options with one field the first one's counts, as in argparse."""
    note: str = ""
    """Not empty: another release's list is used, and why."""

    def named(self, dest: str) -> tuple[Option, ...]:
        """Every option, deprecated ones too, that writes this field."""
        return tuple(option for option in self.options if option.dest == dest)

    def has(self, flag: str) -> bool:
        """Whether this exact spelling exists."""
        return flag in self.by_spelling


def nearest(version: str) -> tuple[str, str]:
    """The release whose list serves `version`, and a note when it is not its own."""
    if version in VERSIONS:
        return version, ""
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if number is None:
        return VERSIONS[
            -1
        ], f"SGLang {version or 'of unknown version'}: no list of its arguments, {VERSIONS[-1]} is used"
    wanted = tuple(map(int, number.groups()))
    known = [tuple(map(int, name.split("."))) for name in VERSIONS]
    # Flags change in between; the older list is right until the newer one is reached.
    best = max((one for one in known if one <= wanted), default=known[0])
    name = ".".join(map(str, best))
    return (
        name,
        f"SGLang {version}: no list of its arguments, that of {name} is used; what the engine then says decides",
    )


def table(version: str) -> Table:
    """The options of this release, or of the nearest one that has a list."""
    name, note = nearest(version)
    base = _load(name)
    return base if not note else replace(base, note=note)


@cache
def _load(version: str) -> Table:
    text = (resources.files(__package__) / "arguments" / f"{version}.json").read_text(encoding="utf-8")
    options = tuple(_option(*row) for row in json.loads(text)["options"])
    spellings = {spelling: option for option in options for spelling in option.spellings}
    defaults: dict[str, Any] = {}
    for option in options:
        if option.has_default:
            defaults.setdefault(option.dest, option.default)
    return Table(version, options, spellings, defaults)


def _option(spellings: list[str], dest: str, kind: Kind, extra: dict[str, Any]) -> Option:
    default = False if kind == "true" else None
    choices = extra.get("choices")
    return Option(
        spellings=tuple(spellings),
        dest=dest,
        kind=kind,
        nargs=0 if kind in ("true", "on_off", "none") else extra.get("nargs"),
        type=extra.get("type", "str"),
        choices=None if choices is None else tuple(choices),
        default=extra.get("default", default),
        has_default=not extra.get("no_default"),
        const=extra.get("const"),
        deprecated=extra.get("deprecated"),
        keys=extra.get("keys", {}),
        error=extra.get("error", ""),
    )


# --- values -----------------------------------------------------------------------------------------------------------


def convert(option: Option, written: str, texts: Sequence[str]) -> Any:
    """The value that argparse stores. written: the spelling used, completed.

    Raises `ValueError` with argparse's words.
    """
    flag = "/".join(option.spellings)
    match option.kind:
        case "true":
            return True
        case "none":
            return None
        case "on_off":
            return not written.startswith("--no-")
    converted = [_checked(option, text, flag) for text in texts]
    if option.kind == "const":
        return option.const
    if option.kind == "paths":
        return [_lora_path(text) for text in texts]
    if option.nargs == "?" and not converted:
        return option.const
    return converted[0] if option.nargs in (None, "?") else converted


def _checked(option: Option, text: str, flag: str) -> Any:
    try:
        graph = option.type == "graph_config"
        value = _graph_config(text, option.keys) if graph else _CONVERT[option.type](text)
    except _Told as told:
        raise ValueError(f"argument {flag}: {told}") from None
    except (ValueError, TypeError):
        raise ValueError(f"argument {flag}: invalid {option.type} value: {text!r}") from None
    if option.choices is not None and value not in option.choices:
        listed = ", ".join(map(repr, option.choices))
        raise ValueError(f"argument {flag}: invalid choice: {value!r} (choose from {listed})")
    return value


class _Told(ValueError):
    """A type's own message."""


def _human_int(text: str) -> int:
    """`8192`, `8k` = 8000, `8Ki` = 8192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if match is None:
        return int(text.strip())
    number, suffix = match.groups()
    power = "kMGT".index(suffix[0].lower() if suffix[0] == "K" else suffix[0]) + 1
    if suffix.endswith("i"):
        return int(number) * int(1024**power)
    return int(Decimal(number) * 1000**power)


def _graph_config(text: str, keys: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """The JSON of `--cuda-graph-config`. keys: phase -> the settings that this release knows."""
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise _Told(f"--cuda-graph-config must be a JSON object, got {type(parsed).__name__}")
    for phase, settings in parsed.items():
        if phase not in keys:
            raise _Told(f"--cuda-graph-config: unknown phase '{phase}', expected one of {tuple(keys)}")
        if not isinstance(settings, dict):
            raise _Told(f"--cuda-graph-config['{phase}'] must be a JSON object, got {type(settings).__name__}")
        if "tc_compiler" not in keys[phase]:
            _graph_backend(settings.get("backend", ""))
        known = tuple(keys[phase])
        for key in settings:
            if key not in known:
                raise _Told(f"--cuda-graph-config['{phase}']: unknown key '{key}', expected one of {known}")
    return parsed


def _graph_backend(text: str) -> str:
    if text == "tc_piecewise":
        raise _Told("tc_piecewise was removed; select breakable, full, or disabled")
    return text


def _lora_path(text: str) -> Any:
    return json.loads(text) if text.strip().startswith("{") else text.strip()


_CONVERT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "json": json.loads,
    "human_int": _human_int,
    "nullable_str": lambda text: None if text in ("", "None") else text,
    "graph_backend": _graph_backend,
}
