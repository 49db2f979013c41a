"""A report as plain text: the root cause first, its consequences under it, the rest in one line per status."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence

from rltop.checks.catalogue import CATALOGUE
from rltop.checks.evaluate import NO_RULE
from rltop.checks.phrase import num
from rltop.checks.verdict import FIRING, Report, Verdict

LABEL = 6
"""Width of the status column."""


def render(report: Report, *, width: int = 100, injected_faults: Sequence[str] = (), refs: bool = False) -> str:
    """Text of at most `width` columns (at least 40), without a final newline.

    Root causes with evidence and advice, each followed by the checks that it explains; then `info`, `pass` and `skip`.
    Skips whose cause is the same are one line. `injected_faults` are announced first: they are not the run's own.
    """
    width = max(width, 40)
    firing = [v for v in report.verdicts if v.status in FIRING]
    lines: list[str] = []
    if injected_faults:
        lines += [*_wrap(f"injected on purpose: {', '.join(injected_faults)}", "", width), ""]
    lines += _wrap(_headline(report), "", width)
    shown: set[str] = set()
    for root in report.root_causes:
        for verdict in (v for v in firing if v.id == root and not v.consequence_of):
            lines += ["", *_block(verdict, width, refs)]
        followers = [v for v in firing if root in v.consequence_of]
        lines += _followers(followers, width)
        shown |= {root, *(v.id for v in followers)}
    # A consequence of a consequence hangs under no root; it is still news.
    lines += _followers([v for v in firing if v.id not in shown], width)
    rest = _rest(report, width)
    return "\n".join([*lines, *([""] if rest else []), *rest])


FULL_ROOTS = 3
"""Root causes that `render_folded` shows with evidence and advice; the others are two lines each."""
FOLDED_EVIDENCE = 2
COMMAND = "rltop check --all"


def render_folded(
    report: Report, *, width: int = 100, injected_faults: Sequence[str] = (), command: str = COMMAND
) -> str:
    """What somebody needs who has five seconds: what broke, where it stands, what to do. Everything that is not wrong
    is one line; `render` shows it."""
    width = max(width, 40)
    firing = [v for v in report.verdicts if v.status in FIRING]
    roots = [v for root in report.root_causes for v in firing if v.id == root and not v.consequence_of]
    lines: list[str] = []
    if injected_faults:
        lines += [*_wrap(f"injected on purpose: {', '.join(injected_faults)}", "", width), ""]
    lines += _wrap(_verdict_line(report, roots, len(firing)), "", width)
    shown: set[str] = set()
    for number, verdict in enumerate(roots):
        lines += ["", *_short_block(verdict, width, full=number < FULL_ROOTS)]
        followers = [v for v in firing if verdict.id in v.consequence_of and v.id not in shown]
        if verdict.id not in shown:
            lines += _folded_followers(followers, width)
        shown |= {verdict.id, *(v.id for v in followers)}
    lines += _folded_followers([v for v in firing if v.id not in shown], width)
    notes = [_cut(f"note  {v.id}: {v.cause}", width) for v in report.verdicts if v.status == "info"]
    passed = len({v.id for v in report.verdicts if v.status == "pass"})
    skipped = len({v.id for v in report.verdicts if v.status == "skip"})
    rest = _wrap(f"{passed} checks passed, {skipped} could not be tested: {command} says which and why.", "", width)
    return "\n".join([*lines, "", *notes, *rest])


def _verdict_line(report: Report, roots: Sequence[Verdict], firing: int) -> str:
    if not roots:
        return "Nothing is wrong in what could be tested." if not firing else "Something is wrong."
    fails = len({v.id for v in roots if v.status == "fail"})
    warns = len({v.id for v in roots if v.status == "warn"} - {v.id for v in roots if v.status == "fail"})
    parts = [f"{fails} root cause{'s' if fails > 1 else ''}"] if fails else []
    parts += [f"{warns} warning{'s' if warns > 1 else ''}"] if warns else []
    effects = firing - len(roots)
    below = sum(v.status == "fail" and bool(v.consequence_of) for v in report.verdicts)
    told = f", with {effects} consequence{'s' if effects > 1 else ''}" if effects else ""
    return " and ".join(parts) + told + (f" ({below} fail):" if below else ":")


def _short_block(verdict: Verdict, width: int, *, full: bool) -> list[str]:
    pad = " " * LABEL
    place = _place(verdict)
    head = f"{verdict.status.upper():<{LABEL}}{verdict.id}" + (f"  {place}" if place else "")
    sure = "" if verdict.confidence == "high" else f"  (confidence {verdict.confidence})"
    lines = [_cut(head + sure, width), *_wrap(verdict.cause, pad, width)]
    evidence = verdict.evidence[: FOLDED_EVIDENCE if full else 1]
    for one in evidence:
        source = one.source if one.line is None else f"{one.source}:{one.line}"
        lines.append(_cut(f"{pad}at  {source}  {one.text}", width))
    if more := len(verdict.evidence) - len(evidence):
        lines[-1:] = [_cut(lines[-1], width - len(f" (+{more})")) + f" (+{more})"]
    for advice in verdict.advice if full else ():
        lines += _wrap(advice, f"{pad}do  ", width)
    return lines


def _folded_followers(followers: Iterable[Verdict], width: int) -> list[str]:
    return [_cut(f"{' ' * LABEL}so  {v.id} ({v.status}): {v.cause}", width) for v in followers]


def _cut(text: str, width: int) -> str:
    plain = _one_line(text)
    return plain if len(plain) <= width else plain[: width - 1] + "…"


def _headline(report: Report) -> str:
    counts = report.summary
    told = [f"{counts.get(status, 0)} {status}" for status in ("fail", "warn", "info", "pass", "skip")]
    return "checks: " + ", ".join(told)


def _block(verdict: Verdict, width: int, refs: bool) -> list[str]:
    titles = {entry.id: entry.title for entry in CATALOGUE}
    place = _place(verdict)
    head = f"{verdict.status.upper():<{LABEL}}{verdict.id}"
    head += f"  {place}" if place else ""
    title = f"  ({titles[verdict.id]})" if verdict.id in titles else ""
    pad = " " * LABEL
    lines = [head + title] if len(head + title) <= width else textwrap.wrap(head, width, subsequent_indent=pad)
    lines += _wrap(verdict.cause, pad, width)
    lines += _wrap(
        f"value {_plain(verdict.value)}  threshold {_plain(verdict.threshold)}  confidence {verdict.confidence}",
        pad,
        width,
    )
    for evidence in verdict.evidence:
        source = evidence.source if evidence.line is None else f"{evidence.source}:{evidence.line}"
        lines += _wrap(f"{source}  {_one_line(evidence.text)}", f"{pad}at  ", width)
    for advice in verdict.advice:
        lines += _wrap(advice, f"{pad}do  ", width)
    if refs and verdict.refs:
        lines += _wrap(" ".join(verdict.refs), f"{pad}ref ", width)
    return lines


def _followers(followers: Iterable[Verdict], width: int) -> list[str]:
    lines: list[str] = []
    for verdict in followers:
        text = f"explains {verdict.id} ({verdict.status}): {verdict.cause}"
        lines += _wrap(text, " " * LABEL, width)
    return lines


def _rest(report: Report, width: int) -> list[str]:
    lines: list[str] = []
    for verdict in (v for v in report.verdicts if v.status == "info"):
        lines += _wrap(f"{verdict.id}: {verdict.cause}", f"{'info':<{LABEL}}", width)
    passed = list(dict.fromkeys(v.id for v in report.verdicts if v.status == "pass"))
    if passed:
        lines += _wrap(", ".join(passed), f"{'pass':<{LABEL}}", width)
    reasons: dict[str, list[str]] = {}
    for verdict in (v for v in report.verdicts if v.status == "skip"):
        reasons.setdefault(verdict.cause, []).append(verdict.id)
    for cause, ids in sorted(reasons.items(), key=lambda item: item[0] == NO_RULE):
        told = f"{len(ids)} checks" if cause == NO_RULE and len(ids) > 1 else ", ".join(ids)
        lines += _wrap(f"{told}: {cause}", f"{'skip':<{LABEL}}", width)
    return lines


def _place(verdict: Verdict) -> str:
    parts = [
        f"{name} {value}"
        for name, value in (
            ("rollout", verdict.rollout),
            ("step", verdict.step),
            ("engine", verdict.engine),
            ("rank", verdict.rank),
        )
        if value is not None
    ]
    return ", ".join(parts)


def _plain(value: object) -> str:
    """A value in one line: maps as `name=number`."""
    match value:
        case None:
            return "-"
        case bool() | str():
            return str(value)
        case int() | float():
            return num(value) if isinstance(value, float) else str(value)
        case dict():
            parts = {key: _plain(entry) for key, entry in value.items() if entry is not None}
            nested = {key for key in parts if isinstance(value[key], dict)}
            return ", ".join(f"{key}=({text})" if key in nested else f"{key}={text}" for key, text in parts.items())
        case _:
            return json.dumps(value, ensure_ascii=False, default=str)


def _one_line(text: str) -> str:
    """No control characters: a terminal must not act on what a model wrote."""
    return "".join(ch if ch.isprintable() else " " for ch in text)


def _wrap(text: str, lead: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(_one_line(text), width, initial_indent=lead, subsequent_indent=" " * len(lead))
    return wrapped or [lead.rstrip()]
