"""What a launch script starts: its words with their lines, and the environment that it sets, without running it.

slime's and Relax's examples are shell scripts: arrays of flags (`CKPT_ARGS=( --load … )`), exports, and one
`ray job submit … -- python3 train.py "${CKPT_ARGS[@]}"`. Only so much of the shell is understood: assignments, arrays,
`+=`, `export`, `source`, comments, redirections, here-documents, and the expansions `$A`, `${A}`, `${A[@]}`,
`${A:-default}`, integer arithmetic, and the usual ways to the script's own directory. Nothing is executed: everything
else stays as it is written and is named in `unresolved`. Branches (`if`, `case`) are read in order as if all of them
were taken, so of two assignments the later one holds. Of several programs the one with the most flags is the launch.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rltop.evidence.shell import Token, Word, commands, pieces

MOST_CHARS = 4 << 20
_ASSIGN = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<op>\+?=)")
_BRACED = re.compile(
    r"\$\{(?P<name>[A-Za-z_]\w*|\d)(?P<array>\[[@*]\])?(?:(?P<op>:?[-=+?])(?P<word>.*))?\}$", re.DOTALL
)
_PLAIN = re.compile(r"\$(?P<name>[A-Za-z_]\w*)$")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})$")
"""All arguments of the script itself."""
_PROGRAM = re.compile(r"(?:.*/)?python[\d.]*$|(?:.*/)?(?:torchrun|deepspeed|accelerate|rltop)$|.*\.py$")
_NO_LAUNCH = re.compile(
    r"(?:.*/)?(?:pkill|killall|kill|echo|printf|which|command|alias|grep|ps|rm|cat|ls|cp|mkdir|pip3?|test|\[+)$"
)
_OWN_DIRECTORY = re.compile(r"dirname\b.*(?:BASH_SOURCE|\$0|\$\{0\})", re.DOTALL)
_KEYWORDS = ("export", "declare", "local", "readonly", "then", "do", "else", "{", "if", "while", "!", "time", "exec")
_MOST_SOURCED = 20
_MOST_DEPTH = 20
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch as far as it can be known without running it."""

    source: str
    words: tuple[Word, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """What the script exports, and `env_vars` of `--runtime-env-json`."""
    unresolved: tuple[str, ...] = ()
    """Expansions that only a shell could work out, as they are written."""

    @property
    def text(self) -> str:
        """The command in one line, for people."""
        return " ".join(word.text for word in self.words)

    @property
    def line(self) -> int | None:
        """Line of the program; None for a command without a file."""
        return self.words[0].line if self.words else None


def is_unread(text: str) -> bool:
    """A value that holds an expansion which could not be worked out."""
    return any(expansion for _, expansion in pieces(text))


@dataclass(slots=True)
class _Shell:
    environ: Mapping[str, str]
    directory: str
    load: Callable[[str], str | None]
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    unresolved: dict[str, None] = field(default_factory=dict)
    launch: list[Word] = field(default_factory=list)
    sourced: int = 0

    def run(self, text: str, line: int | None = None) -> None:
        """Take a script's assignments and its launch. `line`: all words count as of this line (a sourced file)."""
        if "\r\n" in text:
            self.unresolved["carriage returns at the line ends: a shell would not run this script"] = None
            text = text.replace("\r\n", "\n")
        for command in commands(text[:MOST_CHARS]):
            tokens = command if line is None else [(Word(word.text, line), quoted) for word, quoted in command]
            words = self._assignments(tokens)
            expanded = [part for word, quoted in words for part in self.words(word, quoted)]
            if len(expanded) >= 2 and expanded[0].text in ("source", "."):
                self._source(expanded[1])
            elif (program := program_of(expanded)) and _flags(program) >= _flags(program_of(self.launch)):
                self.launch = expanded

    def _source(self, word: Word) -> None:
        self.sourced += 1
        text = self.load(word.text) if self.sourced <= _MOST_SOURCED else None
        if text is None:
            self.unresolved[f"source {word.text}"] = None
        else:
            self.run(text, word.line)

    def _assignments(self, command: list[Token]) -> list[Token]:
        """Take the assignments at the start of a command; returns the words that are left."""
        words = list(command)
        export = False
        while words:
            word, quoted = words[0]
            if not quoted and word.text in _KEYWORDS:
                export = export or word.text == "export"
                words.pop(0)
                continue
            if export and word.text.startswith("-"):
                words.pop(0)
                continue
            found = _ASSIGN.match(word.text)
            if not found:
                break
            name, more, value = found["name"], found["op"] == "+=", word.text[found.end() :]
            words.pop(0)
            if value == "(":
                items: list[Word] = []
                while words and not (words[0][0].text == ")" and not words[0][1]):
                    items += self.words(*words.pop(0))
                words = words[1:]
                self.arrays[name] = (self.arrays.get(name, []) if more else []) + items
                continue
            self.values[name] = (self.values.get(name, "") if more else "") + self.text(value)
            if export:
                self.exported[name] = self.values[name]
        return words

    def words(self, word: Word, quoted: str) -> list[Word]:
        """A word after expansion. An array becomes its words, an empty one none; single quotes keep all as it is."""
        if quoted == "'":
            return [word]
        if _ARGUMENTS.match(word.text):
            self.unresolved[word.text] = None
            return []
        found = _BRACED.match(word.text) or _PLAIN.match(word.text)
        name = found["name"] if found else ""
        if name in self.arrays:
            return list(self.arrays[name])
        if found and "array" in found.re.groupindex and found["array"] and name not in self.values:
            self.unresolved[word.text] = None
            return []
        text = self.text(word.text)
        if found and not quoted and not is_unread(text):  # the shell splits what an unquoted variable holds
            return [Word(part, word.line) for part in text.split()]
        if is_unread(text):
            return [Word(text, word.line, "whole" if quoted else "split")]
        return [Word(text, word.line)]

    def text(self, text: str, depth: int = 0) -> str:
        """Text with its expansions put in, as far as they are known."""
        return "".join(self._expand(part, depth) if expansion else part for part, expansion in pieces(text))

    def _expand(self, written: str, depth: int) -> str:
        known = self._value(written, depth) if depth < _MOST_DEPTH else None
        if known is None:
            self.unresolved[written] = None
            return written
        return known

    def _value(self, written: str, depth: int) -> str | None:
        if written.startswith("$((") and written.endswith("))"):
            return _arithmetic(self.text(_dollars(written[3:-2], self._names()), depth + 1))
        if written.startswith(("$(", "`")):
            return self.directory if _OWN_DIRECTORY.search(written) else None
        found = _BRACED.match(written) or _PLAIN.match(written)
        if found is None:
            return None
        value = self._of(found["name"])
        op = found["op"] if "op" in found.re.groupindex else None
        if op and op[-1] == "+":
            return self.text(found["word"], depth + 1) if value else ""
        if op and op[-1] in "-=" and (value is None or (op[0] == ":" and not value)):
            return self.text(found["word"], depth + 1)
        return value

    def _of(self, name: str) -> str | None:
        if name in self.values:
            return self.values[name]
        if name in self.arrays:
            return " ".join(word.text for word in self.arrays[name])
        return self.environ.get(name)

    def _names(self) -> set[str]:
        return {*self.values, *self.environ}


def _dollars(text: str, names: set[str]) -> str:
    """In arithmetic a variable needs no `$`."""
    return re.sub(r"(?<![\w${])([A-Za-z_]\w*)", lambda m: f"${{{m[1]}}}" if m[1] in names else m[1], text)


def _arithmetic(text: str) -> str | None:
    """Value of an integer expression; None for anything else."""
    if len(text) > 200 or not re.fullmatch(r"[\d\s+\-*/%()]+", text) or "**" in text:
        return None
    try:
        tree = ast.parse(text.replace("//", "/").replace("/", "//").strip(), mode="eval")
        return str(_number(tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError("no integer arithmetic")


def read_script(
    text: str,
    source: str,
    environ: Mapping[str, str] | None = None,
    *,
    directory: str = ".",
    load: Callable[[str], str | None] = lambda _path: None,
) -> Launch:
    """The launch in a shell script: of the commands that start a Python program the one with the most flags.

    `environ`: variables from outside, used where the script sets none. `directory`: where the script lies. `load` gives
    the text of a file that it sources, or None. Empty `words` mean that the script starts no Python program.
    """
    shell = _Shell(environ or {}, directory, load)
    shell.run(text)
    env = dict(shell.exported)
    env.update(_runtime_env(shell.launch))
    return Launch(source, tuple(program_of(shell.launch)), env, tuple(shell.unresolved))


def from_argv(argv: Iterable[str], source: str = "command line") -> Launch:
    """A launch that was given as words, as the shell made them."""
    words = [Word(word, 1) for word in argv]
    return Launch(source, tuple(program_of(words) or words), _runtime_env(words))


def program_of(words: list[Word]) -> list[Word]:
    """From the program on: what a submitting command (`ray job submit … --`, `srun …`) has before it is not the
    trainer's. Empty for a command that starts no Python program (`pkill -9 python`)."""
    texts = [word.text for word in words]
    if not texts or _NO_LAUNCH.match(texts[0]):
        return []
    if "--" in texts and any(_PROGRAM.match(text) for text in texts[texts.index("--") + 1 :]):
        words = words[texts.index("--") + 1 :]
    start = next((at for at, word in enumerate(words) if _PROGRAM.match(word.text)), None)
    return words[start:] if start is not None else []


def _flags(words: list[Word]) -> int:
    return sum(word.text.startswith("--") or "." in word.text.partition("=")[0] * ("=" in word.text) for word in words)


def _runtime_env(words: Iterable[Word]) -> dict[str, str]:
    """`env_vars` of `--runtime-env-json`, both spellings of the flag."""
    texts = [word.text for word in words]
    for at, text in enumerate(texts):
        if text == "--runtime-env-json" and at + 1 < len(texts):
            body = texts[at + 1]
        elif text.startswith("--runtime-env-json="):
            body = text.partition("=")[2]
        else:
            continue
        try:
            found = json.loads(body)
        except ValueError:
            return {}
        values = found.get("env_vars") if isinstance(found, dict) else None
        return {str(key): str(value) for key, value in values.items()} if isinstance(values, dict) else {}
    return {}
