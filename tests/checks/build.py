"""Short ways to write observations and records in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltop.checks.evaluate import evaluate
from rltop.checks.found import LogEvent, Owner
from rltop.checks.observe import Args, MetricRow, Observations, RunStart, Sample, SyncEvent, Where
from rltop.checks.samples import make_sample
from rltop.checks.thresholds import DEFAULTS, Thresholds
from rltop.checks.verdict import Report, Verdict
from rltop.protocol.messages import Record, Source

GOOD_TEXT = "Let me set up the equation: the train covers 60 km in 45 minutes, so its speed is 80 km/h."
FRESH = (RunStart(0, 0, True),)


def train(step: int, *, on: int | None = None, rollout: int | None = None, **values: float) -> MetricRow:
    """A row of the train axis; names without `train/`. `on` is the step in its rollout."""
    named = {f"train/{name}": value for name, value in values.items()}
    return MetricRow("train", step, named, rollout_id=rollout, step_in_rollout=on)


def rollout(step: int, *, segment: int = 0, **values: float) -> MetricRow:
    """A row of the rollout axis; names without `rollout/`."""
    named = {f"rollout/{name}": value for name, value in values.items()}
    return MetricRow("rollout", step, named, rollout_id=step, segment=segment)


def healthy(step: int, **changes: float) -> MetricRow:
    """A train step of a healthy run, with one step per rollout."""
    values = {
        "loss": 0.02,
        "pg_loss": 0.02,
        "kl_loss": 0.0,
        "ppo_kl": 0.0,
        "pg_clipfrac": 0.0,
        "grad_norm": 0.3,
        "train_rollout_logprob_abs_diff": 0.012,
    }
    return train(step, on=0, rollout=step, **values | changes)


def sample(response: str = GOOD_TEXT, *, rollout_id: int | None = 0, index: int = 0, **fields: Any) -> Sample:
    """A sample as a source makes it."""
    keys = ("segment", "mode", "when", "where")
    options = {key: fields.pop(key) for key in keys if key in fields}
    return make_sample({"index": index, "response": response, **fields}, rollout_id=rollout_id, **options)


def obs(
    *rows: MetricRow | Sample | SyncEvent,
    flags: Mapping[str, object] | None = None,
    starts: Sequence[RunStart] = FRESH,
    **more: Any,
) -> Observations:
    """Observations of a fresh start (unless `starts` says otherwise)."""
    return Observations(
        metrics=tuple(row for row in rows if isinstance(row, MetricRow)),
        samples=tuple(row for row in rows if isinstance(row, Sample)),
        syncs=tuple(row for row in rows if isinstance(row, SyncEvent)),
        args=Args(flags or {}, "slime"),
        starts=tuple(starts),
        **more,
    )


def event(
    kind: str,
    text: str = "",
    *,
    time: float | None = None,
    order: int = 0,
    line: int = 1,
    source: str = "train.log",
    owner: Owner = "",
    actor: str = "",
    pid: int | None = None,
    node: str = "",
    rank: int | None = None,
    engine: int | str | None = None,
    segment: int = 0,
    repeated: int = 0,
    **data: object,
) -> LogEvent:
    """One log event; what is no field of it is its data."""
    return LogEvent(
        kind,
        text or kind,
        Where(source, line, text or kind),
        owner,
        actor,
        pid,
        node,
        rank,
        engine,
        time=time,
        order=order,
        segment=segment,
        repeated=repeated,
        data=data,
    )


def in_order(*events: LogEvent) -> tuple[LogEvent, ...]:
    """Events as a reader numbers them: by their place here, one second apart where they have no time."""
    return tuple(
        replace(one, order=i, where=replace(one.where, line=i + 1), time=float(i) if one.time is None else one.time)
        for i, one in enumerate(events)
    )


def verdict(check: str, observations: Observations, thresholds: Thresholds = DEFAULTS) -> Verdict:
    """The one verdict of a check."""
    (found,) = (v for v in evaluate(observations, thresholds).verdicts if v.id == check)
    return found


def firing(report: Report) -> dict[str, str]:
    """id -> status of what is wrong and not a consequence."""
    return {v.id: v.status for v in report.verdicts if v.status in ("warn", "fail") and not v.consequence_of}


def at(line: int, source: str = "train.log") -> Where:
    """A place in a file."""
    return Where(source, line, f"line {line}")


@dataclass
class Recorder:
    """Makes records as a reporter does."""

    source: Source = field(default_factory=lambda: Source("trainer", 0, "node", 1))
    seq: int = 0

    def __call__(self, what: str, **payload: Any) -> Record:
        self.seq += 1
        return Record("run", self.source, self.seq, float(self.seq), float(self.seq), what, payload)

    def run(self, **payload: Any) -> Record:
        facts = {"framework": "rltop", "args": {"rollout_batch_size": 4}, "vocab_size": 260, "fresh_start": True}
        return self("run", **facts | payload)

    def metrics(self, axis: Literal["rollout", "train"], step: int, values: Mapping[str, float], **more: Any) -> Record:
        named = {f"{axis}/{name}": value for name, value in values.items()}
        fields: dict[str, Any] = {"axis": axis, "step": step, "rollout_id": step, "values": named}
        if axis == "train":
            fields["step_in_rollout"] = 0
        return self("metrics", **fields | more)

    def samples(self, rollout_id: int, responses: Iterable[str], **fields: Any) -> Record:
        samples = [{"index": i, "response": text, **fields} for i, text in enumerate(responses)]
        return self("samples", rollout_id=rollout_id, samples=samples, total=len(samples))

    def sync(self, version: str, rollout_id: int, **more: Any) -> Record:
        return self("weights", version=version, rollout_id=rollout_id, transport="tensor", **more)
