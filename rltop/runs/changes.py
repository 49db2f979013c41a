"""What changed between two runs, the likely culprit first. Pure: two descriptions in, a list out.

What one of them does not know is a note, never a change: a run without a manifest did not lose its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rltop.runs.masks import is_noise, is_secret
from rltop.runs.risks import EXPLAINS, explained, risk_of

SECRET = "(secret)"
NOT_KEPT = "(not kept)"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one run."""

    name: str
    path: str
    manifest: Mapping[str, Any] | None
    """As `rltop.daemon.capture` wrote it; None: there is none."""
    args: Mapping[str, Any]
    """Arguments as the trainer resolved them; empty: it told none."""
    failing: tuple[str, ...] = ()
    """Root causes among the failed checks."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `before` and `after` are None where the thing was not there."""

    kind: str
    """argument, environment, version, git, checkpoint, command, host, directory"""
    name: str
    before: Any
    after: Any
    score: int
    why: str
    """Why it stands where it stands."""
    explains: tuple[str, ...] = ()
    """Checks that failed in the later run and that a change of this kind can explain."""


@dataclass(slots=True)
class Difference:
    """The answer: changes, the likeliest culprit first, and what could not be compared."""

    changes: list[Change] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def difference(before: Facts, after: Facts) -> Difference:
    """Everything that differs between two runs."""
    found = Difference()
    for kind, name, old, new in _all(before, after, found.unknown):
        risk = risk_of(kind, name)
        causes = tuple(explained(risk, after.failing))
        why = risk.why + (f"; can explain {', '.join(causes)}" if causes else "")
        score = risk.score + (EXPLAINS if causes else 0)
        found.changes.append(Change(kind, name, old, new, score, why, causes))
    found.changes.sort(key=lambda change: (-change.score, change.kind, change.name))
    return found


def _all(before: Facts, after: Facts, unknown: list[str]) -> Iterator[tuple[str, str, Any, Any]]:
    yield from _arguments(before, after, unknown)
    old, new = before.manifest, after.manifest
    for facts in (before, after):
        if facts.manifest is None:
            unknown.append(
                f"{facts.name}: no manifest (an older rltop, or its daemon died at the start): environment, versions, "
                "git and checkpoints are not known"
            )
        else:
            unknown += [f"{facts.name}: {note}" for note in facts.manifest.get("notes") or ()]
    if old is None or new is None:
        return
    yield from _environment(old.get("environment") or {}, new.get("environment") or {}, before, after, unknown)
    yield from _versions(old.get("versions") or {}, new.get("versions") or {})
    yield from _git(old.get("git") or [], new.get("git") or [])
    yield from _checkpoints(old.get("checkpoints") or {}, new.get("checkpoints") or {})
    for kind, key in (("host", "host"), ("directory", "cwd")):
        if old.get(key) != new.get(key):
            yield kind, key, old.get(key), new.get(key)


# ---------------------------------------------------------------- arguments


def _arguments(before: Facts, after: Facts, unknown: list[str]) -> Iterator[tuple[str, str, Any, Any]]:
    old_words, new_words = _command(before), _command(after)
    old_flags, new_flags = parse_flags(old_words), parse_flags(new_words)
    if old_words and new_words:
        old_program, new_program = _program(old_words), _program(new_words)
        if old_program != new_program:
            yield "command", "program", " ".join(old_program), " ".join(new_program)
    if before.args and after.args:
        old, new = _plain(before.args), _plain(after.args)
        # What was typed and the trainer does not know by that name is compared as typed.
        told = old.keys() | new.keys()
        old |= {name: value for name, value in old_flags.items() if name not in told}
        new |= {name: value for name, value in new_flags.items() if name not in told}
    else:
        old, new = old_flags, new_flags
        for facts in (before, after):
            if not facts.args:
                unknown.append(f"{facts.name}: its trainer told no arguments; the command lines are compared")
        if not (old_words and new_words):
            return
    for name in sorted(old.keys() | new.keys()):
        first, second = _neutral(old.get(name), before), _neutral(new.get(name), after)
        if first != second:
            yield "argument", name, _open(name, old.get(name)), _open(name, new.get(name))


def _open(name: str, value: Any) -> Any:
    return SECRET if value is not None and is_secret(name, str(value)) else value


def _command(facts: Facts) -> list[str]:
    words = facts.manifest.get("command") if facts.manifest is not None else None
    return [str(word) for word in words] if isinstance(words, list) else []


def _plain(args: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).lstrip("-").replace("-", "_"): value for name, value in args.items()}


def _neutral(value: Any, facts: Facts) -> Any:
    """A value without what differs between any two runs: the run's own directory and name."""
    if isinstance(value, str):
        return value.replace(facts.path, "{run directory}").replace(f"/{facts.name}/", "/{run}/")
    if isinstance(value, list | tuple):
        return [_neutral(item, facts) for item in value]
    return value


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """Flags of a command line: `--a b`, `--a=b`, `--a` alone (True), `--a b c` and repeats (lists). Names with `_`."""
    found: dict[str, Any] = {}
    name = ""
    for word in argv[1:]:
        if word.startswith("--") and len(word) > 2:
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            if equals:
                _add(found, name, value)
                name = ""
            else:
                found.setdefault(name, True)
        elif name:
            _add(found, name, word)
    return found


def _add(found: dict[str, Any], name: str, value: str) -> None:
    had = found.get(name)
    found[name] = value if had is None or had is True else [*(had if isinstance(had, list) else [had]), value]


def _program(words: Sequence[str]) -> tuple[str, ...]:
    """What runs: the words before the first flag, the interpreter by its name only."""
    head: list[str] = []
    for index, word in enumerate(words):
        if word.startswith("--") and index:
            break
        head.append(PurePath(word).name if index == 0 else word)
    return tuple(head)


# ---------------------------------------------------------------- the manifest's parts


def _environment(
    old: Mapping[str, Any], new: Mapping[str, Any], before: Facts, after: Facts, unknown: list[str]
) -> Iterator[tuple[str, str, Any, Any]]:
    blind = 0
    for name in sorted(old.keys() | new.keys()):
        if is_noise(name):
            continue  # an older rltop kept it
        first, second = old.get(name), new.get(name)
        if first is not None and second is not None and "value" not in first and "value" not in second:
            if first.get("fingerprint") is None or second.get("fingerprint") is None:
                blind += 1
                continue
            if first["fingerprint"] == second["fingerprint"]:
                continue
        elif _neutral((first or {}).get("value"), before) == _neutral((second or {}).get("value"), after) and (
            (first is None) == (second is None)
        ):
            continue
        yield "environment", name, _shown(first), _shown(second)
    if blind:
        unknown.append(f"environment: {blind} variables could not be compared (no fingerprints)")


def _shown(entry: Mapping[str, Any] | None) -> Any:
    if entry is None:
        return None
    return entry.get("value", SECRET if entry.get("secret") else NOT_KEPT)


def _versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    known = "python" in old and "python" in new
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) == new.get(name):
            continue
        if (name not in old or name not in new) and not known and name not in ("rltop", "os", "driver"):
            continue  # one of the two could not tell its Python's packages: a note says so
        if name == "driver" and (name not in old or name not in new):
            continue
        yield "version", name, old.get(name), new.get(name)


def _git(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Any, Any]]:
    """Repositories are matched by their place; a lone one on each side is the same work, wherever it was cloned to."""
    before = {str(state["root"]): state for state in old}
    after = {str(state["root"]): state for state in new}
    if len(before) == len(after) == 1 and before.keys() != after.keys():
        before = {next(iter(after)): next(iter(before.values()))}
    for root in sorted(before.keys() & after.keys()):
        first, second = before[root], after[root]
        if (first.get("commit"), first.get("diff")) != (second.get("commit"), second.get("diff")):
            yield "git", PurePath(root).name, _commit(first), _commit(second)


def _commit(state: Mapping[str, Any]) -> str:
    text = f"{str(state.get('commit', ''))[:10]} {state.get('subject', '')}".strip()
    if state.get("dirty"):
        stat = state.get("diff_stat") or [f"{state['dirty']} files"]
        text += f" + uncommitted: {str(stat[-1]).strip()}"
    return text


def _checkpoints(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Same flag, same path, something else there. Another path is a change of the flag itself."""
    for flag in sorted(old.keys() & new.keys()):
        first, second = old[flag], new[flag]
        if first.get("path") != second.get("path"):
            continue
        moved = [key for key in (first.keys() | second.keys()) if first.get(key) != second.get(key)]
        if moved and flag not in ("save", "critic-save"):
            yield "checkpoint", flag, _some(first, moved), _some(second, moved)


def _some(state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: state.get(key) for key in sorted(keys)}
