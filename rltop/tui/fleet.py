"""From the cells of engines and fleet to what the engine table and screen show: pure functions.

Failure policy: a field that is missing or malformed shows as unknown; nothing is invented, nothing raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from rltop.tui.lenient import as_int, as_list, as_map, as_number, as_text
from rltop.tui.picture import State, under

_UNWELL = ("CRASHED", "LOST", "QUARANTINED", "BACKOFF", "SUSPECT")
_STAND_INS = ("CPU engine", "null engine")
_ON_THE_WAY = (
    "DRAINING",
    "STOPPING",
    "RECLAIMING",
    "LAUNCHING",
    "LOADING",
    "CAPTURING",
    "WARMING",
    "OFFLOADED",
    "RESERVED",
    "STALE",
    "STOPPED",
)
SIGNALS: tuple[tuple[str, str, str], ...] = (
    ("P", "process", "its processes are there"),
    ("H", "probe", "its health route answers"),
    ("G", "progress", "tokens come while requests run"),
    ("T", "trainer", "the trainer's requests succeed"),
    ("L", "log", "its log shows no fault"),
)
"""Letter, name, and what is true when it is well, of the five signals that health is judged by."""
GPU_FAULTS = ("ima", "misaligned", "launch-failure", "illegal-instruction")
"""Classes of crashes that a bisection hunts without being told which engine's."""
HTTP_ACTIONS = ("flush", "pause", "continue", "profile")
"""What an engine that others own can be asked for."""


class Signal(Struct, frozen=True):
    """One of the five. ok None: unknown."""

    letter: str
    name: str
    meaning: str
    ok: bool | None
    text: str
    t: float | None


class EngineView(Struct, frozen=True):
    """One engine. None = unknown."""

    id: str
    kind: str
    """`SGLang`, `CPU engine` or `null engine` (stand-ins) or what the run calls it."""
    state: str
    generation: int | None
    weights: str
    old: bool
    """Its weights are not the required ones."""
    running: float | None
    queued: float | None
    tokens_per_s: float | None
    kv: float | None
    """Share of the KV cache in use, 0..1."""
    graph: bool | None
    """Whether CUDA graphs are on: as seen to be in effect, else whether the last batch of a busy engine used one."""
    accept: float | None
    """Mean accepted length of speculative decoding."""
    seen: float | None
    """Server time of the last good scrape."""
    error: str
    url: str
    pid: int | None
    host: str
    version: str
    model_path: str
    log: str
    required: str = ""
    """Weight version that it should hold; empty: nobody said."""
    owner: str = ""
    """`rltop`: this run's daemon starts and stops it; `other`: it may only be watched; empty: not said."""
    launcher: str = ""
    since: float | None = None
    """Server time at which it came into its state."""
    deadline: float | None = None
    """Server time until which the state may last."""
    cause: str = ""
    fingerprint: str = ""
    restarts: int | None = None
    backoff_until: float | None = None
    stage: str = ""
    """Of the operation that is working on it."""
    pending: str = ""
    """What a queued operation waits for."""
    signals: tuple[Signal, ...] = ()
    digest: str = ""
    arm: str = ""
    hung: bool = False
    """It has answered no request for too long."""
    paused: str = ""
    """Who asked it to hold its requests; empty: nobody."""
    paused_at: float | None = None
    previous: int | None = None
    """Generation that a revert goes back to."""

    @property
    def process(self) -> str:
        """Which, and where."""
        return f"pid {self.pid or '?'} on {self.host or '?'}"

    @property
    def word(self) -> str:
        """The state without what stands in brackets."""
        return self.state.split("(")[0].upper()

    @property
    def trouble(self) -> int:
        """0 = unwell, 1 = on its way somewhere, 2 = needs a look (old weights, scrape error), 3 = well."""
        if self.word in _UNWELL:
            return 0
        if self.word in _ON_THE_WAY:
            return 1
        if self.word == "NAMED":  # nobody could reach it yet: that is no fault of its own
            return 3
        return 2 if self.old or self.error or self.paused else 3

    @property
    def stand_in(self) -> bool:
        """One of rltop's own engines, not SGLang."""
        return self.kind in _STAND_INS

    @property
    def hunted(self) -> bool:
        """It died of a wrong address on the GPU, which a bisection looks for."""
        return self.fingerprint.partition("/")[0] in GPU_FAULTS

    @property
    def owned(self) -> bool:
        """rltop can restart it."""
        return self.owner == "rltop"

    @property
    def stopped(self) -> bool:
        """It is down and stays so until somebody starts it."""
        return self.word in ("STOPPED", "QUARANTINED", "LOST", "CRASHED")


def required_weights(state: State) -> str:
    """The weight version every engine should hold: what the fleet asks for, else that of the newest sync."""
    wanted = as_map(as_map(state.get("fleet")).get("required")).get("version")
    return as_text(wanted) or as_text(as_map(state.get("weights")).get("version"))


class EngineMemo(Struct):
    """Views made before: state values are replaced, never changed in place, so the same value is the same view."""

    required: str = ""
    values: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    made: dict[str, EngineView] = field(default_factory=dict)
    order: list[EngineView] = field(default_factory=list)

    def views(self, state: State) -> list[EngineView]:
        """The `engine/*` keys, by id (numbers as numbers)."""
        required = required_weights(state)
        values = dict(under(state, "engine/"))
        if required != self.required:
            self.values, self.required = {}, required
        fresh = [key for key, value in values.items() if self.values.get(key) is not value]
        if fresh or len(values) != len(self.values):
            self.made = {
                key: self.made[key] if self.values.get(key) is value else _engine(key, value, required)
                for key, value in values.items()
            }
            self.order = sorted(self.made.values(), key=lambda view: natural(view.id))
            self.values = values
        return list(self.order)


def engine_views(state: State) -> list[EngineView]:
    """The `engine/*` keys, by id (numbers as numbers)."""
    return EngineMemo().views(state)


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key in which `e10` comes after `e9`."""
    parts: list[tuple[int, int, str]] = []
    digits = ""
    for char in text + "\0":
        if char.isdecimal() and char.isascii():
            digits += char
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        if char != "\0":
            parts.append((1, 0, char))
    return tuple(parts)


def _engine(key: str, value: Mapping[str, Any], required: str) -> EngineView:
    kind = as_text(value.get("kind"))
    weights = as_text(value.get("weight_version"))
    pid, pause = as_int(value.get("pid")), as_map(value.get("paused"))
    state, ours = as_text(value.get("state")).upper(), value.get("owner") == "rltop"
    return EngineView(
        id=as_text(value.get("id")) or key,
        kind={"cpu": "CPU engine", "null": "null engine", "sglang": "SGLang"}.get(kind, kind),
        state=state,
        generation=as_int(value.get("generation")),
        weights=weights,
        # The fleet lets no engine of its own serve old weights (what one holds is only seen a moment after a push), and
        # of one that does not run they say nothing.
        old=bool(required and weights and weights != required) and (state == "STALE" or not ours),
        running=as_number(value.get("running")),
        queued=as_number(value.get("queued")),
        tokens_per_s=as_number(value.get("tokens_per_s")),
        kv=as_number(value.get("token_usage")),
        graph=_graph(value),
        accept=as_number(value.get("spec_accept_length")),
        seen=as_number(value.get("seen")),
        error=as_text(value.get("error")),
        url=as_text(value.get("url")),
        pid=pid if pid is not None and pid > 0 else None,
        host=as_text(value.get("host")),
        version=as_text(value.get("version")),
        model_path=as_text(value.get("model_path")),
        log=as_text(value.get("log")),
        required=required,
        owner=as_text(value.get("owner")),
        launcher=as_text(value.get("launcher")),
        since=as_number(value.get("since")),
        deadline=as_number(value.get("deadline")),
        cause=as_text(value.get("cause")),
        fingerprint=as_text(value.get("fingerprint")),
        restarts=as_int(value.get("restarts")),
        backoff_until=as_number(value.get("backoff_until")),
        stage=as_text(value.get("stage")),
        pending=as_text(value.get("pending")),
        signals=_signals(value.get("signals")),
        digest=as_text(value.get("weight_digest")),
        arm=as_text(value.get("arm")),
        hung=value.get("hung") is True,
        # Beside the name stands what the daemon knows of the caller: too long for a line.
        paused=as_text(pause.get("by")).partition(" (")[0],
        paused_at=as_number(pause.get("since")),
        previous=as_int(value.get("previous_generation")),
    )


def _graph(value: Mapping[str, Any]) -> bool | None:
    """An idle engine's gauge tells of its last batch, and a prefill may run without a graph: what was seen to be in
    effect goes first."""
    seen = as_text(as_map(value.get("toggles")).get("cuda_graph"))
    if seen in ("on", "off"):
        return seen == "on"
    gauge = value.get("cuda_graph")
    return bool(gauge) if isinstance(gauge, bool | int | float) and value.get("running") else None


def _signals(value: Any) -> tuple[Signal, ...]:
    """The five in their order; empty when the engine has none of them."""
    given = as_map(value)
    if not given:
        return ()
    out = []
    for letter, name, meaning in SIGNALS:
        one = as_map(given.get(name))
        ok = one.get("ok")
        ok = ok if isinstance(ok, bool) else None
        out.append(Signal(letter, name, meaning, ok, as_text(one.get("text")), as_number(one.get("t"))))
    return tuple(out)


# ---------------------------------------------------------------- fleet


class AbRow(Struct, frozen=True):
    """One quantity of an A/B run; `low` and `high` bound the difference B - A."""

    name: str
    a: float | None
    b: float | None
    diff: float | None
    low: float | None
    high: float | None
    n: int | None

    @property
    def sure(self) -> bool:
        """The interval of the difference leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class AbView(Struct, frozen=True):
    """An A/B run: arm B has `changes`, arm A is as before."""

    changes: Mapping[str, str]
    since: float | None
    rows: tuple[AbRow, ...]
    verdict: str


class FleetView(Struct, frozen=True):
    """All engines that rltop owns."""

    serving: int | None
    total: int | None
    keep: int
    """Engines that go on serving in a rolling operation, by default."""
    source: str
    """Where the required weights come from: `trainer`, `disk` or `base`."""
    safe_point: bool
    ab: AbView | None


def fleet_view(state: State) -> FleetView | None:
    """The `fleet` key; None where rltop owns no engines."""
    fleet = state.get("fleet")
    if not isinstance(fleet, Mapping):
        return None
    keep = as_int(fleet.get("keep"))
    return FleetView(
        serving=as_int(fleet.get("serving")),
        total=as_int(fleet.get("total")),
        keep=1 if keep is None else keep,
        source=as_text(as_map(fleet.get("required")).get("source")),
        safe_point=fleet.get("safe_point") is True,
        ab=_ab(fleet.get("ab")),
    )


def _ab(value: Any) -> AbView | None:
    if not isinstance(value, Mapping):
        return None
    rows = []
    for item in map(as_map, as_list(value.get("rows"))):
        a, b, diff, low, high = (as_number(item.get(name)) for name in ("a", "b", "diff", "low", "high"))
        rows.append(AbRow(as_text(item.get("name")), a, b, diff, low, high, as_int(item.get("n"))))
    changes = {as_text(name): as_text(item) for name, item in as_map(value.get("changes")).items()}
    return AbView(changes, as_number(value.get("since")), tuple(rows), as_text(value.get("verdict")))
