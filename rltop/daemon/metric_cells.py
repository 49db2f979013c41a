"""Values of `metrics` records -> cells `metric/<name>`, points of curves, and what a thousand ranks say in one cell.

A value that another trainer reports under its own name goes by rltop's too (`rltop.evidence.metric_names`): both are
curves, the cell of ours says what it was `reported` as, and the key `names` holds everything that was renamed, with the
source of the row. So the checks see what they know whoever trains, and a user finds the name that they know.

Ranks other than 0 have a curve of their own, `<name>@<rank>`: the first `OWN_RANKS` that report a name. From the next
one on all ranks are folded beside them into the curves `<name>@min` and `<name>@max` and the cell `ranks/<name>`, which
says who they are. So what a fleet costs does not grow with it, and the outlier has a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, isnan, nan
from typing import Any

from rltop.daemon.core import Core
from rltop.evidence.metric_names import Names, Rename, View
from rltop.protocol.messages import Axis, axis_of

MAX_NAME = 200
OWN_RANKS = 16
"""Ranks other than 0 of one name with curves of their own."""
OPEN_STEPS = 8
"""Newest steps of a name for which late ranks are waited."""
MOST_BAD = 8
"""Ranks with NaN or Inf that a cell names."""
MOST_TOLD = 500
"""Renamed metrics in the key `names`."""
_MOST_PLANS = 16_384


@dataclass(slots=True)
class _Spread:
    """One step of one name over all ranks."""

    step: int
    count: int = 0
    total: float = 0.0
    low: float = inf
    low_who: str = ""
    high: float = -inf
    high_who: str = ""
    bad: int = 0
    bad_who: list[str] = field(default_factory=list)
    dirty: bool = True

    def add(self, who: str, value: float) -> None:
        self.count += 1
        self.dirty = True
        if not isfinite(value):
            self.bad += 1
            if len(self.bad_who) < MOST_BAD:
                self.bad_who.append(who)
            return
        self.total += value
        if value < self.low:
            self.low, self.low_who = value, who
        if value > self.high:
            self.high, self.high_who = value, who


@dataclass(slots=True)
class _Ranks:
    """All ranks of one name."""

    axis: Axis
    own: set[int] = field(default_factory=set)
    folded: bool = False
    steps: dict[int, _Spread] = field(default_factory=dict)
    late: int = 0
    bad: int = 0
    dirty: bool = False

    def takes(self, rank: int) -> bool:
        """The rank has no curve of its own."""
        return self.folded and rank not in self.own


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is done with one name of one framework."""

    name: str
    axis: Axis
    rename: Rename | None
    ours_axis: Axis


class MetricCells:
    """Takes the values of `metrics` records. names: what the metrics of other trainers are here."""

    def __init__(self, core: Core, names: Names) -> None:
        self._core = core
        self._names = names
        self._nan: dict[str, int] = {}
        self._views: dict[str, View] = {}
        self._plans: dict[tuple[str, str, Axis | None, Axis | None], _Plan] = {}
        self._ranks: dict[str, _Ranks] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._when: float | None = None
        """Wall clock of the points of the record that is being taken; None: not known."""

    def restore(self) -> None:
        """Take over counters from a restored state table."""
        table = self._core.table
        for key in table.keys("metric/"):
            self._nan[key.removeprefix("metric/")] = int(table.get(key).get("nan", 0))
        self._told = dict(table.get("names") or {})

    def restart(self) -> None:
        """The run starts again: its steps may go back."""
        for ranks in self._ranks.values():
            ranks.steps.clear()

    def take(
        self,
        payload: dict[str, Any],
        *,
        rank: int,
        who: str,
        framework: str,
        told: Callable[[str], None],
        when: float | None = None,
    ) -> dict[str, Any]:
        """Apply the values of a record; returns its payload as the checks should see it: with rltop's names.

        payload: `values` is a map and `step` an int. who: name of its source. framework: whose names the metrics have.
        told: called with what is wrong with a value. when: wall clock of the values, NaN where nobody knows it; None:
        they are of now.
        """
        values, step = payload["values"], payload["step"]
        axis, side = _sides(payload)
        rollout_id = payload.get("rollout_id")
        renamed: dict[str, float] = {}
        now = self._core.now()
        self._when = now if when is None else None if isnan(when) else when
        for name, raw in values.items():
            if not isinstance(raw, (int, float)) or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
                told(f"{str(name)[:80]!r} is not a number under a name")
                continue
            value = _float(raw)
            plan = self._plans.get((framework, name, axis, side)) or self._plan(framework, name, axis, side)
            rename = plan.rename
            if rename is not None and rename.ours in values:
                rename = None  # what is reported under our name counts
            if rank == 0:
                kept = self._set(name, step, value, plan.axis, rollout_id, now, None)
                if rename is not None:
                    renamed[rename.ours] = ours = value * rename.scale
                    kept = self._set(rename.ours, step, ours, plan.ours_axis, rollout_id, now, name) and kept
                    if rename.ours not in self._told:
                        self._tell(rename)
                shown, shown_axis = (name, plan.axis) if rename is None else (rename.ours, plan.ours_axis)
                seen = self._ranks.get(shown)
                if seen is None and kept:  # the others may come later, with the same step
                    seen = self._ranks[shown] = _Ranks(shown_axis)
                if seen is not None:
                    self._see(seen, who, step, value if rename is None else ours)
            elif (
                rename is None and (seen := self._ranks.get(name)) is not None and seen.folded and rank not in seen.own
            ):
                # What most values of a fleet are: nothing but a number more in a spread.
                spread = seen.steps.get(step)
                if spread is None or not isfinite(value):
                    self._see(seen, who, step, value)
                else:
                    spread.add(who, value)
                    seen.dirty = True
                continue
            elif rename is not None:
                renamed[rename.ours] = ours = value * rename.scale
                kept = self._of_rank(rename.ours, rank, who, step, ours, plan.ours_axis, rollout_id, now)
            else:
                kept = self._of_rank(name, rank, who, step, value, plan.axis, rollout_id, now)
            if not kept:
                told(f"too many different names, {name[:80]!r} was left out")
        if not renamed:
            return payload
        # Each of our names says by itself what its steps count; the record's axis was about the others.
        return {**payload, "values": {**values, **renamed}, "axis": None}

    def tick(self) -> None:
        """Show what the ranks said since the last call."""
        now = self._core.now()
        for name, ranks in self._ranks.items():
            if not ranks.dirty or not ranks.folded:
                continue
            ranks.dirty = False
            newest: _Spread | None = None
            for spread in ranks.steps.values():
                newest = spread if newest is None or spread.step > newest.step else newest
                if spread.dirty:
                    spread.dirty = False
                    good = spread.count > spread.bad
                    self._set(f"{name}@min", spread.step, spread.low if good else nan, ranks.axis, None, now, None)
                    self._set(f"{name}@max", spread.step, spread.high if good else nan, ranks.axis, None, now, None)
            if newest is not None:
                self._core.set(f"ranks/{name}", _cell(newest, ranks, now))

    # ---------------------------------------------------------------- inside

    def _plan(self, framework: str, name: str, axis: Axis | None, side: Axis | None) -> _Plan:
        view = self._views.get(framework)
        if view is None:
            view = self._names.of(framework)
            if len(self._views) < 64:
                self._views[framework] = view
        rename = view.find(name, side)
        own = axis or (rename.clock if rename is not None else view.axis(name)) or axis_of(name, None)
        plan = _Plan(name, own, rename, own if rename is None else rename.clock)
        if len(self._plans) < _MOST_PLANS:
            self._plans[framework, name, axis, side] = plan
        return plan

    def _set(
        self, name: str, step: int, value: float, axis: Axis, rollout_id: Any, now: float, reported: str | None
    ) -> bool:
        """A point and its cell; False when there are too many curves."""
        if not self._core.point(name, step, value, self._when):
            return False
        if not isfinite(value):
            self._nan[name] = self._nan.get(name, 0) + 1
        cell = {
            "step": step,
            "value": value,
            "t": now,
            "axis": axis,
            "rollout_id": rollout_id,
            "nan": self._nan.get(name, 0),
        }
        if reported is not None:
            cell["reported"] = reported
        self._core.set(f"metric/{name}", cell)
        return True

    def _of_rank(
        self, name: str, rank: int, who: str, step: int, value: float, axis: Axis, rollout_id: Any, now: float
    ) -> bool:
        ranks = self._ranks.get(name)
        if ranks is None:
            if self._core.series.full(name):
                return False
            ranks = self._ranks[name] = _Ranks(axis)
        self._see(ranks, who, step, value)
        if rank in ranks.own or (len(ranks.own) < OWN_RANKS and not ranks.folded):
            ranks.own.add(rank)
            return self._set(f"{name}@{rank}", step, value, axis, rollout_id, now, None)
        ranks.folded = True
        return True

    @staticmethod
    def _see(ranks: _Ranks, who: str, step: int, value: float) -> None:
        spread = ranks.steps.get(step)
        if spread is None:
            if len(ranks.steps) >= OPEN_STEPS:
                oldest = min(ranks.steps)
                if step < oldest:
                    ranks.late += 1
                    return
                del ranks.steps[oldest]
            spread = ranks.steps[step] = _Spread(step)
        spread.add(who, value)
        ranks.bad += not isfinite(value)
        ranks.dirty = True

    def _tell(self, rename: Rename) -> None:
        """Show in the key `names` what was renamed."""
        if len(self._told) >= MOST_TOLD:
            return
        self._told = {
            **self._told,
            rename.ours: {
                "reported": rename.theirs,
                "framework": rename.framework,
                "axis": rename.axis,
                "scale": rename.scale,
                "source": rename.source,
                "checked": rename.checked,
            },
        }
        self._core.set("names", self._told)


def _sides(payload: Mapping[str, Any]) -> tuple[Axis | None, Axis | None]:
    """What the record says that its step counts, and what its ids let suppose."""
    axis: Axis | None = None
    match payload.get("axis"):
        case "rollout":
            axis = "rollout"
        case "train":
            axis = "train"
    if axis is not None:
        return axis, axis
    if payload.get("step_in_rollout") is not None:
        return None, "train"
    rollout_id = payload.get("rollout_id")
    return None, "rollout" if rollout_id is not None and rollout_id == payload["step"] else None


def _cell(spread: _Spread, ranks: _Ranks, now: float) -> dict[str, Any]:
    good = spread.count - spread.bad
    return {
        "step": spread.step,
        "axis": ranks.axis,
        "t": now,
        "ranks": spread.count,
        "min": spread.low if good else nan,
        "min_rank": spread.low_who,
        "max": spread.high if good else nan,
        "max_rank": spread.high_who,
        "mean": spread.total / good if good else nan,
        "bad": spread.bad,
        "bad_ranks": list(spread.bad_who),
        "nan": ranks.bad,
        "late": ranks.late,
    }


def _float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an int beyond float: what arithmetic would make of it
        return inf if number > 0 else -inf
