"""Message types of the wire, one Struct per type, named as in `docs/protocol.md`.

Every body is a MessagePack map with the field names below; unknown keys are ignored, missing ones take the default.
NaN and Inf travel as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTO_MIN = 1
"""Oldest protocol version that this build speaks."""
PROTO_MAX = 1
"""Newest protocol version that this build speaks."""

Role = Literal["view", "control"]


class Header(msgspec.Struct, omit_defaults=True, frozen=True):
    """Second frame of every message. `t` is the message type; the rest depends on it."""

    v: int
    """Protocol version of the body."""
    t: str
    """Message type: the tag in `BODIES`, or one the receiver does not know and answers with `err/unsupported`."""
    id: str = ""
    """Set by the sender of a request; unique per connection (commands: unique for ever)."""
    re: str = ""
    """In an answer: the `id` of the request."""
    seq: int = 0
    """In `snap` and `delta`: the per-client sequence, strictly +1. In `rec`: the per-source sequence."""
    epoch: str = ""
    """Random per daemon start, in everything the daemon sends."""


# ---------------------------------------------------------------- producers -> daemon


class Source(msgspec.Struct, frozen=True):
    """Who produced a record."""

    role: str
    """`trainer`, `rollout`, `engine`, `hook` or any other short word."""
    rank: int = 0
    host: str = ""
    pid: int = 0
    framework: str = ""
    """Whose names its metrics have; "": those of the `run` record's framework."""

    @property
    def name(self) -> str:
        """Stable display name, for example `trainer/0`."""
        return f"{self.role}/{self.rank}"


class Record(msgspec.Struct, frozen=True):
    """Body of `rec`: one thing a producer saw. `payload` is one of the `*Payload` maps below, chosen by `kind`."""

    run: str
    source: Source
    seq: int
    """Per source, from 1, strictly +1 for every record that was *made*; a hole is a loss."""
    mono: float
    """Producer's monotonic clock, seconds."""
    wall: float
    """Producer's wall clock, seconds since the epoch."""
    kind: str
    payload: dict[str, Any]
    dropped: int = 0
    """Records of this source dropped so far because nobody took them."""


Axis = Literal["rollout", "train"]


def axis_of(name: str, given: Axis | None) -> Axis:
    """Axis of a metric: the record's, else by the metric's name: `train/…` counts optimizer steps, all others
    rollouts."""
    return given or ("train" if name.startswith("train/") else "rollout")


class MetricsPayload(msgspec.Struct, frozen=True):
    """Kind `metrics`: scalars of one rollout or one optimizer step, under slime's names."""

    values: dict[str, float]
    step: int
    """Value on the x axis: the rollout id for `rollout`, `perf` and `eval`; `train/step` for `train`."""
    axis: Axis | None = None
    """None: of each value by its name, see `axis_of`."""
    rollout_id: int | None = None
    step_in_rollout: int | None = None
    """0 is the on-policy step of its rollout. None when axis is `rollout`."""


class SamplesPayload(msgspec.Struct, frozen=True):
    """Kind `samples`: some finished rollouts of one rollout id, as plain maps.

    Keys: index, group_index, prompt, response, response_length (tokens), reward, label, status
    (`completed`, `truncated`, `aborted`), finish_reason, weight_version, engine, token_ids, rollout_log_probs,
    log_probs (both per response token, natural log). All optional but index and response.
    """

    rollout_id: int
    samples: list[dict[str, Any]]
    total: int = 0
    """How many samples the rollout has; `samples` may be fewer."""


class PhasePayload(msgspec.Struct, frozen=True):
    """Kind `phase`: the run enters or leaves a phase."""

    name: str
    """rollout, log_probs, ref_log_probs, train, update_weights, offload, wake_up, sleep, onload, save, eval, start,
    cold_start."""
    edge: Literal["enter", "leave"]
    rollout_id: int | None = None
    elapsed_s: float | None = None
    """On `leave`: how long it took."""


class LogPayload(msgspec.Struct, frozen=True):
    """Kind `log`: one line for people."""

    level: Literal["debug", "info", "warn", "error"]
    text: str


class WeightsPayload(msgspec.Struct, frozen=True):
    """Kind `weights`: one weight sync ended."""

    version: str
    rollout_id: int | None
    """The first rollout id that is sampled with this version."""
    ok: bool = True
    transport: str = ""
    """`disk`, `tensor`, `distributed`."""
    engines: dict[str, Any] = {}
    """engine id -> {ok, version, message, digest, same, gone, findings, differing}. findings: the first tensors that
    are not what the trainer holds, each {name, kind, detail, max_abs_err, parameter}; differing: how many there are."""
    digest: str = ""
    """Digest over all pushed tensors, as the trainer sees them."""
    elapsed_s: float | None = None
    layers: list[list[int]] = []
    """The layer ids of the pushed names, one ascending list per pipeline stage of the trainer, first stage first.
    Together they should be 0, 1, ... without gap or repetition."""
    checked: bool = False
    """The engines' weights were overwritten with random numbers before this sync (`--check-weight-update-equal`)."""
    findings: list[dict[str, Any]] = []
    """Tensors in which the trainer itself is not what it was loaded from."""


class EnginePayload(msgspec.Struct, frozen=True):
    """Kind `engine`: an engine started, changed or went away. The daemon scrapes `url` from then on.

    Of an engine that the daemon itself owns only `trouble`, and whether `state` is OFFLOADED, is used."""

    id: str
    """Short name, unique in the run: `0`, `1`, ..."""
    url: str = ""
    kind: str = "sglang"
    """`sglang`, or `cpu` for rltop's own CPU engine (a stand-in; every surface says so)."""
    state: str = "HEALTHY"
    """State names of DESIGN section 4: LAUNCHING, LOADING, STALE, HEALTHY, STOPPED, CRASHED, ..."""
    generation: int = 1
    pid: int = 0
    host: str = ""
    version: str = ""
    """SGLang version, or rltop's for the CPU engine."""
    weight_version: str = ""
    model_path: str = ""
    log: str = ""
    """Path of the engine's log on its host."""
    trouble: str | None = None
    """How requests to it fail, or "" when they succeed again; nothing else of the record is used then. None: not
    said."""


class RunPayload(msgspec.Struct, frozen=True):
    """Kind `run`: facts of the run, sent once at its start."""

    framework: str
    """`rltop`, `slime`, `relax`, ..."""
    args: dict[str, Any] = {}
    """Effective arguments, by slime's names with underscores."""
    mode: Literal["full", "rollout-only", "train-only"] = "full"
    backend: str = ""
    """Versions line of the training backend, e.g. `megatron-core 0.16.1, local spec, cpu/gloo, fp32, padded`."""
    start_rollout_id: int = 0
    fresh_start: bool = True
    """First rollout id is 0 and nothing was resumed from `--load`."""
    num_rollout: int | None = None
    vocab_size: int | None = None
    injected_faults: list[str] = []
    """Faults injected on purpose (`--inject`); shown wherever the run is shown."""
    stand_ins: list[str] = []
    """Parts that are stand-ins, in words."""


class ByePayload(msgspec.Struct, frozen=True):
    """Kind `bye`: the producer ends."""

    reason: Literal["done", "failed", "interrupted"]
    text: str = ""


PAYLOADS: dict[str, type[msgspec.Struct]] = {
    "metrics": MetricsPayload,
    "samples": SamplesPayload,
    "phase": PhasePayload,
    "log": LogPayload,
    "weights": WeightsPayload,
    "engine": EnginePayload,
    "run": RunPayload,
    "bye": ByePayload,
}
"""Record kind -> payload type."""


# ---------------------------------------------------------------- viewers <-> daemon


class Hello(msgspec.Struct, frozen=True):
    """Client's first message on a socket."""

    proto: tuple[int, int]
    """Lowest and highest protocol version that the client speaks."""
    client: str
    """Free text, `rltop/0.1.0`."""
    role: Role = "view"
    name: str = ""
    """Self-declared operator name (`--as`); shown as unverified."""
    features: list[str] = []
    fps: float = 2.0
    """Most delta frames per second that the client wants."""
    want: list[str] = msgspec.field(default_factory=lambda: ["*"])
    """Key globs (fnmatch) of the state table."""
    epoch: str = ""
    """With `ver` and `eseq`: resume. An unknown epoch means a full snapshot."""
    ver: int = 0
    eseq: int = 0


class Welcome(msgspec.Struct, frozen=True):
    """Daemon's answer to `hello`; a `snap` (or, on resume, a `delta`) follows on the same socket."""

    proto: int
    run: str
    server: str
    """`rltop/0.1.0`."""
    server_time: float
    role: Role
    resumed: bool = False
    features: list[str] = []
    limits: dict[str, int] = {}
    """lease_s, in_flight, max_message_bytes, event_ring."""


class Snap(msgspec.Struct, frozen=True):
    """The whole state table, without history."""

    ver: int
    eseq: int
    """Sequence of the newest event."""
    keys: dict[str, Any]
    events: list[dict[str, Any]] = []
    """The newest events (at most 200), oldest first."""


class Delta(msgspec.Struct, frozen=True):
    """What changed since the last frame sent in this session (the first of a resumed one: since what `hello` named)."""

    ver: int
    eseq: int
    """Sequence of the last event that this frame accounts for; there may be newer ones in the next frame."""
    set: dict[str, Any] = {}
    gone: list[str] = []
    events: list[dict[str, Any]] = []
    gap: tuple[int, int] | None = None
    """Events from..to (inclusive) fell off the ring before this client took them."""


class Ack(msgspec.Struct, frozen=True):
    """Client took every frame up to this per-client sequence."""

    seq: int


class Tick(msgspec.Struct, frozen=True):
    """1 Hz sign of life, outside the sequence; tells quiet from dead."""

    time: float
    lag_ms: float
    """Loop lag of the daemon."""
    ages: dict[str, float] = {}
    """Source name -> seconds since its last record or scrape."""
    viewers: int = 0


class Ping(msgspec.Struct, frozen=True):
    """Client's sign of life after 2 s of silence; a client silent for `lease_s` is dropped. Answered by `pong`."""


class SeriesQuery(msgspec.Struct, frozen=True):
    """History of metrics, bucketed."""

    keys: list[str]
    """Names as in the state keys, without `metric/`. At most 500."""
    lo: float | None = None
    """First step, None = the oldest."""
    hi: float | None = None
    """Last step, None = the newest."""
    buckets: int = 200
    exact: bool = False
    """Also the float64 values, of the series where every point is its own bucket."""


class SeriesAnswer(msgspec.Struct, frozen=True):
    """Answer `series`: `cols[key]` names the blob index of each column, all little-endian and of length n."""

    cols: dict[str, dict[str, int]]
    """key -> {n, step, min, max, last, nan}: n is the number of buckets, the others are blob indices.
    `step` is float64 (last step in the bucket), min/max/last float32 (NaN where a bucket holds no finite value),
    nan uint32 (count of NaN and Inf). With `exact`, where every bucket is one point, also value: float64, as it was."""
    missing: list[str] = []


class EventsQuery(msgspec.Struct, frozen=True):
    """A page of the event log: of the matching events with lo <= eseq <= hi the newest `limit`."""

    lo: int = 0
    hi: int | None = None
    kinds: list[str] = []
    text: str = ""
    """Case-insensitive substring."""
    limit: int = 200


class EventsAnswer(msgspec.Struct, frozen=True):
    """Answer `events`: oldest first; `more` when earlier ones matched too."""

    events: list[dict[str, Any]]
    more: bool = False


class LinesQuery(msgspec.Struct, frozen=True):
    """Lines of a log around one line, as the evidence of a verdict names it, its last ones, or those behind a byte."""

    source: str
    """`source` of the evidence."""
    line: int
    """From 1; 0: the last lines, `before` of them."""
    before: int = 100
    after: int = 100
    """Lines around it; at most 500 on each side."""
    start: int | None = None
    """With `line` 0: the whole lines from this byte on, at most 500; `end` of the answer is where the next ones are."""


class LinesAnswer(msgspec.Struct, frozen=True):
    """Answer `lines`: consecutive lines; without any, `why` says what is in the way."""

    source: str
    first: int = 0
    """Number of the first of them; 0 of the last lines of a log, which are not counted."""
    lines: list[str] = []
    """Without line ends, each at most 4,000 bytes long."""
    why: str = ""
    end: int = -1
    """With `line` 0: the byte behind the last line; -1: not known."""


class DumpsQuery(msgspec.Struct, frozen=True):
    """Which dumps of rollouts the run has."""


class DumpsAnswer(msgspec.Struct, frozen=True):
    """Answer `dumps`: oldest rollout first; without any, `why` says where was looked."""

    dumps: list[dict[str, Any]] = []
    """{path, rollout_id, eval, bytes, t (last change, seconds since the epoch), train[] (paths of the train dumps that
    are joined to it)}; `path` is what `dump-page?` asks for."""
    why: str = ""
    holes: list[int] = []
    """Rollout ids between the first and the last that have no dump (at most 100)."""


class DumpPageQuery(msgspec.Struct, frozen=True, rename={"start": "from", "stop": "to"}):
    """Samples of one dump: a page of the list that `filter` and `sort` make of it."""

    path: str
    """As in `dumps`."""
    start: int = 0
    stop: int = 50
    """Places in that list; at most 1,000 rows, 1 sample in full."""
    filter: str = ""
    """Words that all occur in prompt, response, label or status, and terms such as `reward<0.5`, `status=truncated`."""
    sort: str = ""
    """`reward`, `length`, `gap`, `status`, `group`, with `-` before it for the other way round; empty: as in the
    file."""
    search: str = ""
    """Not the rows from `from` on, but the first one from there whose prompt or response has this text; backwards when
    `to` < `from`."""
    group_at: int = -1
    """Only the group of the sample at this place of the file."""
    want: Literal["rows", "whole", "stats"] = "rows"
    """One line of each, all of one, or the numbers of the whole file."""


class DumpPageAnswer(msgspec.Struct, frozen=True, rename={"start": "from"}):
    """Answer `dump-page`. A long file is read in slices: ask again until `done`."""

    path: str
    start: int = 0
    """Place of the first row in the list."""
    rows: list[dict[str, Any]] = []
    """{at (place in the file), index, group_index, reward, status, length (response tokens), gap (mean |train -
    rollout| log-prob), text}; what is not known is null."""
    samples: list[dict[str, Any]] = []
    """With `want` "whole": see docs/protocol.md."""
    stats: dict[str, Any] = {}
    """With `want` "stats": perf metrics recomputed from the samples."""
    count: int = 0
    """Rows in the list as far as is known."""
    indexed: int = 0
    """Samples of the file that were gone through."""
    done: bool = True
    """The answer is complete; a search that found nothing has ended."""
    ended: bool = True
    """The list is known to its end: `count` is final."""
    found: int = -1
    """With `search`: the place in the list."""
    why: str = ""
    """What is in the way, in words."""


class Command(msgspec.Struct, frozen=True):
    """Body of `cmd` (control socket only). The header's `id` makes it idempotent."""

    name: str
    target: str = ""
    args: dict[str, Any] = {}
    if_epoch: str = ""
    if_gen: int | None = None
    dry_run: bool = False
    reason: str = ""


class Accepted(msgspec.Struct, frozen=True):
    """The command became an operation; its progress is in the key `op/<op>` and in events of kind `op`."""

    op: str
    plan: list[str] = []
    """What will be (with dry_run: would be) done."""


class Rejected(msgspec.Struct, frozen=True):
    """The command was not taken; nothing was changed."""

    code: str
    """`unknown-command`, `bad-args`, `not-control`, `stale-epoch`, `stale-generation`, `busy`, `not-running` (what it
    is about is not going on)."""
    why: str
    do: str = ""


class Err(msgspec.Struct, frozen=True):
    """A message could not be handled. `code`: `proto`, `unsupported`, `malformed`, `hello-first`, `not-control`,
    `busy`, `internal`."""

    code: str
    why: str


class Bye(msgspec.Struct, frozen=True):
    """Either side leaves in good order."""

    reason: str = ""


BODIES: dict[str, type[msgspec.Struct]] = {
    "rec": Record,
    "hello": Hello,
    "welcome": Welcome,
    "snap": Snap,
    "delta": Delta,
    "ack": Ack,
    "tick": Tick,
    "ping": Ping,
    "pong": Ping,
    "series?": SeriesQuery,
    "series": SeriesAnswer,
    "events?": EventsQuery,
    "events": EventsAnswer,
    "lines?": LinesQuery,
    "lines": LinesAnswer,
    "dumps?": DumpsQuery,
    "dumps": DumpsAnswer,
    "dump-page?": DumpPageQuery,
    "dump-page": DumpPageAnswer,
    "cmd": Command,
    "accepted": Accepted,
    "rejected": Rejected,
    "err": Err,
    "bye": Bye,
}
"""Message type -> body type."""
