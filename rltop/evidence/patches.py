"""The patch of a quantisation list: a unified diff that `patch -p0` takes. No file is written."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rltop.checks.ignore_list import corrected
from rltop.checks.observe import Observations

MOST_BYTES = 16 << 20
_LIST = re.compile(r'(?P<indent>[ \t]*)"ignore"\s*:\s*(?P<list>\[[^\]]*\])')


def ignore_patches(obs: Observations, directory: Path) -> Iterator[str]:
    """A diff per checkpoint whose list has a right correction; the files are named as the arguments name them."""
    for one in obs.checkpoints:
        lists = corrected(one)
        if lists is None:
            continue
        name = f"{one.path.rstrip('/')}/config.json"
        try:
            with (directory / Path(one.path).expanduser() / "config.json").open("rb") as file:
                text = file.read(MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if (changed := with_list(text, *lists)) is not None:
            yield diff(text, changed, name)


def with_list(text: str, old: Sequence[str], new: Sequence[str]) -> str | None:
    """`text` of a config with the list `old` replaced, the rest untouched; None where the list is not found in it."""
    for found in _LIST.finditer(text):
        try:
            there = json.loads(found["list"])
        except ValueError:
            continue
        if tuple(there) == tuple(old):
            inner = f"\n{found['indent']}{_step(text)}"
            rules = f",{inner}".join(json.dumps(rule, ensure_ascii=False) for rule in new)
            made = f"[{inner}{rules}\n{found['indent']}]"
            return text[: found.start("list")] + made + text[found.end("list") :]
    return None


def _step(text: str) -> str:
    """One level of indentation, as the file has it."""
    found = re.search(r"^\{\s*\n([ \t]+)\S", text)
    return found[1] if found else "  "


def diff(old: str, new: str, name: str) -> str:
    """Unified diff, also for a file without a newline at its end."""
    lines: list[str] = []
    for line in difflib.unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), name, name):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)
