"""What turns a feature off, as words to paste: from how a trial's arguments differed from those with everything on.

The lines are those of the cell (`docs/protocol.md`): `- --flag value`, `+ --flag value`, `- NAME=value`,
`+ NAME=value`. SGLang takes the last of two equal flags, so what replaces a flag is only added.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_SLIME_OWN = frozenset(
    {"model-path", "tp-size", "port", "host", "nnodes", "node-rank", "base-gpu-id", "random-seed", "config"}
    | {"enable-memory-saver", "enable-return-routed-experts", "skip-server-warmup", "trust-remote-code"}
)
"""Options of SGLang that slime sets itself and takes no `--sglang-` flag for (sglang_utils/arguments.py 51-69)."""
_VARIABLE = re.compile(r"[A-Za-z_]\w*(?==)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Each option with its values, each variable as `NAME=value`."""

    add: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    """Names of variables."""

    @property
    def sglang(self) -> str:
        """What is added to SGLang's command line; empty: nothing."""
        return " ".join(_quoted(option) for option in self.add)

    @property
    def slime(self) -> str:
        """The same for slime's command line; empty: nothing, or slime sets one of these itself."""
        return "" if any(_name(option) in _SLIME_OWN for option in self.add) else _prefixed(self.add)

    @property
    def slime_leaves_out(self) -> str:
        """As slime's flags; empty: nothing that slime has a flag for."""
        return _prefixed([option for option in self.leave_out if _name(option) not in _SLIME_OWN])

    @property
    def slime_sets(self) -> tuple[str, ...]:
        """Options of it that slime sets itself."""
        return tuple(option for option in (*self.add, *self.leave_out) if _name(option) in _SLIME_OWN)

    def lines(self) -> list[str]:
        """Label and what to paste, one line each: `SGLang: --disable-radix-cache`. Empty: nothing is known."""
        leave = " ".join(map(_quoted, self.leave_out))
        rows = [
            ("SGLang, add", self.sglang),
            ("slime, add", self.slime),
            ("SGLang, leave out", leave),
            ("slime, leave out", self.slime_leaves_out),
            ("environment, set", " ".join(map(_quoted, self.env))),
            ("environment, unset", " ".join(self.unset)),
        ]
        return [f"{label}: {text}" for label, text in rows if text]


def recipe(lines: Sequence[str]) -> Recipe:
    """From the differences of a trial; what is no such line is left out."""
    came = [line[2:] for line in lines if line.startswith("+ ")]
    gone = [line[2:] for line in lines if line.startswith("- ")]
    add = tuple(text for text in came if text.startswith("--"))
    env = tuple(text for text in came if _VARIABLE.match(text))
    flags, names = {_name(option) for option in add}, {_variable(text) for text in env}
    return Recipe(
        add=add,
        leave_out=tuple(text for text in gone if text.startswith("--") and _name(text) not in flags),
        env=env,
        unset=tuple(
            name for text in gone if not text.startswith("--") and (name := _variable(text)) and name not in names
        ),
    )


def _name(option: str) -> str:
    """`tp-size` of `--tp_size 2`."""
    return re.split(r"[ =]", option.removeprefix("--"), maxsplit=1)[0].replace("_", "-")


def _variable(text: str) -> str:
    """`NAME` of `NAME=value` and of `NAME (not inherited any more)`."""
    return re.split(r"[ =]", text, maxsplit=1)[0]


def _prefixed(options: Sequence[str]) -> str:
    return " ".join(_quoted(f"--sglang-{option.removeprefix('--')}") for option in options)


def _quoted(option: str) -> str:
    """For a shell; what is plain stays as it is."""
    head, space, rest = option.partition(" ")
    if re.fullmatch(r"[\w@%+=:,./ -]*", rest):
        return option if re.fullmatch(r"[\w@%+=:,./-]*", head) else _assignment(head) + space + rest
    return f"{head}{space}{shlex.quote(rest)}"


def _assignment(text: str) -> str:
    name, equals, value = text.partition("=")
    return f"{name}{equals}{shlex.quote(value)}"
