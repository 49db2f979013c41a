"""`input.parse`: the evidence can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rltop.checks.found import Problem
from rltop.checks.names import some
from rltop.checks.observe import Observations
from rltop.checks.phrase import count, of_place
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

ID = "input.parse"
LINK = "link"
"""Kind of a problem that is a symbolic link which was not followed; its `why` is the target."""
MOST = 8
"""Files that are named."""
_KINDS = {
    "args": "a command line",
    "env": "an environment",
    "script": "a launch script",
    "log": "a log",
    "metrics": "a row of metrics",
    "samples": "a row of samples",
    "http": "a recorded request",
    "rows": "a row of a table",
    "dump": "a readable dump",
    "document": "a JSON document",
    "index": "an index of weights",
    "safetensors": "a whole safetensors file",
}


def kind_in_words(kind: str) -> str:
    """What a file was taken for, as in "is not a log"."""
    return _KINDS.get(kind, kind)


def _all(files: int) -> str:
    return "The file" if files == 1 else f"All {files} files"


def _links(links: Sequence[Problem]) -> str:
    one = len(links) == 1
    names = some([problem.where.source for problem in links], 4)
    return f"{count(len(links), 'link')} out of PATH, or to nothing, {'was' if one else 'were'} not followed: {names}."


def _unfollowed(links: Sequence[Problem], value: dict[str, object]) -> Verdict:
    return Verdict(
        ID,
        "info",
        value=value,
        threshold=0,
        evidence=tuple(of_place(problem.where, f"-> {problem.why}") for problem in links[:MOST]),
        cause=_links(links),
        advice=("rltop check PATH TARGET: what a link points to is read where it is given itself",),
    )


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict over all files. The cut last line of a growing file is fine."""
    if obs.live or obs.launch:
        cause = "there are no files: the evidence is a stream" if obs.live else "nothing has run yet"
        return [Verdict(ID, "skip", cause=cause)]
    if not obs.files and not obs.problems:
        return [Verdict(ID, "skip", cause="no file was given")]
    links = [problem for problem in obs.problems if problem.kind == LINK]
    bad = [problem for problem in obs.problems if not problem.cut_end and problem.kind != LINK]
    cut = len(obs.problems) - len(bad) - len(links)
    value: dict[str, object] = {"files": len(obs.files), "problems": len(bad)}
    if links:
        value["links"] = len(links)
    if links and not bad:
        return [_unfollowed(links, value)]
    if not bad:
        note = f" The last line of {cut} growing file{'s' if cut > 1 else ''} is cut, which is fine." if cut else ""
        return [Verdict(ID, "pass", value=value, threshold=0, cause=f"{_all(len(obs.files))} can be read.{note}")]
    first = bad[0]
    place = first.where.source if first.where.line is None else f"{first.where.source}:{first.where.line}"
    cause = f"{place} is not {kind_in_words(first.kind)}: {first.why}."
    if len(bad) > 1:
        files = list(dict.fromkeys(problem.where.source for problem in bad))
        cause += f" {len(bad)} places in {len(files)} files can not be read; the rest was used."
    if links:
        cause += f" {_links(links)}"
    return [
        Verdict(
            ID,
            "warn",
            value=value | {"sources": list(dict.fromkeys(problem.where.source for problem in bad))[:MOST]},
            threshold=0,
            evidence=tuple(of_place(problem.where, problem.where.text or problem.why) for problem in bad[:MOST]),
            cause=cause,
            advice=(f"copy {first.where.source} again", "let the run flush its files before they are copied"),
        )
    ]
