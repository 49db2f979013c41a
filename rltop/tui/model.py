"""What the app keeps between two ticks: histories, events, the frozen picture of a pause. Its clocks are passed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Reversible, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rltop.tui.clientlike import ClientLike, SeriesLike
from rltop.tui.fleet import EngineMemo
from rltop.tui.history import History
from rltop.tui.picture import CHARTS, Link, chart_key, run_view
from rltop.tui.theme import Glyphs
from rltop.tui.view import Frame

EVENTS_KEPT = 5000
"""Events held for scrolling back; older ones are asked for again."""


class Clocks(Struct, frozen=True):
    """Where time comes from."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    stamp: Callable[[float], str]
    """Wall time -> `HH:MM:SS` of this machine's zone."""


class Model:
    """Folds the mirror's changes into what the panes need. `pull` once per tick, `frame` as often as wanted."""

    def __init__(self, client: ClientLike, clocks: Clocks, glyphs: Glyphs, *, control: bool) -> None:
        self._client = client
        self._clocks = clocks
        self._glyphs = glyphs
        self._control = control
        self._epoch = ""
        self._told = 0.0
        self._told_at = 0.0
        self._server_now: float | None = None
        self._events: list[dict[str, Any]] = []
        self._frozen: Frame | None = None
        self._frozen_at = 0.0
        self._memo = EngineMemo()
        self.histories: dict[str, History] = {}

    def pull(self) -> set[str]:
        """Take what changed: keys of the state table, `events`, `epoch`. Goes on in a pause, so nothing is missed."""
        mirror = self._client.mirror
        dirty = mirror.take_dirty()
        if mirror.epoch != self._epoch:
            if self._epoch:
                dirty.add("epoch")
                self.histories.clear()
                self._events.clear()
            self._epoch = mirror.epoch
        if mirror.server_time != self._told:
            self._told, self._told_at = mirror.server_time, self._clocks.monotonic()
        for key in dirty:
            if key.startswith("metric/"):
                self._point(key.removeprefix("metric/"), mirror.state.get(key))
        if self._take_events(mirror.events):
            dirty.add("events")
        return dirty

    def _point(self, name: str, value: Any) -> None:
        if not any(name in spec.keys for spec in CHARTS) or not isinstance(value, Mapping):
            return
        step, number = value.get("step"), value.get("value")
        if isinstance(step, int | float) and isinstance(number, int | float) and math.isfinite(step):
            self.histories.setdefault(name, History(holes=1)).append(float(step), float(number))

    def _take_events(self, events: Reversible[dict[str, Any]]) -> bool:
        newest = self._events[-1].get("eseq", 0) if self._events else 0
        fresh: list[dict[str, Any]] = []
        for event in reversed(events):
            if event.get("eseq", 0) <= newest:
                break
            fresh.append(event)
        self._events += reversed(fresh)
        del self._events[: max(0, len(self._events) - EVENTS_KEPT)]
        return bool(fresh)

    def add_older(self, events: Sequence[dict[str, Any]]) -> int:
        """Put a page of older events in front. Returns how many were new."""
        first = self._events[0].get("eseq", 0) if self._events else float("inf")
        older = [event for event in events if event.get("eseq", 0) < first]
        self._events[:0] = older
        return len(older)

    @property
    def oldest_event(self) -> int:
        """Sequence of the oldest event held; 1 when there is nothing older to ask for."""
        return int(self._events[0].get("eseq", 1)) if self._events else 1

    def chart_keys(self) -> list[str]:
        """Metrics that the charts show now."""
        state = self._client.mirror.state
        return [key for spec in CHARTS if (key := chart_key(spec, state)) is not None]

    def take_series(self, answer: Mapping[str, SeriesLike], lo: float | None = None) -> None:
        """Put the daemon's history of some metrics behind the live points."""
        for key, series in answer.items():
            self.histories.setdefault(key, History()).refine(series, lo)

    # -------------------------------------------------------------- pause

    @property
    def paused(self) -> bool:
        return self._frozen is not None

    def pause(self) -> None:
        """Freeze the picture as it is."""
        now = self.frame()
        self._frozen_at = self._clocks.monotonic()
        self._frozen = replace(
            now,
            state=dict(now.state),
            events=list(now.events),
            gaps=list(now.gaps),
            histories={key: history.copy() for key, history in self.histories.items()},
        )

    def resume(self) -> None:
        """Back to the newest."""
        self._frozen = None

    # -------------------------------------------------------------- frame

    def frame(self) -> Frame:
        """The picture now; in a pause the frozen one with the living connection state."""
        link = self._link()
        if self._frozen is not None:
            return replace(self._frozen, link=link)
        mirror = self._client.mirror
        if not link.lost:
            self._server_now = self._now()
        return Frame(
            state=mirror.state,
            link=link,
            events=self._events,
            gaps=mirror.gaps,
            histories=self.histories,
            server_now=self._server_now,
            clock=self._clocks.stamp,
            glyphs=self._glyphs,
            run_name=mirror.run,
            control=self._control and mirror.role == "control",
            memo=self._memo,
        )

    def _now(self) -> float:
        """The daemon's wall clock: as last told plus what went by here since; before it told any, our own."""
        return self._told + self._clocks.monotonic() - self._told_at if self._told else self._clocks.wall()

    def _link(self) -> Link:
        client, now = self._client, self._clocks.monotonic()
        tick = client.mirror.tick
        over = run_view(client.mirror.state).ended is not None
        quiet = min(tick.ages.values()) + now - self._told_at if tick is not None and tick.ages and not over else None
        return Link(
            status=client.status,
            age_s=max(0.0, now - client.since),
            problem=client.problem,
            quiet_s=quiet,
            viewers=tick.viewers if tick is not None else 0,
            lag_ms=tick.lag_ms if tick is not None else 0.0,
            paused_s=now - self._frozen_at if self._frozen is not None else None,
            archive="archive" in client.mirror.state,
        )
