"""From the cells of toggles to what the engine screen shows of them, of one engine or of several: pure functions.

Failure policy: a field that is missing or malformed shows as unknown; nothing is invented, nothing raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from rltop.tui.lenient import as_list, as_map, as_text
from rltop.tui.picture import State


class ToggleView(Struct, frozen=True):
    """One logical toggle of one engine, or of several that were merged."""

    name: str
    value: str
    """In effect, as far as it can be seen; empty: cannot be seen; `mixed`: differs between the engines."""
    wanted: str
    choices: tuple[str, ...] = ()
    """All of them, the refused ones too."""
    refused: Mapping[str, str] = {}
    """Choice -> why it cannot be had now."""
    aliases: tuple[str, ...] = ()
    """What moves with it."""
    verify: str = ""
    """How the value in effect was found out."""
    engine_side: str = ""
    trainer_side: str = ""
    locked: str = ""
    """Why no choice can be had at all; empty: some can."""
    free: str = ""
    """What may be typed beside the choices, as a placeholder; empty: nothing."""
    ignored: bool = False
    """The engine was told and does otherwise."""
    wrong: bool = False
    """What is in effect is not what was asked for, in one of them."""
    starting: bool = False
    """Its engine is on its way up: what is in effect is not known yet."""

    @property
    def now(self) -> str:
        """What a change starts from: what was asked for, else what is in effect."""
        return self.wanted or self.value


MIXED = "mixed"
_STARTING = frozenset({"LAUNCHING", "LOADING", "CAPTURING", "WARMING"})


def toggle_views(state: State, engine: str) -> list[ToggleView]:
    """The toggles of one engine in the daemon's order: of `toggles/<id>`, else what its cell says is in effect."""
    cell = as_map(state.get(f"engine/{engine}"))
    ignored = set(map(as_text, as_list(cell.get("ignored"))))
    known, seen = as_map(state.get(f"toggles/{engine}")), as_map(cell.get("verified"))
    starting = cell.get("state") in _STARTING
    if known:
        return [
            _toggle(as_text(name), as_map(value), ignored, seen.get(name), starting=starting)
            for name, value in known.items()
        ]
    effective, wanted = as_map(cell.get("toggles")), as_map(cell.get("wanted"))
    names = [*effective, *(name for name in wanted if name not in effective)]
    return [
        ToggleView(
            as_text(name),
            as_text(effective.get(name)),
            as_text(wanted.get(name)),
            ignored=as_text(name) in ignored,
            wrong=_differ(as_text(effective.get(name)), as_text(wanted.get(name))),
            starting=starting,
        )
        for name in names
    ]


def _differ(value: str, wanted: str) -> bool:
    return bool(value and wanted and value != wanted)


def _toggle(name: str, value: Mapping[str, Any], ignored: set[str], seen: Any, *, starting: bool) -> ToggleView:
    """seen: where the value in effect was seen; without it how it would be."""
    sides = as_map(value.get("sides"))
    refused = {as_text(choice): as_text(why) for choice, why in as_map(value.get("refused")).items()}
    locked = refused.pop("", "")
    choices = dict.fromkeys([*map(as_text, as_list(value.get("choices"))), *refused])
    return ToggleView(
        name=name,
        value=as_text(value.get("value")),
        wanted=as_text(value.get("wanted")),
        choices=tuple(choices),
        refused=refused,
        aliases=tuple(map(as_text, as_list(value.get("aliases")))),
        verify=as_text(seen) or as_text(value.get("verify")),
        engine_side=as_text(sides.get("engine")),
        trainer_side=as_text(sides.get("trainer")),
        locked=locked,
        free=as_text(value.get("free")) if not locked else "",
        ignored=name in ignored,
        wrong=_differ(as_text(value.get("value")), as_text(value.get("wanted"))),
        starting=starting,
    )


def merge(engines: Sequence[tuple[str, Sequence[ToggleView]]]) -> list[ToggleView]:
    """Toggles of several engines as one list. A choice that one of them refuses is refused, and says for which."""
    if len(engines) == 1:
        return list(engines[0][1])
    grouped: dict[str, list[tuple[str, ToggleView]]] = {}
    for engine, views in engines:
        for view in views:
            grouped.setdefault(view.name, []).append((engine, view))
    return [_merged(name, views) for name, views in grouped.items()]


def _merged(name: str, views: Sequence[tuple[str, ToggleView]]) -> ToggleView:
    def same(values: Iterable[str]) -> str:
        found = dict.fromkeys(values)
        return MIXED if len(found) > 1 else next(iter(found), "")

    refused: dict[str, str] = {}
    locked = ""
    for engine, view in views:
        for choice, why in view.refused.items():
            refused.setdefault(choice, f"engine {engine}: {why}")
        locked = locked or (f"engine {engine}: {view.locked}" if view.locked else "")
    return ToggleView(
        name=name,
        value=same(view.value for _, view in views if view.value),  # one that starts does not make it differ
        # One of them may have it written out and another derive it: they are asked for the same.
        wanted=same(view.now for _, view in views if view.now) if any(view.wanted for _, view in views) else "",
        choices=tuple(dict.fromkeys(choice for _, view in views for choice in view.choices)),
        refused=refused,
        aliases=tuple(dict.fromkeys(alias for _, view in views for alias in view.aliases)),
        verify=same(view.verify for _, view in views if view.value),
        engine_side=same(view.engine_side for _, view in views),
        trainer_side=same(view.trainer_side for _, view in views),
        locked=locked,
        free="" if locked else next((view.free for _, view in views if view.free), ""),
        ignored=any(view.ignored for _, view in views),
        wrong=any(view.wrong for _, view in views),
        starting=any(view.starting for _, view in views),
    )
