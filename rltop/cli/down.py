"""`rltop down`: stop a run."""

from __future__ import annotations

from rltop.cli.output import note
from rltop.errors import RltopError
from rltop.runs import find_run, list_runs


def down(name: str | None, *, timeout_s: float) -> int:
    """Stop the trainer and the daemon of a run. A run that is not running is not an error: it is down.

    Raises RltopError: no such run; no name while several runs are alive; it does not end.
    """
    from rltop.daemon.spawn import stop_daemon

    living = [run.name for run in list_runs() if run.alive]
    if name is None and len(living) > 1:
        raise RltopError(
            "say which run to stop", where="down", why=f"alive: {', '.join(living)}", do=f"rltop down {living[0]}"
        )
    run = find_run(name)
    if not run.alive:
        note(f"run {run.name} is not running")
        return 0
    stop_daemon(run, timeout_s=timeout_s)
    note(f"run {run.name} is down")
    return 0
