"""Armed faults in a running engine: when they strike, and what they do to the scheduler and to requests.

`Injection` is shared by the HTTP thread and the scheduler's; a lock guards what is armed. Without any armed fault
`before_batch` costs one look at an empty tuple.

Failure policy: a fault strikes only after a log line that calls it injected. Whatever goes wrong here is the engine's
own error, not the fault's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rltop.train.cpu_engine.faults import INJECTED, Fault, drawn, parse_faults

LOGGER = logging.getLogger("rltop.cpu_engine")

Phase = Literal["prefill", "decode"]

Death = Literal["exception", "abort", "watchdog"]
"""How the scheduler ends: by its own exception, by SIGABRT, or by SGLang's watchdog."""


class SchedulerDied(Exception):
    """What an injected fault does to the scheduler's loop."""

    def __init__(
        self, traceback: str, *, death: Death = "exception", before: str = "", after: str = "", seconds: float = 0.0
    ) -> None:
        super().__init__(traceback.splitlines()[-1] if traceback else death)
        self.traceback = traceback
        """SGLang's, printed after "Scheduler hit an exception: "; empty: the scheduler has no time to print one."""
        self.death: Death = death
        self.before, self.after = before, after
        """Lines without SGLang's prefix, printed before and after."""
        self.seconds = seconds
        """How long SGLang's watchdog saw no progress."""


@dataclass(slots=True)
class _Armed:
    fault: Fault
    since: float
    batches: int = 0
    strikes: int = 0
    off: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return self.fault.kind.name


class Injection:
    """The faults of one engine."""

    def __init__(
        self,
        faults: tuple[Fault, ...] = (),
        *,
        toggles: Mapping[str, str | None] | None = None,
        seed: str = "0",
        environ: Mapping[str, str] | None = None,
        watchdog_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seed: of hazards. toggles: effective values, for conditions. environ: the engine's, for core dumps."""
        self._toggles, self._seed, self._clock = toggles or {}, seed, clock
        self._environ, self._watchdog_s = environ or {}, watchdog_s
        self._lock = threading.Lock()
        self._armed: tuple[_Armed, ...] = tuple(_Armed(fault, clock()) for fault in faults)
        self.standing = ""
        """The fault that holds the scheduler now, if one does."""
        self.scheduler_pid = os.getpid()
        """Stands in a core dump's name."""
        self.on_armed: Callable[[Fault], None] = lambda fault: None
        """Told of a fault that was armed in the living engine."""

    # ------------------------------------------------------------------ arming

    def arm(self, text: str) -> list[str]:
        """Arm more. Raises `RltopError`. Returns what was armed."""
        faults = parse_faults(text, where="/rltop/faults")
        with self._lock:
            self._armed += tuple(_Armed(fault, self._clock()) for fault in faults)
        for fault in faults:
            LOGGER.warning("%s: armed: %s", INJECTED, fault)
            self.on_armed(fault)
        return [str(fault) for fault in faults]

    def disarm(self, name: str) -> int:
        """Take every fault of this name back, or all with "all"; one that stands still goes on. Returns how many."""
        with self._lock:
            gone = [one for one in self._armed if name in (one.name, "all")]
            self._armed = tuple(one for one in self._armed if one not in gone)
        for one in gone:
            one.off.set()
            LOGGER.warning("%s: disarmed: %s", INJECTED, one.fault)
        return len(gone)

    def report(self) -> list[dict[str, Any]]:
        """What is armed, for `GET /rltop/faults`."""
        return [
            {
                "fault": str(one.fault),
                "name": one.name,
                "condition_holds": one.fault.holds(self._toggles),
                "batches": one.batches,
                "strikes": one.strikes,
                "standing": self.standing == one.name,
            }
            for one in self._armed
        ]

    def release(self) -> None:
        """Let a scheduler that stands still go on: the engine stops."""
        for one in self._armed:
            one.off.set()

    @property
    def armed(self) -> bool:
        """Whether there is any fault at all."""
        return bool(self._armed)

    # ------------------------------------------------------------------ asking

    def strike(self, name: str, *, during: str = "") -> Fault | None:
        """The armed fault of this name whose condition holds and which has strikes left; it counts as struck.

        during: of a fault with the setting `while`, only that stage.
        """
        with self._lock:
            for one in self._armed:
                fault, most = one.fault, one.fault.number("count", float("inf"))
                if during and fault.settings.get("while", "load" if name == "slow-start" else "serving") != during:
                    continue
                if one.name == name and fault.holds(self._toggles) and one.strikes < most:
                    one.strikes += 1
                    self._tell(one, "")
                    return fault
        return None

    def before_batch(self, phase: Phase, sampled: Callable[[], bool], *, padded: bool = False) -> None:
        """In the scheduler's thread, before each batch: let what is due strike. Raises `SchedulerDied`.

        sampled: whether the batch has a request with a temperature. padded: it is a decode batch that replays a graph
        of more sequences.
        """
        for one in self._armed:
            if one.fault.kind.stage != "batch" or (one.fault.of_padding and not padded):
                continue
            if self._due(one, phase, sampled):
                one.strikes += 1
                self._do(one, phase)

    def _due(self, one: _Armed, phase: Phase, sampled: Callable[[], bool]) -> bool:
        fault = one.fault
        if fault.settings.get("at", phase) != phase or fault.settings.get("while", "serving") != "serving":
            return False
        if phase != "prefill" if one.name == "slow-prefill" else one.strikes:
            return False  # all others strike once
        one.batches += 1
        if not fault.holds(self._toggles) or self._clock() - one.since < fault.number("after", 0):
            return False
        if one.name == "ngram-stall" and not sampled():
            return False
        if one.batches < fault.number("batch", 0):
            return False
        return "hazard" not in fault.settings or drawn(fault, one.batches, self._seed)

    def _tell(self, one: _Armed, more: str) -> None:
        LOGGER.warning("%s: strikes: %s%s", INJECTED, one.fault, more)

    # ------------------------------------------------------------------ doing

    def _do(self, one: _Armed, phase: Phase) -> None:
        if one.name == "slow-prefill":
            seconds = one.fault.number("seconds", 2)
            if one.strikes == 1:
                self._tell(one, f", at batch {one.batches}: {seconds:g} s longer, as every prefill from now on")
            one.off.wait(seconds)
            return
        self._tell(one, f", at batch {one.batches} ({phase})")
        match one.name:
            case "hang":
                self._stand(one, one.fault.number("seconds", 0) or None)
            case "ngram-stall":
                self._stand(one, one.fault.number("seconds", 94))
            case "watchdog":
                if not self._stand(one, one.fault.number("seconds", self._watchdog_s)):
                    raise SchedulerDied("", death="watchdog", seconds=self._watchdog_s)
            case "ima":
                raise self._illegal_access(one.fault, phase)
            case "oom":
                raise SchedulerDied(
                    signature("oom", execute="_execute_extend" if phase == "prefill" else "_execute_decode")
                )
            case "nccl-timeout":
                now = datetime.now().astimezone()
                text = signature("nccl", nccl=f"{now:%m%d %H:%M:%S.%f}000")
                raise SchedulerDied("", death="abort", before=text, after=signature("aborted"))
            case other:
                raise AssertionError(f"no such batch fault: {other}")

    def _stand(self, one: _Armed, seconds: float | None) -> bool:
        """Stand still. Returns whether it was disarmed before the time was up."""
        self.standing = one.name
        try:
            return one.off.wait(seconds)
        finally:
            self.standing = ""

    def _illegal_access(self, fault: Fault, phase: Phase) -> SchedulerDied:
        kernel = fault.settings.get("kernel", "injected_oob_kernel")
        core = self._core_file()
        if core is not None:
            clock = f"{datetime.now().astimezone():%H:%M:%S.%f}"
            core.parent.mkdir(parents=True, exist_ok=True)
            core.write_text(f"{INJECTED}: this stands where CUDA would have written a core dump of {kernel}.\n")
            before = signature("coredump", clock=clock, kernel=kernel, core=str(core))
            return SchedulerDied("", death="abort", before=before, after=signature("aborted"))
        graphs = self._toggles.get("prefill_graph" if phase == "prefill" else "cuda_graph") == "on"
        if self._toggles.get("launch_blocking") == "on" and not graphs:
            return SchedulerDied(signature("ima_blocking", kernel=kernel))
        return SchedulerDied(signature(f"ima_{phase}"), after=signature("terminate"))

    def _core_file(self) -> Path | None:
        """Where CUDA would write a core dump, if it would."""
        environ, names = self._environ, {"%h": "rltop", "%p": str(self.scheduler_pid), "%t": f"{time.time():.0f}"}
        if environ.get("SGLANG_CUDA_COREDUMP") in ("1", "true"):
            folder = environ.get("SGLANG_CUDA_COREDUMP_DIR", "/tmp/sglang_cuda_coredumps")
            template = f"{folder}/cuda_coredump_%h.%p.%t"
        elif environ.get("CUDA_ENABLE_COREDUMP_ON_EXCEPTION") == "1":
            template = environ.get("CUDA_COREDUMP_FILE", "core_%t_%h_%p.nvcudmp")
        else:
            return None
        for mark, value in names.items():
            template = template.replace(mark, value)
        return Path(template)


def signature(name: str, **values: str) -> str:
    """A text of `signatures.toml` with its braces filled in."""
    text = (resources.files(__package__) / "signatures.toml").read_text(encoding="utf-8")
    found: str = tomllib.loads(text)[name]
    for key, value in values.items():
        found = found.replace("{" + key + "}", value)
    return found.rstrip("\n")
