"""One log line as recognisers see it, and what a recogniser is.

To teach rltop a new line: write `parse`, which takes a `Line` and returns the event's `data` (or None: not this kind),
and add a `Recogniser` to the table of its module. The log reader does the rest: prefixes, time, owner, tracebacks,
masking of model text, bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rltop.checks.found import Owner

EVENT_FIELDS = frozenset({"owner", "actor", "pid", "node", "rank", "engine", "level"})
"""Keys of a recogniser's answer that replace the field of the event of the same name, because the message knows better
than the prefix (`Rank 23, node node-c`)."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its prefixes. Fields that the line does not have come from the prefixed line before it."""

    text: str
    """The message: no ANSI codes, no actor prefix, no time stamp, no rank tags. At most 64 KiB."""
    raw: str
    """The line with its prefixes, without ANSI codes; what evidence shows."""
    source: str
    number: int
    """From 1."""
    own_prefix: bool = False
    """The line itself has an actor prefix, a time or a rank tag."""
    time_of_its_own: bool = False
    certain_owner: bool = False
    """`owner` comes from a prefix, not from the name of the file."""
    owner: Owner = ""
    actor: str = ""
    pid: int | None = None
    node: str = ""
    rank: int | None = None
    engine: int | str | None = None
    level: str = ""
    time: float | None = None
    tags: Mapping[str, int] = field(default_factory=dict)
    """SGLang's rank tags: `TP`, `DP`, `PP`, `EP`."""
    repeated: int = 0
    """`[repeated Nx across cluster]`."""


@dataclass(frozen=True, slots=True)
class Recogniser:
    """Turns lines of one kind into log events."""

    kind: str
    needles: tuple[str, ...]
    """A line is looked at only if it contains one of these, letter by letter. Digits in a needle are ignored."""
    parse: Callable[[Line], Mapping[str, object] | None]
    """The event's `data`; None if the line is something else. Keys of `EVENT_FIELDS` set the event's own fields. Never
    raises for odd text."""
    bulk: bool = False
    """There are very many of these in a healthy run (batch and access lines, timers): of lines that are nothing else,
    kept are the first and newest of each process, those around any other event, and one a minute. `LogSource.counts`
    counts all of them."""
    unless: tuple[str, ...] = ()
    """A line is not looked at if it contains one of these; digits are ignored here too."""


def number(text: str | None) -> float | None:
    """A number as a log prints it; None where the digits and dots are none."""
    try:
        return float(text) if text else None
    except ValueError:
        return None
