"""What an operator has picked and not yet done: engines, and new values of their toggles. Pure; nothing leaves here.

A first change pins the engines that it is for, so that a move of the cursor never carries it to another engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from rltop.tui.fleet import EngineView, natural
from rltop.tui.toggle_views import ToggleView


class Staging(Struct):
    """Selected engines and staged changes."""

    selected: set[str] = field(default_factory=set)
    changes: dict[str, str] = field(default_factory=dict)
    """Toggle -> new value."""
    looking: dict[str, str] = field(default_factory=dict)
    """Toggle -> choice that is being looked at and is not staged: a refused one, or any in a read-only session."""

    def targets(self, views: Sequence[EngineView], cursor: str | None) -> list[EngineView]:
        """The selected engines that are there; none selected: the one under the cursor."""
        chosen = [view for view in views if view.id in self.selected]
        return chosen or [view for view in views if view.id == cursor]

    def select(self, engine: str) -> None:
        """Into the selection, or out of it. What is staged goes when nobody is left to get it."""
        self.selected ^= {engine}
        if not self.selected:
            self.drop()

    def select_all(self, engines: Sequence[str]) -> None:
        """All of them; when all are selected already, none."""
        if engines and self.selected >= set(engines):
            self.selected.clear()
            self.drop()
        else:
            self.selected |= set(engines)

    def turn(self, toggle: ToggleView, step: int, targets: Sequence[EngineView]) -> str:
        """Go `step` choices on. Returns why the choice that is now looked at cannot be had; empty: it is staged."""
        if toggle.locked:
            return toggle.locked
        if not toggle.choices:
            return f"nothing is known of what {toggle.name} can be; = takes a value"
        here = self.looking.get(toggle.name) or self.changes.get(toggle.name) or toggle.now
        at = toggle.choices.index(here) if here in toggle.choices else (-1 if step > 0 else 0)
        return self.put(toggle, toggle.choices[(at + step) % len(toggle.choices)], targets)

    def look(self, toggle: ToggleView, step: int) -> None:
        """Look at another choice without staging it."""
        if toggle.choices:
            here = self.looking.get(toggle.name, toggle.now)
            at = toggle.choices.index(here) if here in toggle.choices else -1
            self.looking[toggle.name] = toggle.choices[(at + step) % len(toggle.choices)]

    def put(self, toggle: ToggleView, value: str, targets: Sequence[EngineView]) -> str:
        """Stage a value (the present one takes the change back). Returns why it is refused, or nothing."""
        self.looking.pop(toggle.name, None)
        if why := toggle.locked or toggle.refused.get(value, ""):
            self.changes.pop(toggle.name, None)
            if value in toggle.refused:
                self.looking[toggle.name] = value
            return why
        if value == toggle.now:
            self.changes.pop(toggle.name, None)
        else:
            self.changes[toggle.name] = value
            self.selected |= {view.id for view in targets}
        return ""

    def drop(self, toggle: str = "") -> None:
        """Take back one change, or all."""
        for held in (self.changes, self.looking):
            if toggle:
                held.pop(toggle, None)
            else:
                held.clear()

    def forget(self, known: Sequence[str]) -> None:
        """Engines that are gone are not selected any more."""
        if self.selected and not self.selected <= set(known):
            self.selected &= set(known)
            if not self.selected:
                self.drop()


def target_text(engines: Sequence[str]) -> str:
    """A command's target: ids with commas, in order."""
    return ",".join(sorted(engines, key=natural))


def names(engines: Sequence[str]) -> str:
    """`engine 3`, `engines 0, 2`, `12 engines`."""
    if len(engines) == 1:
        return f"engine {engines[0]}"
    return f"engines {', '.join(engines)}" if len(engines) <= 6 else f"{len(engines)} engines"


def changes_text(changes: Mapping[str, str]) -> str:
    """`cuda_graph off, speculative NGRAM`."""
    return ", ".join(f"{name} {value}" for name, value in changes.items())
