"""`args.entrypoint`: the job starts what it should."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rltop.checks.events import of_kind, word
from rltop.checks.found import LogEvent
from rltop.checks.observe import Observations
from rltop.checks.phrase import missing, of_event
from rltop.checks.thresholds import Thresholds
from rltop.checks.verdict import Verdict

ENTRYPOINT = "args.entrypoint"
_FILE_ENDS = (".py", ".pyc", ".pyz", ".sh", ".zip", ".bash", ".pyw", ".txt", ".yaml", ".json")


def check(obs: Observations, t: Thresholds) -> Iterable[Verdict]:
    """One verdict, on the first entry that could not be opened."""
    if not obs.logs and not obs.events:
        return [Verdict(ENTRYPOINT, "skip", cause=missing(obs, "a log of the launch"))]
    failed = of_kind(obs, "entry_missing")
    if not failed:
        return [Verdict(ENTRYPOINT, "pass", cause="No log says that the entry file could not be opened.")]
    return [_fail(failed[0])]


def _fail(event: LogEvent) -> Verdict:
    path = word(event, "path")
    name = path.rsplit("/", 1)[-1]
    module = word(event, "module")
    advice: tuple[str, ...]
    value: dict[str, object]
    if module:
        cause = f"python -m was given the module {module}, which is not on its path: a launch mistake."
        value, advice = {"module": module}, (f"set PYTHONPATH or working_dir so that {module} can be imported",)
    elif re.fullmatch(r"\w+(?:\.\w+)+", name) and not name.endswith(_FILE_ENDS):
        cause = (
            f"Python was given the dotted module {name} as if it were a file (without -m), and there is no such file: "
            "a launch mistake, wherever the working directory lies."
        )
        value, advice = {"module": name, "path": path}, (f"python -m {name}",)
    else:
        cause = f"The entry file {path} does not exist where the job starts: a launch mistake."
        value, advice = {"path": path}, (f"correct the path of {name}, or the working_dir of the job",)
    return Verdict(
        ENTRYPOINT, "fail", value=value, threshold="exists", evidence=(of_event(event),), cause=cause, advice=advice
    )
