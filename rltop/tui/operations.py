"""From the cells of operations on engines to what people are shown of them: pure functions.

Failure policy: a field that is missing or malformed shows as unknown; nothing is invented, nothing raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from rltop.tui.fleet import natural
from rltop.tui.lenient import as_list, as_map, as_number, as_text
from rltop.tui.picture import State, under


class OpView(Struct, frozen=True):
    """One operation. `stages`: (server time of its start, words), oldest first."""

    op: str
    name: str
    target: str
    engines: tuple[str, ...]
    state: str
    stage: str
    percent: float | None
    who: str
    reason: str
    text: str
    t: float | None
    ended: float | None
    stages: tuple[tuple[float | None, str], ...]

    @property
    def runs(self) -> bool:
        """It can still be cancelled."""
        return self.state in ("queued", "running")

    def timed(self, now: float | None) -> list[tuple[str, float | None]]:
        """(stage, seconds that it took, or has taken so far)."""
        last = self.ended if self.ended is not None else now
        out: list[tuple[str, float | None]] = []
        for index, (start, words) in enumerate(self.stages):
            end = self.stages[index + 1][0] if index + 1 < len(self.stages) else last
            out.append((words, None if start is None or end is None else max(0.0, end - start)))
        return out


def op_views(state: State) -> list[OpView]:
    """Operations on engines, newest first. That the trainer pushed weights to one is no operation on it."""
    views = [
        _op(key, value)
        for key, value in under(state, "op/")
        if as_text(value.get("name")).startswith(("engine-", "engines-")) and value.get("name") != "engine-synced"
    ]
    return sorted(views, key=lambda view: (view.t or 0.0, natural(view.op)), reverse=True)


def _op(key: str, value: Mapping[str, Any]) -> OpView:
    target = as_text(value.get("target"))
    engines = tuple(map(as_text, as_list(value.get("engines")))) or tuple(filter(None, target.split(",")))
    stages = tuple(
        (as_number(item.get("t")), as_text(item.get("text"))) for item in map(as_map, as_list(value.get("stages")))
    )
    return OpView(
        op=as_text(value.get("op")) or key,
        name=as_text(value.get("name")),
        target=target,
        engines=engines,
        state=as_text(value.get("state")),
        stage=as_text(value.get("stage")),
        percent=as_number(value.get("percent")),
        who=as_text(value.get("who")),
        reason=as_text(value.get("reason")),
        text=as_text(value.get("text")),
        t=as_number(value.get("t")),
        ended=as_number(value.get("ended")),
        stages=stages,
    )


def op_of(ops: Sequence[OpView], engine: str) -> OpView | None:
    """The newest operation on an engine; one that runs goes before newer ones that ended."""
    mine = [op for op in ops if engine in op.engines or op.target == "all"]
    return next((op for op in mine if op.runs), mine[0] if mine else None)
