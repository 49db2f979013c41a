"""One moment as the engine screen sees it: the engines, whom an action would be for, and why none may be taken."""

from __future__ import annotations

from msgspec import Struct

from rltop.tui.fleet import EngineView, FleetView, fleet_view
from rltop.tui.operations import OpView, op_views
from rltop.tui.staging import Staging, names
from rltop.tui.toggle_views import ToggleView, merge, toggle_views
from rltop.tui.view import Frame


class Scene(Struct, frozen=True):
    """One moment as this screen sees it."""

    frame: Frame
    views: list[EngineView]
    fleet: FleetView | None
    ops: list[OpView]
    cursor: EngineView | None
    targets: list[EngineView]
    """Whom an action would be for."""
    toggles: list[ToggleView]

    @property
    def ab(self) -> bool:
        """An A/B run goes on."""
        return self.fleet is not None and self.fleet.ab is not None

    def named(self, engines: list[EngineView]) -> str:
        """`engine 3`, `engines 0, 2`."""
        return names([self.frame.safe(view.id) for view in engines])

    def why_not(self) -> str:
        """Why nothing can be changed here; empty when it can."""
        foreign = [view for view in self.targets if not view.owned]
        if not self.frame.control:
            return "read-only: attach with --control to change it"
        if foreign:
            is_are = "is" if len(foreign) == 1 else "are"
            allowed = "rltop can only flush, pause, continue or profile (h)"
            return f"{self.named(foreign)} {is_are} not rltop's: {allowed}"
        if self.frame.link.status != "live":
            return "not connected: nothing can be changed now"
        return ""


def scene_of(frame: Frame, staging: Staging, cursor: EngineView | None) -> Scene:
    """The moment of a frame. Engines that are gone leave the selection."""
    views = frame.engines()
    staging.forget([view.id for view in views])
    targets = staging.targets(views, cursor.id if cursor is not None else None)
    toggles = merge([(view.id, toggle_views(frame.state, view.id)) for view in targets]) if targets else []
    return Scene(frame, views, fleet_view(frame.state), op_views(frame.state), cursor, targets, toggles)
