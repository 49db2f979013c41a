"""`rltop slime-flags`: a slime launch with an engine toggle changed, as text. Nothing is started.

    rltop slime-flags cuda_graph=off --script run.sh      # the edited launch line, for a restart
    rltop slime-flags cuda_graph=off                      # only the flags
    rltop slime-flags cuda_graph=off --ab 8 --gpus-per-engine 2 > ab.yaml    # for --sglang-config: half each way

slime passes `--sglang-FLAG` on to SGLang, so the table of toggles that restarts rltop's own engines edits its launch
lines too. What only the environment switches goes into `--runtime-env-json`; `--train-env-vars` spares the trainers.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.cli.files import read_text
from rltop.cli.output import note
from rltop.engines.flags import Unread, parse, strip
from rltop.engines.toggles import Change, change
from rltop.errors import RltopError
from rltop.evidence.launch_script import from_argv, is_unread, read_script
from rltop.evidence.shell import Word, pieces

PREFIX = "--sglang-"
WHERE = "slime-flags"
SLIMES = "0.5.15"
"""SGLang in slime's image (2026-08)."""
_SLIMES_OWN = frozenset({"config", "server-concurrency", "router-ip", "router-port"})
"""`--sglang-…` that slime does not pass on as flags of the server."""
_SET_BY_SLIME = frozenset({"tp_size", "nnodes"})
"""What `set_by_slime` adds for the judgement; slime takes no flags for it."""
_GPUS_PER_ENGINE = "--rollout-num-gpus-per-engine"
_MANY = re.compile(r"source |\$[@*]|\$\{(?:\w+\[)?[@*]")
"""Expansions that are left out where they are not known: they stand for any number of words."""


@dataclass(frozen=True, slots=True)
class Split:
    """A launch line, taken apart."""

    others: tuple[str, ...]
    """Words that are not SGLang's, the program first."""
    engine: tuple[str, ...]
    """SGLang's, without slime's prefix."""

    def own(self, flag: str) -> str | None:
        """The value of one of slime's own flags; of several the last."""
        found = None
        for at, word in enumerate(self.others):
            if word == flag and at + 1 < len(self.others):
                found = self.others[at + 1]
            elif word.startswith(f"{flag}="):
                found = type(word)(word.partition("=")[2])
        return found


class _Split(Unread):
    """It stands outside quotes: the shell makes several words of what it gives."""

    __slots__ = ()


def slime_flags(
    changes: Sequence[str], *, script: Path | None, ab: int, gpus_per_engine: int, model: str, version: str
) -> int:
    """Print it. version: of SGLang; "" for the one of slime's image.

    Raises RltopError: an unknown toggle, a combination that SGLang refuses, a script without a launch.
    """
    version = version or SLIMES
    wanted = _wanted(changes)
    split = _read(script) if script is not None else Split((), ())
    engine = [*split.engine, *set_by_slime(split, gpus_per_engine, version=version)]
    new = change(engine, {}, wanted, version=version)
    if not new.allowed:
        first = new.refusals[0]
        unread = sorted({text for word in (*split.engine, *_per_engine(split)) for text in _expansions(word)})
        blind = f"judged without {', '.join(unread)}, which only the shell knows" if unread else ""
        raise RltopError(first.why, where=f"{WHERE} {' '.join(changes)}", why=blind, do=first.do)
    without = parse(new.argv, version=version)
    for text in (*new.warnings, *(f"{name} moves too: {alias.why}" for name, alias in new.aliases.items())):
        note(text)
    if ab:
        print(ab_groups(engine, new, gpus=ab, gpus_per_engine=gpus_per_engine, model=model, version=version))
        return 0
    for word in new.removed:
        note(f"- {PREFIX}{word.removeprefix('--')}")
    for word in new.added:
        note(f"+ {PREFIX}{word.removeprefix('--')}")
    _say_environment(new)
    print(" ".join(map(_quoted, [*split.others, *prefixed(strip(without, _SET_BY_SLIME)[0]), *_spared(new)])))
    return 0


def set_by_slime(split: Split, gpus_per_engine: int, *, version: str) -> list[str]:
    """What slime gives SGLang beside the flags (`compute_server_args`): the size of an engine.

    `--rollout-num-gpus-per-engine` are its GPUs, by default gpus_per_engine; `--num-gpus-per-node` makes nodes of them.
    Where only the shell knows them, they are taken as a number that the flags of SGLang allow.
    """
    if not split.engine and not split.others:
        gpus: int | None = gpus_per_engine
    else:
        gpus = _number(split.own(_GPUS_PER_ENGINE) or str(gpus_per_engine))
    values = parse(split.engine, version=version).values
    pipeline = max(1, values["pp_size"])
    if gpus is None:
        return ["--tp-size", str(math.lcm(max(1, values["dp_size"]), max(1, values["ep_size"])))]
    if gpus % pipeline:
        why = f"{_GPUS_PER_ENGINE} {gpus} is not divisible by {PREFIX}pp-size {pipeline}"
        raise RltopError("slime would not start with this", where=WHERE, why=why, do="correct one of the two")
    per_node = _number(split.own("--num-gpus-per-node") or "8") or gpus
    return ["--tp-size", str(gpus // pipeline), "--nnodes", str(max(1, gpus // per_node))]


def _per_engine(split: Split) -> list[str]:
    found = split.own(_GPUS_PER_ENGINE)
    return [] if found is None else [found]


def _number(text: str) -> int | None:
    """A count that slime takes; None: only the shell knows it."""
    if isinstance(text, Unread):
        return None
    if not text.isdecimal() or not int(text):
        raise RltopError(f"{text!r} is no number of GPUs", where=WHERE, do=f"correct {_GPUS_PER_ENGINE}")
    return int(text)


def _expansions(word: str) -> list[str]:
    return [text for text, expansion in pieces(word) if expansion] if isinstance(word, Unread) else []


def prefixed(argv: Sequence[str]) -> list[str]:
    """SGLang's words as slime takes them."""
    return [type(word)(f"{PREFIX}{word[2:]}") if word.startswith("--") else word for word in argv]


def ab_groups(argv: Sequence[str], new: Change, *, gpus: int, gpus_per_engine: int, model: str, version: str) -> str:
    """The file of `--sglang-config`: half of the engines as the launch has them, half with the change.

    Raises RltopError: engines that do not divide by two, a toggle that only the environment switches.
    """
    if new.env_set or new.env_unset:
        names = ", ".join(sorted([*new.env_set, *new.env_unset]))
        do = "restart the run with it: rltop slime-flags … --script run.sh"
        raise RltopError("groups of one run cannot differ in that", where=WHERE, why=f"{names} is environment", do=do)
    if gpus_per_engine < 1 or gpus % gpus_per_engine or gpus // gpus_per_engine < 2:
        why = f"{gpus} GPUs with {gpus_per_engine} per engine are {gpus / max(1, gpus_per_engine):g} engines"
        raise RltopError("an A/B needs two engines or more", where=f"{WHERE} --ab {gpus}", why=why)
    engines = gpus // gpus_per_engine
    before, after = parse(argv, version=version).values, parse(new.argv, version=version).values
    overrides = {name: value for name, value in after.items() if value != before.get(name)}
    second = (engines // 2) * gpus_per_engine
    lines = [
        "# For slime's --sglang-config: A as launched, B with the change. rltop attach shows them apart.",
        "sglang:",
        f"  - name: {model}",
        "    update_weights: true",
        f"    num_gpus_per_engine: {gpus_per_engine}",
        "    server_groups:",
        "      - worker_type: regular   # A",
        f"        num_gpus: {gpus - second}",
        "      - worker_type: regular   # B",
        f"        num_gpus: {second}",
        "        overrides:",
        *(f"          {name}: {json.dumps(value)}" for name, value in sorted(overrides.items())),
    ]
    return "\n".join(lines)


def _wanted(changes: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in changes:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise RltopError(f"{word!r} is no change", where=WHERE, do="rltop slime-flags cuda_graph=off")
        found[name] = value
    return found


def _read(script: Path) -> Split:
    text = read_text(script, "cannot read the script", do="rltop slime-flags --script RUN.sh", errors="replace")
    launch = read_script(text, str(script), directory=str(script.parent), load=_sourced)
    plain = launch.words or from_argv(shlex.split(text, comments=True)).words
    words = [_marked(word, guess=not launch.words) for word in plain]
    if not any(word.startswith("--") for word in words):
        raise RltopError("no launch in it", where=str(script), why="no command starts a Python program with flags")
    left = {text for word in words for text in _expansions(word)}
    for one in sorted(left, key=text.find):
        note(f"{script}: {one} is for the shell to work out; it stands in the line as it is written")
    for one in launch.unresolved:
        if one not in left and _MANY.match(one):
            note(f"{script}: {one} is not known here: what it stands for is not in the line")
    parts = split(words)
    if PREFIX in text and not parts.engine:
        note(f"{script}:{launch.line or 1}: the launch has no {PREFIX}… flag although the script has: is a \\ missing?")
    return parts


def _marked(word: Word, *, guess: bool) -> str:
    """Its text, as `Unread` where an expansion is left. guess: nobody read it as a shell would."""
    if word.unread or (guess and is_unread(word.text)):
        return (_Split if word.unread == "split" else Unread)(word.text)
    return word.text


def _sourced(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def split(words: Sequence[str]) -> Split:
    """Take SGLang's words out of slime's."""
    others: list[str] = []
    engine: list[str] = []
    into = others
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix(PREFIX)
            into = engine if word.startswith(PREFIX) and name not in _SLIMES_OWN else others
            word = type(word)(f"--{word.removeprefix(PREFIX)}") if into is engine else word
        into.append(word)
    return Split(tuple(others), tuple(engine))


def _say_environment(new: Change) -> None:
    if new.env_set:
        note(f"and in --runtime-env-json: {json.dumps({'env_vars': dict(new.env_set)})}")
        note("it reaches the trainers too; the flag --train-env-vars in the line sets it back for them")
    for name in new.env_unset:
        note(f"and take {name} out of --runtime-env-json")


def _quoted(word: str) -> str:
    """As a shell reads it back; what it has to work out stays for it to work out, in quotes where it was in quotes."""
    if isinstance(word, _Split):
        return "".join(part if expansion else shlex.quote(part) for part, expansion in pieces(word))
    if isinstance(word, Unread):
        escaped = (
            part if expansion else re.sub(r'\\(?!\$)|["`]', lambda found: f"\\{found[0]}", part)
            for part, expansion in pieces(word)
        )
        return f'"{"".join(escaped)}"'
    return shlex.quote(word)


def _spared(new: Change) -> list[str]:
    """Flags that keep the trainers' environment as it was."""
    off: Mapping[str, Any] = {name: "0" for name in new.env_set if name.endswith("LAUNCH_BLOCKING")}
    return ["--train-env-vars", json.dumps(off)] if off else []
