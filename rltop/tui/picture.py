"""From the mirror's state keys to what the panes show: pure functions, no Textual, no clock.

Failure policy: a key that is missing or malformed shows as unknown (`-`); nothing is invented, nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rltop.tui.clientlike import Status
from rltop.tui.lenient import as_list, as_map, as_number, as_text

State = Mapping[str, Any]

QUIET_S = 15.0
"""Without a record for so long from any source a living daemon is called quiet."""
DEAD_S = 6.0
"""Without any frame for so long the way to the daemon is gone. The client says it first, after 5 s."""
FIRST_STEP = (
    "rollout.text",
    "logprob.ref-equal",
    "logprob.magnitude",
    "logprob.train-rollout",
    "kl.on-policy",
    "train.grad-high",
    "train.grad-zero",
    "train.nan",
)
"""`rltop.checks.catalogue.STEP1`, in its order. Importing it costs the first picture 5 ms; a test compares them."""
REPLAY = "train.replay"
SLOW_PHASE = 3.0
"""A phase this many times its median is called slow."""


def under(state: State, prefix: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(rest of the key, value) of the keys that start with `prefix`, in the order of the table."""
    return [(key[len(prefix) :], as_map(value)) for key, value in state.items() if key.startswith(prefix)]


# ---------------------------------------------------------------- header


class RunView(Struct, frozen=True):
    """Who is watched."""

    name: str
    framework: str
    mode: str
    state: str
    text: str
    stand_ins: tuple[str, ...]
    faults: tuple[str, ...]
    num_rollout: int | None
    started: float | None
    ended: float | None


def run_view(state: State, fallback_name: str = "") -> RunView:
    """The `run` key."""
    run = as_map(state.get("run"))
    total = run.get("num_rollout")
    return RunView(
        name=as_text(run.get("name")) or fallback_name,
        framework=as_text(run.get("framework")),
        mode=as_text(run.get("mode")),
        state=as_text(run.get("state")),
        text=as_text(run.get("text")),
        stand_ins=tuple(map(str, as_list(run.get("stand_ins")))),
        faults=tuple(map(str, as_list(run.get("injected_faults")))),
        num_rollout=total if isinstance(total, int) else None,
        started=as_number(run.get("started")),
        ended=as_number(run.get("ended")),
    )


class PhaseView(Struct, frozen=True):
    """The phase clock."""

    name: str
    rollout: int | None
    elapsed_s: float | None
    median_s: float | None
    also: tuple[str, ...]
    """Other open phases."""

    @property
    def times_median(self) -> float | None:
        """How often the median fits into the elapsed time; None without both."""
        if self.elapsed_s is None or not self.median_s:
            return None
        return self.elapsed_s / self.median_s


def phase_view(state: State, server_now: float | None) -> PhaseView | None:
    """The `phase` key; None before the first phase. Elapsed time stops at the end of the run."""
    phase = as_map(state.get("phase"))
    name = as_text(phase.get("name"))
    if not name:
        return None
    since = as_number(phase.get("since"))
    ended = as_number(as_map(state.get("run")).get("ended"))
    until = server_now if ended is None else ended
    rollout = phase.get("rollout_id")
    return PhaseView(
        name=name,
        rollout=rollout if isinstance(rollout, int) else None,
        elapsed_s=None if since is None or until is None else max(0.0, until - since),
        median_s=as_number(phase.get("median_s")),
        also=tuple(str(item) for item in as_list(phase.get("open")) if item != name),
    )


class Link(Struct, frozen=True):
    """The connection, as the app knows it at one moment."""

    status: Status
    age_s: float
    """Since the last frame of any kind."""
    problem: str = ""
    quiet_s: float | None = None
    """Since the newest record of any source, by the daemon's last tick; None: unknown."""
    viewers: int = 0
    lag_ms: float = 0.0
    paused_s: float | None = None
    archive: bool = False
    """There is no daemon any more: this is what the run's journal holds."""

    @property
    def lost(self) -> bool:
        """No sign of life for too long, or the client says so."""
        return self.status == "lost" or (self.status == "live" and self.age_s > DEAD_S)

    @property
    def quiet(self) -> bool:
        """The daemon lives, the run says nothing."""
        return self.status == "live" and not self.lost and self.quiet_s is not None and self.quiet_s > QUIET_S


def newest_rollout(state: State) -> int | None:
    """The rollout of the newest reward, for when no phase is open."""
    for key in CHARTS[0].keys:
        rollout = as_map(state.get(f"metric/{key}")).get("rollout_id")
        if isinstance(rollout, int):
            return rollout
    return None


# ---------------------------------------------------------------- checks


class CheckView(Struct, frozen=True):
    """One verdict."""

    id: str
    status: str
    subject: str = ""
    """`engine 3`, `rank 0`, or empty."""
    where: str = ""
    """`rollout 0 step 1`, or empty."""
    value: Any = None
    threshold: Any = None
    cause: str = ""
    evidence: tuple[Mapping[str, Any], ...] = ()
    advice: tuple[str, ...] = ()
    confidence: str = ""
    consequence_of: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    since: float | None = None
    root: bool = False
    depth: int = 0
    """1: folded under its root cause."""
    muted: str = ""
    """Who muted it and why; it stays in the list, behind what calls for somebody."""


_RANK = {"fail": 0, "warn": 1, "info": 2, "pass": 3, "skip": 4}


def check_views(state: State) -> list[CheckView]:
    """Verdicts, worst thing first: each root cause with its consequences under it, then the rest by status.

    Within a status the outcome of a replay comes first (it is what such a run is for), then the first-step checks in
    the order in which slime's guide looks at them.
    """
    roots = [str(item) for item in as_list(as_map(state.get("checks")).get("root_causes"))]
    views = [_check(key, value, roots) for key, value in under(state, "check/")]
    by_root: dict[str, list[CheckView]] = {}
    top: list[CheckView] = []
    known = {view.id for view in views if view.status in ("fail", "warn")}
    for view in views:
        parent = next((item for item in view.consequence_of if item in known and item != view.id), None)
        if parent is None or view.status not in ("fail", "warn"):
            top.append(view)
        else:
            by_root.setdefault(parent, []).append(view)

    def order(view: CheckView) -> tuple[int, int, int, str]:
        root = roots.index(view.id) if view.id in roots else len(roots)
        return (
            _RANK["info"] if view.muted and view.status in ("fail", "warn") else _RANK[view.status],
            root,
            -1 if view.id == REPLAY else FIRST_STEP.index(view.id) if view.id in FIRST_STEP else len(FIRST_STEP),
            view.id,
        )

    out: list[CheckView] = []
    for view in sorted(top, key=order):
        out.append(view)
        _fold(view.id, by_root, out)
    for rest in by_root.values():  # a ring of consequences has no root: show it all the same
        out.extend(rest)
    return out


def _fold(root: str, by_root: dict[str, list[CheckView]], out: list[CheckView]) -> None:
    for child in sorted(by_root.pop(root, ()), key=lambda view: _RANK[view.status]):
        out.append(_deeper(child))
        _fold(child.id, by_root, out)


def _deeper(view: CheckView) -> CheckView:
    return replace(view, depth=1, root=False)


def _check(key: str, value: Mapping[str, Any], roots: list[str]) -> CheckView:
    name = as_text(value.get("id")) or key
    subject = " ".join(f"{what} {value[what]}" for what in ("engine", "rank") if value.get(what) is not None)
    where = " ".join(f"{what} {value[what]}" for what in ("rollout", "step") if value.get(what) is not None)
    status = as_text(value.get("status"))
    return CheckView(
        id=name,
        status=status if status in _RANK else "skip",
        subject=subject,
        where=where,
        value=value.get("value"),
        threshold=value.get("threshold"),
        cause=as_text(value.get("cause")),
        evidence=tuple(as_map(item) for item in as_list(value.get("evidence"))),
        advice=tuple(map(str, as_list(value.get("advice")))),
        confidence=as_text(value.get("confidence")),
        consequence_of=tuple(map(str, as_list(value.get("consequence_of")))),
        refs=tuple(map(str, as_list(value.get("refs")))),
        since=as_number(value.get("since")),
        root=name in roots,
        muted=_mute(as_map(value.get("muted"))),
    )


def _mute(mute: Mapping[str, Any]) -> str:
    who, reason = as_text(mute.get("who")), as_text(mute.get("reason"))
    return f"{reason or 'muted'} ({who})" if who else reason


def check_counts(views: Iterable[CheckView]) -> dict[str, int]:
    """How many verdicts have each status, worst first, zeros and muted ones left out."""
    counts = dict.fromkeys(_RANK, 0)
    for view in views:
        if not view.muted:
            counts[view.status] += 1
    return {status: count for status, count in counts.items() if count}


# ---------------------------------------------------------------- charts


class ChartSpec(Struct, frozen=True):
    """What one chart shows: the first of `keys` that the run reports; `check` gives its threshold and its colour."""

    title: str
    keys: tuple[str, ...]
    check: str = ""
    unit: str = ""
    healthy: str = ""
    """What a healthy value is, for the help screen."""


CHARTS: tuple[ChartSpec, ...] = (
    ChartSpec(
        "reward",
        ("rollout/raw_reward", "rollout/rewards"),
        healthy="rises, with noise; flat from the start: nothing is learned",
    ),
    ChartSpec(
        "KL",
        ("train/kl_loss", "train/ppo_kl", "rollout/kl"),
        healthy="exactly 0 at the first step, then a slow rise",
    ),
    ChartSpec(
        "grad_norm",
        ("train/grad_norm",),
        "train.grad-high",
        healthy="below about 1 and steady; single spikes are data, growth is not",
    ),
    ChartSpec(
        "response length",
        ("rollout/response_len/mean", "rollout/response_lengths"),
        unit="tok",
        healthy="moves slowly; at the limit: responses are cut off",
    ),
    ChartSpec(
        "log-prob gap",
        ("train/train_rollout_logprob_abs_diff",),
        "logprob.train-rollout",
        healthy="small and flat (below 0.01 in fp32, 0.05 in bf16); a jump at a weight sync: the sync is wrong",
    ),
    ChartSpec(
        "entropy", ("train/entropy_loss", "rollout/entropy"), healthy="falls slowly; near 0: the policy has collapsed"
    ),
)


def chart_key(spec: ChartSpec, state: State) -> str | None:
    """Which metric the chart shows now."""
    return next((key for key in spec.keys if f"metric/{key}" in state), None)


def threshold(spec: ChartSpec, state: State) -> float | None:
    """The number that the chart's check compares with, when it is one positive number."""
    if not spec.check:
        return None
    limit = as_map(state.get(f"check/{spec.check}")).get("threshold")
    if isinstance(limit, Mapping):
        limit = limit.get("warn", limit.get("fail", limit.get("max")))
    number = as_number(limit)
    return number if number is not None and math.isfinite(number) and number > 0 else None


def check_status(spec: ChartSpec, state: State) -> str:
    """Status of the chart's check, empty without one."""
    return as_text(as_map(state.get(f"check/{spec.check}")).get("status")) if spec.check else ""
