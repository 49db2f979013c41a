"""What a run leaves behind: the records that file readers make for the rules, beside those of `observe.py`.

The rules see no file: a reader of `rltop.evidence` (or the daemon, from its stream) turns what it read into these. They
are facts, not judgements, and small: a log of any size becomes a bounded number of `LogEvent`s, a checkpoint becomes
names, shapes and counts. Mappings hold plain values (numbers, strings, lists, maps) as the source wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rltop.checks.observe import Where

Owner = Literal["trainer", "engine", "rollout", "router", "ray", "host", "launcher", ""]


LOG_KINDS: Mapping[str, str] = {
    "http": "access line of a server: method, path, status",
    "prefill": "prefill batch: new_seq, new_token, cached_token, running_req, queue_req",
    "flushed": "a prefix cache was emptied: nothing",
    "flush_failed": "a prefix cache that could not be flushed: message",
    "update_refused": "an update that an engine refused or did only in part: message, path",
    "update_summary": "what one weight sync was made of: tensors, buckets",
    "weights_check": "answer of the weights checker, or of --check-weight-update-equal: ok, message",
    "weights_equal": "rltop's trainer found every tensor equal (--check-weight-update-equal): version, engines",
    "ckpt_loaded": "the trainer confirms a load: directory, iteration (Megatron) or hf (true)",
    "ckpt_fallback": "--load holds no checkpoint, another one is taken: asked, instead (the flag that is taken)",
    "service": "a framework's service: what (unhealthy, stale, restart, global, failed, fatal, ...), role, why, count",
    "scale": "the fleet of engines grows or shrinks: what (out, in, removed, evicted), why, count, engine_id",
    "placement_create": "a placement group is asked for: gpus, bundles",
    "placement_wait": "a placement group waits: gpus, elapsed_s, registered, available",
    "placement_bundle": "where a bundle lies: index, node, gpu",
    "recovered": "dead engines were started again: count",
    "oom": "out of GPU memory: gpu, tried_gb, total_gb, free_gb, processes (pid -> GB)",
    "pickle_refused": "a weights-only load refused a class: class",
    "over_length": "a request was refused for its token count: message",
    "release": "memory of an engine was released: tags",
    "memory_held": "memory that a release should have freed: device, after_s, engines, holders, processes (pid -> GB)",
    "no_weights": "an engine answered as it does without weights: engine_id, how, samples, rollout",
    "resume": "memory of an engine was brought back: tags",
}
"""Kinds of log events that the rules over files read, and the keys of `data`. Other recognisers add their own."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One thing that a log line (or a traceback, which is one event) says. Model text never becomes one."""

    kind: str
    """What it says: `ima`, `oom`, `traceback`, `batch`, `update`, ...; the recogniser that made it defines `data`."""
    text: str
    """The line, or the last line of a traceback."""
    where: Where
    owner: Owner = ""
    actor: str = ""
    """Ray actor's name where the line has one (`MegatronTrainRayActor`)."""
    pid: int | None = None
    node: str = ""
    """`ip=` of the Ray prefix, or the node's name."""
    rank: int | None = None
    engine: int | str | None = None
    level: str = ""
    time: float | None = None
    """Seconds since the epoch; a clock without date counts from 1970-01-01; None where the line has no time."""
    order: int = 0
    """Place among all events of all files after merging by time; of two events the smaller came first."""
    segment: int = 0
    repeated: int = 0
    """Ray hid the same line of this many other processes (`[repeated Nx across cluster]`)."""
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogSource:
    """One log as a whole: what it covers and how it ends."""

    source: str
    lines: int = 0
    owner: Owner = ""
    """Owner by the file's name, where it has one."""
    from_start: bool = False
    """It has start-up lines (arguments, placement, initialisation): what is missing in it did not happen."""
    first_time: float | None = None
    last_time: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Events per kind as counted, also those that were too many to keep."""


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request to an engine or router and its answer, in the order of the capture."""

    path: str
    """Without host and query."""
    status: int | None = None
    engine: int | str | None = None
    method: str = ""
    body: Mapping[str, object] = field(default_factory=dict)
    answer: Mapping[str, object] = field(default_factory=dict)
    """JSON answer; a text answer is `{"text": ...}`."""
    server: str = ""
    """`Server` header: a proxy that answers for an engine shows itself here."""
    url: str = ""
    step: int | None = None
    time: float | None = None
    order: int = 0
    where: Where | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    """Other fields of the row."""


@dataclass(frozen=True, slots=True)
class Document:
    """A small JSON or text document whose fields a rule looks up: `server_info`, `router_workers`, `weights_checker`,
    `versions`, `ip_local_port_range`, `env`, `tensor_names`, `ignore_rules`, `gpu_procs`, `note`, `config`,
    `generation_config`, `tokenizer_config`."""

    kind: str
    source: str
    fields: Mapping[str, object] = field(default_factory=dict)
    text: str = ""
    """Whole text where it is no JSON (notes)."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of a top-level key, where known."""

    def at(self, key: str = "", text: str = "") -> Where:
        """The place of a key, for evidence."""
        return Where(self.source, self.lines.get(key), text or (f"{key}: {self.fields.get(key)}" if key else ""))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a small table: `greedy_probe`, `bisect`, `gpu_mem`, `seq_error`."""

    kind: str
    fields: Mapping[str, object]
    where: Where
    order: int = 0


@dataclass(frozen=True, slots=True)
class RaySnapshot:
    """One `ray status`."""

    source: str
    at_s: float | None = None
    """Seconds since the start, from the file name's `_<N>s`."""
    nodes: int = 0
    pending_nodes: int = 0
    usage: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Resource -> (used, total); memory in bytes."""
    demands: tuple[tuple[Mapping[str, float], int, str], ...] = ()
    """(resources of one bundle, how many, strategy) that wait."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of a resource, of `demands`."""
    node_totals: tuple[Mapping[str, float], ...] = ()
    """What each node has, where the text says (`ray status -v`)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Header of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class BadScale:
    """A quantisation scale tensor with unusable entries."""

    name: str
    file: str
    entries: int
    nan: int = 0
    inf: int = 0
    zero: int = 0
    negative: int = 0


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    """A Hugging Face model directory, or the part of one that is in the evidence."""

    path: str
    config: Mapping[str, object] | None = None
    generation_config: Mapping[str, object] | None = None
    tokenizer_config: Mapping[str, object] | None = None
    tokenizer_tokens: Mapping[str, int] = field(default_factory=dict)
    """Special (added) tokens -> id."""
    index: Mapping[str, str] | None = None
    """`weight_map`: tensor name -> file; None without an index file."""
    index_source: str = ""
    index_lines: Mapping[str, int] = field(default_factory=dict)
    """File named in the index -> its first line there."""
    index_outside: tuple[str, ...] = ()
    """Files of the index that point out of the directory; never opened."""
    files: tuple[str, ...] = ()
    """Weight files on disk."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """File -> why its header can not be read."""
    tensors: tuple[Tensor, ...] = ()
    bad_scales: tuple[BadScale, ...] = ()
    scales_read: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """One `iter_*` or `release` directory."""

    name: str
    number: int | None
    files: int = 0
    has_metadata: bool = False
    """`.metadata` (torch_dist) or `mp_rank_*` files (legacy) are there."""


@dataclass(frozen=True, slots=True)
class MegatronCheckpoint:
    """A Megatron checkpoint directory."""

    path: str
    tracker: str | None = None
    """Text of `latest_checkpointed_iteration.txt`; None without the file."""
    iterations: tuple[Iteration, ...] = ()
    rollout_states: tuple[int, ...] = ()
    """Rollout ids of `rollout/global_dataset_state_dict_<id>.pt`."""
    is_iteration: bool = False
    """The directory itself is one iteration's (it was given as `--load` by mistake)."""


@dataclass(frozen=True, slots=True)
class Dump:
    """One `.pt` dump, read without unpickling, or a file of samples."""

    source: str
    kind: Literal["rollout", "train-v1", "train-v2", "state", "samples", "other"]
    """`samples`: a file of one sample per line, which is judged by its fields and bytes only."""
    rollout_id: int | None = None
    rank: int | None = None
    is_eval: bool = False
    samples: int = 0
    indices: tuple[int, ...] = ()
    """`index` of a rollout dump's samples, `sample_index` of a train dump's, in file order."""
    keys: tuple[int, ...] = ()
    """A hash of each sample's tokens where these must join the dumps: Relax's train dumps have no other key."""
    shards: Mapping[str, object] = field(default_factory=dict)
    """v2: what `dp_shards` says (how many there should be, which are here)."""
    field_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes per sample field over the whole dump."""
    fields: Mapping[str, int] = field(default_factory=dict)
    """How many samples have the field with a value other than None."""
    foreign: tuple[str, ...] = ()
    """`module.name` of every global that the pickle wants and that is not on the allow-list; nothing was executed."""
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """A piece of evidence that could not be read in whole."""

    where: Where
    kind: str
    """What it was taken for: `metrics`, `index`, `safetensors`, ..."""
    why: str
    cut_end: bool = False
    """Only the last line is cut: a growing file, which is fine."""
    whole: bool = False
    """Nothing of the file could be used."""
