"""The last words of a process that dies at its start: what Python, argparse, the loader or rltop's own engine prints
before any logging is set up, without a time and without a traceback.

    /usr/bin/python3: Error while finding module specification for 'sglang.launch_server' (ModuleNotFoundError: ...)
    launch_server.py: error: argument --tp-size: invalid int value: 'x'
    error: /models/none/config.json: cannot read the checkpoint

They are the cause, and there is no other: nothing ran yet. Pure. Lines that say nothing known are no last words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LINES = 40
"""Of the end of a log that are looked at: what may follow the words (hints, leaked semaphores) is shorter."""

_LOGGED = re.compile(r"^\[?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|^\[[^\]]{0,80}\d\d:\d\d:\d\d|^(?:INFO|DEBUG|WARNING)\b")
"""A line of a process that can log: whatever stands above it was not its last word."""
_FORMS: tuple[re.Pattern[str], ...] = (
    re.compile(r"^(?P<usage>[\w./-]{1,200}: error): (?P<what>\S.*)"),
    re.compile(r"^(?P<own>error): (?P<what>\S.*)"),
    re.compile(r"^(?:Error|ERROR|Fatal(?: Python)? error|fatal): (?P<what>\S.*)"),
    re.compile(
        r"^(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|NotFound))(?:: (?P<what>.*))?$"
    ),
    re.compile(r"^\S*python[\d.]*: (?P<what>\S.*)"),
    re.compile(r"^(?P<what>\S.*: (?:command not found|not found|No such file or directory|Permission denied))$"),
    re.compile(r"^(?P<what>\S+: error while loading shared libraries: .*)"),
)
_OWN_WHY = re.compile(r"^  why: (?P<text>\S.*)")
_OWN_DO = re.compile(r"^  do:  ?(?P<text>\S.*)")

_IMPORT = re.compile(
    r"ModuleNotFoundError|ImportError|No module named|cannot import name|error while loading shared libraries|"
    r"undefined symbol|can't open file"
)
_CHECKPOINT = re.compile(
    r"config\.json|safetensors|checkpoint|tokenizer|HFValidationError|RepositoryNotFoundError|LocalEntryNotFoundError|"
    r"not a valid model identifier|not a local folder|[Uu]nrecognized model|model type .* not recognize",
    re.I,
)
_USAGE = re.compile(r"unrecognized arguments|invalid choice|\bargument --?\w|ambiguous option|arguments are required")


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """Why a start failed, in the process's own words."""

    kind: str
    """`usage`, `import`, `checkpoint` or `error`."""
    cause: str
    """What that means: a clause for people."""
    text: str
    """The words, without what every such line has in front."""
    do: str
    raw: str
    """The line as it stands."""
    source: str
    """Name of the log."""
    line: int
    """From 1."""


_MEANS = {
    "usage": ("It refuses its arguments", "rltop engine set --dry-run shows the argv"),
    "import": (
        "What it needs cannot be imported",
        "give python the interpreter that has the server installed (python in [engines])",
    ),
    "checkpoint": (
        "Its checkpoint cannot be read",
        "model_path must be a checkpoint's folder (config.json, tokenizer, *.safetensors) that the engine's host sees",
    ),
}


def class_of(text: str) -> tuple[str, str, str] | None:
    """(class, what it means, what to do) of an error at the start by its words; None: no class of its own."""
    for kind, pattern in (("import", _IMPORT), ("checkpoint", _CHECKPOINT), ("usage", _USAGE)):
        if pattern.search(text):
            return kind, *_MEANS[kind]
    return None


def last_words(lines: Sequence[tuple[int, str]], source: str) -> LastWords | None:
    """The newest error among the last lines of a log, (number, text) each; None where they tell of none."""
    for at in range(len(lines) - 1, -1, -1):
        number, text = lines[at]
        if _LOGGED.match(text):
            return None
        found = next((match for form in _FORMS if (match := form.match(text))), None)
        if found is not None:
            return _read(found, source, number, [line for _, line in lines[at + 1 :]])
    return None


def _read(found: re.Match[str], source: str, number: int, after: Sequence[str]) -> LastWords:
    groups = found.groupdict()
    what = (groups.get("what") or "").strip()
    words = f"{groups['name']}: {what}".removesuffix(": ") if groups.get("name") else what
    why = next((match["text"] for line in after if (match := _OWN_WHY.match(line))), "")
    advice = next((match["text"] for line in after if (match := _OWN_DO.match(line))), "")
    words = f"{words}: {why}" if why else words
    # What argparse refuses is an argument, whatever its value names; rltop's own engine refuses what it is given.
    known = None if groups.get("usage") else class_of(found.string)
    if known is None and (groups.get("usage") or groups.get("own")):
        known = ("usage", *_MEANS["usage"])
    kind, cause, do = known or ("error", "An error ended it", "")
    return LastWords(kind=kind, cause=cause, text=words, do=advice or do, raw=found.string, source=source, line=number)
