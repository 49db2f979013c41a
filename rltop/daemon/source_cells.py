"""Cells of the sources: one each as long as there are few, one per role for a fleet.

With up to `MOST_SHOWN` sources every one has its cell `source/<name>`. A run with more has a cell `sources/<role>` for
each role, with the sums, the hosts, who is oldest and who loses records; cells of their own keep the first ones that
came, rank 0 among them, and those that lose something. So a snapshot does not grow with the fleet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rltop.daemon.core import Core

MOST_SHOWN = 64
"""Sources with a cell of their own."""
MOST_TROUBLED = 32
"""Beside them, of those that lose records."""
MOST_ROLES = 32
"""The sources of more roles are told together, as role `other`."""
MOST_HOSTS = 16
"""Hosts that a cell of a role names, those with the most losses and the most sources first."""
_COUNTERS = ("records", "lost", "dropped", "malformed", "unknown")
_TROUBLE = ("lost", "dropped", "malformed", "unknown")


@dataclass(slots=True)
class Source:
    """What is known of one source (role and rank)."""

    role: str
    rank: int
    host: str
    pid: int
    key: str = ""
    """Name of the key under which its last record came over TCP; "" on the unix socket."""
    seq: int = 0
    records: int = 0
    lost: int = 0
    dropped: int = 0
    malformed: int = 0
    unknown: int = 0
    last: float = 0.0
    left: bool = False
    dirty: bool = False
    gone: float | None = None
    """When its process was first seen to be gone."""
    hung_s: float = 0.0
    """Its process ended while we hung for so long; 0: it did not."""
    hole: tuple[int, int, int] | None = None
    """First and last missing sequence number and the count, not yet shown."""
    log_lines: int = 0
    log_dropped: int = 0
    processes: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """(host, pid) -> newest sequence and drop count of that process: each counts for itself, and two of one role and
    rank may live at once (a fork)."""

    @property
    def name(self) -> str:
        """`role/rank`."""
        return f"{self.role}/{self.rank}"

    @property
    def troubled(self) -> bool:
        """Something of it was lost, or could not be used."""
        return bool(self.lost or self.dropped or self.malformed or self.unknown)

    def value(self) -> dict[str, Any]:
        """Its cell."""
        return {
            "role": self.role,
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "key": self.key,
            "seq": self.seq,
            "records": self.records,
            "lost": self.lost,
            "dropped": self.dropped,
            "malformed": self.malformed,
            "unknown": self.unknown,
            "last": self.last,
            "left": self.left,
        }


class SourceCells:
    """Shows the sources once a second."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._shown: dict[str, None] = {}
        """Names of those with a cell of their own, oldest first."""
        self._troubled = 0

    def restore(self, names: Iterable[str]) -> None:
        """These have a cell already."""
        self._shown = dict.fromkeys(names)

    def shows(self, source: Source) -> bool:
        """Whether it has a cell of its own; the first ones get one."""
        if source.name in self._shown:
            return True
        if len(self._shown) - self._troubled < MOST_SHOWN:
            self._shown[source.name] = None
            return True
        if source.troubled and self._troubled < MOST_TROUBLED:
            self._troubled += 1
            self._shown[source.name] = None
            return True
        return False

    def show(self, sources: Mapping[str, Source]) -> None:
        """Bring all cells up to date."""
        changed = False
        for source in sources.values():
            if source.dirty:
                changed, source.dirty = True, False
                if self.shows(source):
                    self._core.set(f"source/{source.name}", source.value())
        if changed and len(sources) > MOST_SHOWN:
            for role, members in _by_role(sources.values()).items():
                self._core.set(f"sources/{role}", _folded(role, members))

    def ages(self, sources: Mapping[str, Source], now: float) -> dict[str, float]:
        """Source name -> seconds since its last record, for those that are shown and did not say goodbye; for all
        others `<role>/*`, the least of them."""
        found: dict[str, float] = {}
        for name, source in sources.items():
            if not source.left:
                key = name if name in self._shown else f"{source.role}/*"
                age = max(0.0, now - source.last)
                found[key] = min(age, found.get(key, age))
        return found


def _by_role(sources: Iterable[Source]) -> dict[str, list[Source]]:
    found: dict[str, list[Source]] = {}
    for source in sources:
        known = source.role in found or len(found) < MOST_ROLES - 1
        found.setdefault(source.role if known else "other", []).append(source)
    return found


def _folded(role: str, members: list[Source]) -> dict[str, Any]:
    here = [source for source in members if not source.left]
    oldest = min(here, key=lambda source: source.last, default=None)
    lost, size = Counter[str](), Counter[str]()
    for source in members:
        size[source.host] += 1
        lost[source.host] += source.lost + source.dropped
    hosts = sorted(size, key=lambda host: (-lost[host], -size[host], host))
    sums = {name: sum(getattr(source, name) for source in members) for name in _COUNTERS}
    return {
        "role": role,
        "count": len(members),
        "left": len(members) - len(here),
        **sums,
        "troubled": sum(source.troubled for source in members),
        "last": max(source.last for source in members),
        "oldest": oldest.name if oldest is not None else "",
        "oldest_last": oldest.last if oldest is not None else None,
        "hosts": len(size),
        "by_host": {host: {"count": size[host], "lost": lost[host]} for host in hosts[:MOST_HOSTS]},
    }
