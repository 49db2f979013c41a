"""`rltop changed A B`: what differs between two runs, the likeliest culprit first. `rltop changed RUN`: since the last
good run before it."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

from rltop.cli.output import age, clean, number, print_json
from rltop.runs.changes import Change, Difference

if TYPE_CHECKING:
    from rltop.daemon.compare import Seen

SHOWN = 12
"""Most changes without --all."""


def changed(first: str, second: str | None, *, as_json: bool, every: bool) -> int:
    """Compare and print. Raises RltopError: no such run or attempt, no good run before it."""
    from rltop.daemon.compare import compare, last_good, see

    if second is None:
        after = see(first)
        before, why = last_good(after)
    else:
        before, after, why = see(first), see(second), "named"
    found = compare(before, after)
    if as_json:
        print_json(_json(before, after, why, found))
        return 0
    print("\n".join(_lines(before, after, why, found, every=every)))
    return 0


# ---------------------------------------------------------------- printing


def _json(before: Seen, after: Seen, why: str, found: Difference) -> dict[str, Any]:
    return {
        "before": before.label,
        "after": after.label,
        "chosen": why,
        "changes": [
            {
                "kind": change.kind,
                "name": change.name,
                "before": change.before,
                "after": change.after,
                "score": change.score,
                "why": change.why,
                "explains": list(change.explains),
            }
            for change in found.changes
        ],
        "unknown": found.unknown,
    }


def _lines(before: Seen, after: Seen, why: str, found: Difference, *, every: bool) -> list[str]:
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    lines = [f"{before.label} -> {after.label}, begun {age(abs(after.started - before.started))} apart"]
    if why != "named":
        lines.append(f"{before.label} is {why}")
    failing = after.facts().failing
    if failing:
        lines.append(f"{after.label} fails: {', '.join(failing)}")
    shown = found.changes if every else found.changes[:SHOWN]
    if not found.changes:
        lines += ["", "nothing that is known of both runs differs"]
    for place, change in enumerate(shown, 1):
        lines += ["", *_change(place, change, width)]
    if left := len(found.changes) - len(shown):
        lines += ["", f"{left} less likely changes are left out: --all shows them"]
    if found.unknown:
        lines += ["", "not known:", *(f"  {clean(text)}" for text in found.unknown)]
    return lines


def _change(place: int, change: Change, width: int) -> list[str]:
    name = f"--{change.name.replace('_', '-')}" if change.kind == "argument" else change.name
    return [
        _cut(f"{place:>3}  {change.kind} {name}", width),
        *(
            _cut(f"       {sign} {clean(_text(value))}", width)
            for sign, value in (("-", change.before), ("+", change.after))
        ),
        _cut(f"       {change.why}", width),
    ]


def _text(value: Any) -> str:
    return "(not there)" if value is None else "set" if value is True else number(value)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
