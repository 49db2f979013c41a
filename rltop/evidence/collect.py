"""From paths to `Observations`: finds the evidence, reads it, puts it in the order of time, works out the mode.

Failure policy: a file that can not be read is a `Problem` and the rest goes on; a reader that raises is a defect of
rltop, told as a problem of that file. `Unusable` is raised only when there is nothing at all to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rltop.checks.found import LogEvent
from rltop.checks.observe import Args, MetricRow, Mode, Observations, RunStart
from rltop.checks.rules.ckpt_load import same_path
from rltop.checks.rules.input_parse import LINK, kind_in_words
from rltop.checks.series import steps_per_rollout
from rltop.errors import RltopError
from rltop.evidence import segments
from rltop.evidence.args import merged
from rltop.evidence.beside import set_aside
from rltop.evidence.metric_names import Names, shipped
from rltop.evidence.readers import READERS
from rltop.evidence.settings import with_script
from rltop.evidence.sink import Reader, Sink, Source
from rltop.evidence.walk import Found, walk

_OF_TRAINER = (
    "rollout/log_probs",
    "rollout/ref_log_probs",
    "rollout/raw_reward",
    "rollout/advantages",
    "rollout/returns",
)
"""Metrics of a rollout that the trainer reports; without one nobody does."""
_STARTS_WITH_LOAD = "ckpt_loaded"


def collect(paths: Sequence[Path], *, readers: Sequence[Reader] = READERS, names: Names | None = None) -> Observations:
    """Everything that lies under `paths`, as the rules see it. names: default the table that comes with rltop.

    Raises RltopError (exit 2) for a path that is missing or unreadable, and when nothing was recognised or the only
    evidence is broken.
    """
    for path in paths:
        _check(path)
    sink = Sink(names=names or shipped())
    found = walk(paths, readers, sink)
    for source, reader in found.work:
        _read(source, reader, sink)
    if not sink.files:
        raise _unusable(paths, found, sink)
    return observations(sink)


def _check(path: Path) -> None:
    try:
        path.stat()
        if path.is_dir():
            next(path.iterdir(), None)
    except OSError as error:
        why = error.strerror or str(error)
        raise RltopError(
            "can not be read", where=str(path), why=why, do="rltop check PATH: a folder or a file"
        ) from None
    if not path.is_dir() and not path.is_file():
        raise RltopError("is neither a folder nor a file", where=str(path), do="rltop check PATH: a folder or a file")


def _read(source: Source, reader: Reader, sink: Sink) -> None:
    try:
        reader.read(source, sink)
    except Exception as error:  # one reader must not hide what the others find
        why = f"rltop's own reader failed on it ({type(error).__name__}: {error}), which is a defect of rltop"
        sink.problem(source, reader.kind, why, whole=True)


def _unusable(paths: Sequence[Path], found: Found, sink: Sink) -> RltopError:
    scripts = [source for source, reader in found.work if reader.kind == "script"]
    if sink.scripts and not sink.problems:
        named = {one.where.source for one in sink.scripts if one.where}
        script = next(source.path for source in scripts if source.name in named)
        return RltopError(
            "holds a launch script and nothing of a run",
            where=", ".join(map(str, paths)),
            why=f"what {script} would start can be tested before it runs",
            do=f"rltop doctor {script}",
        )
    broken = [problem for problem in sink.problems if problem.kind != LINK]
    if broken:
        first = broken[0]
        line = first.where.line or 1
        others = len({problem.where.source for problem in broken} - {first.where.source})
        rest = f" ({others} more {'files' if others > 1 else 'file'} can not be used)" if others else ""
        return RltopError(
            f"is not {kind_in_words(first.kind)}, and there is no other evidence{rest}",
            where=f"{first.where.source}:{line}",
            why=first.why,
            do="copy the file again; let the run flush it first",
        )
    looked = [f"{link.name} (a link out of it, not followed)" for link in found.links]
    looked += [*(f"{name} (empty)" for name in found.empty), *found.strange, *(source.name for source in scripts)]
    listed = ", ".join(looked[:5]) + (f" and {len(looked) - 5} more" if len(looked) > 5 else "")
    return RltopError(
        "holds nothing that rltop recognises",
        where=", ".join(map(str, paths)),
        why=f"looked at {listed}" if looked else "there is no file in it",
        do="give a folder with *.log, metrics*.jsonl, args.txt, samples*.jsonl, *.pt or a checkpoint (docs/cli.md)"
        + (f"; a launch script before its start: rltop doctor {scripts[0].path}" if scripts else ""),
    )


def observations(sink: Sink) -> Observations:
    """What the readers found, put together."""
    set_aside(sink)
    given = with_script(sink.args, sink.scripts)
    args = merged(given)
    events = in_order(sink.events)
    loads = [event for event in events if event.kind == _STARTS_WITH_LOAD]
    rows, cuts = segments.cut(_rollouts_of_steps(sink.metrics, args), loads)
    samples = segments.place_samples(sink.samples, rows, cuts)
    obs = Observations(
        metrics=tuple(rows),
        samples=tuple(samples),
        syncs=tuple(segments.place(sink.syncs, cuts)),
        phases=tuple(sorted(segments.place(sink.phases, cuts), key=lambda phase: phase.time or 0.0)),
        engines=tuple(sink.engines),
        lines=tuple(segments.place(sink.lines, cuts)),
        events=tuple(segments.place(events, cuts)),
        logs=tuple(sink.logs),
        http=tuple(sorted(sink.http, key=lambda call: (call.order, call.time or 0.0))),
        documents=tuple(sink.documents),
        rows=tuple(sink.rows),
        ray=tuple(sink.ray),
        checkpoints=tuple(sink.checkpoints),
        megatron=tuple(sink.megatron),
        dumps=tuple(sink.dumps),
        problems=tuple(sink.problems),
        files=tuple(dict.fromkeys([*sink.files, *(_script(sink, given))])),
        args=args,
        vocab_size=_vocabulary(sink, args),
    )
    return replace(obs, mode=mode_of(obs), starts=_starts(obs))


def _script(sink: Sink, given: Sequence[Args]) -> list[str]:
    """The launch script whose arguments are used."""
    return [one.where.source for one in given if one.where and any(one is script for script in sink.scripts)]


def in_order(events: Sequence[LogEvent]) -> list[LogEvent]:
    """Events of all files in the order of time. A line without a time comes right after the line before it in its file.
    A process's own lines never change places: where its clock goes back, they keep the later time."""
    keyed: list[tuple[float, int, LogEvent]] = []
    by_file: dict[str, list[LogEvent]] = {}
    for event in events:
        by_file.setdefault(event.where.source, []).append(event)
    count = 0
    for found in by_file.values():
        found.sort(key=lambda event: event.where.line or 0)
        latest: dict[tuple[object, ...], float] = {}
        newest = next((event.time for event in found if event.time is not None), 0.0)
        for event in found:
            stream = (event.actor, event.pid, event.node, event.rank)
            newest = event.time if event.time is not None else newest
            latest[stream] = max(newest, latest.get(stream, newest))
            keyed.append((latest[stream], count, event))
            count += 1
    keyed.sort(key=lambda item: item[:2])
    return [replace(event, order=order) for order, (_, _, event) in enumerate(keyed)]


def _rollouts_of_steps(rows: Sequence[MetricRow], args: Args) -> list[MetricRow]:
    """Rows on the rollout axis that only know their step, with the rollout of that step; and where the arguments say
    how many steps a rollout has, they and not the order of lines decide which rollout a step belongs to."""
    per_rollout = steps_per_rollout(Observations(args=args))
    if per_rollout is None:
        return list(rows)
    kept = []
    for row in rows:
        if row.axis == "rollout" and row.rollout_id is None and per_rollout > 1:
            kept.append(replace(row, step=row.step // per_rollout))
        elif row.axis == "train" and row.rollout_id is not None and row.step_in_rollout == 0 and per_rollout > 1:
            rollout = row.rollout_id == row.step and "train/step" not in row.values
            kept.append(replace(row, step=row.step * per_rollout) if rollout and row.time is None else row)
        else:
            kept.append(row)
    return kept


def mode_of(obs: Observations) -> Mode:
    """By the arguments; without them, logs of rollouts or engines and nothing of a trainer are rollout-only."""
    if obs.args.on("debug_rollout_only"):
        return "rollout-only"
    if obs.args.on("debug_train_only") or obs.args.given("load_debug_rollout_data"):
        return "train-only"
    if obs.args.flags or not obs.logs:
        return "full"
    if any("rollout_only" in log.source.lower() for log in obs.logs) and not _trains(obs):
        return "rollout-only"
    sided = any(event.owner in ("engine", "rollout", "router") for event in obs.events)
    sided = sided or any(log.owner in ("engine", "rollout", "router") for log in obs.logs) or bool(obs.metrics)
    return "rollout-only" if sided and not _trains(obs) else "full"


def _trains(obs: Observations) -> bool:
    """Something in the evidence was made by a trainer, or for one. A file's name alone says little: `train.log` is
    also what people call the log of a job without a trainer."""
    sided = {event.owner for event in obs.events if event.actor or event.rank is not None}
    if "trainer" in sided or obs.phases or obs.syncs:
        return True
    if any(row.axis == "train" or any(name in row.values for name in _OF_TRAINER) for row in obs.metrics):
        return True
    if not sided and not obs.metrics and any(log.owner == "trainer" for log in obs.logs):
        return True
    if any(
        "update_weights" in str(event.data.get("path", "")) or event.kind in ("update_refused", "update_summary")
        for event in obs.events
    ):
        return True
    return any("update_weights" in call.path for call in obs.http)


def _starts(obs: Observations) -> tuple[RunStart, ...]:
    """How segments began, where the trainer's log says what was loaded into them."""
    found = []
    for segment in sorted({row.segment for row in obs.metrics}):
        rows = [row for row in obs.metrics if row.segment == segment]
        ids = [row.rollout_id if row.rollout_id is not None else row.step for row in rows]
        first = min(ids, default=None)
        loads = [event for event in obs.events if event.kind == _STARTS_WITH_LOAD and event.segment == segment]
        numbers = [value for event in loads if isinstance(value := event.data.get("iteration"), int)]
        numbers += [0 for event in loads if event.data.get("hf") and _of_reference(obs, event)]
        if first is None or not numbers:
            continue
        found.append(RunStart(segment, first, first == 0 and max(numbers) == 0))
    return tuple(found)


def _of_reference(obs: Observations, event: LogEvent) -> bool:
    """Weights from Hugging Face begin at iteration 0; they are the reference's too if both come from one directory."""
    loaded, reference = str(event.data.get("directory") or ""), obs.args.text("ref_load")
    return bool(loaded) and (not reference or same_path(loaded, reference))


def _vocabulary(sink: Sink, args: Args) -> int | None:
    """Size of the vocabulary: the checkpoint's, a configuration's, the arguments'."""
    maps = [checkpoint.config for checkpoint in sink.checkpoints if checkpoint.config]
    maps += [document.fields for document in sink.documents if document.kind == "config"]
    for fields in maps:
        inner = fields.get("text_config")
        for one in (fields, inner if isinstance(inner, dict) else {}):
            size = one.get("vocab_size")
            if isinstance(size, int) and not isinstance(size, bool) and size > 0:
                return size
    number = args.number("vocab_size") or args.number("padded_vocab_size")
    return int(number) if number and number > 0 else None
