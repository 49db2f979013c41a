"""A run's name is started again: a new attempt begins in the same directory and journal.

What the attempt before left stays in the journal (events, curves, verdict changes, operations). What stood in the
state table goes: its verdicts, newest metrics, engines and sources are about another trainer, and nothing of it may be
read as the state of the new one before that has said a word. A summary of it stays under the key `previous`.

A daemon that is started without a trainer, or that finds the trainer of an earlier daemon alive, goes on with the
attempt that there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from rltop.daemon.core import Core
from rltop.daemon.past import End, end_from
from rltop.daemon.trainer_job import adopt_trainer, read_record

RECORD = "attempt"
"""Kind of the journal record that begins an attempt: records before it are not shown to the checks again."""
_GONE = ("check/", "metric/", "engine/", "toggles/", "source/", "sources/", "ranks/")
_GONE_KEYS = ("checks", "samples", "weights", "phase", "trainer", "changed", "fleet", "names")
REWARD = "metric/rollout/raw_reward"


def begins(trainer: Sequence[str], head: int, run_dir: Path) -> bool:
    """Whether a daemon that is to start `trainer` begins a new attempt.

    head: sequence of the newest event in the journal, 0 for a new one.
    """
    if not trainer or not head:
        return False
    record = read_record(run_dir)
    return record is None or adopt_trainer(record, run_dir) is None


def begin(core: Core, run_dir: Path, *, end: End | None = None, keep: Set[str] = frozenset()) -> int:
    """Put the attempt before away and begin the next; returns its number, from 2.

    end: how the one before ended, where somebody knows it better than the run directory. keep: keys that are of the
    next one already.
    """
    table = core.table
    before: Mapping[str, Any] = table.get("run") or {}
    number = int(before.get("attempt") or 1) + 1
    newest = core.ring.newest(1)
    end = end or end_from(before, table.get("trainer") or {}, run_dir, last=newest[0]["t"] if newest else None)
    checks = table.get("checks") or {}
    core.set("previous", _summary(core, number - 1, before, end))
    for key in [key for key in table.keys("") if key.startswith(_GONE) or key in _GONE_KEYS]:
        if key not in keep:
            core.set(key, None)
    core.set("run", {"name": run_dir.name, "attempt": number, "started": core.now()})
    core.series.restart()
    core.sink.record(core.now(), RECORD, "daemon", {"attempt": number})
    core.event("run", "info", _told(number, end, checks), "daemon", state="waiting", attempt=number)
    return number


def _summary(core: Core, number: int, run: Mapping[str, Any], end: End) -> dict[str, Any]:
    table = core.table
    checks, reward = table.get("checks") or {}, table.get(REWARD) or {}
    rollout = (table.get("phase") or {}).get("rollout_id")
    return {
        "attempt": number,
        "state": end.state,
        "text": end.text,
        "started": run.get("started"),
        "ended": end.ended,
        "rollout": rollout if rollout is not None else reward.get("step"),
        "reward": reward.get("value"),
        "summary": checks.get("summary", {}),
        "root_causes": checks.get("root_causes", []),
    }


def _told(number: int, end: End, checks: Mapping[str, Any]) -> str:
    how = f"attempt {number - 1} {end.state}" + (f" ({end.text})" if end.text else "")
    counts = checks.get("summary") or {}
    bad = [f"{counts[status]} {status}" for status in ("fail", "warn") if counts.get(status)]
    causes = checks.get("root_causes") or []
    if bad:
        put_away = f"; its verdicts are put away: {', '.join(bad)}" + (f" ({', '.join(causes)})" if causes else "")
    else:
        put_away = "; its verdicts are put away, none of them bad" if counts else ""
    return f"attempt {number} of this run begins; {how}{put_away}"
