"""What special log lines hold: metric dicts, timers, printed samples, printed arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rltop.checks.found import LogEvent
from rltop.checks.observe import Args, Axis, MetricRow, PhaseEvent, Sample, TextLine, Where
from rltop.checks.samples import make_sample
from rltop.evidence import args as arguments
from rltop.evidence import literal
from rltop.evidence.bounded import FirstAndNewest
from rltop.evidence.lines import relax
from rltop.evidence.lines.line import Line
from rltop.evidence.metric_names import View, shipped
from rltop.evidence.metrics import rows_of
from rltop.evidence.printed import Parts, split

# -- metric dicts

_DICT = re.compile(r"(?P<label>[a-z][a-z_-]*) (?P<id>-?\d{1,15}): \{")
_BARE = re.compile(r"^\s*(?:\S+\.py:\d+ - )?\{['\"]")
_VERL = re.compile(r"(?:^|\s)step:(?P<id>\d{1,15}) - (?=\S+:)")
_ITERATION = re.compile(r"(?:^|\s)iteration\s+(?P<id>\d{1,15})\s*/\s*\d+ \|")
_TRAIN_LABELS = ("step", "critic-step", "train")
_LABELS = frozenset({*_TRAIN_LABELS, "rollout", "eval", "perf", "iteration"})
"""Labels of which a dict is one of metrics whatever its names are."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """A dict of metrics in a log."""

    label: str
    """`step`, `rollout`, `perf`, `eval`, ...; `iteration` for Megatron's line; empty for a dict alone."""
    id: int | None
    axis: Axis
    fields: Mapping[str, object]


def metrics_of(line: Line) -> Metrics | None:
    """The metrics of a line; None where it has none."""
    text = line.text
    if found := _DICT.search(text):
        fields = literal.parse_map(text[found.end() - 1 :])
        if fields is None or not (found["label"] in _LABELS or any("/" in name for name in fields)):
            return None  # `Ports for engine 0: {'port': …}` is no metric
        axis: Axis = "train" if found["label"] in _TRAIN_LABELS else "rollout"
        return Metrics(found["label"], int(found["id"]), axis, fields)
    if found := _VERL.search(text):
        pairs = (part.rpartition(":") for part in text[found.end() :].split(" - "))
        fields = {name.strip(): value for name, _, raw in pairs if (value := _number(raw)) is not None}
        return Metrics("step", int(found["id"]), "train", fields) if fields else None
    if found := _ITERATION.search(text):
        pairs = (part.rpartition(":") for part in text[found.end() :].split("|"))
        fields = {name.strip(): value for name, _, raw in pairs if (value := _number(raw)) is not None}
        return Metrics("iteration", int(found["id"]), "train", fields) if fields else None
    if _BARE.match(text):
        fields = literal.parse_map(text)
        if fields and any("/" in name or name in ("loss", "grad_norm", "reward") for name in fields):
            return Metrics("", None, "train", fields)
    return None


def _number(raw: str) -> float | None:
    word = raw.strip()
    if (call := re.fullmatch(r"(?:np|numpy|torch)?\.?\w+\((.*)\)", word)) is not None:
        word = call[1]
    try:
        return float(word)
    except ValueError:
        return None


@dataclass(slots=True)
class RolloutContext:
    """Which rollout a step of a log belongs to: the one whose own metrics the same process printed before it."""

    _rollout: dict[tuple[str, int | None], tuple[int, int]] = field(default_factory=dict)
    _alone: dict[tuple[str, int | None], int] = field(default_factory=dict)
    """Dicts without any step so far, by process: they are counted."""
    _whole: bool = True
    """Every rollout printed its line so far: counting steps after it is safe."""
    names: View = field(default_factory=lambda: shipped().of())

    def place(self, found: Metrics, line: Line) -> list[MetricRow]:
        """Rows of a dict, with the rollout that they belong to where the log tells."""
        where = Where(line.source, line.number, line.raw.strip()[:120])
        axis, id_ = found.axis, found.id
        stream = (line.actor, line.pid)
        if found.label == "rollout" and id_ is not None:
            old = self._rollout.get(stream)
            if old is not None and id_ > old[0] + 1:
                self._whole = False
            self._rollout[stream] = (id_, 0)
        if found.label == "" and id_ is None and not any(name.endswith("step") for name in found.fields):
            id_ = self._alone[stream] = self._alone.get(stream, -1) + 1
        rollout_id = id_ if axis == "rollout" else None
        rows = list(
            rows_of(
                *(found.fields, where), axis=axis, step=id_, rollout_id=rollout_id, time=line.time, names=self.names
            )
        )
        if found.label != "step":
            return rows
        known = self._rollout.get(stream)
        if known is None:
            return rows
        self._rollout[stream] = (known[0], known[1] + 1)
        return [
            replace(row, rollout_id=known[0], step_in_rollout=known[1])
            if row.axis == "train" and row.rollout_id is None
            else row
            for row in rows
        ]

    def finish(self, rows: Iterable[MetricRow]) -> list[MetricRow]:
        """The rows; without the guessed rollouts if a rollout's line was missing on the way."""
        if self._whole:
            return list(rows)
        return [replace(row, rollout_id=None, step_in_rollout=None) if row.axis == "train" else row for row in rows]


# -- timers

_TIMER = re.compile(
    r"Timer (?P<name>[\w./-]{1,80}) (?P<edge>start|end)(?: \(elapsed: (?P<elapsed>[\d.]+) ?s(?:econds)?\))?"
)


def phase_of(line: Line) -> PhaseEvent | None:
    """`Timer actor_train start` and `... end (elapsed: 34.2s)`; Relax's lines of a rollout's begin and end."""
    where = Where(line.source, line.number, line.raw.strip()[:400])
    if told := relax.ROLLOUT.search(line.text):
        at = int(told["begun"] or told["ended"])
        return PhaseEvent("rollout", "enter" if told["start"] else "leave", at, time=line.time, where=where)
    found = _TIMER.search(line.text)
    if found is None:
        return None
    try:
        elapsed = float(found["elapsed"]) if found["elapsed"] else None
    except ValueError:
        elapsed = None
    edge: Literal["enter", "leave"] = "enter" if found["edge"] == "start" else "leave"
    return PhaseEvent(found["name"], edge, None, elapsed, time=line.time, where=where)


# -- samples

_SAMPLE = re.compile(r"(?P<when>First rollout sample|Finish rollout)\s*:\s*(?P<rest>.*)", re.DOTALL)
_END = re.compile(r"\], label: (?P<label>.*?)(?:, reward: (?P<reward>.*))?$", re.DOTALL)
MOST_SAMPLES = (300, 300, 300)
"""First, newest, and between: a measure of text takes a millisecond or two."""


@dataclass(slots=True)
class Printed:
    """A printed sample; its rollout is known when the metrics that come next are."""

    rest: str
    where: Where
    rollout_id: int | None = None
    measured: Sample | None = None
    """What was measured of it, once: of a log that grows it is asked for again and again."""

    def fields(self) -> dict[str, object]:
        """Prompt, response, label and reward, as a record of samples has them."""
        return _fields(self.rest)[0]


@dataclass(slots=True)
class SampleLines:
    """Printed samples of one log. Each belongs to the rollout whose metrics come next."""

    seen: int = 0
    _kept: FirstAndNewest[Printed] = field(default_factory=lambda: FirstAndNewest(*MOST_SAMPLES))
    _waiting: list[Printed] = field(default_factory=list)
    _last: int | None = None

    def take(self, line: Line) -> str:
        """The text that the line prints, which is a model's from here on; empty if it prints none."""
        found = _SAMPLE.search(line.text)
        if found is None:
            return ""
        self.seen += 1
        where = Where(line.source, line.number, line.raw.strip()[:160])
        printed = Printed(found["rest"][:32_768], where)
        self._kept.append(printed)
        self._waiting = [*self._waiting[-31:], printed]
        return found["rest"] or " "

    def settle(self, rollout_id: int | None, actor: str) -> list[Printed]:
        """The metrics of a rollout were printed: the samples before them are its own. The trainer's come later.
        Returns those that have their rollout now."""
        settled: list[Printed] = []
        if rollout_id is None:
            return settled
        if self._last is None or rollout_id != self._last:
            settled, self._waiting = self._waiting, []
            for printed in settled:
                printed.rollout_id = rollout_id
        self._last = rollout_id
        return settled

    def finish(self) -> list[Sample]:
        """The samples so far, measured; those of the rollout that goes on with its number."""
        for printed in self._waiting:
            printed.rollout_id = None if self._last is None else self._last + 1
        return [_measured(printed, index) for index, printed in enumerate(self._kept)]


def _measured(printed: Printed, index: int) -> Sample:
    if printed.measured is None:
        printed.measured = _sample(printed, index)
    sample = printed.measured
    if (sample.rollout_id, sample.index) != (printed.rollout_id, index):
        sample = printed.measured = replace(sample, rollout_id=printed.rollout_id, index=index)
    return sample


def _fields(rest: str) -> tuple[dict[str, object], Parts]:
    end = None
    for found in _END.finditer(rest):  # the text may hold the words itself: the last one counts
        end = found
    parts = split(_text(rest[: end.start() + 1] if end else rest))
    fields: dict[str, object] = {"response": parts.response, "prompt": parts.prompt}
    if end:
        fields |= {"label": end["label"].strip(), "reward": _reward(end["reward"] or "")}
    return fields, parts


def _sample(printed: Printed, index: int) -> Sample:
    fields, parts = _fields(printed.rest)
    fields["index"] = index
    sample = make_sample(fields, rollout_id=printed.rollout_id, where=printed.where)
    if parts.last == parts.response:
        return sample
    # Several answers: a conversation in the prompt, or turns that the model made up. Only the last one is sure to be
    # the model's, and it counts where it is plainly no text.
    final = make_sample(fields | {"response": parts.last}, rollout_id=None)
    garbage = final.text.families or (final.text.counted_chars >= 20 and final.text.top_char_share >= 0.9)
    return replace(sample, text=final.text, excerpt=final.excerpt) if garbage else sample


def _reward(text: str) -> float | None:
    """A number, or the `score` of several values, as Relax's rewards give them."""
    if not text.startswith("{"):
        return _number(text)
    fields = literal.parse_map(text) or {}
    score = fields.get("score")
    return float(score) if isinstance(score, int | float) else None


def _text(body: str) -> str:
    try:
        value = literal.parse(body)
    except literal.Unreadable:
        return body.strip("[]'\"")
    if isinstance(value, list):
        return "".join(item for item in value if isinstance(item, str))
    return str(value)


_MODEL = re.compile(r"\s*\[(?:prompt|response)\] ")
MOST_MASKED = 5000
"""Lines of one printed text."""
_MODEL_END = re.compile(r"\s*\[(?:ground_truth|score|reward|label)\]")


def ends(text: str) -> bool:
    """The printed text ends in this line, with `], label: ...`, or by its bracket."""
    return _END.search(text) is not None or text.rstrip().endswith(("']", '"]'))


def still_masked(line: Line, masked: int) -> int:
    """How many lines of model text there were so far, with this one; 0 if none follows.

    verl prints `[prompt]`, `[response]` and then text over any number of lines; `[ground_truth]` or `[score]` ends it,
    and so does a line with a time.
    """
    if _MODEL.match(line.text):
        return 1
    if not masked or masked >= MOST_MASKED or line.time_of_its_own or _MODEL_END.match(line.text) or ends(line.text):
        return 0
    return masked + 1


def text_line(event: LogEvent) -> TextLine:
    """A line for rules that read lines."""
    return TextLine(event.text, event.owner, event.level, event.rank, event.time, where=event.where)


# -- arguments

_COMMAND = re.compile(r"(?:^|\s)(?P<command>(?:\S*python[\d.]*\s+(?:-\w+\s+)*)?\S+\.py\s+(?:--|\\).*)", re.DOTALL)
MOST_ROWS = 5000


@dataclass(slots=True)
class ArgsTables:
    """Arguments that a log prints: Megatron's table, a Namespace, a command line."""

    source: str
    open: bool = False
    _builder: arguments.ArgsBuilder | None = None
    _where: Where | None = None
    _rows: int = 0
    _found: list[Args] = field(default_factory=list)

    def start(self, line: Line) -> list[Args]:
        """Arguments that this line holds, if any; a table begins."""
        text = line.text
        where = Where(line.source, line.number, line.raw.strip()[:200])
        if arguments.TABLE_END.search(text):
            return []
        if arguments.TABLE_START.search(text):
            self.open, self._rows = True, 0
            self._builder, self._where = arguments.ArgsBuilder(), where
            return []
        if "Namespace(" in text:
            flags = arguments.namespace(text[text.find("Namespace(") :])
            return [Args(flags, "", where)] if flags else []
        if found := _COMMAND.search(text):
            command = arguments.parse_args(found["command"], line.source, first_line=line.number)
            if len(command.flags) >= 2:
                return [replace(command, where=where)]
        return []

    def take(self, text: str, number: int) -> bool:
        """The line is a row of the open table, or its end."""
        self._rows += 1
        row = arguments.table_row(text)
        if row is not None and self._builder is not None and self._rows <= MOST_ROWS:
            self._builder.put(row[0], row[1], number)
            return True
        if arguments.TABLE_END.search(text) or self._rows > MOST_ROWS:
            self._close()
            return True
        if not text.strip():
            return True
        if self._rows > 1 and self._builder is not None and len(self._builder.flags) == 0:
            self._close()
        return False

    def _close(self) -> None:
        self.open = False
        if self._builder is not None and self._builder.flags and self._where is not None:
            self._found.append(replace(self._builder.build(self._where), repeats={}))
        self._builder = None

    def so_far(self) -> list[Args]:
        """Arguments of the tables that have ended."""
        return list(self._found)

    def finish(self) -> list[Args]:
        """Arguments of the tables."""
        self._close()
        return self._found
