"""What can be asked of a fleet of engines, and the answers: plain frozen data.

A request says what is wanted of which engines; `Fleet.plan` turns it into a `FleetPlan` (nothing has happened yet) or a
`Refused`. Targets are engine ids; an empty tuple or `("all",)` means every engine of the fleet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rltop.engines.launcher import Kind

VERSION = "0.5.23"
"""Whose arguments are assumed until an engine has said its version."""
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""An engine's id, whole: it is the name of its folder, so nothing that leads anywhere else."""
Mode = Literal["rolling", "at-once"]
When = Literal["now", "safe-point"]
HttpAction = Literal["flush", "pause", "continue", "profile"]
RefusedCode = Literal["refused-by-rules", "bad-args", "stale-generation", "busy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Required:
    """Which weights an engine must hold before it may serve."""

    version: str
    """Label as `/model_info` says it. `default` is a checkpoint nobody has updated."""
    source: Literal["trainer", "disk", "base"]
    """trainer: it pushes, the fleet waits. disk: the fleet loads `path`. base: the checkpoint of the launch itself."""
    path: str = ""
    """Directory that the engine's host can read (source disk; for base: empty means the launch's model path)."""
    digest: str = ""
    """`per_gpu_checksum` that the engine's `/weights_checker` must answer; empty: not known, the label decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What toggles change: arguments and environment of a launch."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Variables that are not inherited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSlot:
    """One engine as its owner declares it; the fields are those of `LaunchSpec`."""

    id: str
    kind: Kind = "cpu"
    model_path: str = ""
    python: str = ""
    """Interpreter with the server installed; empty: the launcher's own."""
    args: tuple[str, ...] = ()
    """SGLang's argv without `--model-path`, `--host`, `--port`, `--enable-metrics`."""
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    place: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartEngines:
    """Have these engines run. One that runs already as declared is kept; an undeclared one is left alone."""

    slots: tuple[EngineSlot, ...]
    launcher: str = "local"
    ray: Mapping[str, Any] | None = None
    """Where the cluster is; the daemon makes the `ray` launcher from it before it plans."""
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetToggles:
    """Restart engines with other logical toggles (`engines/toggles.py`); a stopped one only gets the arguments."""

    targets: tuple[str, ...] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    mode: Mode = "rolling"
    keep: int | None = None
    """Engines that go on serving during a rolling change; None: the policy's `keep_serving`."""
    when: When = "now"
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Stop and start with the same arguments. Also ends a quarantine."""

    targets: tuple[str, ...] = ()
    mode: Mode = "rolling"
    keep: int | None = None
    when: When = "now"
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Stop and keep stopped."""

    targets: tuple[str, ...] = ()
    when: When = "now"
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start what is stopped, crashed, waiting for its backoff or quarantined."""

    targets: tuple[str, ...] = ()
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Revert:
    """Restart with the arguments and environment of the generation before the last change; one that is stopped only
    gets them."""

    targets: tuple[str, ...] = ()
    mode: Mode = "rolling"
    keep: int | None = None
    when: When = "now"
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synced:
    """The trainer says: this generation of this engine got version `version` from me. The engine is asked itself."""

    target: str
    generation: int
    version: str
    digest: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ab:
    """Half of the targets get the changes (arm B), the other half stays (arm A)."""

    changes: Mapping[str, str]
    targets: tuple[str, ...] = ()
    keep: int | None = None
    when: When = "now"
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AbEnd:
    """Put arm B back to what it was before, and close the comparison."""

    keep: int | None = None
    when: When = "now"
    reason: str = ""
    who: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Http:
    """Something an engine does by itself, without a restart."""

    target: str
    action: HttpAction
    reason: str = ""
    who: str = ""


Request: TypeAlias = StartEngines | SetToggles | Restart | Stop | Start | Revert | Synced | Ab | AbEnd | Http


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Nothing was done and nothing will be."""

    code: RefusedCode
    why: str
    do: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPlan:
    """What `carry_out` would do. Valid until a slot it names changes its generation."""

    request: Request
    steps: list[str]
    """For people, in order."""
    diff: Mapping[str, list[str]] = field(default_factory=dict)
    """Engine id -> `- --flag`, `+ --flag`, `- NAME=value`, `+ NAME=value`."""
    targets: tuple[str, ...] = ()
    generations: Mapping[str, int] = field(default_factory=dict)
    """Engine id -> generation the plan was made for."""
    configs: Mapping[str, Config] = field(default_factory=dict)
    """Engine id -> arguments and environment it will be started with."""
    stays: tuple[str, ...] = ()
    """Engines of `configs` that are stopped and stay so: they get the arguments, and are not started."""
    warnings: list[str] = field(default_factory=list)
