"""A report as plain text: the root cause first, its consequences under it, the rest in one line per status."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from rltop.checks.catalogue import CATALOGUE
from rltop.checks.evaluate import NO_RULE
from rltop.checks.layout import cut, wrap
from rltop.checks.names import some
from rltop.checks.phrase import count, num
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
        lines += [*wrap(f"injected on purpose: {', '.join(injected_faults)}", "", width), ""]
    lines += wrap(_headline(report), "", width)
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
FOLDED_LINES = 2
"""Lines of a note or of a consequence; its whole text is in `render`."""
COMMAND = "rltop check --all"


def render_folded(
    report: Report,
    *,
    width: int = 100,
    injected_faults: Sequence[str] = (),
    command: str = COMMAND,
    nothing: str = "Nothing is wrong in what could be tested.",
) -> str:
    """What somebody needs who has five seconds: what broke, where it stands, what to do. Everything that is not wrong
    is one line; `render` shows it. nothing: the sentence of a report in which nothing is wrong."""
    width = max(width, 40)
    firing = [v for v in report.verdicts if v.status in FIRING]
    roots = [v for root in report.root_causes for v in firing if v.id == root and not v.consequence_of]
    lines: list[str] = []
    if injected_faults:
        lines += [*wrap(f"injected on purpose: {', '.join(injected_faults)}", "", width), ""]
    lines += wrap(_verdict_line(report, roots, firing, nothing), "", width)
    shown: set[str] = set()
    told: set[str] = set()
    for number, verdict in enumerate(roots):
        full = verdict.id in report.root_causes[:FULL_ROOTS] and number < MOST_BLOCKS
        lines += ["", *_short_block(verdict, width, full=full, told=told, command=command)]
        told |= {f"{verdict.id} {advice}" for advice in verdict.advice}
        followers = [v for v in firing if verdict.id in v.consequence_of and v.id not in shown]
        if verdict.id not in shown:
            lines += _folded_followers(followers, width, below=verdict)
        shown |= {verdict.id, *(v.id for v in followers)}
    lines += _folded_followers([v for v in firing if v.id not in shown], width)
    return "\n".join([*lines, "", *_folded_rest(report, width, command)])


MOST_BLOCKS = 6
"""Verdicts shown with evidence and advice, where one root cause was found in many places."""


def _verdict_line(report: Report, roots: Sequence[Verdict], firing: Sequence[Verdict], nothing: str) -> str:
    if not roots:
        return nothing if not firing else "Something is wrong."
    failed = {v.id for v in roots if v.status == "fail"}
    fails, warns = len(failed), len({v.id for v in roots if v.status == "warn"} - failed)
    effects = [v for v in firing if v.consequence_of]
    below = sum(v.status == "fail" for v in effects)
    warnings = count(warns, "warning")
    if below and not fails:
        # The exit code says that something failed: so must the first line.
        rest = len(effects) - below
        more = f", with {count(rest, 'more consequence')}" if rest else ""
        return f"{below} FAIL, explained by {warnings}{more}:"
    parts = [count(fails, "root cause")] if fails else []
    if fails and (places := sum(v.id in failed for v in roots)) > fails:
        parts[0] += f" in {places} places"
    parts += [warnings] if warns else []
    told = f", with {count(len(effects), 'consequence')}" if effects else ""
    return " and ".join(parts) + told + (f" ({below} fail):" if below else ":")


def _short_block(verdict: Verdict, width: int, *, full: bool, told: Collection[str], command: str) -> list[str]:
    """`told` is the advice, each with its check, that stands above already."""
    pad = " " * LABEL
    lines = [_short_head(verdict, width), *wrap(verdict.cause, pad, width)]
    lines += _short_evidence(verdict, width, FOLDED_EVIDENCE if full else 1)
    new = [advice for advice in verdict.advice if f"{verdict.id} {advice}" not in told]
    for advice in new if full else ():
        lines += wrap(advice, f"{pad}do  ", width)
    if new and not full:
        lines += wrap(f"{count(len(new), 'more thing')} to do: {command}", f"{pad}do  ", width)
    return lines


def _short_head(verdict: Verdict, width: int) -> str:
    place = _place(verdict)
    head = f"{verdict.status.upper():<{LABEL}}{verdict.id}" + (f"  {place}" if place else "")
    return cut(head + ("" if verdict.confidence == "high" else f"  (confidence {verdict.confidence})"), width)


def _short_evidence(verdict: Verdict, width: int, most: int) -> list[str]:
    lines = []
    for one in verdict.evidence[:most]:
        source = one.source if one.line is None else f"{one.source}:{one.line}"
        lines.append(cut(f"{' ' * LABEL}at  {source}  {one.text}", width))
    if more := len(verdict.evidence) - len(lines):
        lines[-1:] = [cut(lines[-1], width - len(f" (+{more})")) + f" (+{more})"]
    return lines


def _folded_followers(followers: Iterable[Verdict], width: int, *, below: Verdict | None = None) -> list[str]:
    """Consequences in brief. A fail under a warning is what broke the run: it stands like a cause, after it."""
    lines: list[str] = []
    ordered = sorted(followers, key=lambda v: FIRING.index(v.status))
    for verdict in ordered:
        if verdict.status == "fail" and (below is None or below.status != "fail"):
            lines += ["", _short_head(verdict, width), *wrap(verdict.cause, " " * LABEL, width)]
            lines += _short_evidence(verdict, width, 1)
            if verdict.consequence_of:
                lines += wrap(f"(explained by {', '.join(verdict.consequence_of)})", " " * LABEL, width)
        else:
            text = f"{verdict.id} ({verdict.status}): {verdict.cause}"
            lines += wrap(text, f"{' ' * LABEL}so  ", width, most=FOLDED_LINES)
    return lines


def _folded_rest(report: Report, width: int, command: str) -> list[str]:
    """Notes with something to do, then one line on everything else."""
    noted = [v for v in report.verdicts if v.status == "info"]
    lines = []
    for verdict in (v for v in noted if v.advice):
        lines += wrap(f"{verdict.id}: {verdict.cause}", "note  ", width, most=FOLDED_LINES)
    quiet = list(dict.fromkeys(v.id for v in noted if not v.advice))
    remarks = f", {count(len(quiet), 'remark')} ({some(quiet, 3)})" if quiet else ""
    passed = len({v.id for v in report.verdicts if v.status == "pass"})
    skipped = len({v.id for v in report.verdicts if v.status == "skip"})
    rest = f"{count(passed, 'check')} passed{remarks}, {skipped} could not be tested: {command} has it all, uncut."
    return [*lines, *wrap(rest, "", width)]


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
    lines = [head + title] if len(head + title) <= width else [cut(head, width)]
    lines += wrap(verdict.cause, pad, width)
    lines += wrap(
        f"value {_plain(verdict.value)}  threshold {_plain(verdict.threshold)}  confidence {verdict.confidence}",
        pad,
        width,
    )
    lines += _details(verdict, width)
    if refs and verdict.refs:
        lines += wrap(" ".join(verdict.refs), f"{pad}ref ", width)
    return lines


def _details(verdict: Verdict, width: int) -> list[str]:
    """Evidence and advice in full."""
    pad = " " * LABEL
    lines: list[str] = []
    for evidence in verdict.evidence:
        source = evidence.source if evidence.line is None else f"{evidence.source}:{evidence.line}"
        lines += wrap(f"{source}  {evidence.text}", f"{pad}at  ", width)
    for advice in verdict.advice:
        lines += wrap(advice, f"{pad}do  ", width)
    return lines


def _followers(followers: Iterable[Verdict], width: int) -> list[str]:
    lines: list[str] = []
    for verdict in followers:
        text = f"explains {verdict.id} ({verdict.status}): {verdict.cause}"
        lines += wrap(text, " " * LABEL, width)
        lines += _details(verdict, width)
    return lines


def _rest(report: Report, width: int) -> list[str]:
    lines: list[str] = []
    for verdict in (v for v in report.verdicts if v.status == "info"):
        lines += wrap(f"{verdict.id}: {verdict.cause}", f"{'info':<{LABEL}}", width)
        lines += _details(verdict, width)
    passed = list(dict.fromkeys(v.id for v in report.verdicts if v.status == "pass"))
    if passed:
        lines += wrap(", ".join(passed), f"{'pass':<{LABEL}}", width)
    reasons: dict[str, list[str]] = {}
    for verdict in (v for v in report.verdicts if v.status == "skip"):
        reasons.setdefault(verdict.cause, []).append(verdict.id)
    for cause, ids in sorted(reasons.items(), key=lambda item: item[0] == NO_RULE):
        told = f"{len(ids)} checks" if cause == NO_RULE and len(ids) > 1 else ", ".join(ids)
        lines += wrap(f"{told}: {cause}", f"{'skip':<{LABEL}}", width)
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
