"""`rltop check PATH...`: judges what a run left behind. stdout is the report, or its JSON and nothing else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rltop.checks.catalogue import CATALOGUE, LAUNCH, STEP1, STEP2
from rltop.checks.evaluate import evaluate, joined
from rltop.checks.layout import wrap
from rltop.checks.observe import Observations
from rltop.checks.phrase import count
from rltop.checks.render import render, render_folded
from rltop.checks.thresholds import DEFAULTS, Thresholds, override
from rltop.checks.verdict import Report
from rltop.cli.files import read_text
from rltop.cli.output import note, print_json
from rltop.errors import RltopError
from rltop.evidence.collect import collect
from rltop.evidence.known import table_path, with_table
from rltop.evidence.metric_names import Names, load
from rltop.settings import names_path

if TYPE_CHECKING:
    from rltop.daemon.past import Judged

SETS: Mapping[str, tuple[str, ...]] = {"step1": STEP1, "step2": STEP2, "launch": LAUNCH}


def check(
    paths: Sequence[Path],
    *,
    as_json: bool = False,
    require: Sequence[str] = (),
    allow_skip: bool = False,
    config: Path | None = None,
    refs: bool = False,
    every: bool = False,
) -> int:
    """Reads, judges, prints. 0: nothing failed; 1: a check failed, or a required one was not tested.

    Raises RltopError (exit 2) when the input can not be used.
    """
    wanted = required(require)
    thresholds = read_thresholds(config) if config is not None else DEFAULTS
    names = load(names_path())
    told = [found for path in paths if (found := _journal(path)) is not None]
    obs = replace(_collected(paths, journals=len(told), names=names), known_crashes=with_table(crash_table(config)))
    if told and not obs.injected_faults:
        obs = replace(obs, injected_faults=tuple(dict.fromkeys(fault for one in told for fault in one.injected_faults)))
    report = evaluate(obs, thresholds)
    for one in told:
        report = joined(report, one.verdicts)
    untested = {} if allow_skip else skipped(report, wanted)
    if as_json:
        document: dict[str, Any] = msgspec.to_builtins(report)
        print_json({key: value for key, value in document.items() if key != "schema"})
    else:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        if untested:
            first = f"{count(len(untested), 'required check')} not tested, so this is no pass: {', '.join(untested)}"
            print("\n".join(wrap(first, "", width)), end="\n\n")
        if every or refs:
            print(render(report, width=width, refs=refs, injected_faults=obs.injected_faults))
        else:
            print(render_folded(report, width=width, injected_faults=obs.injected_faults))
    for id_, why in untested.items():
        note(f"rltop: {id_} is required and was not tested: {why}")
    if untested:
        note("rltop: so the exit code is 1; --allow-skip lets untested checks pass")
    sys.stdout.flush()
    return 1 if report.summary.get("fail") or untested else 0


def _journal(path: Path) -> Judged | None:
    """What the daemon of a run directory said; None for other paths. An unreadable journal is told on stderr."""
    if not (path / "journal.sqlite").is_file():
        return None
    from rltop.daemon.past import judged

    try:
        found = judged(path)
    except RltopError as error:
        note(f"rltop: {path / 'journal.sqlite'} is left out: {error.what}: {error.why}")
        return None
    note(f"rltop: {path / 'journal.sqlite'}: the daemon's verdicts count too, the worse of both holds")
    return found


def _collected(paths: Sequence[Path], *, journals: int, names: Names) -> Observations:
    """The evidence in the files. It may be none where every path is a run directory with a journal."""
    try:
        return collect(paths, names=names)
    except RltopError as error:
        if journals < len(paths):
            raise
        note(f"rltop: only the journal is left: {error.where}: {error.what}")
        return Observations()


def required(words: Sequence[str]) -> tuple[str, ...]:
    """Ids of `--require`, with `step1` and `step2` for their sets. Raises RltopError for an unknown one."""
    known = {entry.id for entry in CATALOGUE}
    ids: list[str] = []
    for word in (part.strip() for text in words for part in text.split(",")):
        if word in SETS:
            ids += SETS[word]
        elif word in known:
            ids.append(word)
        elif word:
            from difflib import get_close_matches

            close = get_close_matches(word, [*known, *SETS], n=1, cutoff=0.3)
            raise RltopError(
                f"there is no check {word!r}",
                where="--require",
                why=f"known are {len(known)} ids and the sets {', '.join(SETS)}",
                do=f"did you mean {close[0]}?" if close else "rltop check --help",
            )
    return tuple(dict.fromkeys(ids))


def skipped(report: Report, ids: Sequence[str]) -> dict[str, str]:
    """Of `ids` those that nothing but `skip` was said of, and why."""
    tested = {verdict.id for verdict in report.verdicts if verdict.status != "skip"}
    why = {verdict.id: verdict.cause for verdict in report.verdicts if verdict.status == "skip"}
    return {id_: why.get(id_, "nothing in the evidence says why") for id_ in ids if id_ not in tested}


def crash_table(config: Path | None) -> Path | None:
    """The file of `known_crashes` in `[checks]`, beside the configuration; None without one. Raises RltopError."""
    if config is None:
        return None
    return table_path(_checks(config), config.parent, where=f"{config} [checks]")


def _checks(path: Path) -> dict[str, Any]:
    """`[checks]` of a configuration. Raises RltopError for a file, a table or a key that can not be used."""
    from rltop.config import parse_checks

    text = read_text(path, "can not be read", do="--config FILE.toml: a file with a table [checks]")
    return parse_checks(text, where=str(path))


def read_thresholds(path: Path) -> Thresholds:
    """`[checks.thresholds]` of a TOML file. Raises RltopError for a file or table that can not be used."""
    return override(_checks(path).get("thresholds", {}), where=f"{path} [checks.thresholds]")
