"""Command-line flags from a frozen dataclass: one field is one flag, its docstring is the help text.

A field `lr: float = 1e-3` becomes `--lr LR`; `bool` becomes a switch, `bool | None` one with a `--no-` form,
`tuple[str, ...]` a flag that may be repeated, `Literal[...]` a choice, `X | None` an optional X. What argparse would
print and exit with is raised as `RltopError`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rltop.errors import RltopError


@dataclasses.dataclass(frozen=True, slots=True)
class Parsed:
    """What a command line said: values by field name, and the tokens that belong to a pass-through prefix."""

    values: dict[str, Any]
    passthrough: tuple[str, ...]


def parse_flags(config: type[Any], argv: Sequence[str], *, prog: str, passthrough: str, about: str) -> Parsed:
    """Read `argv` for the dataclass `config`.

    passthrough: flags that start with this prefix (`--sglang-`) are taken as they are, with the values behind them.
    Raises RltopError (exit code 2) for an unknown flag (naming the closest known ones), a missing or malformed value;
    argparse's own `--help` prints and raises SystemExit(0).
    """
    own, passed = _split(argv, passthrough)
    parser = _Parser(prog=prog, description=about, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    hints = typing.get_type_hints(config)
    docs = field_docs(config)
    for field in dataclasses.fields(config):
        if field.init and field.metadata.get("flag", True):
            _add(parser, field, hints[field.name], docs.get(field.name, ""))
    known, unknown = parser.parse_known_args(own)
    if unknown:
        raise _unknown(unknown[0], flag_names(config))
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(known).items()}
    return Parsed(values, tuple(passed))


def flag_names(config: type[Any]) -> list[str]:
    """All flags of `config`, in the order of its fields."""
    return [_flag(f.name) for f in dataclasses.fields(config) if f.init and f.metadata.get("flag", True)]


def negated_names(config: type[Any]) -> list[str]:
    """The `--no-` forms of the flags that may also be left open."""
    hints = typing.get_type_hints(config)
    fields = (f for f in dataclasses.fields(config) if f.init and f.metadata.get("flag", True))
    return [_flag(f"no_{f.name}") for f in fields if hints[f.name] is not bool and _without_none(hints[f.name]) is bool]


def switch_names(config: type[Any]) -> list[str]:
    """The flags of `config` that take no value."""
    hints = typing.get_type_hints(config)
    fields = (f for f in dataclasses.fields(config) if f.init and f.metadata.get("flag", True))
    return [_flag(f.name) for f in fields if _without_none(hints[f.name]) is bool]


def field_docs(config: type[Any]) -> dict[str, str]:
    """Field name -> the string literal that follows the field in the class body, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any, text: str) -> None:
    text = text.replace("%", "%%")
    if field.default not in (None, False, (), dataclasses.MISSING):
        text += f" (default {field.default})"
    flag, inner = _flag(field.name), _without_none(hint)
    if inner is bool:
        action = "store_true" if hint is bool else argparse.BooleanOptionalAction
        parser.add_argument(flag, action=action, help=text)
    elif typing.get_origin(inner) is tuple:
        parser.add_argument(flag, action="append", metavar=field.name.upper(), help=text)
    elif typing.get_origin(inner) is typing.Literal:
        parser.add_argument(flag, choices=typing.get_args(inner), help=text)
    else:
        parser.add_argument(flag, type=_READERS[inner], metavar=field.name.upper(), help=text)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path")  # `Path("")` is the current directory
    return Path(text)


_READERS: dict[type[Any], Callable[[str], Any]] = {int: _whole, float: _finite, str: str, Path: _path}


def _split(argv: Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """Tokens of our own, and tokens from a flag with `prefix` up to the next flag."""
    own: list[str] = []
    passed: list[str] = []
    into = own
    for token in argv:
        if token.startswith("--"):
            into = passed if token.startswith(prefix) else own
        into.append(token)
    return own, passed


def _unknown(token: str, known: Sequence[str]) -> RltopError:
    if not token.startswith("-"):
        return RltopError(
            "unexpected argument", where=token, why="every argument of `rltop train` is a flag or the value of one"
        )
    flag = token.split("=", 1)[0]
    close = _close(flag, known)
    return RltopError(
        "unknown flag",
        where=flag,
        why="a flag that is not understood is refused, never dropped",
        do="did you mean " + " or ".join(close) + "?" if close else "`rltop train --help` lists all flags",
    )


def _close(flag: str, known: Sequence[str]) -> list[str]:
    """At most three that are spelled nearly so, or that have all its words (`--batch-size`)."""
    plain = flag.removeprefix("--").replace("_", "-")
    names = [name.removeprefix("--") for name in known]
    words = set(plain.split("-"))
    spelled = difflib.get_close_matches(plain, names, n=3, cutoff=_CLOSE)
    return ["--" + name for name in spelled or [name for name in names if words <= set(name.split("-"))][:3]]


_CLOSE = 0.75
"""Below, the two have letters in common and no meaning: `hidden-size` and `engine` have 0.47."""


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing and leaving. (Its `error` hook is meant to be overridden.)"""

    def error(self, message: str) -> NoReturn:
        where, _, why = message.partition(": ")
        if not why or not where.startswith("argument "):
            raise RltopError("bad command line", why=message, do=f"{self.prog} --help")
        raise RltopError("bad value", where=where.removeprefix("argument "), why=why, do=f"{self.prog} --help")
