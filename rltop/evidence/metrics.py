"""Metric rows: from a map of names and numbers (a line of `metrics*.jsonl`, a dict in a log) to `MetricRow`s under
slime's names.

One map may hold both what a rollout measured and what an optimizer step did; it becomes one row of each axis. Names of
other frameworks keep their own name and get slime's beside it, where both measure the same (`metric_names`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rltop.checks.found import Row
from rltop.checks.observe import Args, Axis, MetricRow, SyncEvent, Where
from rltop.evidence import jsonl
from rltop.evidence.bounded import FirstAndNewest
from rltop.evidence.metric_names import View, shipped
from rltop.evidence.sink import Reader, Sink, Source

_IDS = frozenset(
    {
        "rollout_id",
        "step",
        "train/step",
        "rollout/step",
        "eval/step",
        "training/global_step",
        "global_step",
        "step_in_rollout",
        "rank",
        "run",
        "event",
        "segment",
        "epoch",
        "timestamp",
        "time",
        "ts",
    }
)
_TEXT_NUMBERS = {
    "nan": math.nan,
    "inf": math.inf,
    "+inf": math.inf,
    "infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}
MOST_ROWS = (50_000, 50_000)
"""First and newest rows of one file."""
MOST_NAMES = 4096
"""Metrics of one row."""


def number(value: object) -> float | None:
    """A metric's value: a number, a truth value, or the words that stand for NaN and Inf. None for anything else."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str):
        return _TEXT_NUMBERS.get(value.strip().lower())
    return None


def whole(value: object) -> int | None:
    """An id: an integer, or a float without a fraction."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**53 else None
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 2**53:
        return int(value)
    return None


def rows_of(
    fields: Mapping[str, Any],
    where: Where,
    *,
    axis: Axis | None = None,
    step: int | None = None,
    rollout_id: int | None = None,
    rank: int | None = None,
    time: float | None = None,
    names: View | None = None,
) -> Iterator[MetricRow]:
    """Rows of one map: none, one, or one per axis. axis, step, rollout_id: what the line says beside the map.

    names: what names of other frameworks are here; default the table that comes with rltop, of whatever framework.
    """
    names = names or shipped().of()
    told = axis or side_of(fields)
    parts: dict[Axis, dict[str, float]] = {"rollout": {}, "train": {}}
    for name, raw in list(fields.items())[:MOST_NAMES]:
        value = number(raw)
        if value is None or name in _IDS:
            continue
        name = sys.intern(name)  # rows of one run share their names
        if (rename := names.find(name, told)) is not None:
            if rename.ours not in fields:  # what was reported under our name counts
                parts[rename.clock][sys.intern(rename.ours)] = value * rename.scale
            parts[rename.clock].setdefault(name, value)
        else:
            parts[names.axis(name) or axis or "train"][name] = value
    given = _first(fields, "train/step", "training/global_step", "global_step", "step")
    rollout = _first(fields, "rollout/step", "rollout_id", "eval/step")
    rollout = rollout_id if rollout is None else rollout
    train_step = step if axis == "train" and given is None else given
    rollout_step = step if axis == "rollout" and rollout is None else rollout
    rank = rank if (own := whole(fields.get("rank"))) is None else own
    time = time if (own_time := _seconds(fields)) is None else own_time
    if parts["rollout"] and (key := rollout_step if rollout_step is not None else train_step) is not None:
        # Without a rollout's own id the step stands in; `collect` divides it by the steps per rollout.
        yield MetricRow("rollout", key, parts["rollout"], rollout_step, None, rank=rank, time=time, where=where)
    if parts["train"] and (key := train_step if train_step is not None else rollout_step) is not None:
        inside = whole(fields.get("step_in_rollout"))
        if inside is None and train_step is None:
            inside = 0
        yield MetricRow("train", key, parts["train"], rollout_step, inside, rank=rank, time=time, where=where)


def side_of(fields: Mapping[str, Any]) -> Axis | None:
    """Which axis the ids in a map speak of; None when of both, or of neither."""
    train = any(name in fields for name in ("train/step", "step_in_rollout"))
    rollout = any(name in fields for name in ("rollout/step", "eval/step", "rollout_id"))
    return None if train == rollout else "train" if train else "rollout"


def _first(fields: Mapping[str, Any], *names: str) -> int | None:
    return next((found for name in names if (found := whole(fields.get(name))) is not None), None)


def _seconds(fields: Mapping[str, Any]) -> float | None:
    for name in ("timestamp", "time", "ts", "_timestamp"):
        value = fields.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 1e8 < value < 1e11:
            return float(value)
    return None


def is_metrics(fields: Mapping[str, Any]) -> bool:
    """The map looks like a row of metrics: an id and at least one number that has a framework's name."""
    ids = any(name in fields for name in ("step", "train/step", "rollout_id", "rollout/step", "training/global_step"))
    named = any("/" in name and number(value) is not None for name, value in fields.items())
    return (ids and named) or (named and "event" in fields) or _is_sequence_error(fields)


def _is_sequence_error(fields: Mapping[str, Any]) -> bool:
    return "mult_prob_error" in fields or ("prompt_id" in fields and any("error" in name for name in fields))


def sniff(source: Source, head: bytes) -> bool:
    """The first line is a JSON map that looks like metrics."""
    first = jsonl.first_map(head)
    return first is not None and is_metrics(first)


def read(source: Source, sink: Sink) -> None:
    """Reads a file of metric rows: JSON lines, one JSON map or list, or the text of Python dicts."""
    state = _File(sink)
    count = 0
    for where, fields, _ in jsonl.maps(source, sink, "metrics"):
        state.row(where, fields, count)
        count += 1
    state.finish()
    if count:
        sink.files.append(source.name)


class _File:
    """What one file has said so far."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._run_ids: dict[str, int] = {}
        self._pending: list[SyncEvent] = []
        self._last_rollout: int | None = None
        self._capped = False
        self._rows: FirstAndNewest[MetricRow] = FirstAndNewest(*MOST_ROWS)
        self._errors: FirstAndNewest[Row] = FirstAndNewest(*MOST_ROWS)

    def row(self, where: Where, fields: dict[str, Any], order: int) -> None:
        if _is_sequence_error(fields):
            self._errors.append(Row("seq_error", fields, where, order))
            return
        if fields.get("event") == "update_weights" or ("weight_version" in fields and not is_metrics(fields)):
            self._sync(where, fields)
            return
        self._cap(where, fields)
        run = fields.get("run")
        segment = self._run_ids.setdefault(str(run), len(self._run_ids)) if run is not None else 0
        for row in rows_of(fields, where, names=self._sink.names.of()):
            rollout = row.rollout_id if row.axis == "rollout" else None
            if rollout is not None:
                self._last_rollout = rollout
                self._settle(rollout)
            self._rows.append(_in_run(row, run, segment))

    def _cap(self, where: Where, fields: dict[str, Any]) -> None:
        """TRL writes its cap beside the lengths; it is an argument."""
        cap = whole(fields.get("max_completion_length"))
        if cap is not None and not self._capped:
            self._capped = True
            self._sink.args.append(Args({"rollout_max_response_len": cap}, "trl", where))

    def _sync(self, where: Where, fields: dict[str, Any]) -> None:
        ok = fields.get("ok", fields.get("success", True))
        version = str(fields.get("weight_version", fields.get("version", "")) or "")
        if not version and (step := whole(fields.get("after_step"))) is not None:
            version = f"step-{step}"
        event = SyncEvent(version, ok=ok is not False, where=where, transport=str(fields.get("transport", "") or ""))
        self._pending.append(event)

    def _settle(self, rollout: int | None) -> None:
        """The next rollout is the first one sampled with the weights that were pushed before it."""
        for event in self._pending:
            self._sink.syncs.append(SyncEvent(event.version, rollout, event.ok, event.transport, where=event.where))
        self._pending.clear()

    def finish(self) -> None:
        self._sink.metrics += self._rows
        self._sink.rows += self._errors
        self._settle(None if self._last_rollout is None else self._last_rollout + 1)


def _in_run(row: MetricRow, run: object, segment: int) -> MetricRow:
    if run is None:
        return row
    return MetricRow(
        row.axis, row.step, row.values, row.rollout_id, row.step_in_rollout, segment, row.rank, row.time, 1, row.where
    )


READERS: tuple[Reader, ...] = (Reader("metrics", ("metrics*.jsonl", "metrics*.json", "seq_err*.jsonl"), read, sniff),)
