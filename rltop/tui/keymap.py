"""What the keys of the table do now: bindings, footer, help screen and command palette all ask here."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from rltop.tui.keytable import KEYS, Key


class Context(Struct, frozen=True):
    """What decides whether a key does anything now."""

    pane: str = "checks"
    control: bool = False
    """Opened with `--control` and the daemon agreed."""
    live: bool = False
    """Connected now."""
    has_run: bool = True
    """The daemon supervises a trainer that is running."""
    paused: bool = False
    filtered: bool = False
    """The pane has a filter."""
    full: bool = False
    """The pane fills the screen."""
    alone: bool = False
    """The terminal has room for one pane only."""
    tabs: bool = True
    """Some panes share a place and are switched."""
    deep: bool = False
    """Something is open in the pane that Esc closes."""
    single_chart: bool = False
    zoom: int = 0
    """How often the time range was halved."""
    selected: bool = True
    """The pane has a selected row."""
    evidence: bool = False
    """The selected check has evidence that can be opened."""
    screen: str = "live"
    """`live`; `engines`: the engine screen, whose panes are `list`, `status`, `toggles`, `log` and `ab`; `dump`: the
    dump screen, whose panes are `samples`, `text`, `fields` and `stats`; `bisect`: the Bisect screen, whose panes are
    `matrix` and `story`."""
    engines: bool = False
    """There are engines."""
    owned: bool = False
    """rltop owns all engines that an action would be for."""
    stopped: bool = False
    """They are all down."""
    staged: bool = False
    """There are changes that were not sent yet."""
    previous: bool = False
    """They have a generation to go back to."""
    operation: bool = False
    """An operation on engines runs."""
    ab: bool = False
    """An A/B run goes on."""
    access: bool = False
    """The log has lines of good HTTP requests."""
    tokens: bool = True
    """The sample has tokens."""
    gaps: bool = True
    """And the trainer's log-probs of them."""
    files: bool = True
    """There are several dumps."""
    bisection: str = ""
    """The bisection that goes on: `running`, `paused`, `ending` (it has its result, its engines are not back); `cut`:
    the run went down in the middle, it can be resumed. Empty: none."""
    ima: bool = False
    """The engine under the cursor died of a fault that a bisection hunts."""
    sought: bool = True
    """A text is searched."""


STAGING = frozenset({"choose-right", "value", "drop"})
"""About changes that wait to be applied: a viewer without control has none."""


_PAIRS = frozenset({"choose-left", "token-left", "previous-dump", "next-hit"})
"""Actions that stand in the footer for the one of the other direction too."""


def works(key: Key, context: Context) -> bool:
    """Whether the action does anything in this context. Bindings, footer and palette all ask here."""
    if context.screen not in key.screens or (key.dangerous and not (context.control and context.live)):
        return False
    if key.panes and context.pane not in key.panes:
        return False
    if context.screen == "bisect" and key.action in ("full", "filter"):
        return False
    match key.action:
        case "stop-run":
            return context.has_run
        case "back":
            return context.filtered or context.full or context.deep
        case "full":
            return not context.alone
        case "zoom-out":
            return context.zoom > 0
        case "previous-tab" | "next-tab":
            return context.tabs or context.pane == "charts"
        case "left" | "right":
            return context.pane == "charts"
        case "source":
            return context.evidence
        case "bisect":
            return context.engines or context.screen == "live"
        case "bisect-start":
            return context.owned and context.bisection in ("", "cut")
        case "bisect-pause":
            return context.bisection in ("running", "paused", "cut")
        case "bisect-stop":
            return context.bisection in ("running", "paused", "ending")
        case "open" | "copy" | "mute" | "read" | "group" | "fields" | "evidence":
            return context.selected
        case "next-dump" | "previous-dump":
            return context.files
        case "next-hit" | "previous-hit":
            return context.sought
        case "token-left" | "token-right" | "colours":
            return context.tokens
        case "worst":
            return context.gaps
        case "engines" | "http" | "select-all":
            return context.engines
        case "edit" | "log":
            return context.selected
        case "value":
            return context.owned and context.control and context.live
        case "restart" | "stop":
            return context.owned
        case "diff":
            return context.owned and context.staged
        case "access":
            return context.access
        case "drop":
            return context.staged
        case "revert":
            return context.owned and context.previous
        case "ab-run":
            return context.ab or context.staged
        case "cancel-op":
            return context.operation
        case _:
            return True


def find(action: str) -> Key:
    """The entry of an action. Raises KeyError."""
    for key in KEYS:
        if key.action == action:
            return key
    raise KeyError(action)


def hints(context: Context) -> Iterator[tuple[str, str]]:
    """(keys, short label) for the footer, most useful first, only what works now."""
    chosen = [key for key in KEYS if key.footer and works(key, context)]
    for key in sorted(chosen, key=lambda key: _rank(key, context)):
        yield key.label if key.action in _PAIRS else key.label.split(" ")[0], _short(key, context)


def _rank(key: Key, context: Context) -> int:
    if key.screens == ("dump",) and key.action == context.pane:
        return 7  # the way back from there
    if key.action == "bisect" and (context.ima or context.bisection):
        return 6
    # Where engines or samples are looked at, the way to their screen is what is wanted most.
    there = {"engines": "engines", "dumps": "rollouts"}.get(key.action)
    return 11 if there is not None and context.pane == there else key.footer


def _short(key: Key, context: Context) -> str:
    match key.action:
        case "pause" if context.paused:
            return "resume"
        case "bisect-pause" if context.bisection in ("paused", "cut"):
            return "resume"
        case "full" if context.full:
            return "restore"
        case "back" if context.filtered:
            return "clear filter"
        case "choose-left" if not (context.owned and context.control and context.live):
            return "look"
        case "stop" if context.stopped:
            return "start"
        case "ab-run" if context.ab:
            return "end A/B"
        case "fields" | "stats" if context.pane == key.action:
            return "text"
        case "open" if context.pane == "charts":
            return "all charts" if context.single_chart else "one chart"
        case _:
            return key.short


def help_groups(context: Context) -> list[tuple[str, list[Key]]]:
    """The help screen: headings and keys, those of the current pane first; without control no dangerous ones."""
    groups: dict[str, list[Key]] = {}
    for key in KEYS:
        if context.screen not in key.screens or (key.dangerous and not context.control):
            continue
        if not context.control and key.action in STAGING:
            continue
        if not context.control and key.action == "choose-left":
            key = replace(key, help="Look at the other values; refused ones say why")
        groups.setdefault(key.group, []).append(key)
    return sorted(groups.items(), key=lambda group: not any(context.pane in key.panes for key in group[1]))
