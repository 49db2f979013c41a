"""What is seen of one generation of one engine: its process, its log, its answers; and what that means.

`Engine` (supervisor.py) asks for a glance at every turn and hands what comes of it to the state machine. Nothing is
decided here but what the signals say: one event, or none.

Failure policy: what cannot be seen is no news. A launcher that does not answer for long puts a serving engine in doubt,
nothing more.
"""

from __future__ import annotations

import asyncio

from rltop.checks.known import KnownCrash
from rltop.engines import chores
from rltop.engines.crash import Crash
from rltop.engines.crash_phase import Stage
from rltop.engines.exposure import Exposure
from rltop.engines.health import STAND_IN, EngineHealth, HealthLimits, Phase
from rltop.engines.launcher import STAND_INS, Kind, Launched, Launcher, Look, LostNode
from rltop.engines.log import EngineLog
from rltop.engines.requests import Required
from rltop.engines.scrape import EngineStats
from rltop.engines.states import (
    ANSWERING,
    SERVING,
    STARTING,
    Doubt,
    Dying,
    Event,
    Exited,
    Hang,
    NodeFound,
    NodeLost,
    Outdated,
    Reached,
    State,
    Trust,
)
from rltop.errors import RltopError

LOOK_PATIENCE_S = 2.0
BLIND_S = 10.0
"""Without a glance for so long, an engine that serves is in doubt."""
CHUNK = 1 << 16
"""Bytes of log per turn: some 15 ms of reading."""
HEAD = 1 << 18
"""Kept of the start, where SGLang says what it resolved."""
QUIET_LOOKS = 3
"""Glances without a new byte after which the log's end is taken for whole: a traceback is written in pieces."""
SKIP_ABOVE, SKIP_TO = 8 << 20, 2 << 20
"""Of an adopted engine's long log the middle is skipped: the start and the newest part say what is needed."""

_STAGES = {Stage.CAPTURING: State.CAPTURING, Stage.WARMING: State.WARMING, Stage.READY: State.WARMING}


class Watch:
    """One generation under observation."""

    def __init__(self, kind: Kind, known: tuple[KnownCrash, ...] = ()) -> None:
        self.log = EngineLog(known=known)
        self.log_head = b""
        self.health = EngineHealth(STAND_IN if kind in STAND_INS else HealthLimits())
        self.seen: float | None = None
        """When its routes last answered."""
        self.look: Look | None = None
        self.stats: EngineStats | None = None
        self.verified: chores.Verified | None = None
        self.crash: Crash | None = None
        self.weight_version = ""
        self.weight_digest = ""
        """Of `weight_version`; empty: not asked for."""
        self.asked_digest = False
        self.served_since: float | None = None
        """When it was first ready to serve."""
        self.exposure = Exposure()
        self.not_loaded = 0
        """Times in a row that it refused the weights which the fleet had it load."""
        self.skip_middle = False
        self._disagreed = ""
        """The label, other than the required one, that the last probe found."""
        self._quiet = 0
        self._blind_since: float | None = None

    def holds(self, version: str, digest: str = "") -> None:
        """The engine's word for its weights."""
        if version and version != self.weight_version:
            self.weight_version, self.weight_digest = version, ""
        self.weight_digest = digest or self.weight_digest

    async def glance(self, launcher: Launcher, process: Launched, state: State, now: float) -> Event | None:
        """Look at the process and read on in its log."""
        try:
            async with asyncio.timeout(LOOK_PATIENCE_S):
                look = await launcher.look(process)
        except LostNode as error:
            return None if state is State.LOST else NodeLost(process.node or error.where)
        except (RltopError, TimeoutError) as error:
            return self._blind(error, state, now)
        self._blind_since, self.look = None, look
        self.health.look(look, now)
        await self._read_log(launcher, process, look, now)
        if not look.alive:
            asked = state is State.STOPPING
            crash = self.log.crash(exit_code=look.exit_code, asked=asked)
            self.crash = crash if self.crash is None or not asked else self.crash
            return Exited(crash.fingerprint, crash.cause)
        if state is State.LOST:
            return NodeFound()
        reached = _STAGES.get(self.log.stage)
        return Reached(reached) if state in STARTING and reached is not None else None

    def _blind(self, error: Exception, state: State, now: float) -> Event | None:
        if self._blind_since is None:
            self._blind_since = now
        if state in SERVING and now - self._blind_since > BLIND_S:
            return Doubt(f"its launcher does not answer: {str(error).partition(chr(10))[0] or 'late'}")
        return None

    async def _read_log(self, launcher: Launcher, process: Launched, look: Look, now: float) -> None:
        """A bounded part of what is new; all of it once the process has ended."""
        log = self.log
        while log.offset < look.log_size:
            if self.skip_middle and log.offset >= HEAD:
                # Line numbers in evidence count from here on.
                self.skip_middle, log.offset = False, max(log.offset, look.log_size - SKIP_TO)
            try:
                async with asyncio.timeout(LOOK_PATIENCE_S):
                    data = await launcher.read_log(process, log.offset, CHUNK)
            except (RltopError, TimeoutError):
                return
            if not data:
                break
            self.log_head += data[: max(0, HEAD - len(self.log_head))]
            self._quiet = 0
            self.health.read(log, log.feed(data, now), now)
            if look.alive:
                return
            await asyncio.sleep(0)
        self._quiet += 1
        if not look.alive or self._quiet == QUIET_LOOKS:
            self.health.read(log, log.quiet(now), now)

    def judge(self, state: State, *, updating: bool, now: float) -> Event | None:
        """What the five signals say; acted on only while it serves, and while weights move only if it is mute: the
        update waits for what does not answer."""
        if state in STARTING or state is State.OFFLOADED:
            self.health.judge(Phase.STARTING if state in STARTING else Phase.RELEASED, now)
        if state not in ANSWERING or self.look is None:
            return None
        verdict = self.health.judge(Phase.PAUSED if updating else Phase.SERVING, now)
        if verdict.state == "dead" and self.look.alive:
            self.crash = self.log.crash(asked=False)
            return Dying(self.crash.fingerprint, verdict.why)
        if state not in SERVING or (updating and not self.health.mute(now)):
            return None
        match verdict.state:
            case "suspect":
                return Doubt(verdict.why)
            case "hung":
                return Hang(verdict.why)
            case "healthy":
                return Trust()
            case _:
                return None

    def scraped(self, stats: EngineStats, required: Required | None, now: float, began: float) -> Event | None:
        """An answer of its routes, asked at `began`. required: what it must hold while it serves, known before it was
        asked; None: its label is not to be judged.

        It leaves the rotation when two probes in a row, a second apart, find the same wrong label: what the trainer
        says of its updates may arrive after the weights. No sample is lost: requests name the version they need.
        """
        self.stats = stats
        self.seen = now if stats.reachable else self.seen
        self.health.scraped(stats, now, began)
        self.exposure.scraped(stats, now)
        if stats.weight_version is not None:
            self.holds(stats.weight_version)
        if stats.weight_version is None or required is None:
            return None
        before, self._disagreed = self._disagreed, ""
        if stats.weight_version == required.version:
            return None
        if stats.weight_version != before:
            self._disagreed = stats.weight_version
            return None
        return Outdated(f"it holds {stats.weight_version!r}, {required.version!r} is required")
