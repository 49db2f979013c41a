"""Which two runs to compare, and what is known of them: for `rltop changed`, and for the dashboard of a living run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltop.daemon.capture import MANIFEST
from rltop.daemon.past import open_past, state_of
from rltop.errors import RltopError
from rltop.runs import RunInfo, find_run, list_runs
from rltop.runs.changes import Difference, Facts, difference

SHOWN = 12
"""Most changes in the state key `changed`."""
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
    problems: tuple[str, ...] = ()
    """What of it could not be read."""

    @property
    def label(self) -> str:
        """`NAME`, or `NAME#2` for an attempt that is not the newest."""
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
        """Wall clock of its start."""
        return float((self.manifest or {}).get("captured") or self.run.started)


def see(name: str) -> Seen:
    plain, _, number_text = name.partition("#")
    run = find_run(plain)
    if not number_text:
        return look(run)
    if not number_text.isdigit():
        raise RltopError(f"{name!r} is no attempt of a run", where="changed", do=f"rltop changed {plain}#1 {plain}")
    return look(run, int(number_text))


def look(run: RunInfo, attempt: int | None = None) -> Seen:
    """One attempt of a run, the newest by default. Raises RltopError when there is no such attempt."""
    state: dict[str, Any] = {}
    problems: list[str] = []
    try:
        with open_past(run.path, living=run.alive, migrated=False) as past:
            state = state_of(past.connection, _KEYS)
    except RltopError as error:
        problems.append(f"{run.name}: {error.what}: only its manifest is compared")
    newest = int((state.get("run") or {}).get("attempt") or 1)
    wanted = newest if attempt is None else attempt
    if not 1 <= wanted <= newest:
        raise RltopError(
            f"run {run.name!r} has no attempt {wanted}", where="changed", why=f"it has {newest}", do="rltop ps --all"
        )
    manifest = _manifest(run.path / (MANIFEST if wanted == newest else f"manifest.{wanted}.json"), problems)
    return Seen(run, wanted, wanted == newest, state, manifest, tuple(problems))


def _manifest(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read ({error}): it counts as missing")
        return None
    return found if isinstance(found, dict) else None


def last_good(after: Seen) -> tuple[Seen, str]:
    """The newest good run that began before `after`, and why it was chosen. The same program goes before another."""
    earlier = [look(run) for run in list_runs() if run.path != after.run.path]
    if after.attempt > 1:
        earlier.append(look(after.run, after.attempt - 1))
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


def compare(before: Seen, after: Seen) -> Difference:
    """What changed between them, and what of it is not known."""
    found = difference(before.facts(), after.facts())
    found.unknown[:0] = [*before.problems, *after.problems]
    return found


def as_state(run_dir: Path) -> dict[str, Any]:
    """Value of the state key `changed`: the run in `run_dir` against the last good one before it."""
    run = next((found for found in list_runs(everywhere=True) if found.path == run_dir.resolve()), None)
    if run is None:
        return {"before": None, "after": run_dir.name, "why": "the run is not in the registry", "changes": []}
    after = look(run)
    try:
        before, why = last_good(after)
    except RltopError as error:
        return {"before": None, "after": after.label, "why": f"{error.what}: {error.why}", "changes": []}
    found = compare(before, after)
    keys = ("kind", "name", "before", "after", "why")
    return {
        "before": before.label,
        "after": after.label,
        "why": why,
        "changes": [{key: getattr(change, key) for key in keys} for change in found.changes[:SHOWN]],
        "more": max(0, len(found.changes) - SHOWN),
        "unknown": found.unknown,
    }
