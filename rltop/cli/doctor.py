"""`rltop doctor`: judges a launch that has not happened. It reads arguments and checkpoints, asks the host, and edits
nothing."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rltop.checks.catalogue import LAUNCH
from rltop.checks.evaluate import assemble, evaluate
from rltop.checks.plan import Step, launch_plan
from rltop.checks.render import render
from rltop.checks.thresholds import DEFAULTS
from rltop.checks.verdict import Report
from rltop.cli.check import read_thresholds
from rltop.cli.output import print_json
from rltop.errors import RltopError
from rltop.evidence.host import Host, ThisHost
from rltop.evidence.launch import Facts, gather
from rltop.evidence.launch_script import Launch, from_argv, read_script
from rltop.evidence.patches import ignore_patches
from rltop.evidence.shell import Word

MOST_BYTES = 4 << 20
_LABEL = 10


def doctor(
    words: Sequence[str],
    *,
    as_json: bool = False,
    ray_address: str | None = "",
    patch_only: bool = False,
    config: Path | None = None,
    refs: bool = False,
    host: Host | None = None,
) -> int:
    """Gathers, judges, prints. 0: no check failed; 1: one did.

    Raises RltopError (exit 2): nothing given, a file that can not be read, nothing in it that starts a run.
    """
    thresholds = read_thresholds(config) if config is not None else DEFAULTS
    launch, directory = read_launch(words)
    facts = gather(launch, host or ThisHost(), directory, ray_address=ray_address)
    report = judged(evaluate(facts.obs, thresholds))
    plan = launch_plan(facts.obs)
    failed = 1 if report.summary.get("fail") else 0
    patch = "".join(ignore_patches(facts.obs, directory))
    if patch_only:
        sys.stdout.write(patch)
    elif as_json:
        print_json({**document(facts, plan, report), "patch": patch})
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        print("\n".join(_told(facts, plan, width)))
        print(render(report, width=width, refs=refs))
        if patch:
            print(f"\nthe list of quant.map, corrected (rltop doctor --patch … | patch -p0):\n\n{patch}", end="")
    sys.stdout.flush()
    return failed


def judged(report: Report) -> Report:
    """Of a report what can be judged before a launch."""
    return assemble(verdict for verdict in report.verdicts if verdict.id in LAUNCH)


def read_launch(words: Sequence[str]) -> tuple[Launch, Path]:
    """The launch, and the directory from which its relative paths count.

    Raises RltopError (exit 2) as `doctor`.
    """
    if not words:
        raise RltopError(
            "what is to be launched?",
            where="rltop doctor",
            do="rltop doctor FILE (a launch script, flags, a config.toml), or rltop doctor -- python train.py …",
        )
    path = Path(words[0])
    if len(words) > 1 or words[0].startswith("-") or not path.exists():
        if len(words) == 1 and not words[0].startswith("-"):
            raise RltopError("there is no such file", where=words[0], do="a command goes behind --")
        return from_argv(words), Path.cwd()
    text = _text(path)
    if path.suffix == ".toml":
        return _config(text, path), Path.cwd()
    launch = read_script(text, str(path), os.environ, directory=str(path.parent), load=_load)
    if not launch.words:
        from rltop.evidence.args import words_of

        flags = tuple(Word(word, line) for word, line in words_of(text))
        launch = Launch(str(path), flags)
    if not any(word.text.startswith("-") or "=" in word.text for word in launch.words):
        raise RltopError(
            "it starts no run that rltop understands",
            where=str(path),
            why="there is no `python …` with flags in it, and it is no list of flags",
            do="give the command itself: rltop doctor -- python train.py …",
        )
    return launch, Path.cwd()


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RltopError("is too long for a launch script", where=str(path), why="it has more than 4 MiB")
        return data.decode("utf-8")
    except OSError as error:
        raise RltopError("can not be read", where=str(path), why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise RltopError("is no text", where=str(path), why=str(error)) from None


def _load(path: str) -> str | None:
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return None


def _config(text: str, path: Path) -> Launch:
    """The trainer of a config of `rltop up`."""
    from rltop.config import parse_up
    from rltop.train.arguments import TrainConfig
    from rltop.train.flags import flag_names

    config = parse_up(text, where=str(path), trainer_flags=flag_names(TrainConfig))
    words = config.command or ("rltop", "train", *config.flags)
    at = config.lines.get("command", 1)
    found: list[Word] = []
    for word in words:
        at = config.lines.get(word.partition("=")[0], at)
        found.append(Word(word, at))
    return Launch(str(path), tuple(found), config.env)


def document(facts: Facts, plan: Sequence[Step], report: Report) -> dict[str, Any]:
    """The JSON of `--json`, without its schema."""
    verdicts: dict[str, Any] = msgspec.to_builtins(report)
    return {
        "source": facts.launch.source,
        "command": facts.launch.text,
        "plan": [step._asdict() for step in plan],
        "ports": [{"port": port, "wanted_by": flag, "taken_by": who} for port, flag, who in facts.taken],
        "versions": dict(facts.versions),
        "unresolved": list(facts.launch.unresolved),
        **{key: value for key, value in verdicts.items() if key != "schema"},
    }


def _told(facts: Facts, plan: Sequence[Step], width: int) -> Iterator[str]:
    """Plan and host, for people; ends with an empty line."""
    for step in plan:
        yield from _row(step.topic, step.text, width, warn=step.warn)
    for port, flag, who in facts.taken:
        yield from _row("port", f"{port}, wanted by {flag}, is taken on this host by {who}", width, warn=True)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions)
    yield from _row("host", versions, width)
    if not facts.obs.ray:
        yield from _row("cluster", "no Ray cluster was asked; placement is judged without one", width)
    for text in facts.launch.unresolved:
        yield from _row("unread", f"{' '.join(text.split())} (only a shell can work it out)", width)
    yield ""


def _row(label: str, text: str, width: int, *, warn: bool = False) -> list[str]:
    mark = "! " if warn else "  "
    lead = f"{label:<{_LABEL}}{mark}"
    shown = "".join(char if char.isprintable() else " " for char in text)
    indent = " " * len(lead)
    return textwrap.wrap(
        shown, max(width, 40), initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False
    ) or [lead.rstrip()]
