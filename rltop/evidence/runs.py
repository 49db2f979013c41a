"""Which folders under one path hold the same run.

A run may lie in one folder or in several (logs here, metrics there, a folder for each node), and several runs may lie
under one path. Two folders are of different runs where both measured the same metric at the same steps and disagree.
What ranks and nodes measure differs within a run, so folders that are called after these are never told apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from posixpath import dirname

from rltop.checks.observe import MetricRow, Where

_PART = re.compile(
    r"(?:^|[-_.])(?:rank|node|worker|host|gpu|actor|engine|rollout|train|critic)s?[-_]?\d*$", re.IGNORECASE
)
"""Names of folders that hold a part of a run."""
_LEAST = 3
"""Steps that two folders must share before they can disagree."""
_SAME = 0.01
"""Relative difference that rounding in a log may make."""
_COMPARED = ("train/", "rollout/raw_reward", "rollout/log_probs", "rollout/response_len/mean")
"""What two sources of one run agree on; times and throughputs are measured by each on its own."""
MOST_FOLDERS = 64
"""Folders that are compared with each other; more are taken for parts of one run."""

_Cells = dict[str, dict[tuple[str, int | None, int], float]]
"""Metric -> (axis, rank, step) -> value."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Folder -> number of its run, 0 for the first by time. Empty where there is one run only."""

    folders: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many runs there are."""
        return max(self.folders.values(), default=0) + 1

    def of(self, where: Where | None) -> int:
        """Run of a place: that of its folder, or of the nearest one above; else 0."""
        folder = dirname(where.source) if where is not None and self.folders else ""
        while folder and folder not in self.folders:
            folder = dirname(folder)
        return self.folders.get(folder, 0)


def runs_of(rows: Iterable[MetricRow]) -> Runs:
    """The runs that the metrics tell apart."""
    cells: dict[str, _Cells] = {}
    first: dict[str, float] = {}
    for row in rows:
        folder = dirname(row.where.source) if row.where else ""
        if len(cells) >= MOST_FOLDERS and folder not in cells:
            return Runs()
        own = cells.setdefault(folder, {})
        if row.time is not None:
            first[folder] = min(row.time, first.get(folder, row.time))
        for name, value in row.values.items():
            if name.startswith(_COMPARED) and math.isfinite(value):
                own.setdefault(name, {}).setdefault((row.axis, row.rank, row.step), value)
    if len(cells) < 2:
        return Runs()
    groups: list[list[str]] = []
    for folder in sorted(cells, key=lambda one: (first.get(one, math.inf), one)):
        home = next((group for group in groups if not any(_differ(folder, one, cells) for one in group)), None)
        if home is None:
            groups.append([folder])
        else:
            home.append(folder)
    return Runs({folder: at for at, group in enumerate(groups) for folder in group}) if len(groups) > 1 else Runs()


def _differ(left: str, right: str, cells: dict[str, _Cells]) -> bool:
    """Two folders measured the same and disagree."""
    if _PART.search(left.rsplit("/", 1)[-1]) or _PART.search(right.rsplit("/", 1)[-1]):
        return False
    return any(
        _disagree([(value, theirs[place]) for place, value in mine.items() if place in theirs])
        for name, mine in cells[left].items()
        if (theirs := cells[right].get(name))
    )


def _disagree(pairs: Sequence[tuple[float, float]]) -> bool:
    """Most of the shared steps have another value."""
    other = sum(abs(a - b) > _SAME * max(abs(a), abs(b)) for a, b in pairs)
    return len(pairs) >= _LEAST and 2 * other > len(pairs)
