"""`rltop changed A B`: what differs between two runs, the likeliest culprit first. `rltop changed RUN`: since the last
good run before it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.cli.output import age, clean, note, number, print_json
from rltop.errors import RltopError
from rltop.runs import RunInfo, find_run, list_runs
from rltop.runs.changes import Change, Difference, Facts, difference

SHOWN = 12
"""Most changes without --all."""
MANIFEST = "manifest.json"
_KEYS = ("run", "checks", "previous", "phase", "metric/rollout/raw_reward")


@dataclass(frozen=True, slots=True)
class Seen:
    """One attempt of a run, as its directory describes it."""

    run: RunInfo
    attempt: int
    newest: bool
    """It is the run's newest attempt: its journal's state is about it."""
    state: Mapping[str, Any]
    manifest: Mapping[str, Any] | None

    @property
    def label(self) -> str:
        return self.run.name if self.newest else f"{self.run.name}#{self.attempt}"

    def facts(self) -> Facts:
        """For the comparison."""
        args = (self.state.get("run") or {}).get("args") if self.newest else None
        return Facts(self.label, str(self.run.path), self.manifest, args or {}, tuple(self._summary()[1]))

    def _summary(self) -> tuple[Mapping[str, Any], list[str]]:
        found = self.state.get("checks") if self.newest else self.state.get("previous")
        found = found or {}
        return found.get("summary") or {}, [str(cause) for cause in found.get("root_causes") or []]

    @property
    def good(self) -> bool:
        """It got as far as a rollout, checks passed and none failed, and it did not fail."""
        counts, _ = self._summary()
        about = self.state.get("run" if self.newest else "previous") or {}
        got_far = bool(self.state.get("metric/rollout/raw_reward")) if self.newest else about.get("rollout") is not None
        return got_far and about.get("state") != "failed" and bool(counts.get("pass")) and not counts.get("fail")

    @property
    def started(self) -> float:
        return float((self.manifest or {}).get("captured") or self.run.started)


def changed(first: str, second: str | None, *, as_json: bool, every: bool) -> int:
    """Compare and print. Raises RltopError: no such run or attempt, no good run before it."""
    if second is None:
        after = _see(first)
        before, why = _last_good(after)
    else:
        before, after, why = _see(first), _see(second), "named"
    found = difference(before.facts(), after.facts())
    if as_json:
        print_json(_json(before, after, why, found))
        return 0
    print("\n".join(_lines(before, after, why, found, every=every)))
    return 0


# ---------------------------------------------------------------- which runs


def _see(name: str) -> Seen:
    plain, _, number_text = name.partition("#")
    run = find_run(plain)
    if not number_text:
        return _look(run, None)
    if not number_text.isdigit():
        raise RltopError(f"{name!r} is no attempt of a run", where="changed", do=f"rltop changed {plain}#1 {plain}")
    return _look(run, int(number_text))


def _look(run: RunInfo, attempt: int | None) -> Seen:
    from rltop.daemon.past import open_past, state_of

    state: dict[str, Any] = {}
    try:
        with open_past(run.path, living=run.alive) as past:
            state = state_of(past.connection, _KEYS)
    except RltopError as error:
        note(f"run {run.name}: {error.what}: only its manifest is compared")
    newest = int((state.get("run") or {}).get("attempt") or 1)
    wanted = newest if attempt is None else attempt
    if not 1 <= wanted <= newest:
        raise RltopError(
            f"run {run.name!r} has no attempt {wanted}", where="changed", why=f"it has {newest}", do="rltop ps --all"
        )
    manifest = _manifest(run.path / MANIFEST) if wanted == newest else _manifest(run.path / f"manifest.{wanted}.json")
    return Seen(run, wanted, wanted == newest, state, manifest)


def _manifest(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        note(f"{path}: cannot be read ({error}): it counts as missing")
        return None
    return found if isinstance(found, dict) else None


def _last_good(after: Seen) -> tuple[Seen, str]:
    """The newest good run that began before `after`, and why it was chosen. The same program goes before another."""
    earlier = [_look(run, None) for run in list_runs() if run.path != after.run.path]
    if after.attempt > 1:
        earlier.append(_look(after.run, after.attempt - 1))
    good = sorted(
        (seen for seen in earlier if seen.good and seen.started < after.started), key=lambda seen: -seen.started
    )
    if not good:
        raise RltopError(
            f"no good run before {after.label!r}",
            where="changed",
            why=f"of {len(earlier)} earlier runs none had rollouts, passed checks and no failed one",
            do=f"rltop changed OTHER {after.run.name} compares with any run (rltop ps --all)",
        )
    same = [seen for seen in good if _script(seen) == _script(after)]
    chosen = (same or good)[0]
    why = "the newest run before it with rollouts, passed checks and no failed one"
    if same and same[0] is not good[0]:
        why += f", and with the same program (newer, but of another program: {good[0].label})"
    elif not same:
        why += "; it ran another program"
    return chosen, why


def _script(seen: Seen) -> tuple[str, ...]:
    words = [str(word) for word in (seen.manifest or {}).get("command") or seen.run.command]
    head: list[str] = []
    for index, word in enumerate(words):
        if word.startswith("--") and index:
            break
        head.append(word if index else Path(word).name)
    return tuple(head)


# ---------------------------------------------------------------- printing


def _json(before: Seen, after: Seen, why: str, found: Difference) -> dict[str, Any]:
    return {
        "before": before.label,
        "after": after.label,
        "chosen": why,
        "changes": [
            {
                "kind": change.kind,
                "name": change.name,
                "before": change.before,
                "after": change.after,
                "score": change.score,
                "why": change.why,
                "explains": list(change.explains),
            }
            for change in found.changes
        ],
        "unknown": found.unknown,
    }


def _lines(before: Seen, after: Seen, why: str, found: Difference, *, every: bool) -> list[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    lines = [f"{before.label} -> {after.label}, begun {age(abs(after.started - before.started))} apart"]
    if why != "named":
        lines.append(f"{before.label} is {why}")
    failing = after.facts().failing
    if failing:
        lines.append(f"{after.label} fails: {', '.join(failing)}")
    shown = found.changes if every else found.changes[:SHOWN]
    if not found.changes:
        lines += ["", "nothing that is known of both runs differs"]
    for place, change in enumerate(shown, 1):
        lines += ["", *_change(place, change, width)]
    if left := len(found.changes) - len(shown):
        lines += ["", f"{left} less likely changes are left out: --all shows them"]
    if found.unknown:
        lines += ["", "not known:", *(f"  {clean(text)}" for text in found.unknown)]
    return lines


def _change(place: int, change: Change, width: int) -> list[str]:
    name = f"--{change.name.replace('_', '-')}" if change.kind == "argument" else change.name
    return [
        _cut(f"{place:>3}  {change.kind} {name}", width),
        *(
            _cut(f"       {sign} {clean(_text(value))}", width)
            for sign, value in (("-", change.before), ("+", change.after))
        ),
        _cut(f"       {change.why}", width),
    ]


def _text(value: Any) -> str:
    return "(not there)" if value is None else "set" if value is True else number(value)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
