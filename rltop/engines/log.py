"""What the log of one engine says while it grows: how far the start is, how it works, and what broke.

`EngineLog` takes the bytes of one generation's `stdout.log` as they come (`feed`) and answers with news; it keeps a
bounded number of events whatever the log's size, so it can be fed from byte 0 after a daemon was killed. `crash` says
in `crash.Crash` why the engine died, also while the process still lives (SGLang takes 5 to 65 s to die).

Nothing raises for odd text: a line that says nothing known is no news. The lines themselves are known to
`rltop.evidence.lines`; here they only become stages, batches and faults of this one engine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rltop.checks.events import word
from rltop.checks.found import LogEvent
from rltop.checks.known import KnownCrash
from rltop.engines.crash import Crash, End, Suspect, explain, is_fault
from rltop.engines.crash_phase import Stage
from rltop.engines.last_words import LINES, last_words
from rltop.evidence.bounded import FirstAndNewest
from rltop.evidence.logs import LogScan
from rltop.evidence.pieces import Splitter

KEPT = (100, 300)
"""First and newest events of one kind: a hundred tracebacks say no more than ten thousand."""
CHUNK = 64 << 10
"""Bytes of one `feed` that an event loop can bear: some 15 ms of the densest log."""
_LONG = 2048
"""Bytes of a line that are kept as last words."""
SUSPECTS = (64, 64)
"""Faults that may be the first one, and the newest."""

_READY = re.compile(r"fired up and ready")
_STAGES: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (_READY, Stage.READY),
    (re.compile(r"Started server process|Application startup complete|Uvicorn running on"), Stage.WARMING),
    (
        re.compile(r"^Captur\w+ .*graph|^Capturing (?:batches|num tokens)|Capture cuda graph begin", re.I),
        Stage.CAPTURING,
    ),
    (
        re.compile(r"Init (?:torch distributed|parallel) begin|Load weight|KV Cache is allocated|Memory pool end"),
        Stage.LOADING,
    ),
)
_REFUSALS: Mapping[str, str] = {
    "update_refused": "update",
    "weights_check": "weights",
    "over_length": "length",
    "flush_failed": "flush",
}
_GRAPH = re.compile(r"cuda graph: (True|False)")
_CONTROL = re.compile(r"^/(?:update_weights|release_memory|resume_memory|pause_gen|continue_gen|flush_cache|weights_c)")


class NewsKind(StrEnum):
    """What a piece of news is about."""

    STAGE = "stage"
    BATCH = "batch"
    FAULT = "fault"
    REFUSAL = "refusal"
    HEALTH = "health"
    INJECTED = "injected"
    """rltop's CPU engine says that it has a fault because it was told to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNews:
    """One thing that is new in the log."""

    kind: NewsKind
    what: str
    """The stage; `prefill` or `decode`; the recogniser that saw the fault (`ima`, `oom`, `death`, ...); what was
    refused (`update`, `weights`, `length`, `flush`, or an HTTP path); `server` for the engine's own health check; the
    name of an injected fault."""
    text: str
    line: int
    """From 1."""
    seen: float
    """The caller's clock when it was fed."""
    time: float | None = None
    """The log's own time, seconds since the epoch; SGLang's clock has no zone and is taken as UTC."""
    rank: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The newest batch line. None where the line does not say."""

    kind: Literal["prefill", "decode"]
    seen: float
    running: int | None = None
    queued: int | None = None
    new_tokens: int | None = None
    """Prompt tokens of a prefill that had to be computed."""
    tokens_per_s: float | None = None
    accept_len: float | None = None
    """Tokens accepted per verification, of speculative decoding."""
    cuda_graph: bool | None = None


@dataclass(slots=True)
class EngineLog:
    """Follows one engine's log. Not thread-safe. Some 30,000 lines a second: what an engine writes is nothing, but the
    whole log of a long run (after an adoption) is fed in pieces of at most `CHUNK` bytes between other work."""

    name: str = "stdout.log"
    """How the log is called in evidence lines."""
    flags: Mapping[str, object] = field(default_factory=dict)
    """Settings in effect (`speculative_algorithm`, `disable_cuda_graph`), to compare with known crashes."""
    known: tuple[KnownCrash, ...] = ()
    """Public reports to compare a crash with: `rltop.evidence.known`."""
    blocking: bool = False
    """CUDA_LAUNCH_BLOCKING is in effect and graphs are off: a fault is noticed where it was launched."""
    dumping: bool = False
    """CUDA core dumps are on."""
    stage: Stage = Stage.LAUNCHING
    since: dict[Stage, float] = field(default_factory=dict)
    """When a stage was first seen, by the caller's clock."""
    batch: Batch | None = None
    prefill: Batch | None = None
    decode: Batch | None = None
    replayed: int = 0
    """Decode lines of steps that replayed a CUDA graph, and of steps that did not (`eager`)."""
    eager: int = 0
    offset: int = 0
    """Bytes that were fed: where the next chunk begins."""
    fault: LogNews | None = None
    """The first fault that no engine survives; the process may still be there."""
    injected: str = ""
    """The newest fault that was injected and struck: a rehearsal."""
    _scan: LogScan = field(init=False)
    _splitter: Splitter = field(default_factory=Splitter)
    _suspects: FirstAndNewest[Suspect] = field(default_factory=lambda: FirstAndNewest(*SUSPECTS))
    _news: list[LogNews] = field(default_factory=list)
    _end: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=LINES))
    """The last lines, until the engine is ready: what a process that dies at its start has to say."""
    _now: float = 0.0
    _harmless: int = 0
    """Line after which a traceback means nothing."""
    _excused: int = 0
    """Last line of the newest such traceback: no last words before it count."""

    def __post_init__(self) -> None:
        self._scan = LogScan(self.name, live=True, told=self._event, keep=KEPT)

    def feed(self, data: bytes, now: float) -> list[LogNews]:
        """The next bytes of the log, cut anywhere. now: the caller's clock."""
        self._now = now
        self.offset += len(data)
        for start, pieces in self._splitter.feed(data):
            self._read(start, pieces)
        return self._take()

    def _read(self, start: int, pieces: Sequence[bytes]) -> None:
        self._scan.feed(start, pieces)
        if self.stage is not Stage.READY:
            first = max(0, len(pieces) - LINES)
            self._end.extend((start + at, pieces[at][:_LONG]) for at in range(first, len(pieces)) if pieces[at].strip())

    def quiet(self, now: float) -> list[LogNews]:
        """Nothing came for a while (or the process ended): what the log ends with is all of it, also a traceback whose
        next line never comes."""
        self._now = now
        for start, pieces in self._splitter.end():
            self._read(start, pieces)
        self._scan.settle()
        return self._take()

    def crash(self, *, exit_code: int | None = None, asked: bool = False) -> Crash:
        """Why the engine died, as far as its log and exit code tell. The first fault counts, whichever rank it is of;
        what other ranks report later are its consequences.

        asked: rltop itself ended it, so an end without an error is no crash (`stopped`). Call it after `quiet`.
        """
        end = [(number, line.decode("utf-8", "replace").rstrip()) for number, line in self._end]
        return explain(
            tuple(self._suspects),
            self._scan.so_far()[0],
            End(
                exit_code=exit_code,
                asked=asked,
                stage=self.stage,
                flags=self.flags,
                known=self.known,
                blocking=self.blocking,
                dumping=self.dumping,
                injected=self.injected,
                words=last_words([one for one in end if one[0] > self._excused], self.name),
                last_line=end[-1][1] if end else "",
            ),
        )

    # -- events

    def _take(self) -> list[LogNews]:
        news, self._news = self._news, []
        return news

    def _event(self, event: LogEvent) -> None:
        match event.kind:
            case "prefill" | "decode":
                self._on_batch(event)
            case "engine_stage":
                self._on_stage(event)
            case "http":
                self._on_http(event)
            case "health" if word(event, "by") == "server":
                self._tell(NewsKind.HEALTH, "server", event)
            case "injected":
                self._on_injected(event)
            case "harmless":
                self._harmless = event.where.line or 0
            case kind if kind in _REFUSALS:
                self._tell(NewsKind.REFUSAL, _REFUSALS[kind], event)
        if is_fault(event) and not (self._harmless and event.data.get("first_line") == self._harmless + 1):
            suspect = Suspect(event, self.stage)
            self._suspects.append(suspect)
            news = self._tell(NewsKind.FAULT, event.kind, event)
            if self.fault is None and suspect.ends_the_engine:
                self.fault = news
        elif event.kind == "traceback":
            self._excused = event.where.line or 0

    def _tell(self, kind: NewsKind, what: str, event: LogEvent) -> LogNews:
        line = event.where.line or 0
        news = LogNews(
            kind=kind, what=what, text=event.text, line=line, seen=self._now, time=event.time, rank=event.rank
        )
        self._news.append(news)
        return news

    def _on_stage(self, event: LogEvent) -> None:
        found = next((stage for pattern, stage in _STAGES if pattern.search(event.text)), None)
        if found is None or found.rank <= self.stage.rank:
            return
        self._enter(found, event)

    def _enter(self, stage: Stage, event: LogEvent) -> None:
        self.stage = stage
        self.since[stage] = self._now
        self._tell(NewsKind.STAGE, stage.value, event)

    def _on_batch(self, event: LogEvent) -> None:
        if self.stage.rank < Stage.WARMING.rank:
            # Even the warm-up's batch comes after the server's own lines: the beginning of this log is missing.
            self._enter(Stage.READY, event)

        def whole(name: str) -> int | None:
            value = event.data.get(name)
            return int(value) if isinstance(value, int | float) else None

        def real(name: str) -> float | None:
            value = event.data.get(name)
            return float(value) if isinstance(value, int | float) else None

        graph = _GRAPH.search(event.text)
        batch = Batch(
            kind="prefill" if event.kind == "prefill" else "decode",
            seen=self._now,
            running=whole("running_req"),
            queued=whole("queue_req"),
            new_tokens=whole("new_token"),
            tokens_per_s=real("gen_throughput" if event.kind == "decode" else "input_throughput"),
            accept_len=real("accept_len"),
            cuda_graph=None if graph is None else graph[1] == "True",
        )
        self.batch = batch
        if batch.kind == "prefill":
            self.prefill = batch
        else:
            self.decode = batch
            self.replayed += batch.cuda_graph is True
            self.eager += batch.cuda_graph is False
        self._tell(NewsKind.BATCH, event.kind, event)

    def _on_injected(self, event: LogEvent) -> None:
        name = word(event, "fault")
        if word(event, "what") == "strikes":
            self.injected = name
        elif word(event, "what") == "disarmed" and self.injected == name:
            self.injected = ""
        self._tell(NewsKind.INJECTED, name, event)

    def _on_http(self, event: LogEvent) -> None:
        status, path = event.data.get("status"), word(event, "path")
        if isinstance(status, int) and status >= 400 and _CONTROL.match(path):
            self._tell(NewsKind.REFUSAL, path, event)
