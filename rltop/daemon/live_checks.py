"""The checks on a live run: records in, verdicts out, in memory that does not grow with the run.

Kept whole: the run's facts, the first rollouts, the newest, and everything that is evidence of a fault. What lies
between is thinned: metrics to block medians (`rltop.checks.thin`), samples and syncs to nothing (`rltop.checks.keep`).
So the verdicts are those of `rltop check` on the same run, except that a median over a long series is one of medians.

Failure policy: a record that cannot be read is counted by kind in `problems` and otherwise ignored; a field of it that
cannot be read does not take the others with it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rltop.checks.evaluate import evaluate
from rltop.checks.found import LogEvent
from rltop.checks.keep import KeptSamples, KeptSyncs, RolloutKey
from rltop.checks.known import KnownCrash
from rltop.checks.observe import (
    Args,
    EngineCrash,
    EngineFact,
    EngineSync,
    MetricRow,
    Observations,
    PhaseEvent,
    RunStart,
    SyncEvent,
    TextLine,
)
from rltop.checks.phrase import mismatches
from rltop.checks.registry import metric_names
from rltop.checks.rules.logprob_gap import METRIC as GAP
from rltop.checks.rules.rollout_text import pattern_of
from rltop.checks.rules.train_nan import ABORT
from rltop.checks.rules.weights_version import mixed
from rltop.checks.samples import make_sample
from rltop.checks.syncs import findings_of
from rltop.checks.thin import ThinSeries
from rltop.checks.thresholds import DEFAULTS, Thresholds
from rltop.checks.verdict import Report
from rltop.daemon.log_watch import Logs
from rltop.daemon.stillness import Stillness
from rltop.daemon.watched_facts import with_logs
from rltop.protocol.messages import (
    Axis,
    ByePayload,
    EnginePayload,
    LogPayload,
    MetricsPayload,
    PhasePayload,
    Record,
    RunPayload,
    SamplesPayload,
    WeightsPayload,
    axis_of,
)

MOST_SOURCES = 16
"""Sources of metrics with a series of their own. The rest share one per axis, and of them only what may be the evidence
of a verdict is looked at: the ranks of a large run say the same a thousand times."""
MOST_ALIKE = 32
"""Of these, records of one step: what a thousand ranks tell at once is told by some of them."""
MOST_FIRST = 64
"""The same for sources of rank 0, each of which is the only one to say what it says."""
MOST_LINES = 200
MOST_ABORTS = 32
MOST_ENGINES = 4_096
MOST_EVIDENCE_ROLLOUTS = 4_096
MOST_ROLLOUTS = 4_096
JUDGE_EVERY_S = 30.0
"""So often a run in which nothing moves is judged again."""
_MOVING = frozenset({"run", "metrics", "samples", "weights", "phase"})
"""Kinds of records that show that the run moves. An engine's state and log lines also come from one that does not."""
_DEATHS = frozenset({"death", "oom_killer", "health"})
_MOVING_LINES = ("timer", "prefill", "decode", "iteration", "startup", "engine_stage", "placement_bundle")
_MODEL_TEXT = ("First rollout sample:", "Finish rollout:")


class LiveChecks:
    """One run's checks. `feed` takes a record; `report` evaluates only when something was fed that a rule looks at, and
    `tick` has everything judged again when nothing came for a while: a stall is that nothing comes."""

    def __init__(self, thresholds: Thresholds = DEFAULTS, *, known_crashes: tuple[KnownCrash, ...] = ()) -> None:
        self._thresholds = thresholds
        self._known_crashes = known_crashes
        self._names, self._prefixes = metric_names()
        self._problems: Counter[str] = Counter()
        self._now: float | None = None
        self._forget()

    def begin(self) -> None:
        """Another attempt of the run begins: nothing of the one before is evidence any more."""
        self._forget()
        self._news = True

    def _forget(self) -> None:
        self._facts = Observations(live=True, known_crashes=self._known_crashes)
        self._segments = _Segments()
        self._series: dict[tuple[str, bool, int], ThinSeries] = {}
        self._slots: dict[str, int] = {}
        self._alike: tuple[object, int] = (None, 0)
        """Newest step of which one of many ranks told, and how many did."""
        self._samples = KeptSamples()
        self._syncs = KeptSyncs()
        self._phases: deque[PhaseEvent] = deque(maxlen=MOST_LINES)
        self._engines: dict[str, EngineFact] = {}
        self._lines: deque[TextLine] = deque(maxlen=MOST_LINES)
        self._aborts: list[TextLine] = []
        self._evidence: set[RolloutKey] = set()
        self._report: Report | None = None
        self._news = False
        self._logs = Logs()
        self._owned: dict[str, EngineFact] = {}
        self._rollouts: deque[tuple[float, int]] = deque(maxlen=MOST_ROLLOUTS)
        """(when it was told, id) of the newest rollouts."""
        self._rollouts_by: dict[tuple[str, int | None], int] = {}
        self._stillness = Stillness()
        self._judged_at = 0.0
        """Seconds of stillness at the last evaluation for its sake."""

    @property
    def problems(self) -> Mapping[str, int]:
        """What could not be read, by kind."""
        return self._problems

    def feed(self, record: Record) -> None:
        """Take a record in. Never raises for its content."""
        try:
            relevant = self._take(record)
        except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
            self._problems[record.kind] += 1
            return
        if record.kind in _MOVING:
            self._moved()
        if relevant:
            self._report = None
            self._news = True

    def see_logs(self, logs: Logs) -> None:
        """Take what the run's logs say by now, in place of what they said before."""
        if _movements(logs) != _movements(self._logs):
            self._moved()
        self._logs = logs
        for event in logs.events:
            self._note_death(event)
        self._report = None
        self._news = True

    def _note_death(self, event: LogEvent) -> None:
        """Remember how far the run was, while that is known exactly."""
        at = (event.where.source, event.where.line)
        if event.kind not in _DEATHS or at in self._rollouts_by or len(self._rollouts_by) >= MOST_LINES:
            return
        by_then = [number for time, number in self._rollouts if event.time is None or time <= event.time]
        self._rollouts_by[at] = by_then[-1] if by_then else -1

    def see_engines(self, cells: Iterable[Mapping[str, Any]]) -> None:
        """Take the engines that rltop owns, with their crashes, as the fleet tells them. Never raises for content."""
        found: dict[str, EngineFact] = {}
        for cell in cells:
            if cell.get("owner") == "rltop" and len(found) < MOST_ENGINES:
                try:
                    found[str(cell["id"])] = _owned(cell)
                except (KeyError, TypeError, ValueError):
                    self._problems["engine"] += 1
        changed, self._owned = found != self._owned, found
        if changed:
            self._report = None
            self._news = True

    def tick(self, now: float, *, going: bool) -> None:
        """Time goes on, about once a second. now: wall clock, seconds; going: the run has not ended."""
        self._now = now
        self._stillness.tick(now, going=going)
        if self._stillness.seconds - self._judged_at >= JUDGE_EVERY_S:
            self._judged_at = self._stillness.seconds
            self._report = None
            self._news = True

    def _moved(self) -> None:
        if self._judged_at:  # a stall may have been told: it is over
            self._report, self._news = None, True
        self._stillness.moved()
        self._judged_at = 0.0

    def report(self) -> Report:
        """Verdicts on everything fed so far; the same object as long as nothing relevant was fed."""
        if self._report is None:
            self._report = evaluate(with_logs(self.observations(), self._logs.facts), self._thresholds)
        return self._report

    def pending(self) -> Callable[[], Report] | None:
        """The evaluation of everything fed so far; None when nothing that a rule looks at was fed since the last one.

        It holds what it needs, so it may run in any thread while more is fed: a broken run of a thousand rollouts takes
        a tenth of a second.
        """
        if not self._news:
            return None
        self._news = False
        seen, facts, thresholds = self.observations(), self._logs.facts, self._thresholds
        return lambda: evaluate(with_logs(seen, facts), thresholds)

    def observations(self) -> Observations:
        """What the rules see now."""
        streamed = tuple(row for series in self._series.values() for row in series.rows())
        return replace(
            self._facts,
            metrics=streamed or self._logs.rows,
            events=self._logs.events,
            logs=self._logs.sources,
            samples=self._samples.all(),
            syncs=tuple(self._syncs.all()),
            phases=tuple(self._phases),
            engines=tuple({**self._engines, **self._owned}.values()),
            rollouts_by=dict(self._rollouts_by),
            lines=(*self._aborts, *self._lines),
            now=self._now,
            moved=None if self._now is None else self._now - self._stillness.seconds,
        )

    def _take(self, record: Record) -> bool:
        """Whether the record may change a verdict."""
        payload = record.payload
        match record.kind:
            case "run":
                return self._run(record, msgspec.convert(payload, RunPayload))
            case "metrics":
                if self._is_one_of_many(record) and not self._is_heard(payload):
                    return False
                return self._metrics(record, msgspec.convert(_numbers_only(payload), MetricsPayload))
            case "samples":
                return self._take_samples(record, msgspec.convert(payload, SamplesPayload))
            case "weights":
                return self._weights(record, msgspec.convert(payload, WeightsPayload))
            case "engine":
                return self._engine(record, msgspec.convert(payload, EnginePayload))
            case "phase":
                return self._phase(record, msgspec.convert(payload, PhasePayload))
            case "log":
                return self._line(record, msgspec.convert(payload, LogPayload))
            case "bye":
                return self._bye(record, msgspec.convert(payload, ByePayload))
            case _:
                return False

    def _run(self, record: Record, run: RunPayload) -> bool:
        segment, known = self._segments.begin(record.source.name)
        flags = {name.lstrip("-").replace("-", "_"): value for name, value in run.args.items()}
        starts = self._facts.starts
        if not known:
            if starts:
                self._phases.clear()  # what the process before had open is over
            starts = (*starts[-MOST_LINES:], RunStart(segment, run.start_rollout_id, run.fresh_start))
        self._facts = replace(
            self._facts,
            args=Args(flags, run.framework),
            mode=run.mode,
            vocab_size=run.vocab_size,
            injected_faults=tuple(run.injected_faults),
            starts=starts,
            live=True,
        )
        return True

    def _is_one_of_many(self, record: Record) -> bool:
        """Its source has no series of its own; the first ones get one."""
        name = record.source.name
        slot = self._slots.get(name)
        if slot is None:
            room = len(self._slots) < (MOST_FIRST if record.source.rank == 0 else MOST_SOURCES)
            if not room:
                return True
            self._slots[name] = len(self._slots)
        return False

    def _is_heard(self, payload: Mapping[str, Any]) -> bool:
        """One of many ranks may tell a fault, and not many have told of this step."""
        if not _may_tell(payload, self._thresholds):
            return False
        step, told = payload.get("step"), self._alike
        self._alike = (step, told[1] + 1 if told[0] == step else 1)
        return self._alike[1] <= MOST_ALIKE

    def _metrics(self, record: Record, metrics: MetricsPayload) -> bool:
        values = {
            name: value
            for name, value in metrics.values.items()
            if name in self._names or name.startswith(self._prefixes)
        }
        by_axis: dict[Axis, dict[str, float]] = {}
        for name in metrics.values:
            by_axis.setdefault(axis_of(name, metrics.axis), {})
        for name, value in values.items():
            by_axis[axis_of(name, metrics.axis)][name] = value
        for axis in sorted(by_axis):  # a rollout's own metrics come before its train steps
            segment = self._segments.of(record.source.name, axis, metrics.step)
            if by_axis[axis]:
                self._row(record, metrics, axis, by_axis[axis], segment)
        return bool(values)

    def _row(
        self, record: Record, metrics: MetricsPayload, axis: Axis, values: Mapping[str, float], segment: int
    ) -> None:
        row = MetricRow(
            axis=axis,
            step=metrics.step,
            values=values,
            rollout_id=metrics.rollout_id,
            step_in_rollout=metrics.step_in_rollout,
            segment=segment,
            rank=record.source.rank,
            time=record.wall,
        )
        on_policy = not metrics.step_in_rollout
        slot = self._slots.get(record.source.name, MOST_FIRST)
        series = self._series.setdefault((axis, on_policy, slot), ThinSeries())
        notable = _is_notable(row, on_policy, self._thresholds)
        series.append(row, notable=notable)
        if axis == "rollout":
            self._rollouts.append((record.wall, row.step if row.rollout_id is None else row.rollout_id))
        if notable:
            self._mark((segment, metrics.rollout_id if metrics.rollout_id is not None else metrics.step))

    def _take_samples(self, record: Record, payload: SamplesPayload) -> bool:
        segment = self._segments.now(record.source.name)
        taken = payload.samples[: self._samples.sizes.samples_per_rollout]
        made = [make_sample(fields, rollout_id=payload.rollout_id, segment=segment) for fields in taken]
        limit = self._thresholds.gap_warn
        notable = any(
            sample.bad_log_probs
            or pattern_of(sample.text, self._thresholds)
            or (sample.engine_gap is not None and sample.engine_gap.mean > limit)
            for sample in made
        )
        notable = notable or mixed(made)
        key = (segment, payload.rollout_id)
        self._samples.add(key, made, notable=notable)
        if notable:
            self._mark(key)
        return bool(made)

    def _weights(self, record: Record, weights: WeightsPayload) -> bool:
        answers = weights.engines.items()
        engines = tuple(
            EngineSync(
                engine=str(name),
                ok=bool(answer.get("ok", True)),
                version=str(answer.get("version") or ""),
                message=str(answer.get("message") or ""),
                digest=str(answer.get("digest") or ""),
                same=answer.get("same") if isinstance(answer.get("same"), bool) else None,
                findings=findings_of(answer.get("findings")),
                differing=answer["differing"] if isinstance(answer.get("differing"), int) else 0,
            )
            for name, answer in answers
            if isinstance(answer, Mapping) and not answer.get("gone")  # an engine that went away refused nothing
        )
        sync = SyncEvent(
            version=weights.version,
            rollout_id=weights.rollout_id,
            ok=weights.ok,
            transport=weights.transport,
            engines=engines,
            digest=weights.digest,
            checked=weights.checked,
            findings=findings_of(weights.findings),
            segment=self._segments.now(record.source.name),
            time=record.wall,
        )
        if sync.rollout_id is not None and (mismatches(sync) or not all(engine.ok for engine in engines)):
            self._mark((sync.segment, sync.rollout_id))  # a refusal or a wrong weight stays evidence
        self._syncs.add(sync, self._evidence)
        return True

    def _engine(self, record: Record, engine: EnginePayload) -> bool:
        fact = EngineFact(
            id=engine.id,
            kind=engine.kind,
            state=engine.state,
            generation=engine.generation,
            version=engine.version,
            weight_version=engine.weight_version,
            model_path=engine.model_path,
        )
        if self._engines.get(engine.id) == fact:
            return False
        if engine.id not in self._engines and len(self._engines) >= MOST_ENGINES:
            self._problems["engine"] += 1
            return False
        self._engines[engine.id] = fact
        return True

    def _phase(self, record: Record, phase: PhasePayload) -> bool:
        segment = self._segments.now(record.source.name)
        self._phases.append(PhaseEvent(phase.name, phase.edge, phase.rollout_id, phase.elapsed_s, segment, record.wall))
        return False  # what an open phase means is judged by `tick`

    def _line(self, record: Record, line: LogPayload) -> bool:
        if any(mark in line.text for mark in _MODEL_TEXT):
            return False
        return self._text(record, line.text, line.level)

    def _bye(self, record: Record, bye: ByePayload) -> bool:
        self._facts = replace(self._facts, live=False)
        if bye.reason == "failed" and bye.text:
            self._text(record, bye.text, "error")
        return True

    def _text(self, record: Record, text: str, level: str) -> bool:
        source = record.source
        segment = self._segments.now(source.name)
        kept = TextLine(text, source.role, level, source.rank, record.wall, segment)
        if ABORT.search(text):
            if len(self._aborts) < MOST_ABORTS:
                self._aborts.append(kept)
            return True
        if level in ("warn", "error"):
            self._lines.append(kept)
        return False  # no rule looks at other lines yet

    def _mark(self, key: RolloutKey) -> None:
        if len(self._evidence) < MOST_EVIDENCE_ROLLOUTS:
            self._evidence.add(key)


def _owned(cell: Mapping[str, Any]) -> EngineFact:
    """An engine of the fleet, from its cell. Raises KeyError, TypeError or ValueError for one that is odd."""
    return EngineFact(
        id=str(cell["id"]),
        kind=str(cell.get("kind") or ""),
        state=str(cell.get("state") or ""),
        generation=int(cell.get("generation") or 0),
        version=str(cell.get("version") or ""),
        weight_version=str(cell.get("weight_version") or ""),
        model_path=str(cell.get("model_path") or ""),
        owned=True,
        hung=cell.get("hung") is True,
        survived=int(cell.get("survived") or 0),
        since=cell.get("since"),
        cause=str(cell.get("cause") or ""),
        crashes=tuple(
            EngineCrash(
                one["number"], one["generation"], one["fingerprint"], one["cause"], one.get("t"), one.get("rollout")
            )
            for one in cell.get("crashes") or ()
        ),
    )


def _movements(logs: Logs) -> tuple[int, ...]:
    """Grows whenever a log says that something moved. Access lines do not count: polls are most of them."""
    counted = [sum(source.counts.get(kind, 0) for source in logs.sources) for kind in _MOVING_LINES]
    return (*counted, len(logs.rows), len(logs.sources))


class _Segments:
    """Which restart of the run a record belongs to.

    A restart is a second `run` record of one source, or a step that goes back. The first source that goes back begins
    the new segment, the others follow when they go back themselves: their late records stay where they belong.
    """

    def __init__(self) -> None:
        self._newest = 0
        self._begun: set[str] = set()
        self._where: dict[str, tuple[int, dict[str, int]]] = {}

    def begin(self, source: str) -> tuple[int, bool]:
        """A `run` record. Returns its segment and whether that segment's start is known already."""
        known = bool(self._begun) and source not in self._begun
        if source in self._begun:
            self._newest += 1
            self._begun.clear()
        self._begun.add(source)
        self._where[source] = (self._newest, {})
        return self._newest, known

    def of(self, source: str, axis: str, step: int) -> int:
        """Segment of a value at `step` of an axis."""
        segment, last = self._where.get(source, (self._newest, {}))
        if step < last.get(axis, step):
            self._newest += segment == self._newest
            segment, last = self._newest, {}
        self._where[source] = (segment, last | {axis: step})
        return segment

    def now(self, source: str) -> int:
        """Segment of a record without a step."""
        return self._where.get(source, (self._newest, {}))[0]


def _numbers_only(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload without values that are no numbers (`convert` would refuse the whole row for one of them)."""
    values = payload.get("values")
    if not isinstance(values, Mapping):
        return dict(payload)
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {**payload, "values": numbers}


def _may_tell(payload: Mapping[str, Any], t: Thresholds) -> bool:
    """Values of one of many ranks are, or may become, the evidence of a verdict. Quick: it is asked for all of them."""
    values = payload.get("values")
    if not isinstance(values, dict):
        return True
    try:
        whole = math.isfinite(sum(values.values()))
    except (TypeError, OverflowError):
        return True
    if not whole or values.get("train/grad_norm") == 0 or values.get(GAP, 0.0) > t.gap_warn:
        return True
    moved = abs(values.get("train/ppo_kl", 0.0)) > t.kl_tolerance or values.get("train/pg_clipfrac", 0.0) > 0
    return moved and not payload.get("step_in_rollout")


def _is_notable(row: MetricRow, on_policy: bool, t: Thresholds) -> bool:
    """The row is, or may become, the evidence of a verdict."""
    values = row.values
    if not all(map(math.isfinite, values.values())) or values.get("train/grad_norm") == 0:
        return True
    if row.axis == "rollout" or not on_policy:
        return False
    moved = abs(values.get("train/ppo_kl", 0.0)) > t.kl_tolerance or values.get("train/pg_clipfrac", 0.0) > 0
    return moved or values.get(GAP, 0.0) > t.gap_warn
