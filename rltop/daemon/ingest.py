"""Records -> state, events and series. Pure but for the clock that it is given.

Whatever a producer sends, the daemon goes on: an unknown kind, a payload of the wrong shape or a value that is no
number is counted at its source and shown once. Holes in a source's sequence are losses: counted, and shown as `loss`
events. NaN and Inf are values like any other: counted, kept, shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rltop.daemon.core import Core, trim
from rltop.daemon.engine_view import FLEET_KEYS, SCRAPED
from rltop.daemon.metric_cells import MetricCells
from rltop.daemon.phases import PhaseClock
from rltop.daemon.source_cells import Source, SourceCells
from rltop.evidence.metric_names import Names, shipped
from rltop.protocol.messages import (
    PAYLOADS,
    ByePayload,
    EnginePayload,
    LogPayload,
    PhasePayload,
    Record,
    RunPayload,
    SamplesPayload,
    WeightsPayload,
)
from rltop.runs.masks import mask_data

MAX_SAMPLES = 8
"""Samples in the state table; the journal keeps the records whole."""
LOG_LINES_PER_S = 500
MAX_PROCESSES = 64
MAX_SOURCES = 20_000
"""Ranks of a thousand nodes and some; more is a program that makes up sources."""
MAX_ENGINES = 4_096
MAX_TROUBLE = 500
MAX_WORD = 64
"""Characters of a role, an engine id or the name of a phase: they become keys."""
LOST_AFTER_S = 10.0
"""A run whose process is gone is called lost when nothing came from it for so long, and we were there to see it."""
HUNG_S = 5.0
"""We look once a second: after so long a pause we ourselves hung (or were stopped)."""
LOOK_AT = 64
"""Processes that are looked for at once: each costs some 20 us."""
LAST_RECORDS_S = 2.0
"""What an ended process had handed over still comes for so long."""
_ENGINE_LEVEL = {"CRASHED": "error", "LOST": "error", "SUSPECT": "warn", "BACKOFF": "warn", "QUARANTINED": "warn"}
_FACTS = frozenset({"run", "engine"})
"""Kinds that carry a configuration, in which there may be secrets."""
_END_LEVEL = {"done": "info", "failed": "error", "interrupted": "warn"}


class EngineOwner(Protocol):
    """Who owns engines of the run and wants to know what the trainer says (`rltop.daemon.engines`)."""

    def owns(self, engine_id: str) -> bool:
        """Whether its state is not the trainer's to say."""
        ...

    def see_trouble(self, engine_id: str, generation: int, trouble: str) -> None:
        """Requests to it fail, or ("") succeed again."""
        ...

    def see_state(self, engine_id: str, state: str) -> None:
        """The trainer's word on its state."""
        ...

    def see_samples(self, rollout_id: int, samples: list[dict[str, Any]]) -> None:
        """Samples of a rollout, as its record has them."""
        ...

    def see_phase(self) -> None:
        """The cell `phase` has changed."""
        ...

    def see_weights(self) -> None:
        """The cell `weights` has changed."""
        ...


class NoEngines:
    """Nobody does."""

    def owns(self, engine_id: str) -> bool:
        """No."""
        return False

    def see_trouble(self, engine_id: str, generation: int, trouble: str) -> None:
        """Nobody listens."""

    def see_state(self, engine_id: str, state: str) -> None:
        """Nobody listens."""

    def see_samples(self, rollout_id: int, samples: list[dict[str, Any]]) -> None:
        """Nobody listens."""

    def see_phase(self) -> None:
        """Nobody listens."""

    def see_weights(self) -> None:
        """Nobody listens."""


class Ingest:
    """Takes decoded records.

    alive: whether a process of this machine exists, given its pid.
    host: name of this machine; a run elsewhere is never called lost.
    engines: who owns engines; default nobody.
    names: what metrics of other trainers are here; default the table that comes with rltop.
    """

    def __init__(
        self,
        core: Core,
        *,
        host: str,
        alive: Callable[[int], bool],
        engines: EngineOwner | None = None,
        names: Names | None = None,
    ) -> None:
        self._core = core
        self._engines: EngineOwner = engines or NoEngines()
        self._host = host
        self._alive = alive
        self._sources: dict[str, Source] = {}
        self._shown = SourceCells(core)
        self._continued = False
        """Sources without a cell of their own may have reported to the daemon before."""
        self._looked = 0
        self._phases = PhaseClock()
        self._cells = MetricCells(core, names or shipped())
        self._framework = ""
        self._owner = "trainer/0"
        self._metric_roles: set[str] = set()
        self._when: float | None = None
        self._complained: set[str] = set()
        self._ticked: float | None = None

    def restore(self) -> None:
        """Take over counters from a restored state table."""
        table = self._core.table
        for key in table.keys("source/"):
            kept = {name: value for name, value in table.get(key).items() if name in Source.__dataclass_fields__}
            source = self._sources[key.removeprefix("source/")] = Source(**kept)
            source.processes[source.host, source.pid] = (source.seq, source.dropped)
        self._shown.restore(self._sources)
        self._continued = bool(table.keys("sources/"))
        self._cells.restore()
        run = table.get("run") or {}
        self._framework = str(run.get("framework") or "")
        self._owner = str(run.get("owner") or self._owner)
        owner = self._sources.get(self._owner)
        if owner is not None and run.get("state") == "running":
            # As if we had hung since: what ended meanwhile did so unseen, and its last records found nobody.
            self._ticked = min(owner.last, self._core.now() - HUNG_S)
        if (phase := table.get("phase")) is not None and phase["name"]:
            # Whether it is still going on is not known; its next record says it.
            self._core.set("phase", self._phases.current(phase, self._core.now()))

    def ages(self) -> dict[str, float]:
        """Source name -> seconds since its last record; sources that said goodbye are left out, those of a fleet told
        together as `<role>/*`."""
        return self._shown.ages(self._sources, self._core.now())

    # ---------------------------------------------------------------- records

    def streams(self, *, besides: str) -> bool:
        """Whether anybody but sources of that role sends metrics."""
        return bool(self._metric_roles - {besides})

    def over(self, source: str) -> None:
        """What the source had begun is over: another process speaks in its name now."""
        if self._phases.forget(source):
            self._set_phase(self._core.now())

    def recall_phase(self, source: str, payload: PhasePayload, *, mono: float = 0.0, when: float | None = None) -> None:
        """An edge of a phase that an earlier daemon of the run has counted and told: what is open and how long phases
        take is known from it again, and it is no news. when: as of `take`."""
        now = self._core.now()
        if payload.edge == "enter":
            begun = now if when is None else min(now, when)
            self._phases.enter(source, payload.name, payload.rollout_id, now=begun, mono=mono)
        else:
            self._phases.leave(source, payload.name, payload.elapsed_s, mono=mono)
        self._set_phase(now)

    def take(self, record: Record, key: str = "", *, when: float | None = None) -> Record:
        """Apply one record; key: name of its producer's key, "" on the unix socket. when: its metrics, or a
        phase that it tells of, are of that time (wall clock), not of now; NaN: nobody knows of which.

        Returns it as the checks should see it: metrics of other trainers under rltop's names too.
        """
        who = record.source
        if len(who.role) > MAX_WORD or (who.name not in self._sources and len(self._sources) >= MAX_SOURCES):
            self.malformed(f"source {who.role[:MAX_WORD]!r} has too long a name or is one too many")
            return record
        source = self._source(record, key)
        self._when = when
        match record.kind:
            case "metrics":
                self._metric_roles.add(who.role)
                return self._metrics(source, record)
            case kind if kind in PAYLOADS:
                if kind in _FACTS:
                    # Here, before anybody sees it: state, journal and checks get what may be shown.
                    record = msgspec.structs.replace(record, payload=mask_data(record.payload))
                try:
                    payload = msgspec.convert(record.payload, PAYLOADS[kind])
                except (msgspec.ValidationError, RecursionError) as error:
                    self._malformed(source, f"{kind}: {error}")
                    return record
                self._payload(source, record, payload)
            case kind:
                source.unknown += 1
                self._complain(
                    f"unknown {kind}", f"unknown record kind {kind[:40]!r}; counted and left out", source.name
                )
        return record

    def malformed(self, why: str) -> None:
        """Something came to the ingest socket that is no record."""
        self._complain(f"ingest {why[:40]}", f"ingest: refused: {why}", "")

    def _payload(self, source: Source, record: Record, payload: object) -> None:
        match payload:
            case PhasePayload():
                self._phase(source, record, payload)
            case LogPayload():
                self._log(source, payload)
            case SamplesPayload():
                self._keep(source, record)
                few = [trim(sample) for sample in payload.samples[:MAX_SAMPLES]]
                total = max(payload.total, len(payload.samples))
                self._core.set("samples", {"rollout_id": payload.rollout_id, "total": total, "samples": few})
                self._engines.see_samples(payload.rollout_id, payload.samples)
            case WeightsPayload():
                self._keep(source, record)
                self._weights(source, payload)
            case EnginePayload():
                self._keep(source, record)
                self._engine(source, payload)
            case RunPayload():
                self._keep(source, record)
                self._run(source, payload)
            case ByePayload():
                self._bye(source, payload)

    def _metrics(self, source: Source, record: Record) -> Record:
        payload, framework = record.payload, record.source.framework
        values, step = payload.get("values"), payload.get("step")
        if not isinstance(values, dict) or not isinstance(step, int) or isinstance(step, bool):
            self._malformed(source, "metrics: needs `values` (map) and `step` (int)")
            return record
        if (self._core.table.get("run") or {}).get("state") == "waiting":
            # A trainer need not say `run`: one that reports numbers runs.
            self._core.update("run", state="running")
            self._core.event("run", "info", f"{source.name} reports: the run is running", source.name, state="running")
        named = self._cells.take(
            payload,
            rank=source.rank,
            who=source.name,
            framework=framework or self._framework,
            told=lambda why: self._malformed(source, f"metrics: {why}"),
            when=self._when,
        )
        return record if named is payload else msgspec.structs.replace(record, payload=named)

    def _phase(self, source: Source, record: Record, payload: PhasePayload) -> None:
        if len(payload.name) > MAX_WORD:
            self._malformed(source, "phase: its name is too long")
            return
        now = self._core.now()
        if payload.edge == "enter":
            begun = now if self._when is None else min(now, self._when)
            self._phases.enter(source.name, payload.name, payload.rollout_id, now=begun, mono=record.mono)
        else:
            usual = self._phases.median_s(payload.name)
            elapsed, slow = self._phases.leave(source.name, payload.name, payload.elapsed_s, mono=record.mono)
            if slow and elapsed is not None and usual is not None:
                self._core.event(
                    "phase",
                    "warn",
                    f"{payload.name} took {elapsed:.1f} s, usually {usual:.1f} s",
                    source.name,
                    name=payload.name,
                    rollout_id=payload.rollout_id,
                    elapsed_s=elapsed,
                )
        self._set_phase(now)

    def _set_phase(self, now: float) -> None:
        self._core.set("phase", self._phases.current(self._core.table.get("phase"), now))
        self._engines.see_phase()

    def _log(self, source: Source, payload: LogPayload) -> None:
        source.log_lines += 1
        if source.log_lines > LOG_LINES_PER_S:
            source.log_dropped += 1
        else:
            self._core.event("log", payload.level, payload.text, source.name)

    def _weights(self, source: Source, payload: WeightsPayload) -> None:
        self._core.set("weights", trim(msgspec.to_builtins(payload)))
        what = f"weights {payload.version}" + (
            "" if payload.rollout_id is None else f" for rollout {payload.rollout_id}"
        )
        bad = [name for name, said in payload.engines.items() if isinstance(said, dict) and said.get("ok") is False]
        text = f"{what} synced" if payload.ok else f"{what} NOT synced" + (f": engine {', '.join(bad)}" if bad else "")
        level = "info" if payload.ok else "error"
        self._core.event("weights", level, text, source.name, version=payload.version, ok=payload.ok)
        for name, said in payload.engines.items():
            # The engine's own answer; the next scrape would say the same a second later.
            if isinstance(said, dict) and said.get("ok", True) and self._core.table.get(f"engine/{name}") is not None:
                self._core.update(f"engine/{name}", weight_version=str(said.get("version") or payload.version))
        self._engines.see_weights()

    def _engine(self, source: Source, payload: EnginePayload) -> None:
        if payload.trouble is not None:
            self._engines.see_trouble(payload.id, payload.generation, payload.trouble[:MAX_TROUBLE])
            return
        if self._engines.owns(payload.id):
            self._engines.see_state(payload.id, payload.state)
            return
        key = f"engine/{payload.id}"
        before = self._core.table.get(key)
        if before is None and (len(payload.id) > MAX_WORD or len(self._core.table.keys("engine/")) >= MAX_ENGINES):
            self._malformed(source, "engine: too long an id, or one too many")
            return
        kept: dict[str, Any] = {**FLEET_KEYS, **dict.fromkeys(SCRAPED)}
        if before is not None and before["generation"] == payload.generation:
            kept = {name: before.get(name, default) for name, default in kept.items()}
        was = None if before is None else before["state"]
        if was != payload.state:
            kept["since"] = self._core.now()
        facts = trim(msgspec.to_builtins(payload))
        del facts["trouble"]
        self._core.set(key, {**facts, **kept})
        if was != payload.state:
            text = (
                f"engine {payload.id}: {payload.state}"
                if was is None
                else f"engine {payload.id}: {was} -> {payload.state}"
            )
            level = _ENGINE_LEVEL.get(payload.state, "info")
            self._core.event("engine", level, text, source.name, id=payload.id, **{"from": was, "to": payload.state})

    def _run(self, source: Source, payload: RunPayload) -> None:
        self._owner = source.name
        before = self._core.table.get("run") or {}
        if before.get("framework") or before.get("attempt", 1) > 1:
            self._core.series.restart()
            self._cells.restart()
        self._framework = payload.framework
        facts = trim(msgspec.to_builtins(payload))
        now = self._core.now()
        self._core.update("run", **facts, owner=source.name, state="running", text="", started=now, ended=None)
        faults = f", injected faults: {', '.join(payload.injected_faults)}" if payload.injected_faults else ""
        text = f"{payload.framework} run started at rollout {payload.start_rollout_id}{faults}"
        self._core.event("run", "info", text, source.name, state="running")

    def _bye(self, source: Source, payload: ByePayload) -> None:
        source.left = source.dirty = True
        if self._phases.forget(source.name):
            self._set_phase(self._core.now())
        if source.name == self._owner:
            self.end(payload.reason, payload.text, source.name)
        else:
            self._core.event("log", "debug", f"{source.name} left: {payload.reason}", source.name)

    def end(self, state: str, text: str, source: str = "") -> None:
        """The run ended: `done`, `failed`, `interrupted` or `lost`. Says it once."""
        before = self._core.table.get("run") or {}
        if before.get("state") not in ("done", "failed", "interrupted"):
            self._core.update("run", state=state, text=trim(text), ended=self._core.now())
            words = f"run {state}" + (f": {text}" if text else "")
            self._core.event("run", _END_LEVEL.get(state, "error"), words, source, state=state)

    # ---------------------------------------------------------------- once a second

    def tick(self) -> None:
        """Show what was collected since the last call: ranks, source counters, losses, a run that vanished."""
        self._cells.tick()
        for source in self._sources.values():
            if source.hole is not None:
                first, last, count = source.hole
                source.hole = None
                text = f"{count} records of {source.name} were lost"
                self._core.event("loss", "warn", text, source.name, **{"from": first, "to": last}, count=count)
            if source.log_dropped:
                text = f"{source.log_dropped} log lines of {source.name} left out (over {LOG_LINES_PER_S} a second)"
                self._core.event("log", "warn", text, source.name)
            source.log_lines = source.log_dropped = 0
        self._shown.show(self._sources)
        self._look_for_processes()

    def _look_for_processes(self) -> None:
        now, before = self._core.now(), self._ticked
        self._ticked = now
        pause = 0.0 if before is None else now - before
        for source in self._to_look_at(pause):
            # What came over TCP: a container elsewhere may have our host name, and its pids mean nothing here.
            if source.left or source.key or not source.pid or source.host != self._host:
                continue
            if self._alive(source.pid):
                source.gone, source.hung_s = None, 0.0
                continue
            if source.gone is None:
                source.gone = now
                source.hung_s = pause if pause >= HUNG_S else 0.0
            # From when we saw it: while we hung nothing could come, and that says nothing about the run.
            silent = now - max(source.gone, source.last)
            if source.hung_s and silent >= LAST_RECORDS_S:
                self._last_records_missing(source)
            if source.name == self._owner and silent > LOST_AFTER_S:
                self._lost(source)

    def _to_look_at(self, pause: float) -> list[Source]:
        """Sources whose processes are looked for now: of a fleet some each time and the owner; all after a pause."""
        sources = list(self._sources.values())
        if len(sources) <= LOOK_AT or pause >= HUNG_S:
            return sources
        start = self._looked % len(sources)
        self._looked = start + LOOK_AT
        owner = self._sources.get(self._owner)
        return [*([owner] if owner is not None else []), *sources[start : start + LOOK_AT]]

    def _lost(self, owner: Source) -> None:
        if (self._core.table.get("run") or {}).get("state") == "running":
            self.end("lost", f"process {owner.pid} of {owner.name} is gone and did not say goodbye")

    def _last_records_missing(self, source: Source) -> None:
        """It ended while we hung and no goodbye came: what it reported last, its buffers had no room for."""
        who = "the trainer" if source.name == self._owner else source.name
        text = (
            f"{who} ended and its last records never came: the daemon hung or was not there for {source.hung_s:.0f} s, "
            f"the last one is number {source.seq}"
        )
        source.hung_s = 0.0
        self._core.event("loss", "error", text, source.name, **{"from": source.seq + 1})
        if source.name == self._owner and not (self._core.table.get("run") or {}).get("text"):
            self._core.update("run", text=text)

    # ---------------------------------------------------------------- sources

    def _source(self, record: Record, key: str) -> Source:
        who, name, now = record.source, record.source.name, self._core.now()
        source = self._sources.get(name)
        fresh = source is None
        if source is None:
            source = self._sources[name] = Source(who.role, who.rank, who.host, who.pid)
        process = (who.host, who.pid)
        seq, dropped = source.processes.get(process) or self._before(record, fresh)
        if record.seq > seq + 1:
            missing = record.seq - seq - 1
            source.lost += missing
            first, _, count = source.hole or (seq + 1, 0, 0)
            source.hole = (first, record.seq - 1, count + missing)
        source.host, source.pid = process
        source.key = key
        source.seq = max(seq, record.seq)
        source.dropped += max(0, record.dropped - dropped)
        source.processes[process] = (source.seq, max(dropped, record.dropped))
        if len(source.processes) > MAX_PROCESSES:
            del source.processes[next(iter(source.processes))]
        source.records += 1
        source.last, source.dirty, source.left = now, True, False
        if fresh and self._shown.shows(source):
            self._core.set(f"source/{name}", source.value())
        run = self._core.table.get("run") or {}
        if name == self._owner and run.get("state") == "lost" and record.kind != "bye":
            self._core.update("run", state="running", text="", ended=None)
            self._core.event("run", "info", f"{name} is back", name, state="running")
        return source

    def _before(self, record: Record, fresh: bool) -> tuple[int, int]:
        """Sequence and drops of a process before its first record here: none, unless it reported to an earlier daemon
        that kept no cell of it."""
        return (record.seq - 1, record.dropped) if fresh and self._continued else (0, 0)

    def _keep(self, source: Source, record: Record) -> None:
        self._core.sink.record(self._core.now(), record.kind, source.name, record.payload)

    def _malformed(self, source: Source, why: str) -> None:
        source.malformed += 1
        self._complain(f"{source.name} {why[:40]}", f"{source.name}: {why}", source.name)

    def _complain(self, about: str, text: str, source: str) -> None:
        if about not in self._complained and len(self._complained) < 100:
            self._complained.add(about)
            self._core.event("log", "warn", text, source)
