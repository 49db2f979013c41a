"""What a launch script starts: its words with their lines, and the environment that it sets, without running it.

slime's and Relax's examples are shell scripts: arrays of flags (`CKPT_ARGS=( --load … )`), exports, and one
`ray job submit … -- python3 train.py "${CKPT_ARGS[@]}"`. Only so much of the shell is understood: assignments, arrays,
`+=`, `export`, `source`, comments, line ends, and the expansions `$A`, `${A}`, `${A[@]}`, `${A:-default}`. Nothing is
executed: a command substitution (other than the usual one for the script's own directory), arithmetic or an unknown
variable stays as it is written and is named in `unresolved`. Branches (`if`, `case`) are read in order as if all of
them were taken, so of two assignments the later one holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rltop.evidence.shell import Token, Word, commands, substitution

MOST_CHARS = 4 << 20
_ASSIGN = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?(?P<name>[A-Za-z_]\w*)(?P<op>\+?=)")
_EXPANSION = re.compile(
    r"\$(?:\{(?P<name>[A-Za-z_]\w*)(?P<array>\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
_UNKNOWN = re.compile(r"\$\([^)]*\)?|`[^`]*`|\$\{[^}]*\}|\$\w+")
_ARGUMENTS = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")
"""All arguments of the script itself."""
_PROGRAM = re.compile(r"(?:.*/)?python[\d.]*$|(?:.*/)?(?:torchrun|deepspeed|accelerate)$|.*\.py$")
_OWN_DIRECTORY = re.compile(r"BASH_SOURCE|dirname\s+(?:--\s+)?\"?\$0")
_MOST_SOURCED = 20


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


@dataclass(slots=True)
class _Shell:
    environ: Mapping[str, str]
    directory: str
    load: Callable[[str], str | None]
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Word]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    unresolved: list[str] = field(default_factory=list)
    launch: list[Word] = field(default_factory=list)
    sourced: int = 0

    def run(self, text: str, line: int | None = None) -> None:
        """Take a script's assignments and its launch. `line`: all words count as of this line (a sourced file)."""
        for command in commands(text[:MOST_CHARS]):
            tokens = command if line is None else [(Word(word.text, line), quoted) for word, quoted in command]
            words = _assignments(self, tokens)
            expanded = [part for word, quoted in words for part in self.words(word, quoted)]
            if len(expanded) >= 2 and expanded[0].text in ("source", "."):
                self._source(expanded[1])
            elif any(_PROGRAM.match(word.text) for word in expanded):
                self.launch = expanded

    def _source(self, word: Word) -> None:
        self.sourced += 1
        text = self.load(word.text) if self.sourced <= _MOST_SOURCED else None
        if text is None:
            self.unresolved.append(f"source {word.text}")
        else:
            self.run(text, word.line)

    def words(self, word: Word, quoted: str) -> list[Word]:
        """A word after expansion. An array becomes its words; inside single quotes nothing is expanded."""
        if quoted == "'":
            return [word]
        if _ARGUMENTS.fullmatch(word.text):  # what the script is given is not known: no words, and no value of a flag
            self.unresolved += [word.text] if word.text not in self.unresolved else []
            return []
        whole = _EXPANSION.fullmatch(word.text)
        name = (whole["name"] or whole["plain"]) if whole else ""
        if name in self.arrays:
            return list(self.arrays[name])
        text = self.text(word.text)
        if whole and not quoted:  # the shell splits what an unquoted variable holds
            return [Word(part, word.line) for part in text.split()]
        return [Word(text, word.line)]

    def text(self, text: str) -> str:
        """Text with its variables put in."""
        text = _own_directory(text, self.directory)
        for _ in range(8):  # values are expanded when assigned; nested defaults need a few turns
            found = _EXPANSION.sub(self._value, text)
            if found == text:
                break
            text = found
        self.unresolved += [part for part in _UNKNOWN.findall(text) if part not in self.unresolved]
        return text

    def _value(self, found: re.Match[str]) -> str:
        name = found["name"] or found["plain"]
        if name in self.values:
            return self.values[name]
        if name in self.arrays:
            return " ".join(word.text for word in self.arrays[name])
        if name in self.environ:
            return self.environ[name]
        return found["default"] if found["default"] is not None else found[0]


def read_script(
    text: str,
    source: str,
    environ: Mapping[str, str] | None = None,
    *,
    directory: str = ".",
    load: Callable[[str], str | None] = lambda _path: None,
) -> Launch:
    """The launch in a shell script: the last command that starts a Python program.

    `environ`: variables from outside, used where the script sets none. `directory`: where the script lies. `load` gives
    the text of a file that it sources, or None. Empty `words` mean that the script starts no Python program.
    """
    shell = _Shell(environ or {}, directory, load)
    shell.run(text)
    env = dict(shell.exported)
    env.update(_runtime_env(shell.launch))
    return Launch(source, tuple(_program(shell.launch)), env, tuple(dict.fromkeys(shell.unresolved)))


def from_argv(argv: Iterable[str], source: str = "command line") -> Launch:
    """A launch that was given as words, as the shell made them."""
    words = [Word(word, 1) for word in argv]
    return Launch(source, tuple(_program(words)), _runtime_env(words))


def _own_directory(text: str, directory: str) -> str:
    """`$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)` and its likes are the script's directory."""
    start = text.find("$(")
    while start >= 0:
        end = substitution(text, start)
        if _OWN_DIRECTORY.search(text, start, end):
            text = text[:start] + directory + text[end:]
            end = start + len(directory)
        start = text.find("$(", end)
    return text


def _assignments(shell: _Shell, command: list[Token]) -> list[Token]:
    """Take the assignments at the start of a command into the shell; returns the words that are left."""
    words = list(command)
    export = False
    while words:
        word, quoted = words[0]
        if not quoted and word.text in ("export", "declare", "local", "readonly", "then", "do", "else", "{"):
            export = export or word.text == "export"
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
                items += shell.words(*words.pop(0))
            words = words[1:]
            shell.arrays[name] = (shell.arrays.get(name, []) if more else []) + items
            continue
        shell.values[name] = (shell.values.get(name, "") if more else "") + shell.text(value)
        if export:
            shell.exported[name] = shell.values[name]
    return [] if export and not any(_PROGRAM.match(word.text) for word, _ in words) else words


def _program(words: list[Word]) -> list[Word]:
    """From the program on: what a submitting command (`ray job submit … --`) has before it is not the trainer's."""
    texts = [word.text for word in words]
    if "--" in texts and any(_PROGRAM.match(text) for text in texts[texts.index("--") + 1 :]):
        words = words[texts.index("--") + 1 :]
    start = next((at for at, word in enumerate(words) if _PROGRAM.match(word.text)), None)
    return words[start:] if start is not None else words


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
