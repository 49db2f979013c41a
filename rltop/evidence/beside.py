"""A rollout-only run beside the full one: the comparison that tells a bad checkpoint from a bad sync.

Both lie under one path, so the second run's arguments and metrics would be read as the first one's. It is known by its
name (`rollout_only.log`, a folder `debug-rollout-only`) or by a folder of its own whose arguments say
`--debug-rollout-only`. Its samples are marked; its arguments and metric rows are left out.
"""

from __future__ import annotations

import re
from dataclasses import replace
from posixpath import dirname

from rltop.checks.observe import Args, Where
from rltop.evidence.sink import Sink

MODE = "rollout-only"
_NAME = re.compile(r"rollout[-_ ]?only", re.IGNORECASE)


def set_aside(sink: Sink) -> None:
    """Marks and removes, unless the rollout-only run is all there is."""
    folders = _folders(sink.args)

    def aside(where: Where | None) -> bool:
        return where is not None and (bool(_NAME.search(where.source)) or dirname(where.source) in folders)

    rest = [where for where in _places(sink) if not aside(where)]
    if not rest or not any(aside(where) for where in _places(sink)):
        return
    sink.args[:] = [one for one in sink.args if not aside(one.where)]
    sink.metrics[:] = [row for row in sink.metrics if not aside(row.where)]
    sink.samples[:] = [
        replace(sample, mode=MODE) if not sample.mode and aside(sample.where) else sample for sample in sink.samples
    ]


def _folders(args: list[Args]) -> frozenset[str]:
    """Folders whose arguments are those of a rollout-only run, where another folder's are not."""
    only = {dirname(one.where.source) for one in args if one.where and one.on("debug_rollout_only")}
    full = {dirname(one.where.source) for one in args if one.where and one.flags and not one.on("debug_rollout_only")}
    return frozenset(only - full) if full else frozenset()


def _places(sink: Sink) -> list[Where | None]:
    """Where the evidence of a run comes from: what the rules would judge as its metrics, text and arguments."""
    return [
        *(row.where for row in sink.metrics),
        *(sample.where for sample in sink.samples),
        *(one.where for one in sink.args),
    ]
