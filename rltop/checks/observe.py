"""What the rules see: typed facts of a run, whether they came from files or from a live stream.

A source (a file reader, the live stream) turns what it reads into these records; the rules never see a file or socket.
Every kind of evidence is one tuple of `Observations`, empty where the source has none. A new kind is a new dataclass
and a new tuple with the default `()`: the rules that exist do not notice. Facts are measures, not judgements: a sample
carries the measures of its text, and the thresholds are applied by the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rltop.checks.text import TextFacts

if TYPE_CHECKING:
    from rltop.checks import found
    from rltop.checks.known import KnownCrash
    from rltop.checks.verdict import Verdict

Axis = Literal["rollout", "train"]
Mode = Literal["full", "rollout-only", "train-only"]


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file. Live facts have no place: their evidence is `metric@step`."""

    source: str
    """Path relative to what was checked."""
    line: int | None = None
    """From 1; None in binary files."""
    text: str = ""
    """The line, or the part of it that counts; shown as evidence."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Scalars of one rollout or of one optimizer step, under slime's names. Values may be NaN or infinite."""

    axis: Axis
    step: int
    """Rollout id on the rollout axis, `train/step` on the train axis."""
    values: Mapping[str, float]
    rollout_id: int | None = None
    step_in_rollout: int | None = None
    """0 is the on-policy step of its rollout; None where the source does not say (then it is `step` modulo the steps
    per rollout)."""
    segment: int = 0
    """Which run, or which restart of it: 0, 1, ... Trends and neighbours never cross a segment."""
    rank: int | None = None
    time: float | None = None
    """Wall clock, seconds since the epoch."""
    span: int = 1
    """How many rows this one stands for: 1, or more where a bounded source kept only medians."""
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class TokenGap:
    """How far two sets of per-token log-probs of one response are apart, in nats."""

    mean: float
    """Mean of |a - b| over the tokens where both are finite."""
    largest: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One response. Text and token arrays are reduced to measures when the sample is made (`samples.make_sample`)."""

    index: int
    text: TextFacts
    excerpt: str = ""
    """Start of the response, for people."""
    rollout_id: int | None = None
    segment: int = 0
    mode: str = ""
    """Mode of the run that made it, where samples of an A/B comparison lie side by side; else empty."""
    when: str = ""
    """`before_update` or `after_update` where the source knows no rollout ids."""
    group: int | None = None
    reward: float | None = None
    status: str = ""
    finish_reason: str = ""
    response_length: int | None = None
    """Tokens."""
    weight_version: str = ""
    engine: str = ""
    mean_log_prob: float | None = None
    """Trainer's mean log-prob per token, nats; None where not sent."""
    ref_gap: TokenGap | None = None
    """Actor against reference, both from the trainer."""
    engine_gap: TokenGap | None = None
    """Trainer against engine."""
    bad_log_probs: int = 0
    """Log-probs of any of the three that are NaN or infinite."""
    where: Where | None = None
    versions: tuple[str, ...] = ()
    """Weight versions of all turns, in order, where the source has more than the last one."""
    ran_past: tuple[str, ...] = ()
    """Special tokens of the response that more text follows (`<end_of_turn>`): generation did not stop there."""
    label_shown: bool | None = None
    """The response contains its label, the right answer; None without a label."""
    last_token: int | None = None
    """Id of the last token."""


@dataclass(frozen=True, slots=True)
class TensorFinding:
    """One tensor that is not what it should be."""

    name: str
    kind: str
    """`zero`, `nan`, `wrong-shape`, `wrong-layer`, `stale`, `missing`, `extra`, `buffer-lost`, `different`."""
    detail: str = ""
    max_abs_err: float | None = None
    parameter: str = ""
    """The engine's name, where it is another one."""


@dataclass(frozen=True, slots=True)
class EngineSync:
    """What one engine answered to a weight sync."""

    engine: str
    ok: bool = True
    version: str = ""
    message: str = ""
    digest: str = ""
    same: bool | None = None
    """The engine holds what the trainer pushed, as the trainer found by comparing; None: only the digests say."""
    findings: tuple[TensorFinding, ...] = ()
    """The first tensors that differ, zero ones first."""
    differing: int = 0
    """How many tensors differ; 0 where nobody counted."""


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """The trainer pushed weights to the engines."""

    version: str
    rollout_id: int | None = None
    """First rollout that is sampled with this version."""
    ok: bool = True
    transport: str = ""
    engines: tuple[EngineSync, ...] = ()
    digest: str = ""
    """Digest of the pushed tensors as the trainer sees them; empty where not computed."""
    checked: bool = False
    """The engines' weights were random numbers before this sync, so that nothing could be equal by accident."""
    findings: tuple[TensorFinding, ...] = ()
    """Tensors in which the trainer is not what it was loaded from."""
    segment: int = 0
    time: float | None = None
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """The run entered or left a phase."""

    name: str
    edge: Literal["enter", "leave"]
    rollout_id: int | None = None
    elapsed_s: float | None = None
    segment: int = 0
    time: float | None = None
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class EngineCrash:
    """An end of an engine that nobody asked for, as rltop saw it, whose engine it is."""

    number: int
    """Of this engine, from 1 on."""
    generation: int
    fingerprint: str
    cause: str
    """In words; a rehearsal says so."""
    time: float | None = None
    rollout: int | None = None
    """The newest rollout that had begun by then."""


@dataclass(frozen=True, slots=True)
class EngineFact:
    """Newest known state of an engine."""

    id: str
    kind: str = ""
    """`sglang`, or `cpu` for rltop's stand-in."""
    state: str = ""
    generation: int = 1
    version: str = ""
    weight_version: str = ""
    model_path: str = ""
    time: float | None = None
    where: Where | None = None
    owned: bool = False
    """rltop started it, watches it and can start it again; what it says of it is no guess from log lines."""
    hung: bool = False
    """It holds work and has made no token for too long, as the fleet's own signals say."""
    survived: int = 0
    """Rollouts that ended while this generation lived. Of an owned one, like all that follows."""
    since: float | None = None
    """When it came into its state."""
    cause: str = field(default="", compare=False)
    """Why it is in its state."""
    crashes: tuple[EngineCrash, ...] = ()
    """The newest ones, oldest first."""


@dataclass(frozen=True, slots=True)
class TextLine:
    """A log line that says something about the run itself.

    Model text is never evidence of a fault: a source leaves out the lines that print prompts and responses.
    """

    text: str
    owner: str = ""
    """`trainer`, `engine`, `rollout` or the actor's name, as far as known."""
    level: str = ""
    rank: int | None = None
    time: float | None = None
    segment: int = 0
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class RunStart:
    """How one segment began."""

    segment: int = 0
    rollout_id: int | None = None
    """First rollout id of the segment."""
    fresh: bool | None = None
    """The first id is 0 and nothing was resumed from `--load`; None where the source cannot know."""


@dataclass(frozen=True, slots=True)
class Args:
    """Effective arguments: the last occurrence of a flag has won already. Names are slime's, with underscores."""

    flags: Mapping[str, object] = field(default_factory=dict)
    framework: str = ""
    """`slime`, `relax`, `rltop`, `verl`, ...; empty where unknown. verl's names keep their dots
    (`data.train_batch_size`)."""
    where: Where | None = None
    repeats: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values of a flag that was given several times with different values, in order; the last one is in `flags`."""
    words: tuple[str, ...] = ()
    """What is no flag and no flag's value: the script that was started (`train_async.py`)."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of a flag in `where.source`, where known."""

    def at(self, *names: str) -> tuple[Where, ...]:
        """Places of the flags that were given, for evidence."""
        source = self.where.source if self.where else "args"
        line = self.where.line if self.where else None
        return tuple(
            Where(source, self.lines.get(name, line), self._spelt(name)) for name in names if name in self.flags
        )

    def _spelt(self, name: str) -> str:
        value = self.flags[name]
        if "." in name:
            return f"{name}={value}"
        flag = "--" + name.replace("_", "-")
        if isinstance(value, list | tuple):
            return " ".join([flag, *map(str, value)])
        return flag if value is True else f"{flag} {value}"

    def given(self, name: str) -> bool:
        """The flag has a value other than None and the empty string."""
        return self.flags.get(name) not in (None, "")

    def text(self, name: str) -> str:
        """Value as text, empty when not given."""
        value = self.flags.get(name)
        return "" if value is None else str(value)

    def number(self, name: str) -> float | None:
        """Value as a finite number; None when not given or not a number."""
        value = self.flags.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return number if abs(number) < float("inf") else None

    def on(self, name: str) -> bool:
        """The flag is set: true, a number other than 0, or a text that does not say no."""
        value = self.flags.get(name)
        if isinstance(value, str):
            return value.strip().lower() not in ("", "0", "0.0", "false", "no", "none", "off")
        return bool(value)


@dataclass(frozen=True, slots=True)
class Observations:
    """Everything that is known about a run at one moment. The order inside a tuple carries no meaning, except that
    log lines are in the order of their source and of two facts about the same engine the later one holds."""

    metrics: tuple[MetricRow, ...] = ()
    samples: tuple[Sample, ...] = ()
    syncs: tuple[SyncEvent, ...] = ()
    phases: tuple[PhaseEvent, ...] = ()
    engines: tuple[EngineFact, ...] = ()
    lines: tuple[TextLine, ...] = ()
    starts: tuple[RunStart, ...] = ()
    events: tuple[found.LogEvent, ...] = ()
    """In order of time over all files."""
    logs: tuple[found.LogSource, ...] = ()
    http: tuple[found.HttpCall, ...] = ()
    documents: tuple[found.Document, ...] = ()
    rows: tuple[found.Row, ...] = ()
    ray: tuple[found.RaySnapshot, ...] = ()
    checkpoints: tuple[found.HfCheckpoint, ...] = ()
    megatron: tuple[found.MegatronCheckpoint, ...] = ()
    dumps: tuple[found.Dump, ...] = ()
    problems: tuple[found.Problem, ...] = ()
    files: tuple[str, ...] = ()
    """Everything that was recognised, relative to what was checked."""
    args: Args = field(default_factory=Args)
    mode: Mode = "full"
    vocab_size: int | None = None
    actor_pass: bool | None = None
    """Whether the old log-probs come from a pass of their own. False: they are reused from the training forward, so
    `ppo_kl` is 0 by construction. None: inferred from what is logged (`series.old_log_probs`)."""
    live: bool = False
    """The run goes on: what is missing may still come."""
    now: float | None = None
    """Wall clock of the daemon at the moment of judging, seconds since the epoch; None offline. Only differences to
    `moved` mean something: the clocks of logs and of other machines may be others."""
    moved: float | None = None
    """When the daemon last saw anything of the run move, on the clock of `now`: a record, a timer or batch line, a
    metric. Time in which the daemon itself stood still, and time after the end of the run, is left out."""
    rollouts_by: Mapping[tuple[str, int | None], int] = field(default_factory=dict)
    """Of a live run, (source, line) of a line that tells of a death -> the newest rollout that was made by then (-1:
    none), noted when the line was new: the metrics of a long run are thinned, and can not be counted later."""
    injected_faults: tuple[str, ...] = ()
    """Faults injected on purpose. Shown beside the verdicts; no rule looks at them."""
    launch: bool = False
    """Judged before a launch (`rltop doctor`): nothing has run yet."""
    known_crashes: tuple[KnownCrash, ...] = ()
    """Public reports that crashes are compared with."""
    verdicts: tuple[Verdict, ...] = ()
    """What the rules of the stages before said (`registry.Rule.stage`); empty for rules of the first stage."""
    memo: dict[tuple[str, str, str], Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Series that were worked out from these observations already (`series.points`); empty in every copy."""
