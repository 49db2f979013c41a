"""Tells where, in the logs of a run, the run was started again. Pure.

A new attempt has begun when the id of a rollout goes back and another process prints it, or start-up lines came before
it: those of a driver or an engine, a checkpoint that is loaded, the timers of a start. Back to rollout 0 in the same
log is a new attempt without any, unless the same process prints it. A start that goes on behind the newest rollout is
known by the line that only a driver prints at its start, and another process. The attempt then begins at the first
start-up line, not at the rollout that gave it away. Clocks are not looked at: they jump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rltop.checks.found import LogEvent
from rltop.checks.observe import MetricRow


@dataclass(frozen=True, slots=True)
class Begin:
    """The first line of an attempt, and its time (seconds since the epoch, as the log has it)."""

    source: str
    line: int
    time: float | None = None


@dataclass(slots=True)
class _Stream:
    step: int
    pid: int | None
    source: str = ""


STARTS = frozenset({"startup", "placement_create", "ckpt_loaded"})
"""An engine that is started again within a run prints some of them too: alone they begin nothing."""
DRIVER = frozenset({"placement_create"})
"""What is printed once in the life of a run."""
TIMERS = frozenset({"start", "cold_start"})
"""Phases that a trainer is in before its first rollout only: their begin is a start-up line."""
_KINDS = ("rollout/raw_reward", "rollout/log_probs", "perf/rollout_time", "train/loss", "train/critic-value_loss")


@dataclass(slots=True)
class Restarts:
    """Sees events and rows in the order of their lines."""

    _last: dict[tuple[str, str], _Stream] = field(default_factory=dict)
    _mark: Begin | None = None
    """First start-up line since the newest row."""
    _driver: bool = False
    """A driver started since the newest row."""

    def event(self, event: LogEvent) -> None:
        """A line that may be of a start."""
        if not _starts(event):
            return
        if self._mark is None:
            self._mark = Begin(event.where.source, event.where.line or 1, event.time)
        self._driver = self._driver or event.kind in DRIVER

    def row(self, row: MetricRow, actor: str, pid: int | None) -> Begin | None:
        """A metric row; where the attempt begins to which it belongs, if that is a new one."""
        begun = self._begun(row, actor, pid)
        if begun is not None:
            self._last.clear()
        if row.where is not None:
            number = row.rollout_id if row.axis == "rollout" and row.rollout_id is not None else row.step
            self._last[_stream(row.values, row.axis), actor] = _Stream(number, pid, row.where.source)
        self._mark, self._driver = None, False
        return begun

    def _begun(self, row: MetricRow, actor: str, pid: int | None) -> Begin | None:
        before = self._last.get((_stream(row.values, row.axis), actor))
        if before is None or row.where is None:
            return None
        number = row.rollout_id if row.axis == "rollout" and row.rollout_id is not None else row.step
        other = pid is not None and before.pid is not None and pid != before.pid
        back = number < before.step
        # train/step goes back within a run where rollouts differ in their number of steps: another process says more.
        sure = other or self._mark is not None if row.axis == "rollout" else other
        if row.axis == "rollout" and number == 0 and row.where.source == before.source:
            sure = sure or pid is None or before.pid is None
        if (back and sure) or (other and self._driver):
            return self._mark or Begin(row.where.source, row.where.line or 1, row.time)
        return None


def _starts(event: LogEvent) -> bool:
    if event.kind == "timer":
        return event.data.get("edge") == "start" and event.data.get("name") in TIMERS
    return event.kind in STARTS


def _stream(values: Mapping[str, float], axis: str) -> str:
    """Rows that come one after the other."""
    kind = next((name for name in _KINDS if name in values), "")
    return f"{axis} {kind or sorted(values)[0] if values else ''}"
