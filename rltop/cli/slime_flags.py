"""`rltop slime-flags`: a slime launch with an engine toggle changed, as text. Nothing is started.

    rltop slime-flags cuda_graph=off --script run.sh      # the edited launch line, for a restart
    rltop slime-flags cuda_graph=off                      # only the flags
    rltop slime-flags cuda_graph=off --ab 8 --gpus-per-engine 2 > ab.yaml    # for --sglang-config: half each way

slime passes `--sglang-FLAG` on to SGLang, so the table of toggles that restarts rltop's own engines edits its launch
lines too. What only the environment switches goes into `--runtime-env-json`; `--train-env-vars` spares the trainers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.cli.output import note
from rltop.engines.flags import parse
from rltop.engines.toggles import Change, change
from rltop.errors import RltopError
from rltop.evidence.launch_script import from_argv, is_unread, read_script

PREFIX = "--sglang-"
WHERE = "slime-flags"
SLIMES = "0.5.15"
"""SGLang in slime's image (2026-08)."""
_SLIMES_OWN = frozenset({"config", "server-concurrency", "router-ip", "router-port"})
"""`--sglang-…` that slime does not pass on as flags of the server."""


@dataclass(frozen=True, slots=True)
class Split:
    """A launch line, taken apart."""

    others: tuple[str, ...]
    """Words that are not SGLang's, the program first."""
    engine: tuple[str, ...]
    """SGLang's, without slime's prefix."""


def slime_flags(
    changes: Sequence[str], *, script: Path | None, ab: int, gpus_per_engine: int, model: str, version: str
) -> int:
    """Print it. version: of SGLang; "" for the one of slime's image.

    Raises RltopError: an unknown toggle, a combination that SGLang refuses, a script without a launch.
    """
    version = version or SLIMES
    wanted = _wanted(changes)
    split = _read(script) if script is not None else Split((), ())
    new = change(split.engine, {}, wanted, version=version)
    if not new.allowed:
        first = new.refusals[0]
        raise RltopError(first.why, where=f"{WHERE} {' '.join(changes)}", do=first.do)
    for text in (*new.warnings, *(f"{name} moves too: {alias.why}" for name, alias in new.aliases.items())):
        note(text)
    if ab:
        print(ab_groups(split.engine, new, gpus=ab, gpus_per_engine=gpus_per_engine, model=model, version=version))
        return 0
    for word in new.removed:
        note(f"- {PREFIX}{word.removeprefix('--')}")
    for word in new.added:
        note(f"+ {PREFIX}{word.removeprefix('--')}")
    _say_environment(new)
    print(" ".join(map(_quoted, [*split.others, *prefixed(new.argv), *_spared(new)])))
    return 0


def prefixed(argv: Sequence[str]) -> list[str]:
    """SGLang's words as slime takes them."""
    return [f"{PREFIX}{word[2:]}" if word.startswith("--") else word for word in argv]


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
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RltopError("cannot read the script", where=str(script), why=str(error)) from None
    launch = read_script(text, str(script), directory=str(script.parent), load=_sourced)
    words = [word.text for word in (launch.words or from_argv(shlex.split(text, comments=True)).words)]
    if not any(word.startswith("--") for word in words):
        raise RltopError("no launch in it", where=str(script), why="no command starts a Python program with flags")
    for text in launch.unresolved:
        note(f"{script}: {text} is for the shell to work out; it stands in the line as it is written")
    return split(words)


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
            word = f"--{word.removeprefix(PREFIX)}" if into is engine else word
        into.append(word)
    return Split(tuple(others), tuple(engine))


def _say_environment(new: Change) -> None:
    if new.env_set:
        note(f"and in --runtime-env-json: {json.dumps({'env_vars': dict(new.env_set)})}")
        note("it reaches the trainers too; the flag --train-env-vars in the line sets it back for them")
    for name in new.env_unset:
        note(f"and take {name} out of --runtime-env-json")


def _quoted(word: str) -> str:
    """As a shell reads it back; what it has to work out stays for it to work out."""
    return f'"{word}"' if is_unread(word) and '"' not in word else shlex.quote(word)


def _spared(new: Change) -> list[str]:
    """Flags that keep the trainers' environment as it was."""
    off: Mapping[str, Any] = {name: "0" for name in new.env_set if name.endswith("LAUNCH_BLOCKING")}
    return ["--train-env-vars", json.dumps(off)] if off else []
