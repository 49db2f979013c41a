"""Which engines serve the run, and which of them wait for weights: the daemon's cells against what the trainer pushed.

Pure. An engine is known by its id and its generation. It is in the rotation when the daemon calls it HEALTHY or SUSPECT
and it holds the required version: by the trainer's own word if it ever had one about this generation, else by the
cell's. An engine that failed a push holds nothing until it is pushed again, whatever it says of itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltop.train.dispatch import Key
from rltop.train.ports import EngineFacts, SyncReport

SERVING = frozenset({"HEALTHY", "SUSPECT"})
"""States in which the daemon lets the trainer ask."""
LOADED = SERVING | {"STALE"}
"""States in which an engine takes weights."""
FAILED = frozenset({"CRASHED", "BACKOFF", "QUARANTINED", "LOST"})
"""States of an engine that did not come up, or came down by itself."""
STARTING = frozenset({"LAUNCHING", "LOADING", "CAPTURING", "WARMING"})
"""States of a process that does not answer yet."""
GONE = FAILED | STARTING | {"STOPPED", "RECLAIMING"}
"""States in which no earlier request can be answered any more."""

RESERVED = "RESERVED"
"""On trial for a bisection: nobody else's to ask, to push to, or to wait for without end."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
"""An engine that failed a push is pushed again after 1 s, doubling to 60 s,"""
PAUSE_PER_S = 10.0
"""and not before ten times as long as the push took: an engine that hangs costs every push its time-out."""


@dataclass(slots=True)
class Membership:
    """What is known of the run's engines. `ids` are those that the trainer asked for, in order of their index."""

    ids: Sequence[str]
    cells: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _holds: dict[Key, str] = field(default_factory=dict)
    """What the trainer saw the engine hold; empty: not to be used before the next push."""
    _strikes: dict[Key, tuple[int, float]] = field(default_factory=dict)
    """Failed pushes, and when the next one may be tried."""

    def take(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """The newest cells. One that is missing keeps its last: a daemon that comes back may not know it yet."""
        self.cells |= {name: cell for name in self.ids if (cell := cells.get(name)) is not None}

    def rotation(self, version: str) -> list[EngineFacts]:
        """Engines that may be asked for samples of `version`."""
        return [facts(cell) for cell in self._in(SERVING) if self._held(cell) == version]

    def loaded(self, now: float) -> list[EngineFacts]:
        """Engines that the next version is pushed to."""
        return [facts(cell) for cell in self._in(LOADED) if self._may_push(cell, now)]

    def behind(self, version: str, now: float) -> list[EngineFacts]:
        """Engines that answer and do not hold `version`; to be pushed now.

        A STALE engine counts as behind even if its cell says that it holds the version, unless the trainer saw it: a
        label is no proof.
        """
        return [
            facts(cell)
            for cell in self._in(LOADED)
            if (self._holds.get(_key(cell)) if cell.get("state") == "STALE" else self._held(cell)) != version
            and self._may_push(cell, now)
        ]

    def unpromoted(self, version: str) -> list[EngineFacts]:
        """Engines that hold `version`, as the trainer saw, and that the daemon still calls STALE."""
        return [facts(cell) for cell in self._in({"STALE"}) if self._holds.get(_key(cell)) == version]

    def dead(self) -> list[Key]:
        """Generations that cannot answer any more."""
        found: list[Key] = []
        for cell in self._known():
            name, generation = _key(cell)
            last = generation if cell.get("state") in GONE else generation - 1
            found += [(name, old) for old in (last, last - 1) if old > 0]
        return found

    def took(
        self, report: SyncReport, engines: Sequence[EngineFacts], *, now: float, seconds: float
    ) -> list[EngineFacts]:
        """Remember what each of `engines` did with a push that took `seconds`; returns those that hold the version now.

        What differs from the trainer's weights does not count as held, unless the difference was planted.
        """
        good = []
        for engine in engines:
            key, reply = (engine.id, engine.generation), report.engines.get(engine.id)
            if reply is None:
                continue
            if reply.ok and reply.version == report.version and (reply.same is not False or report.planted):
                self._holds[key] = report.version
                self._strikes.pop(key, None)
                good.append(engine)
            else:
                self._holds[key] = ""
                count = self._strikes.get(key, (0, 0.0))[0]
                pause = max(min(FIRST_PAUSE_S * 2.0 ** min(count, 10), LAST_PAUSE_S), PAUSE_PER_S * seconds)
                self._strikes[key] = (count + 1, now + pause)
        return good

    def distrust(self, key: Key) -> None:
        """It was seen to hold another version than it should: push it again, at once."""
        self._holds[key] = ""

    def reserved(self) -> bool:
        """Some are on trial for a bisection: out of the rotation, and back when it is over."""
        return any(cell.get("state") == RESERVED for cell in self._known())

    def state(self, name: str) -> str:
        """Of one engine; empty: nothing is known of it."""
        return str(self.cells.get(name, {}).get("state") or "")

    def told(self, version: str = "") -> str:
        """The states of all engines, one after the other, for people."""
        return "; ".join(self._told(name, version) for name in self.ids)

    def _told(self, name: str, version: str) -> str:
        cell = self.cells.get(name)
        if cell is None:
            return f"engine {name}: nothing is known of it"
        state, held = cell.get("state") or "unknown", self._held(cell)
        words = [str(state)]
        if cell.get("cause"):
            words.append(f"({cell['cause']})")
        if version and state in LOADED and held != version:
            words.append(f"with weights {held!r} instead of {version!r}" if held else "and did not take its weights")
        return f"engine {name}: {' '.join(words)}"

    def _known(self) -> list[Mapping[str, Any]]:
        return [self.cells[name] for name in self.ids if name in self.cells]

    def _in(self, states: frozenset[str] | set[str]) -> list[Mapping[str, Any]]:
        return [cell for cell in self._known() if cell.get("state") in states and cell.get("url")]

    def _held(self, cell: Mapping[str, Any]) -> str:
        seen = self._holds.get(_key(cell))
        return str(cell.get("weight_version") or "") if seen is None else seen

    def _may_push(self, cell: Mapping[str, Any], now: float) -> bool:
        return self._strikes.get(_key(cell), (0, 0.0))[1] <= now


def facts(cell: Mapping[str, Any]) -> EngineFacts:
    """An engine's cell in the trainer's words."""
    return EngineFacts(
        id=str(cell.get("id")),
        url=str(cell.get("url") or ""),
        kind="sglang" if cell.get("kind") == "sglang" else "cpu",
        pid=int(cell.get("pid") or 0),
        host=str(cell.get("host") or ""),
        version=str(cell.get("version") or ""),
        weight_version=str(cell.get("weight_version") or ""),
        model_path=str(cell.get("model_path") or ""),
        log=str(cell.get("log") or ""),
        generation=int(cell.get("generation") or 0),
    )


def _key(cell: Mapping[str, Any]) -> Key:
    return (str(cell.get("id")), int(cell.get("generation") or 0))
