"""Glyphs, the two themes of rltop, and the palette: style name -> terminal style.

No meaning is carried by colour alone: a status is a glyph, a word and a colour, so that `--ascii` and `NO_COLOR` lose
nothing.
"""

from __future__ import annotations

from msgspec import Struct
from rich.color import Color
from rich.style import Style
from textual.theme import Theme

DARK = Theme(
    name="rltop-dark",
    primary="#6cb6ff",
    secondary="#8dbfa8",
    accent="#6cb6ff",
    foreground="#cdd5df",
    background="#10141a",
    surface="#171d26",
    panel="#1d2530",
    success="#6fc27c",
    warning="#e0ac3e",
    error="#ff7a70",
    dark=True,
)
LIGHT = Theme(
    name="rltop-light",
    primary="#0a5fb4",
    secondary="#2f6f57",
    accent="#0a5fb4",
    foreground="#24292f",
    background="#fafbfc",
    surface="#f0f2f5",
    panel="#e6eaef",
    success="#1a7f37",
    warning="#8a5a00",
    error="#c62828",
    dark=False,
)
STATUSES = ("fail", "warn", "info", "pass", "skip")
"""Worst first."""


class Glyphs(Struct, frozen=True):
    """The characters of a screen. `ascii_only` decides how text of the run is cleaned."""

    ascii_only: bool = False
    fail: str = "✗"
    warn: str = "▲"
    info: str = "●"
    ok: str = "✓"
    skip: str = "○"
    live: str = "●"
    wait: str = "◌"
    lost: str = "✗"
    paused: str = "‖"
    rule: str = "─"
    rule_focus: str = "━"
    side: str = "│"
    elbow: str = "└"
    cut: str = "…"
    arrow: str = "→"
    open: str = "▾"
    shut: str = "▸"
    dot: str = "·"
    up: str = "↑"
    down: str = "↓"
    full: str = "█"
    half: str = "▌"
    empty: str = "░"
    limit: str = "╌"
    cursor: str = "│"
    newline: str = "↵"
    times: str = "×"
    le: str = "≤"
    more: str = "⋯"

    def status(self, status: str) -> str:
        """Glyph of a check status."""
        return {"fail": self.fail, "warn": self.warn, "info": self.info, "pass": self.ok}.get(status, self.skip)

    def level(self, level: str) -> str:
        """Glyph of an event level."""
        return {"error": self.fail, "warn": self.warn, "info": self.dot}.get(level, " ")


UNICODE = Glyphs()
ASCII = Glyphs(
    ascii_only=True,
    fail="X",
    warn="!",
    info="i",
    ok="+",
    skip="-",
    live="*",
    wait="~",
    lost="X",
    paused="=",
    rule="-",
    rule_focus="=",
    side="|",
    elbow="`",
    cut="~",
    arrow="->",
    open="v",
    shut=">",
    dot="-",
    up="^",
    down="v",
    full="#",
    half="#",
    empty=".",
    limit="-",
    cursor="|",
    newline="\\n",
    times="x",
    le="<=",
    more="...",
)


def status_style(status: str) -> str:
    """Style name of a check status or event level."""
    match status:
        case "fail" | "error":
            return "bad"
        case "warn":
            return "warn"
        case "info":
            return "text"
        case "pass":
            return "ok"
        case _:
            return "dim"


class Palette:
    """Style name -> style, for one theme.

    Names: text, strong, note, dim, faint, rule, accent, ok, warn, bad, data, limit; heat1 to heat4 (how much, of
    something unwanted), plus and minus (signs); followed by any of the flags `+b` (bold), `+sel` (selected row), `+cur`
    (the character under a cursor) and `+grey` (the connection is lost: everything in one grey).
    Heat is one hue that gets stronger, the signs are blue and orange, and each differs in more than its colour.
    """

    def __init__(self, theme: Theme) -> None:
        self._styles: dict[str, Style] = {}
        self._ansi = theme.ansi
        self._base = _ansi_base() if theme.ansi else _true_base(theme)
        self._sel = Style(reverse=True) if theme.ansi else Style(bgcolor=_mix(theme, "accent", 0.22))
        self._grey = Style(dim=True) if theme.ansi else Style(color=_mix(theme, "foreground", 0.45))

    def __getitem__(self, name: str) -> Style:
        style = self._styles.get(name)
        if style is None:
            style = self._styles[name] = self._make(name)
        return style

    def _make(self, name: str) -> Style:
        base, *flags = name.split("+")
        style = self._base.get(base, self._base["text"])
        if "grey" in flags and base not in ("bad", "warn"):
            style = self._base["text"] + self._grey
        elif "grey" in flags:
            style = self._base["text"] + self._grey + Style(bold=True)
        if "b" in flags:
            style += Style(bold=True)
        if "sel" in flags:
            style += self._sel
        if "cur" in flags:
            style += Style(bold=True, reverse=True)
        return style


def _ansi_base() -> dict[str, Style]:
    """The terminal's own sixteen colours; with NO_COLOR what is left is bold and dim."""
    return {
        "text": Style(),
        "strong": Style(bold=True),
        "note": Style(),
        "dim": Style(dim=True),
        "faint": Style(dim=True),
        "rule": Style(dim=True),
        "accent": Style(color="cyan"),
        "ok": Style(color="green"),
        "warn": Style(color="yellow", bold=True),
        "bad": Style(color="red", bold=True),
        "data": Style(color="cyan"),
        "limit": Style(color="yellow"),
        "heat1": Style(italic=True),
        "heat2": Style(underline=True),
        "heat3": Style(color="yellow", bold=True, underline=True),
        "heat4": Style(color="yellow", bold=True, underline=True, italic=True),
        "plus": Style(color="cyan", bold=True),
        "minus": Style(color="yellow", underline=True),
    }


def _true_base(theme: Theme) -> dict[str, Style]:
    bg = Color.parse(theme.background or ("#121212" if theme.dark else "#fafafa"))
    plain = {
        "text": _mix(theme, "foreground", 0.92),
        "strong": _mix(theme, "foreground", 1.0),
        "note": _mix(theme, "foreground", 0.75),
        "dim": _mix(theme, "foreground", 0.6),
        "faint": _mix(theme, "foreground", 0.42),
        "rule": _mix(theme, "foreground", 0.22),
        "accent": _mix(theme, "accent", 1.0),
        "ok": _mix(theme, "success", 0.9),
        "warn": _mix(theme, "warning", 1.0),
        "bad": _mix(theme, "error", 1.0),
        "data": _mix(theme, "accent", 0.85),
        "limit": _mix(theme, "warning", 0.75),
    }
    bold = {"strong", "bad"}
    styles = {name: Style(color=color, bgcolor=bg, bold=name in bold) for name, color in plain.items()}
    text = plain["strong"]
    heats = {f"heat{at}": _mix(theme, "warning", share) for at, share in ((1, 0.2), (2, 0.36), (3, 0.52))}
    styles |= {name: Style(color=text, bgcolor=color) for name, color in heats.items()}
    styles["heat2"] += Style(bold=True)  # a terminal of 256 colours has one shade for both
    styles["heat3"] += Style(bold=True, underline=True)
    styles["heat4"] = Style(color=bg, bgcolor=plain["warn"], bold=True)
    styles["plus"] = Style(color=plain["accent"], bgcolor=bg, bold=True)
    styles["minus"] = Style(color=plain["warn"], bgcolor=bg, underline=True)
    return styles


_FALLBACK = {
    True: {
        "foreground": "#e0e0e0",
        "background": "#121212",
        "success": "#4ebf71",
        "warning": "#ffa62b",
        "error": "#ba3c5b",
    },
    False: {
        "foreground": "#1f1f1f",
        "background": "#fafafa",
        "success": "#2e8b57",
        "warning": "#8a5a00",
        "error": "#b00020",
    },
}


def _mix(theme: Theme, name: str, share: float) -> Color:
    """Colour `name` of the theme, faded into the background: 1.0 is the colour itself, 0.0 the background."""
    own = getattr(theme, name) or _FALLBACK[theme.dark].get(name) or theme.primary
    ground = Color.parse(theme.background or _FALLBACK[theme.dark]["background"]).get_truecolor()
    top = Color.parse(own).get_truecolor()
    return Color.from_rgb(*(round(g + (t - g) * share) for g, t in zip(ground, top, strict=True)))
