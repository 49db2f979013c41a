"""The one table of keys: bindings, footer, help screen and command palette are all made from it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

PANES = ("checks", "charts", "engines", "events", "rollouts", "run")
"""Pane names in the order of their number keys."""
LISTS = ("checks", "engines", "events", "rollouts", "run")
"""Panes that are lists of rows."""


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


class Key(Struct, frozen=True, kw_only=True):
    """One action and its keys.

    action: stable name, also the id of its bindings.
    keys: Textual key names; the first is shown.
    shown: how the keys are written for people; empty: the first key.
    short: one or two words for the footer.
    help: what it does, for the help screen and the palette.
    group: heading in the help screen.
    panes: panes where it works; empty: everywhere.
    footer: rank in the footer, lowest first; 0 is never shown there.
    palette: in the command palette.
    dangerous: changes the run: needs `--control`, asks before it acts.
    """

    action: str
    keys: tuple[str, ...]
    shown: str = ""
    short: str = ""
    help: str
    group: str = "Everywhere"
    panes: tuple[str, ...] = ()
    footer: int = 0
    palette: bool = True
    dangerous: bool = False

    @property
    def label(self) -> str:
        """The keys as people read them."""
        return self.shown or self.keys[0]


KEYS: tuple[Key, ...] = (
    Key(
        action="quit",
        keys=("q",),
        short="quit",
        help="Leave the dashboard; a demo ends with it, any other run goes on",
        footer=55,
    ),
    Key(
        action="help",
        keys=("question_mark", "f1"),
        shown="?",
        short="help",
        help="Keys and what healthy values are",
        footer=99,
    ),
    Key(
        action="palette",
        keys=("colon", "ctrl+p"),
        shown=": ctrl+p",
        short="commands",
        help="Find any action by name",
        footer=80,
        palette=False,
    ),
    Key(action="pause", keys=("space",), shown="space", short="pause", help="Freeze or release the picture", footer=30),
    Key(action="copy", keys=("y",), short="copy", help="Copy the selected row (OSC 52, and to a file)", footer=60),
    Key(action="changed", keys=("w",), short="changed", help="What changed since the last good run before this one"),
    Key(action="screenshot", keys=("P",), short="screenshot", help="Save the screen as an SVG file"),
    Key(action="theme", keys=("T",), short="theme", help="Choose another theme"),
    Key(action="suspend", keys=("ctrl+z",), short="suspend", help="Back to the shell; `fg` returns", palette=False),
    Key(action="interrupt", keys=("ctrl+c",), short="quit", help="Leave with exit code 130", palette=False),
    Key(
        action="pane",
        keys=("1", "2", "3", "4", "5", "6"),
        shown="1..6",
        short="pane",
        help="Go to a pane by its number",
        group="Panes",
        footer=50,
        palette=False,
    ),
    Key(action="next-pane", keys=("tab",), short="next", help="Next pane", group="Panes", palette=False),
    Key(action="previous-pane", keys=("shift+tab",), help="Previous pane", group="Panes", palette=False),
    Key(
        action="previous-tab",
        keys=("left_square_bracket",),
        shown="[",
        help="Previous tab (charts: previous chart)",
        group="Panes",
        palette=False,
    ),
    Key(
        action="next-tab",
        keys=("right_square_bracket",),
        shown="]",
        help="Next tab (charts: next chart)",
        group="Panes",
        palette=False,
    ),
    Key(
        action="full",
        keys=("f",),
        short="full screen",
        help="Fill the screen with this pane, or undo it",
        group="Panes",
        footer=40,
    ),
    Key(action="up", keys=("up", "k"), shown="↑ k", help="Up; charts: the chart above", group="Move", palette=False),
    Key(
        action="down",
        keys=("down", "j"),
        shown="↓ j",
        help="Down; charts: the chart below",
        group="Move",
        palette=False,
    ),
    Key(
        action="left",
        keys=("left", "comma"),
        shown="← ,",
        help="Charts: cursor to the left",
        group="Move",
        palette=False,
    ),
    Key(
        action="right",
        keys=("right", "full_stop"),
        shown="→ .",
        help="Charts: cursor to the right",
        group="Move",
        palette=False,
    ),
    Key(action="page-up", keys=("pageup",), help="One page up", group="Move", palette=False),
    Key(action="page-down", keys=("pagedown",), help="One page down", group="Move", palette=False),
    Key(action="home", keys=("g", "home"), shown="g", help="To the start", group="Move", palette=False),
    Key(
        action="end",
        keys=("G", "end"),
        shown="G",
        help="To the end; events: follow the newest",
        group="Move",
        palette=False,
    ),
    Key(
        action="open",
        keys=("enter",),
        shown="enter",
        short="open",
        help="Open or close the selected row",
        group="Move",
        footer=10,
    ),
    Key(
        action="back",
        keys=("escape",),
        shown="esc",
        short="back",
        help="Back: drop the filter, the cursor, the full screen",
        group="Move",
        footer=20,
        palette=False,
    ),
    Key(
        action="filter",
        keys=("slash",),
        shown="/",
        short="filter",
        help="Show only rows that contain a text",
        group="Lists",
        panes=LISTS,
        footer=12,
    ),
    Key(
        action="sort",
        keys=("s",),
        short="sort",
        help="Sort engines by the next column",
        group="Lists",
        panes=("engines",),
        footer=14,
    ),
    Key(
        action="level",
        keys=("v",),
        short="level",
        help="Least level of events: debug, info, warn, error",
        group="Lists",
        panes=("events",),
        footer=14,
    ),
    Key(
        action="source",
        keys=("o",),
        short="source",
        help="The log around the evidence of the selected check, or its metric in the charts",
        group="Lists",
        panes=("checks",),
        footer=11,
    ),
    Key(
        action="log-y",
        keys=("l",),
        short="log y",
        help="Logarithmic y axis on or off",
        group="Charts",
        panes=("charts",),
        footer=14,
    ),
    Key(
        action="zoom-in",
        keys=("plus", "equals_sign"),
        shown="+",
        short="zoom",
        help="Half the time range",
        group="Charts",
        panes=("charts",),
        footer=13,
    ),
    Key(
        action="zoom-out",
        keys=("minus",),
        shown="-",
        short="wider",
        help="Double the time range",
        group="Charts",
        panes=("charts",),
        footer=15,
    ),
    Key(
        action="note",
        keys=("n",),
        short="note",
        help="Write a line into everybody's event log",
        group="Control",
        footer=70,
        dangerous=True,
    ),
    Key(
        action="mute",
        keys=("m",),
        short="mute",
        help="Mute the selected check with a reason, or hear it again",
        group="Control",
        panes=("checks",),
        footer=16,
        dangerous=True,
    ),
    Key(
        action="stop-run",
        keys=("ctrl+x",),
        short="stop run",
        help="Stop the trainer (asks first); the daemon stays",
        group="Control",
        footer=71,
        dangerous=True,
    ),
)


def works(key: Key, context: Context) -> bool:
    """Whether the action does anything in this context. Bindings, footer and palette all ask here."""
    if key.dangerous and not (context.control and context.live):
        return False
    if key.panes and context.pane not in key.panes:
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
        case "open" | "copy" | "mute":
            return context.selected
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
    for key in sorted(chosen, key=lambda key: key.footer):
        yield key.label.split(" ")[0], _short(key, context)


def _short(key: Key, context: Context) -> str:
    match key.action:
        case "pause" if context.paused:
            return "resume"
        case "full" if context.full:
            return "restore"
        case "back" if context.filtered:
            return "clear filter"
        case "open" if context.pane == "charts":
            return "all charts" if context.single_chart else "one chart"
        case _:
            return key.short


def help_groups(context: Context) -> list[tuple[str, list[Key]]]:
    """The help screen: headings and keys, those of the current pane first; without control no dangerous ones."""
    groups: dict[str, list[Key]] = {}
    for key in KEYS:
        if key.dangerous and not context.control:
            continue
        groups.setdefault(key.group, []).append(key)
    return sorted(groups.items(), key=lambda group: not any(context.pane in key.panes for key in group[1]))
