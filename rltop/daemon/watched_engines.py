"""Engines as the logs of a run tell of them: where they listen, that they died and of what, that they came back.

slime numbers its engines (`Ports for engine 0: …`), SGLang only says where it listens; both are brought together by
address, then by process. An engine that a log calls dead stays CRASHED, whatever answers at its address, until a log
names it again: that is the next generation. Everything is called in the daemon's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rltop.checks.found import LogEvent
from rltop.checks.phrase import brief
from rltop.daemon.core import Core
from rltop.daemon.engine_view import MOST_CRASHES
from rltop.daemon.others import NAMED, Others

MOST_ENGINES = 4_096
CAUSE = 300
"""Characters of what a log says of a death."""
FAULTS = frozenset({"ima", "oom", "kernel", "collective", "memory_saver", "port_in_use", "oom_killer"})
"""What an engine may say before it dies."""
_ENDS = frozenset({"server", "init", "subprocess", "watchdog", "sigquit", "worker", "killed"})
_DEAD = frozenset({"CRASHED", "STOPPED"})


def at(event: LogEvent) -> str:
    """`train.log:17`, as evidence names a line."""
    return f"{event.where.source}:{event.where.line}" if event.where.line else event.where.source


class NamedEngines:
    """Keeps the cells of engines that logs name. others: who asks them."""

    def __init__(self, core: Core, others: Others) -> None:
        self._core = core
        self._others = others
        self._by_process: dict[tuple[str, str, int], str] = {}
        """(log, node, pid) of a process that speaks for an engine -> its id."""
        self._by_source: dict[str, str] = {}
        """Log that is one engine's own -> its id."""
        self._faults: dict[str, LogEvent] = {}
        """Engine -> the first fault of its process."""
        self._named_at: dict[str, LogEvent] = {}
        self._tells = self._changed = False
        self._serves: set[str] = set()
        """Engines whose process said that it listens."""

    def see(self, event: LogEvent, *, rollout: int | None, tell: bool = True) -> bool:
        """A log line. rollout: the newest one whose samples were made. tell: what it changes is an event. Returns
        whether it changed anything."""
        self._tells, self._changed = tell, False
        self._see(event, rollout)
        return self._changed

    def _see(self, event: LogEvent, rollout: int | None) -> None:
        match event.kind:
            case "engine_address":
                self._address(event)
            case "router_address":
                host = event.data.get("host") or event.node or "127.0.0.1"
                self._core.update("run", router=f"http://{_netloc(str(host), event.data['port'])}")
            case "health" if event.data.get("by") == "monitor":
                engine = self._numbered(event.engine)
                if engine is not None and event.data.get("kills"):
                    self._died(engine, event, "its health monitor killed it", rollout)
            case "recovered":
                self._recovered(event)
            case "death":
                self._death(event, rollout)
            case "sigterm":
                if (engine := self._speaker(event)) is not None:
                    self._state(engine, "STOPPED", f"it was told to end ({at(event)})", event)
            case kind if kind in FAULTS and event.owner in ("engine", "host"):
                if (engine := self._speaker(event)) is not None:
                    self._faults.setdefault(engine, event)

    def forget(self) -> None:
        """Take away the cells that an earlier daemon of the run left: its logs will name them again."""
        mine = self._others_ids()
        for key in self._core.table.keys("engine/"):
            if key.removeprefix("engine/") not in mine:
                self._core.set(key, None)

    def of_attempt(self, source: str, line: int) -> set[str]:
        """A new attempt begins at that line: keys of the engines that were named since; the others are forgotten."""
        kept = set()
        for engine, event in list(self._named_at.items()):
            if event.where.source == source and (event.where.line or 0) >= line:
                kept |= {f"engine/{engine}", f"toggles/{engine}"}
                continue
            self._others.forget(engine)
            del self._named_at[engine]
            self._by_process = {who: one for who, one in self._by_process.items() if one != engine}
            self._by_source = {log: one for log, one in self._by_source.items() if one != engine}
            self._faults.pop(engine, None)
            self._serves.discard(engine)
        kept |= {key for at in range(len(self._others.urls)) for key in (f"engine/{at}", f"toggles/{at}")}
        return kept

    # ---------------------------------------------------------------- where it listens

    def _address(self, event: LogEvent) -> None:
        by, number = event.data.get("by"), event.data.get("number")
        host = str(event.data.get("host") or event.node or "")
        port = event.data["port"]
        engine = self._numbered(number) if number is not None else None
        known = engine if engine is not None else self._listening(host, port) or self._speaker(event)
        cell = self._cell(known)
        if known is None or cell is None:
            known = self._new_id(number)
            if known is None:
                return
            self._name(known, host, port, event)
        elif cell["state"] in _DEAD or (known not in self._others_ids() and self._is_new(known, by)):
            self._name(known, host, port, event)
        if by in ("adapter", "server"):
            self._serves.add(known)
        if by != "ports":  # those are printed by the rollout manager
            self._speaks(event, known)

    def _is_new(self, engine: str, by: object) -> bool:
        """The line is of another process than the one that is known."""
        return by == "ports" or (by == "args" and engine in self._serves)

    def _name(self, engine: str, host: str, port: object, event: LogEvent) -> None:
        before = self._cell(engine)
        self._serves.discard(engine)
        self._faults.pop(engine, None)
        self._named_at[engine] = event
        url = f"http://{_netloc(host or '127.0.0.1', port)}"
        kept = {} if before is None else {"crashes": before.get("crashes") or []}
        self._others.name(engine, url, cause=f"named in {at(event)}; nobody has asked it yet", **kept)
        was = None if before is None else before["state"]
        how = "is at" if before is None else "was started again at"
        self._tell(engine, "info", f"engine {engine} {how} {url}", event, was, NAMED)

    def _new_id(self, number: object) -> str | None:
        taken = {key.removeprefix("engine/") for key in self._core.table.keys("engine/")}
        if len(taken) >= MOST_ENGINES:
            return None
        first = int(number) if isinstance(number, int) else 0
        if isinstance(number, int) and str(first) in taken:
            return f"log-{first}"  # an engine of --engine has that place
        return next(str(one) for one in range(first, first + MOST_ENGINES + 1) if str(one) not in taken)

    def _numbered(self, number: object) -> str | None:
        """Id of the engine that slime gives this number."""
        if not isinstance(number, int):
            return None
        if f"log-{number}" in self._named_at:
            return f"log-{number}"
        return str(number) if str(number) in self._named_at else None

    def _listening(self, host: str, port: object) -> str | None:
        found = []
        for key in self._core.table.keys("engine/"):
            parts = urlsplit(self._core.table.get(key).get("url") or "")
            if parts.port != port:
                continue
            if parts.hostname == host:
                return key.removeprefix("engine/")
            if not host or parts.hostname in ("127.0.0.1", "localhost"):
                found.append(key.removeprefix("engine/"))
        return found[0] if len(found) == 1 else None

    def _others_ids(self) -> set[str]:
        return {str(at) for at in range(len(self._others.urls))}

    # ---------------------------------------------------------------- who speaks

    def _speaks(self, event: LogEvent, engine: str) -> None:
        if event.pid is not None:
            self._by_process[event.where.source, event.node, event.pid] = engine
        elif event.owner == "engine":
            self._by_source[event.where.source] = engine

    def _speaker(self, event: LogEvent) -> str | None:
        """Id of the engine whose process printed the line, or is its subject."""
        victim = event.data.get("victim")
        for pid in (event.pid, victim if isinstance(victim, int) else None):
            if pid is not None and (
                found := self._by_process.get((event.where.source, event.node, pid))
                or next((one for (_, _, known), one in self._by_process.items() if known == pid), None)
            ):
                return found
        if event.engine is not None and self._cell(str(event.engine)) is not None:
            return str(event.engine)
        return self._by_source.get(event.where.source) if event.pid is None else None

    # ---------------------------------------------------------------- deaths

    def _death(self, event: LogEvent, rollout: int | None) -> None:
        engine = self._speaker(event)
        if engine is None:
            return
        how = event.data.get("how")
        if how in _ENDS or (how == "actor" and "Engine" in str(event.data.get("name") or "")):
            self._died(engine, event, "its process ended", rollout)

    def _died(self, engine: str, event: LogEvent, words: str, rollout: int | None) -> None:
        cell = self._cell(engine)
        if cell is None or cell["state"] in _DEAD:
            return
        told = f"{words} ({at(event)}: {brief(event.text, CAUSE)})"
        if (fault := self._faults.get(engine)) is not None:
            told = f"{brief(fault.text, CAUSE)} ({at(fault)}); then {told}"
        known = list(cell.get("crashes") or ())
        number = known[-1]["number"] + 1 if known else 1
        one = {
            "number": number,
            "generation": cell["generation"],
            "t": self._core.now(),
            "fingerprint": "",
            "cause": told,
            "rollout": rollout,
        }
        self._core.update(f"engine/{engine}", crashes=[*known, one][-MOST_CRASHES:])
        self._state(engine, "CRASHED", told, event)

    def _recovered(self, event: LogEvent) -> None:
        """slime says how many it started; their addresses came before, if this log has them."""
        count = event.data.get("count")
        dead = [engine for engine in self._named_at if (self._cell(engine) or {}).get("state") == "CRASHED"]
        for engine in dead[: count if isinstance(count, int) else 0]:
            parts = urlsplit((self._cell(engine) or {}).get("url") or "")
            self._name(engine, parts.hostname or "", parts.port, event)

    def _state(self, engine: str, state: str, cause: str, event: LogEvent) -> None:
        cell = self._cell(engine)
        if cell is None or cell["state"] == state:
            return
        self._core.update(f"engine/{engine}", state=state, cause=cause, since=self._core.now())
        self._tell(
            engine, "error" if state == "CRASHED" else "warn", f"engine {engine}: {cause}", event, cell["state"], state
        )

    def _tell(self, engine: str, level: str, text: str, event: LogEvent, was: str | None, to: str) -> None:
        self._changed = True
        if self._tells:
            self._core.event("engine", level, text, at(event), id=engine, **{"from": was, "to": to})

    def _cell(self, engine: str | None) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = None if engine is None else self._core.table.get(f"engine/{engine}")
        return found


def _netloc(host: str, port: object) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
