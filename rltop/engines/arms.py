"""The two arms of an A/B comparison: which engine is in which, what is measured of them, and what viewers see.

The arms are in the slots' files, so a comparison goes on under the next daemon; its numbers begin anew there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rltop.engines.ab import Arm, Comparison
from rltop.engines.cautions import unlike
from rltop.engines.requests import Ab, AbEnd, Request
from rltop.engines.scrape import EngineStats
from rltop.engines.supervisor import Engine


def arm_fields(request: Request, engine: Engine) -> dict[str, Any]:
    """What a restart writes down of the comparison."""
    match request:
        case Ab():
            return {"arm": "B", "ab_base": engine.record.config, "ab_changes": dict(request.changes)}
        case AbEnd():
            return {"arm": "", "ab_base": None, "ab_changes": {}}
        case _:
            return {}


class Arms:
    """The comparison of a fleet, if there is one."""

    def __init__(self, engines: Mapping[str, Engine], clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._engines = engines
        self._clock = clock
        self._wall = wall
        self._comparison: Comparison | None = None
        self._unlike = ""
        """In what its engines differed before: that is compared too."""

    def settle(self, request: Ab | AbEnd | None = None) -> None:
        """After a change of arms: whoever was asked for and is not in arm B is arm A, as long as there is an arm B.

        Raises `RltopError` when it cannot be written down.
        """
        with_b = any(engine.record.arm == "B" for engine in self._engines.values())
        named = set(request.targets) - {"all"} if isinstance(request, Ab) else set()
        for engine in self._engines.values():
            arm = engine.record.arm
            if arm == "A" and not with_b:
                engine.note(arm="")
            elif arm == "" and with_b and isinstance(request, Ab) and (not named or engine.id in named):
                engine.note(arm="A")
            if request is not None:
                engine.publish()
        self._compare()

    def _compare(self) -> None:
        arms: dict[str, Arm] = {}
        for engine in self._engines.values():
            if engine.record.arm:
                arms[engine.id] = engine.record.arm
        if set(arms.values()) != {"A", "B"}:
            self._comparison = None
        elif self._comparison is None or self._comparison.arms != arms:
            self._comparison = Comparison(arms, self._clock())
            records = {name: self._engines[name].record for name in arms}
            self._unlike = unlike({name: one.ab_base or one.config for name, one in records.items()}, self._engines)

    def looked(self, engine_id: str, stats: EngineStats, now: float) -> None:
        """A scrape of an engine that serves."""
        if self._comparison is not None:
            self._comparison.looked(engine_id, stats, now)

    def left(self, engine_id: str, crashed: bool) -> None:
        """An engine left the rotation."""
        if self._comparison is not None and crashed:
            self._comparison.crashed(engine_id)
        elif self._comparison is not None:
            self._comparison.left(engine_id)

    def sampled(self, engine_id: str, rollout_id: int, gap: float, tokens: int) -> None:
        """Mean |rollout - train| log-prob of `tokens` tokens that this engine made."""
        if self._comparison is not None:
            self._comparison.sampled(engine_id, rollout_id, gap, tokens)

    def cell(self) -> dict[str, Any] | None:
        """`fleet.ab`."""
        found = self._comparison
        if found is None:
            return None
        changes = next((dict(one.record.ab_changes) for one in self._engines.values() if one.record.arm == "B"), {})
        return {
            "changes": changes,
            "since": round(found.since + self._wall() - self._clock(), 1),
            "arms": dict(found.arms),
            "rows": [row.cell() for row in found.rows()],
            "verdict": found.verdict() + (f"; the engines differed before: {self._unlike}" if self._unlike else ""),
        }
