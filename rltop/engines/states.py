"""The vocabulary of an engine slot's life: states, settings, the slot itself, events and actions. Plain data.

`machine.py` says which event leads where; this says what the words mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

DYING = "it is dying: "
"""Before the line of the log that says so: what is known of a crash until the process has ended."""


class State(StrEnum):
    """Where a slot is in its life."""

    STOPPED = "STOPPED"
    LAUNCHING = "LAUNCHING"
    """A process is being made."""
    LOADING = "LOADING"
    CAPTURING = "CAPTURING"
    """CUDA graphs."""
    WARMING = "WARMING"
    STALE = "STALE"
    """It answers, but does not hold the required weights: it serves nobody."""
    HEALTHY = "HEALTHY"
    SUSPECT = "SUSPECT"
    """It serves; a signal is bad."""
    DRAINING = "DRAINING"
    """Out of the rotation; what it runs may end."""
    STOPPING = "STOPPING"
    RECLAIMING = "RECLAIMING"
    """The process ended; its children, lock, port and GPU memory are awaited."""
    OFFLOADED = "OFFLOADED"
    """Its memory is released to the trainer: asking it for a token would kill it, so nothing probes."""
    CRASHED = "CRASHED"
    """Its end was not asked for. `Slot.dying`: its process is still there, writing its dumps."""
    BACKOFF = "BACKOFF"
    QUARANTINED = "QUARANTINED"
    """It keeps crashing in one way: a person decides."""
    LOST = "LOST"
    """Its node does not answer: the process may live or not."""


STARTING = frozenset({State.LOADING, State.CAPTURING, State.WARMING})
SERVING = frozenset({State.HEALTHY, State.SUSPECT})
"""In the rotation."""
ANSWERING = SERVING | {State.STALE}
LIVE = STARTING | ANSWERING | {State.DRAINING, State.STOPPING, State.OFFLOADED}
"""A process of this slot's generation exists, as far as is known."""
DEAD = frozenset({State.STOPPED, State.CRASHED, State.BACKOFF, State.QUARANTINED, State.RECLAIMING})
"""No process may be thought to serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetPolicy:
    """Settings of a fleet. Times in seconds. Raises `ValueError` for values that cannot work."""

    keep_serving: int = 1
    """Engines that stay in the rotation during a rolling operation, where there are more than that."""
    restart: Literal["auto", "never"] = "auto"
    """What follows a crash."""
    on_hang: Literal["alarm", "restart"] = "alarm"
    drain_s: float = 60.0
    """How long running requests may take before they are aborted (the trainer asks them again elsewhere)."""
    dying_s: float = 90.0
    """How long an engine with a fatal error may take to end by itself: SGLang writes dumps for up to 65 s."""
    abort_s: float = 5.0
    """How long aborted requests may take to be answered."""
    term_s: float = 25.0
    """SIGTERM to SIGKILL. SGLang looks for it every 5 s, then waits up to 15 s for its schedulers."""
    kill_s: float = 10.0
    """SIGKILL to alarm."""
    reclaim_s: float = 30.0
    """End of the process to alarm: its memory, port or lock is still held."""
    launch_s: float = 120.0
    """Until a process exists; with Ray it may wait for its bundle."""
    start_s: float = 900.0
    """From the process to its first answer: load, capture, warm up."""
    stale_s: float = 120.0
    """Without the required weights until alarm."""
    lost_s: float = 60.0
    """How long a node may be away before its engine is given up and started elsewhere (`restart="auto"`)."""
    backoff_s: float = 10.0
    backoff_max_s: float = 300.0
    flap_crashes: int = 3
    flap_rollouts: int = 6
    """So many crashes with one fingerprint, with at most so many rollouts survived between them, are flapping."""
    flap_s: float = 600.0
    """And so are as many within this time, whatever the rollouts: where they are short, many lie between two crashes of
    a loop. A crash this soon after the last one with its fingerprint is in a row with it: the backoff doubles."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name.endswith("_s") and getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        if self.backoff_max_s < self.backoff_s:
            raise ValueError(f"backoff_max_s = {self.backoff_max_s}: less than backoff_s = {self.backoff_s}")
        if self.keep_serving < 0:
            raise ValueError(f"keep_serving = {self.keep_serving}: must not be negative")
        if self.flap_crashes < 2 or self.flap_rollouts < 0:
            raise ValueError(f"flap_crashes = {self.flap_crashes} (at least 2), flap_rollouts = {self.flap_rollouts}")


@dataclass(frozen=True, slots=True)
class Crash:
    """One end that nobody asked for."""

    fingerprint: str
    rollouts: int
    """Survived by that generation."""
    generation: int
    at: float | None = None
    """When, on the slot's clock; None: not known (of an earlier boot of the machine)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One engine's place. `since` and `deadline` are on the caller's clock."""

    policy: FleetPolicy = field(default_factory=FleetPolicy)
    state: State = State.STOPPED
    since: float = 0.0
    deadline: float | None = None
    """When `Tick` acts; None: nothing is due."""
    generation: int = 0
    """Number of the newest process; every launch gets the next."""
    cause: str = ""
    """Why it is in this state."""
    fingerprint: str = ""
    """Of the last crash; kept until the slot is started by a person."""
    failing: Crash | None = None
    """It is being ended for this: what follows RECLAIMING is a crash's backoff, not STOPPED."""
    crashes: tuple[Crash, ...] = ()
    """Newest last; forgotten once a generation survives more than `flap_rollouts`, and `flap_s` have passed since."""
    rollouts: int = 0
    """Survived by this generation."""
    restarts: int = 0
    """Automatic ones, in all."""
    dying: bool = False
    """CRASHED, but the process has not ended yet: it has `dying_s` to write what tells why."""
    clean: bool = True
    """Nothing of an ended process is left."""
    escalated: bool = False
    """The deadline of this state has passed and was acted on."""

    reserved: bool = False
    """This generation is for trials (`trials.py`): it never enters the rotation, and a crash of it is not followed by a
    restart."""

    def serves(self) -> bool:
        """In the rotation."""
        return self.state in SERVING and not self.reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What a slot should come to. Level-triggered: it holds until it is replaced."""

    run: bool = False
    generation: int = 0
    """A process older than this number is to be replaced: it has other arguments, or a person asked for a new one."""
    drain: bool = True
    cause: str = ""
    """What is said while a slot moves towards it."""
    reserved: bool = False
    """Whoever is started next is for trials."""


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Start:
    """Launch the next generation. From BACKOFF only when due, unless a person asks."""

    person: bool = False
    cause: str = ""
    reserved: bool = False


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process exists."""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """No process came of it, or what came is being ended by the launcher."""

    fingerprint: str
    cause: str


@dataclass(frozen=True, slots=True)
class Adopted:
    """A process of generation `generation` from an earlier supervisor lives."""

    generation: int


@dataclass(frozen=True, slots=True)
class Reached:
    """Its log says it came to CAPTURING or WARMING."""

    state: State


@dataclass(frozen=True, slots=True)
class Ready:
    """It answers requests."""

    cause: str = ""


@dataclass(frozen=True, slots=True)
class Awaits:
    """Why it is still STALE."""

    cause: str
    refused: bool = False
    """It did not load what the fleet had it load."""


@dataclass(frozen=True, slots=True)
class Synced:
    """It holds the required weights; it was asked."""

    version: str


@dataclass(frozen=True, slots=True)
class Outdated:
    """It serves other weights than the required ones."""

    cause: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """A signal is bad."""

    cause: str


@dataclass(frozen=True, slots=True)
class Trust:
    """All signals are good again."""


@dataclass(frozen=True, slots=True)
class Hang:
    """It holds work and makes no progress."""

    cause: str


@dataclass(frozen=True, slots=True)
class Dying:
    """Its log holds a line that no engine survives, or its scheduler is gone; the main process is still there."""

    fingerprint: str
    cause: str


@dataclass(frozen=True, slots=True)
class Released:
    """Its memory was given to the trainer."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """It has its memory back, with nothing in it."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End it. drain: let running requests end first."""

    cause: str
    drain: bool = True


@dataclass(frozen=True, slots=True)
class Undrain:
    """The stop was called off before anything was ended."""

    cause: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing runs on it."""

    cause: str = ""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended."""

    fingerprint: str
    cause: str


@dataclass(frozen=True, slots=True)
class Held:
    """Something of the ended process is left; who and how much."""

    cause: str


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Nothing is left of the ended process."""


@dataclass(frozen=True, slots=True)
class RolloutDone:
    """A rollout ended while this slot was as it is."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """Its node does not answer."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeFound:
    """The node answers again, and the process lives."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A person says that a lost process is gone for good."""

    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes. updating: a weight update is going on, in which nothing may be ended."""

    updating: bool = False


Event: TypeAlias = (
    Start
    | Spawned
    | SpawnFailed
    | Adopted
    | Reached
    | Ready
    | Awaits
    | Synced
    | Outdated
    | Doubt
    | Trust
    | Hang
    | Dying
    | Released
    | Resumed
    | Stop
    | Undrain
    | Drained
    | Exited
    | Held
    | Reclaimed
    | RolloutDone
    | NodeLost
    | NodeFound
    | GiveUp
    | Tick
)


# ---------------------------------------------------------------------- actions


class Action(StrEnum):
    """What the supervisor must do now."""

    SPAWN = "spawn"
    """Start the process of `slot.generation`."""
    ABANDON_SPAWN = "abandon spawn"
    """The launch took too long: cancel it."""
    DRAIN = "drain"
    """Wait until nothing runs."""
    ABORT = "abort"
    """Abort its requests."""
    TERMINATE = "terminate"
    KILL = "kill"
    EVIDENCE = "evidence"
    """Keep what tells why it ended."""
    RECLAIM = "reclaim"
    """Kill what is left of it and is ours, then watch the rest go."""
    ALARM = "alarm"
    """Tell people; the cause says what."""


class IllegalTransition(Exception):
    """An event that a state does not allow."""

    def __init__(self, slot: Slot, event: Event) -> None:
        super().__init__(f"{type(event).__name__} is not allowed in {slot.state} (generation {slot.generation})")
        self.slot = slot
        self.event = event
