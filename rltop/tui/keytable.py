"""The one table of keys, of all screens. What works when is in `keymap`."""

from __future__ import annotations

from msgspec import Struct

PANES = ("checks", "charts", "engines", "events", "rollouts", "run")
"""Pane names in the order of their number keys."""
LISTS = ("checks", "engines", "events", "rollouts", "run", "list")
"""Panes that are lists of rows."""


class Key(Struct, frozen=True, kw_only=True):
    """One action and its keys.

    action: stable name, also the id of its bindings.
    keys: Textual key names; the first is shown.
    shown: how the keys are written for people; empty: the first key.
    short: one or two words for the footer.
    help: what it does, for the help screen and the palette.
    group: heading in the help screen.
    screens: screens where it works.
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
    screens: tuple[str, ...] = ("live",)

    @property
    def label(self) -> str:
        """The keys as people read them."""
        return self.shown or self.keys[0]


BOTH = ("live", "engines")
ENGINES = ("engines",)

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
        screens=BOTH,
        keys=("question_mark", "f1"),
        shown="?",
        short="help",
        help="Keys and what healthy values are",
        footer=99,
    ),
    Key(
        action="palette",
        screens=BOTH,
        keys=("colon", "ctrl+p"),
        shown=": ctrl+p",
        short="commands",
        help="Find any action by name",
        footer=80,
        palette=False,
    ),
    Key(action="pause", keys=("space",), shown="space", short="pause", help="Freeze or release the picture", footer=30),
    Key(
        action="copy",
        screens=BOTH,
        keys=("y",),
        short="copy",
        help="Copy the selected row (OSC 52, and to a file)",
        footer=60,
    ),
    Key(action="changed", keys=("w",), short="changed", help="What changed since the last good run before this one"),
    Key(action="screenshot", screens=BOTH, keys=("P",), short="screenshot", help="Save the screen as an SVG file"),
    Key(action="theme", screens=BOTH, keys=("T",), short="theme", help="Choose another theme"),
    Key(
        action="suspend",
        screens=BOTH,
        keys=("ctrl+z",),
        short="suspend",
        help="Back to the shell; `fg` returns",
        palette=False,
    ),
    Key(
        action="interrupt", screens=BOTH, keys=("ctrl+c",), short="quit", help="Leave with exit code 130", palette=False
    ),
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
        screens=BOTH,
        keys=("f",),
        short="full screen",
        help="Fill the screen with this pane or part, or undo it",
        group="Panes",
        footer=40,
    ),
    Key(
        action="up",
        screens=BOTH,
        keys=("up", "k"),
        shown="↑ k",
        help="Up; charts: the chart above",
        group="Move",
        palette=False,
    ),
    Key(
        action="down",
        screens=BOTH,
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
    Key(action="page-up", screens=BOTH, keys=("pageup",), help="One page up", group="Move", palette=False),
    Key(action="page-down", screens=BOTH, keys=("pagedown",), help="One page down", group="Move", palette=False),
    Key(action="home", screens=BOTH, keys=("g", "home"), shown="g", help="To the start", group="Move", palette=False),
    Key(
        action="end",
        screens=BOTH,
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
        screens=BOTH,
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
        screens=BOTH,
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
    Key(
        action="engines",
        keys=("e",),
        short="engines",
        help="The engine screen: signals, toggles, log; with --control change, restart, revert, A/B",
        group="Lists",
        footer=52,
    ),
    Key(
        action="close",
        keys=("q",),
        short="close",
        help="Back to the dashboard",
        group="Everywhere",
        footer=55,
        screens=ENGINES,
    ),
    Key(
        action="next-section",
        keys=("tab",),
        short="next part",
        help="To the next part: engines, status, toggles, log, A/B",
        group="Move",
        footer=34,
        palette=False,
        screens=ENGINES,
    ),
    Key(
        action="previous-section",
        keys=("shift+tab",),
        help="To the part before",
        group="Move",
        palette=False,
        screens=ENGINES,
    ),
    Key(
        action="select",
        keys=("space",),
        shown="space",
        short="select",
        help="Select the engine, or not any more; actions are for all selected ones",
        group="Engines",
        panes=("list",),
        footer=13,
        screens=ENGINES,
    ),
    Key(
        action="select-all",
        keys=("a",),
        short="all",
        help="Select all of rltop's engines that the filter shows, or none",
        group="Engines",
        footer=32,
        screens=ENGINES,
    ),
    Key(
        action="edit",
        keys=("e", "enter"),
        short="toggles",
        help="To the toggles of the selected engines, to change them",
        group="Engines",
        panes=("list", "status", "log", "ab"),
        footer=10,
        screens=ENGINES,
    ),
    Key(
        action="access",
        keys=("v",),
        short="HTTP lines",
        help="Show or hide the lines of good HTTP requests in the log",
        group="Engines",
        panes=("log",),
        footer=12,
        screens=ENGINES,
    ),
    Key(
        action="log", keys=("l",), short="log", help="To the newest lines of the log", group="Engines", screens=ENGINES
    ),
    Key(
        action="choose-left",
        keys=("left",),
        shown="← →",
        short="change",
        help="Stage another value; refused ones say why",
        group="Toggles",
        panes=("toggles",),
        footer=9,
        palette=False,
        screens=ENGINES,
    ),
    Key(
        action="choose-right",
        keys=("right",),
        help="Stage the next value",
        group="Toggles",
        panes=("toggles",),
        palette=False,
        screens=ENGINES,
    ),
    Key(
        action="value",
        keys=("equals_sign",),
        shown="=",
        short="type",
        help="Type a value for the toggle",
        group="Toggles",
        panes=("toggles",),
        footer=33,
        screens=ENGINES,
    ),
    Key(
        action="drop",
        keys=("x",),
        short="drop",
        help="Take back what is staged (toggles: of this one)",
        group="Toggles",
        footer=15,
        screens=ENGINES,
    ),
    Key(
        action="diff",
        keys=("d",),
        short="diff, apply",
        help="What the staged changes would do (argv, environment), and apply them",
        group="Engine control",
        footer=8,
        dangerous=True,
        screens=ENGINES,
    ),
    Key(
        action="restart",
        keys=("r",),
        short="restart",
        help="Restart the selected engines (shows the plan first)",
        group="Engine control",
        footer=20,
        dangerous=True,
        screens=ENGINES,
    ),
    Key(
        action="revert",
        keys=("u",),
        short="revert",
        help="Back to the previous generation (shows its diff first)",
        group="Engine control",
        footer=21,
        dangerous=True,
        screens=ENGINES,
    ),
    Key(
        action="stop",
        keys=("s",),
        short="stop",
        help="Stop the selected engines, or start them when they are down",
        group="Engine control",
        footer=22,
        dangerous=True,
        screens=ENGINES,
    ),
    Key(
        action="ab-run",
        keys=("b",),
        short="A/B",
        help="Put the staged changes on half of the engines and compare; again: end it",
        group="Engine control",
        footer=23,
        dangerous=True,
        screens=ENGINES,
    ),
    Key(
        action="http",
        keys=("h",),
        short="http",
        help="Flush the cache, pause, continue or profile: over HTTP, also engines of others",
        group="Engine control",
        footer=31,
        dangerous=True,
        screens=ENGINES,
    ),
    Key(
        action="cancel-op",
        keys=("c",),
        short="cancel",
        help="Cancel the running operation (asks first)",
        group="Engine control",
        footer=7,
        dangerous=True,
        screens=ENGINES,
    ),
)
