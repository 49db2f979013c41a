"""Arguments: a command line, a file of flags, or the table that Megatron prints at the start.

The last occurrence of a flag wins; what was given twice with different values is kept beside it. A value stays text
unless it is a number, a truth value or None in a printed table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rltop.checks.observe import Args, Where

_FLAG = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)
_DOTTED = re.compile(r"\+{0,2}(?P<name>[A-Za-z_]\w*(?:\.\w+)+)=(?P<value>.*)", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d_]*(?:\.\d*)?(?:[eE][-+]?\d+)?|-?\.\d+(?:[eE][-+]?\d+)?|-inf|-nan")
_WORD = re.compile(r"""(?:[^\s"'\\#]|\\.|"(?:[^"\\]|\\.)*"|'[^']*'|(?<!\s)#)+|\#[^\n]*""", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_]\w*")
_FRAMEWORKS = ("relax", "slime", "miles", "verl", "openrlhf", "trl", "areal", "rltop", "nemo_rl", "vime")
MOST_WORDS = 50_000


@dataclass(slots=True)
class ArgsBuilder:
    """Collects flags in the order in which they were given."""

    flags: dict[str, object] = field(default_factory=dict)
    seen: dict[str, list[object]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    framework: str = ""

    def put(self, name: str, value: object, line: int) -> None:
        """One occurrence of a flag."""
        if name == "framework":
            self.framework = str(value).lower()
            return
        self.flags[name] = value
        self.lines[name] = line
        values = self.seen.setdefault(name, [])
        if not values or values[-1] != value:
            values.append(value)

    def build(self, where: Where) -> Args:
        """The arguments; empty flags where nothing was given."""
        repeats = {name: tuple(values) for name, values in self.seen.items() if len(values) > 1}
        framework = self.framework or _framework(self.flags, self.words)
        return Args(dict(self.flags), framework, where, repeats, tuple(self.words), dict(self.lines))


def _framework(flags: Mapping[str, object], words: Iterable[str]) -> str:
    if any("." in name for name in flags):
        return "verl"
    text = " ".join([*words, str(flags.get("m", ""))]).lower()  # `python -m relax.entrypoints.train`
    return next((name for name in _FRAMEWORKS if re.search(rf"\b{name}\b|\b{name}[._/]", text)), "")


def words_of(text: str) -> Iterable[tuple[str, int]]:
    """(word, line) of a shell text: quotes are taken off, comments and line-end backslashes left out."""
    line, at = 1, 0
    for count, found in enumerate(_WORD.finditer(text)):
        if count >= MOST_WORDS:
            return
        line += text.count("\n", at, found.start())
        at = found.start()
        word = found[0]
        if word.startswith("#"):
            continue
        word = re.sub(r"\\\r?\n", "", word)
        word = re.sub(r"""\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'""", _unquote, word, flags=re.DOTALL)
        if word:
            yield word, line


def _unquote(found: re.Match[str]) -> str:
    return next((group for group in found.groups() if group is not None), "")


def parse_args(text: str, source: str, *, first_line: int = 1) -> Args:
    """Arguments of a command line or of a file of flags, over any number of lines."""
    return parse_words(((word, number + first_line - 1) for word, number in words_of(text)), source)


def parse_words(words: Iterable[tuple[str, int]], source: str) -> Args:
    """Arguments of words that a shell has split already, each with its line in `source`."""
    builder = ArgsBuilder()
    name = ""
    values: list[str] = []
    at = 1

    def close() -> None:
        if name:
            builder.put(name, True if not values else values[0] if len(values) == 1 else list(values), at)

    for word, line in words:
        dotted = _DOTTED.fullmatch(word)
        if dotted:
            close()
            name, values = "", []
            builder.put(dotted["name"], dotted["value"], line)
            continue
        if not name and (pair := re.fullmatch(r"(framework)=(\S+)", word)):
            builder.put(pair[1], pair[2], line)
            continue
        flag = None if _NUMBER.fullmatch(word) else _FLAG.fullmatch(word)
        if flag:
            close()
            name, at = flag["name"].replace("-", "_"), line
            values = [] if flag["value"] is None else [flag["value"]]
            if flag["value"] is not None:
                close()
                name, values = "", []
        elif name:
            if re.search(r"\.(?:py|sh)$", word) and not values and _is_switch(name):
                close()
                name = ""
                builder.words.append(word)
            else:
                values.append(word)
        else:
            builder.words.append(word)
    close()
    builder.words = builder.words[:64]
    return builder.build(Where(source, None))


def _is_switch(name: str) -> bool:
    return name in ("u", "m", "colocate")


def parse_value(text: str) -> object:
    """A value of a printed table: None, a truth value, a number, else its text."""
    low = text.strip()
    match low:
        case "None" | "null":
            return None
        case "True" | "true":
            return True
        case "False" | "false":
            return False
    if re.fullmatch(r"-?\d{1,300}", low):
        return int(low)
    if _NUMBER.fullmatch(low):
        try:
            return float(low)
        except ValueError:
            return low
    if len(low) > 1 and low[0] == low[-1] and low[0] in "'\"":
        return low[1:-1]
    member = _MEMBER.fullmatch(low)
    return member["name"] if member else low


_MEMBER = re.compile(r"<?\w*(?:Backend|Type|Mode)\.(?P<name>\w+)(?:: [^>]*>)?")
"""A member of an enumeration as Python prints it (`AttnBackend.flash`): the flag's own value is its name."""
_TABLE_ROW = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]*) \.{2,} (?P<value>.*)")
TABLE_START = re.compile(r"-{4,} (?:\S+ )?arguments -{4,}")
TABLE_END = re.compile(r"-{4,} end of (?:\S+ )?arguments -{4,}")


def table_row(text: str) -> tuple[str, object] | None:
    """A row of Megatron's table, `name ....... value`."""
    found = _TABLE_ROW.fullmatch(text)
    return (found["name"], parse_value(found["value"])) if found else None


def namespace(text: str) -> dict[str, object] | None:
    """`Namespace(a=1, b='x')` or `ServerArgs(...)`: name -> value; None where it is not one."""
    start = text.find("(")
    if start < 0:
        return None
    found: dict[str, object] = {}
    for match in _PAIR.finditer(text, start + 1, start + 1 + 256 * 1024):
        found[match["name"]] = parse_value(match["value"].strip())
    return found or None


_PAIR = re.compile(
    r"(?<![\w.])(?P<name>[a-zA-Z_]\w*)=(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\[\]]*\]|\{[^{}]*\}|"
    r"\([^()]*\)|[^,()]*(?:\([^()]*\))?)(?=,|\)|$)"
)


def merged(parts: Iterable[Args]) -> Args:
    """One set of arguments of several sources; of two the later one wins. A source that only prints defaults it does
    not name (None) does not hide a value."""
    found = Args()
    for part in parts:
        flags = {name: value for name, value in part.flags.items() if value is not None or name not in found.flags}
        if not found.flags:
            found = replace(part, flags=flags)
            continue
        one_place = found.where is not None and part.where is not None and found.where.source == part.where.source
        lines = {**found.lines, **part.lines} if one_place else found.lines
        found = Args(
            {**found.flags, **flags},
            part.framework or found.framework,
            found.where or part.where,
            {**found.repeats, **part.repeats},
            tuple(dict.fromkeys((*found.words, *part.words))),
            lines,
        )
    return found
