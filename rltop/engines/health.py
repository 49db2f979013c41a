"""Is an engine well? Five signals, each visible on its own, fused into one verdict for the state machine.

    process   the process tree, from the launcher's glance
    probe     /metrics, /v1/loads and /model_info answer (`scrape`); never /health, which runs a forward pass
    progress  token counters move while there is work
    trainer   what the trainer's own requests met
    log       the engine's log (`log.EngineLog`)

None of them is enough. A health route answers 200 while the scheduler hangs (sglang#36943) and 503 while the engine is
merely paused; gauges keep their last value in a hang; a refused connection means nothing before the port is bound. So:
a dead process or a fatal line in the log is DEAD; work without a moving counter for long is HUNG, whatever the routes
answer; everything else that is odd is SUSPECT, which keeps the engine in the rotation and kills nothing. A long
prefill, a kernel that is compiled at its first use, and a pause for a weight update are no hangs.

Pure: the clock is passed in, nothing is asked from here. `may_generate` says when `/health_generate` would be harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from rltop.checks.phrase import brief, span
from rltop.engines.crash_phase import Stage
from rltop.engines.launcher import Look
from rltop.engines.log import EngineLog, LogNews, NewsKind
from rltop.engines.scrape import EngineStats
from rltop.engines.states import DYING

State = Literal["healthy", "suspect", "hung", "dead"]
IDLE_REFRESH_S = 35.0
"""SGLang writes the gauges of an idle scheduler every 30 s: until then they say what ran last."""
OLD_S = 10.0
"""A scrape that long ago was not followed by another because nobody asked (the engine was out of the rotation)."""
ODD_S = 30.0
"""So long a refusal or a failed health check of SGLang's own stays in view."""
MUTE_S = 5.0
"""No route answers for longer: it will not take weights either. A weight update waits for such an engine, so it is
judged, and may be ended, in one."""
NAMES = ("process", "probe", "progress", "trainer", "log")


class Phase(StrEnum):
    """What the supervisor has the engine do: it decides which signals mean something."""

    STARTING = "starting"
    """Before READY: nothing answers and nothing moves. Its deadline is the state machine's."""
    SERVING = "serving"
    PAUSED = "paused"
    """A weight update, or a pause that somebody asked for."""
    RELEASED = "released"
    """Its memory is with the trainer: a request would kill it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthLimits:
    """When odd becomes suspect and suspect becomes hung, in seconds. Raises ValueError for values that cannot work."""

    stall_suspect_s: float = 20.0
    """Work, and no token: SGLang's own window for a health check (`SGLANG_HEALTH_CHECK_TIMEOUT`)."""
    stall_hung_s: float = 120.0
    """Above the longest harmless stall that was measured (94 s, a kernel compiled at its first use), below the 300 s of
    SGLang's watchdog, which kills: people hear of it while it can still be looked at."""
    compile_s: float = 450.0
    """With a compiler running below the engine: the watchdog's 300 s fire up to 150 s late, then it decides."""
    prefill_tokens_per_s: float = 200.0
    """A prefill that is known to compute N tokens may take N divided by this: a chunk of 8192 tokens 41 s."""
    probe_hung_s: float = 60.0
    """No route answers though the process lives. Crash diagnostics keep SGLang's routes silent for up to 65 s, but
    then the log says so first."""
    paused_s: float = 600.0
    """A pause this long is suspect: weight updates take seconds to minutes."""
    calm_s: float = 5.0
    """Without any doubt, before a suspect engine is trusted again."""
    generate_every_s: float = 30.0
    """Between two `/health_generate`, which cost a forward pass and at least 1 s."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if self.stall_hung_s < self.stall_suspect_s:
            raise ValueError(f"stall_hung_s = {self.stall_hung_s}: less than stall_suspect_s = {self.stall_suspect_s}")


STAND_IN = HealthLimits(stall_suspect_s=3.0, stall_hung_s=15.0, compile_s=60.0, probe_hung_s=15.0, calm_s=2.0)
"""For rltop's CPU engine: it makes a token every few milliseconds, and its faults are injected to be seen."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One of the five, for people."""

    ok: bool | None
    """None: says nothing now, and `text` why."""
    text: str
    t: float
    """Since when it says this, on the caller's clock."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the five say together."""

    state: State
    why: str
    """One sentence; empty when healthy."""


@dataclass(slots=True)
class EngineHealth:
    """The health of one generation of one engine. Feed it what was seen, then `judge`. `now` is one monotonic clock."""

    limits: HealthLimits = field(default_factory=HealthLimits)
    speculative: str = ""
    """Algorithm in effect: NGRAM compiles a sampler at its first request with a temperature."""
    restarts: int = 0
    """Times that counters began anew: a new process behind the same address."""
    _signals: dict[str, Signal] = field(default_factory=dict)
    _look: Look | None = None
    _had_scheduler: bool = False
    _stats: EngineStats | None = None
    _scraped: float | None = None
    _unreachable_since: float | None = None
    _work_since: float | None = None
    """Since when there was work without a break; in the future where the gauges may be old."""
    _guessed: bool = False
    """Only the gauges say so."""
    _decoded: float | None = None
    """When the last token was decoded, or a request ended."""
    _prefilled: float | None = None
    """When prompt tokens were last computed."""
    _prefill_tokens: int = 0
    """Of the newest prefill in the log."""
    _paused_since: float | None = None
    _generated: float | None = None
    _generate_failed: str = ""
    held: str = ""
    """`paused by WHO`, while somebody's pause lasts."""
    _garbled: str = ""
    _trainer: str = ""
    _dying: str = ""
    _odd: str = ""
    """The newest line that is no fault and yet worth a look."""
    _odd_at: float = 0.0
    _injected: str = ""
    _stage: Stage = Stage.LAUNCHING
    _doubted: float | None = None
    """When there was last a reason for doubt."""

    # -- what was seen

    def look(self, look: Look, now: float) -> None:
        """The launcher's glance at the processes."""
        self._look = look
        alive = len(look.children)
        if not look.alive:
            how = "how, nobody knows" if look.exit_code is None else f"with {_exit(look.exit_code)}"
            for name in ("probe", "progress"):
                self._say(name, None, "its process has ended", now)
            return self._say("process", False, f"ended, {how}", now)
        schedulers = [name for _, name in look.children if _SCHEDULER in name]
        self._had_scheduler = self._had_scheduler or bool(schedulers)
        if self._had_scheduler and not schedulers:
            return self._say("process", False, "its scheduler process is gone", now)
        self._say("process", True, f"runs, with {alive} child processes" if alive else "runs", now)

    def scraped(self, stats: EngineStats, now: float, began: float | None = None) -> None:
        """An answer of `scrape`, or none (`reachable` is False). began: when it was asked; silence counts from then."""
        self._scraped = now
        if not stats.reachable:
            if self._unreachable_since is None:
                self._unreachable_since = now if began is None else began
            return self._say("probe", False, brief(stats.problem or "no route answers", 160), now)
        self._unreachable_since, before, self._stats = None, self._stats, stats
        self._counters(before, stats, now)
        self._work(stats, now)
        self._garbled = f"its answer cannot be read: {brief(stats.garbled, 160)}" if stats.garbled else ""
        if self._generate_failed or self._garbled:
            return self._say("probe", False, self._generate_failed or self._garbled, now)
        self._say("probe", True, "answers", now)

    def generated(self, ok: bool, text: str, now: float) -> None:
        """An answer of `/health_generate`. 200 proves little; anything else on an idle engine is a reason for doubt."""
        self._generated = now
        self._generate_failed = "" if ok else f"/health_generate: {brief(text, 120)}"

    def trainer_saw(self, ok: bool, text: str, now: float) -> None:
        """The trainer's requests to this engine fail, or succeed again."""
        self._trainer = "" if ok else brief(text or "its requests fail", 160)
        self._say("trainer", ok, self._trainer or "its requests are answered", now)

    def flowed_since(self, then: float) -> bool:
        """Whether a token was decoded, or a request ended, after `then`."""
        return self._decoded is not None and self._decoded > then

    def proved(self) -> None:
        """It came into the rotation just now: what requests met before says nothing."""
        self._trainer = ""
        self._signals.pop("trainer", None)

    def read(self, log: EngineLog, news: Iterable[LogNews], now: float) -> None:
        """What is new in its log."""
        self._stage, self._injected = log.stage, log.injected
        for one in news:
            if one.kind is NewsKind.BATCH:
                if one.what == "decode":
                    self._decoded = now
                else:
                    self._prefilled = now
                    self._prefill_tokens = log.prefill.new_tokens or 0 if log.prefill else 0
            elif one.kind in (NewsKind.REFUSAL, NewsKind.HEALTH):
                self._odd, self._odd_at = brief(one.text, 160), now
        if log.fault is not None:
            self._dying = brief(log.fault.text, 160)
            # Whoever told it to stop knows why: the log has nothing to blame.
            told = log.fault.what == "sigterm"
            self._say("log", None if told else False, self._dying, now)
        elif self._odd and now - self._odd_at < ODD_S:
            self._say("log", None, self._odd, now)
        else:
            self._say("log", True, "no fault", now)

    # -- what it means

    def judge(self, phase: Phase, now: float) -> Verdict:
        """The verdict, and the signal `progress` with it."""
        doubts: list[str] = []
        verdict = self._dead() or self._hung(phase, now, doubts)
        if verdict is not None:
            self._doubted = now
            return Verdict(verdict.state, verdict.why + self._rehearsal())
        if phase is not Phase.STARTING and self._trainer:
            doubts.append(f"the trainer's requests fail: {self._trainer}")
        if doubts:
            self._doubted = now
            return Verdict("suspect", "; ".join(doubts) + self._rehearsal())
        if self._doubted is not None and now - self._doubted < self.limits.calm_s:
            return Verdict("suspect", f"well again, for less than {span(self.limits.calm_s)}")
        self._doubted = None
        return Verdict("healthy", "")

    def mute(self, now: float) -> bool:
        """No route has answered for longer than `MUTE_S`, by the clock."""
        return self._unreachable_since is not None and now - self._unreachable_since > MUTE_S

    def may_generate(self, phase: Phase, now: float) -> str:
        """Empty: `/health_generate` does no harm now. Else why not: it kills a released engine, blocks behind a pause
        and fails on a busy one."""
        stats = self._stats
        if phase is not Phase.SERVING:
            return f"the engine is {phase}"
        if self._stage is not Stage.READY:
            return "the engine is not ready yet"
        if stats is None or self._unreachable_since is not None:
            return "it is not known what the engine does"
        if stats.paused:
            return "requests are paused"
        if stats.running or stats.queued or stats.active:
            return "the engine is busy: its counters tell more"
        if self._generated is not None and now - self._generated < self.limits.generate_every_s:
            return "it was asked a moment ago"
        return ""

    def signals(self, now: float, wall: float) -> dict[str, dict[str, Any]]:
        """The five for the engine's cell: `{ok, text, t}`, t on the wall clock."""
        unknown = Signal(None, "nothing seen yet", now)
        found = {name: self._signals.setdefault(name, unknown) for name in NAMES}
        return {name: {"ok": one.ok, "text": one.text, "t": wall - (now - one.t)} for name, one in found.items()}

    # -- inside

    def _say(self, name: str, ok: bool | None, text: str, now: float) -> None:
        old = self._signals.get(name)
        if old is None or old.ok is not ok:
            self._signals[name] = Signal(ok, text, now)
        elif old.text != text:
            self._signals[name] = Signal(ok, text, old.t)

    def _counters(self, before: EngineStats | None, stats: EngineStats, now: float) -> None:
        """Which counters moved. A counter that fell belongs to a new process."""
        if before is None:
            return
        if _fell(before.decode_tokens_total, stats.decode_tokens_total) or _fell(
            before.requests_total, stats.requests_total
        ):
            self.restarts += 1
            self._work_since = self._decoded = self._prefilled = None
            return
        if _rose(before.decode_tokens_total, stats.decode_tokens_total) or _rose(
            before.requests_total, stats.requests_total
        ):
            self._decoded = now
        if _rose(before.prefill_tokens_total, stats.prefill_tokens_total):
            self._prefilled = now

    def _work(self, stats: EngineStats, now: float) -> None:
        """Since when there is work. The scheduler's gauges are old news while it idles: they count at once only where
        the HTTP side does not count (older versions, `active` is None), else after they had time to be refreshed."""
        if stats.active or (stats.active is None and (stats.running or stats.queued)):
            self._work_since = now if self._work_since is None else min(self._work_since, now)
            self._guessed = False
        elif stats.running or stats.queued:
            if self._work_since is None or not self._guessed:
                self._work_since = now + IDLE_REFRESH_S
            self._guessed = True
        else:
            self._work_since = None

    def _dead(self) -> Verdict | None:
        process = self._signals.get("process")
        gone = process.text if process is not None and process.ok is False else ""
        if gone.startswith("ended"):
            return Verdict("dead", f"its process {gone}")
        if self._dying:  # tells more than that the scheduler is gone, which may be seen at the same glance
            return Verdict("dead", f"{DYING}{self._dying}")
        return Verdict("dead", gone) if gone else None

    def _hung(self, phase: Phase, now: float, doubts: list[str]) -> Verdict | None:
        """HUNG, or reasons for doubt in `doubts`; keeps the signal `progress`."""
        if phase is Phase.STARTING:
            self._say("progress", None, f"starting: {self._stage}", now)
            return None
        if phase is Phase.RELEASED:
            self._paused_since = self._work_since = None
            self._say("progress", None, "its memory is released", now)
            self._say("probe", None, "not asked: its memory is released", now)
            return None
        if self._scraped is not None and now - self._scraped > OLD_S:
            self._unreachable_since = self._work_since = None
            for name in ("probe", "progress"):
                self._say(name, None, "not asked lately", now)
            return None
        if verdict := self._silent(now, doubts):
            return verdict
        if self.held or phase is Phase.PAUSED or (self._stats is not None and self._stats.paused):
            return self._paused(phase, now, doubts)
        self._paused_since = None
        return self._stalled(now, doubts)

    def _silent(self, now: float, doubts: list[str]) -> Verdict | None:
        """No route answers."""
        if self._unreachable_since is None:
            doubts += [doubt for doubt in (self._generate_failed, self._garbled) if doubt]
            return None
        silent = now - self._unreachable_since
        if silent >= self.limits.probe_hung_s:
            return Verdict("hung", f"none of its routes has answered for {_over(silent)}, though its process lives")
        probe = self._signals["probe"].text
        doubts.append(f"no route answers ({probe})")
        return None

    def _paused(self, phase: Phase, now: float, doubts: list[str]) -> Verdict | None:
        if self._paused_since is None:
            self._paused_since = now
        paused = now - self._paused_since
        self._work_since = None  # work is counted anew when the pause is over
        why = self.held or ("paused for a weight update" if phase is Phase.PAUSED else "paused: it holds its requests")
        self._say("progress", None, why, now)
        if paused >= self.limits.paused_s:
            doubts.append(f"it has been paused for {_over(paused)}")
        return None

    def _stalled(self, now: float, doubts: list[str]) -> Verdict | None:
        """Work, and no token."""
        stats, limits = self._stats, self.limits
        if self._work_since is None or stats is None:
            self._say("progress", True if stats else None, "idle" if stats else "nothing seen yet", now)
            return None
        if stats.decode_tokens_total is None and self._decoded is None and self._prefilled is None:
            self._say("progress", None, "no counters: the engine runs without --enable-metrics", now)
            return None
        moved = max(self._work_since, self._decoded or self._work_since)
        still = now - moved
        if still < limits.stall_suspect_s:
            self._say("progress", True, "tokens flow" if self._decoded else "has work", now)
            return None
        work = _work(stats)
        prefilled = self._prefilled
        if prefilled is not None and now - prefilled < limits.stall_suspect_s:
            why = f"slow prefill: prompt tokens are computed, none was decoded for {_over(still)} ({work})"
        elif (compiler := self._compiler()) and still < limits.compile_s:
            why = f"no token for {_over(still)}: it compiles a kernel ({compiler} runs below it){self._ngram()}"
        elif still < self._patience(moved) and (self._decoded or 0.0) < self._work_since:
            why = f"slow prefill or stuck: no first token for {_over(still)} ({work}){self._ngram()}"
        elif still < self._patience(moved):
            why = f"no token for {_over(still)} ({work}){self._ngram()}"
        else:
            why = f"hung: no token for {_over(still)} with {work}{self._answers()}"
            self._say("progress", False, why, now)
            return Verdict("hung", why)
        self._say("progress", False, why, now)
        doubts.append(why)
        return None

    def _patience(self, moved: float) -> float:
        """How long nothing may move. After a prefill began: the time that it may take."""
        if self._prefilled is not None and self._prefilled >= moved:
            allowed = self._prefill_tokens / self.limits.prefill_tokens_per_s
            return max(self.limits.stall_hung_s, (self._prefilled - moved) + allowed)
        return self.limits.stall_hung_s

    def _compiler(self) -> str:
        children = self._look.children if self._look else ()
        return next((name for _, name in children if name in _COMPILERS), "")

    def _ngram(self) -> str:
        """The stall that is known of NGRAM."""
        if self.speculative.upper() != "NGRAM":
            return ""
        return "; NGRAM compiles its sampler at the first request with a temperature, 94 s were measured"

    def _rehearsal(self) -> str:
        return f" (a rehearsal: the fault {self._injected} was injected)" if self._injected else ""

    def _answers(self) -> str:
        """That a route answers does not mean that it works."""
        return "" if self._unreachable_since is not None else ", though its routes answer"


_SCHEDULER = "schedul"
"""Part of `sglang::scheduler_TP0` that survives the 15 characters of a process name."""
_COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus"})


_STEPS = (1, 2, 3, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 450, 600, 900, 1800, 3600)


def _over(seconds: float) -> str:
    """`over 20 s`: in steps, so that a sentence that stays true is not told anew at every glance."""
    return f"over {span(max((step for step in _STEPS if step <= seconds), default=0))}"


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


def _rose(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after > before


def _fell(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after < before


def _work(stats: EngineStats) -> str:
    """`3 requests running, 2 queued`; what only the HTTP side knows of when the scheduler says nothing."""
    running, queued = stats.running or 0, stats.queued or 0
    if running or queued:
        return f"{running} running, {queued} queued"
    return f"{stats.active or 0} waiting for an answer"
