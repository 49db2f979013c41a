"""A command line of SGLang: parsed as SGLang parses it, and edited by what its options mean.

`parse` follows argparse (Python 3.11): unique prefixes, `--a=b`, repeats (the last one wins), ambiguous and unknown
options, `nargs`, types, choices; and SGLang's `--config FILE`, which is read into the front of the arguments. `strip`
takes options away by the field that they write, in every spelling.

Failure policy: nothing raises for a wrong command line. Every error is returned, the first one being the one on which
SGLang stops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.engines.options import Option, Table, convert, table


class Unread(str):
    """A word that a shell has yet to work out (`$(seq 16 8 256)`): kept as it is and not judged.

    An option that does not take its text as a value counts with its default.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Given:
    """One option as it was written."""

    option: Option
    written: str
    """The spelling used, an abbreviation completed, without a value."""
    start: int
    stop: int
    """Its tokens are `argv[start:stop]` of `Parsed.argv`."""
    value: Any


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a command line says."""

    values: dict[str, Any]
    """Field -> value, defaults included. Of a wrong option its default."""
    errors: tuple[str, ...]
    """Empty: SGLang's parser accepts it. Otherwise the first is SGLang's."""
    given: tuple[Given, ...]
    argv: tuple[str, ...]
    """The arguments that were parsed: with the contents of `--config FILE` in front."""
    warnings: tuple[str, ...] = ()

    def is_given(self, *dests: str) -> bool:
        """Whether an option for one of these fields was written."""
        return any(given.option.dest in dests for given in self.given)


def parse(argv: Sequence[str], *, version: str, read: Callable[[str], str] | None = None) -> Parsed:
    """Parse SGLang's arguments as SGLang `version` would.

    read: gives the text of a `--config` file by its path; by default it is read from this host's disk.
    """
    spec = table(version)
    errors: list[str] = []
    tokens, notes = _merge_config(list(argv), spec, read or _read_file, errors)
    # argparse looks at every token before it acts on any: an ambiguous prefix comes first, wherever it stands.
    kinds = _classify(tokens, spec, errors)
    given: list[Given] = []
    strangers: list[str] = []
    position = 0
    while position < len(tokens):
        match kinds[position]:
            case _Use() as use:
                position = _take(tokens, kinds, position, use, given, errors)
            case _:
                strangers += [] if isinstance(tokens[position], Unread) else [tokens[position]]
                position += 1
    if strangers:
        errors.append(f"unrecognized arguments: {' '.join(strangers)}")
    values: dict[str, Any] = dict(spec.defaults)
    warnings = list(notes)
    for one in given:
        if one.option.kind != "none":
            values[one.option.dest] = one.value
        if one.option.deprecated is not None:
            instead = f": use {one.option.deprecated}" if one.option.deprecated else ""
            warnings.append(f"{one.option.spellings[0]} is deprecated{instead}")
    if any(one.option.dest == "config" for one in given):
        warnings.append("--config=FILE (with an equals sign) is accepted and ignored by SGLang: write --config FILE")
    return Parsed(values, tuple(errors), tuple(given), tuple(tokens), tuple(warnings))


@dataclass(frozen=True, slots=True)
class _Use:
    option: Option
    written: str
    explicit: str | None


@dataclass(frozen=True, slots=True)
class _Stranger:
    """Looks like an option, is none."""


_Token = _Use | _Stranger | None
"""None: a value."""


def _classify(tokens: list[str], spec: Table, errors: list[str]) -> list[_Token]:
    """Which tokens are options. After a lone `--` none is."""
    kinds: list[_Token] = []
    only_values = False
    for token in tokens:
        if only_values:
            kinds.append(None)
        elif token == "--":
            only_values = True
            kinds.append(_Stranger())
        else:
            kinds.append(_find(token, spec, errors))
    return kinds


def _find(token: str, spec: Table, errors: list[str]) -> _Token:
    if not token.startswith("-") or token == "-":
        return None
    if option := spec.by_spelling.get(token):
        return _Use(option, token, None)
    name, equals, explicit = token.partition("=")
    if equals and (option := spec.by_spelling.get(name)):
        return _Use(option, name, explicit)
    # A prefix of several spellings is ambiguous even where they belong to one option.
    matches = [spelling for spelling in spec.by_spelling if spelling.startswith(name)] if name[:2] == "--" else []
    if len(matches) > 1:
        errors.append(f"ambiguous option: {token} could match {', '.join(matches)}")
        return _Stranger()
    if matches:
        return _Use(spec.by_spelling[matches[0]], matches[0], explicit if equals else None)
    if re.fullmatch(r"-\d+|-\d*\.\d+", token) or " " in token:
        return None
    return _Stranger()


def strip(parsed: Parsed, dests: Collection[str]) -> tuple[list[str], list[str]]:
    """(the arguments without those that write one of the fields, each removed option). Works on `parsed.argv`."""
    kept: list[str] = []
    removed: list[str] = []
    position = 0
    for given in parsed.given:
        kept += parsed.argv[position : given.start]
        tokens = parsed.argv[given.start : given.stop]
        if given.option.dest in dests:
            removed.append(" ".join(tokens))
        else:
            kept += tokens
        position = given.stop
    return kept + list(parsed.argv[position:]), removed


def _take(
    tokens: list[str], kinds: list[_Token], position: int, use: _Use, given: list[Given], errors: list[str]
) -> int:
    """Read one option's values; return the position after them."""
    option, flag = use.option, "/".join(use.option.spellings)
    stop = position + 1
    while stop < len(tokens) and kinds[stop] is None:
        stop += 1
    following = tokens[position + 1 : stop]
    if use.explicit is not None:
        values, stop = [use.explicit], position + 1
        if not option.takes_values:
            errors.append(f"argument {flag}: ignored explicit argument {use.explicit!r}")
            return stop
    elif option.nargs is None or option.nargs == "?":
        values, stop = following[:1], position + 1 + len(following[:1])
    elif option.nargs == 0:
        values, stop = [], position + 1
    else:
        values = following
    if not values and option.nargs in (None, "+"):
        errors.append(
            f"argument {flag}: expected {'one argument' if option.nargs is None else 'at least one argument'}"
        )
        return stop
    if option.error:
        errors.append(option.error)
        return stop
    try:
        value = convert(option, use.written, values)
    except ValueError as error:
        if not any(isinstance(token, Unread) for token in tokens[position:stop]):
            errors.append(str(error))
            return stop
        value = option.default
    given.append(Given(option, use.written, position, stop, value))
    return stop


# --- --config FILE ---------------------------------------------------------------------------------------------------


def _read_file(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _merge_config(
    tokens: list[str], spec: Table, read: Callable[[str], str], errors: list[str]
) -> tuple[list[str], list[str]]:
    """Replace `--config FILE` by its contents, in front: SGLang does so only for this exact spelling."""
    places = [index for index, token in enumerate(tokens) if token == "--config"]
    if not places:
        return tokens, []
    if len(places) > 1:
        errors.append("Multiple config files specified! Only one allowed.")
        return tokens, []
    place = places[0]
    if place == len(tokens) - 1:
        errors.append("No config file specified after --config flag!")
        return tokens[:place], []
    path = tokens[place + 1]
    rest = tokens[:place] + tokens[place + 2 :]
    try:
        inserted = _config_tokens(_yaml(path, read(path)), spec)
    except (OSError, ValueError) as error:
        errors.append(f"--config {path}: {error}")
        return rest, []
    return inserted + rest, [f"the arguments in {path} were read"]


def _yaml(path: str, text: str) -> dict[str, Any]:
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be YAML format, got: {Path(path).suffix}")
    try:
        import yaml
    except ImportError:
        raise ValueError(
            "reading it needs the package pyyaml: pip install pyyaml, or give its arguments directly"
        ) from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("Config file must contain a dictionary at root level")
    return {str(key): value for key, value in content.items()}


def _config_tokens(content: dict[str, Any], spec: Table) -> list[str]:
    switches, refused = _config_keys(spec)
    tokens: list[str] = []
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in refused:
            raise ValueError(f"Unsupported config option '{name}'")
        match value:
            case bool() if name in switches:
                tokens += [f"--{key}"] * value
            case bool():
                tokens += [f"--{key}", str(value).lower()]
            case list():
                tokens += [f"--{key}", *map(str, value)] if value else []
            case dict():
                tokens += [f"--{key}", json.dumps(value)]
            case _:
                tokens += [f"--{key}", str(value)]
    return tokens


def _config_keys(spec: Table) -> tuple[set[str], set[str]]:
    """Names in a file that are switches, and names that SGLang does not take from a file.

    0.5.14 knows an option by its destination alone, and a deprecated option that shares a destination takes the good
    one with it. 0.5.23 knows every long spelling.
    """
    modern = spec.version != "0.5.14"

    def names(options: Iterable[Option]) -> set[str]:
        found = {option.dest for option in options}
        if modern:
            found |= {text[2:].replace("-", "_") for option in options for text in option.spellings if text[:2] == "--"}
        return found

    plain = [o for o in spec.options if o.kind in ("store", "true") and o.deprecated is None]
    if modern:
        plain += [o for o in spec.options if o.deprecated is not None and o.nargs is None]
    others = [o for o in spec.options if o not in plain and o.dest != "config"]
    refused = names(others) - (names(plain) if modern else set())
    return names([o for o in plain if o.kind == "true"]), refused
