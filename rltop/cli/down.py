"""`rltop down`: stop a run."""

from __future__ import annotations

import asyncio

from rltop.cli.output import note
from rltop.errors import RltopError
from rltop.runs import RunInfo, find_run, list_runs


def down(name: str | None, *, timeout_s: float | None) -> int:
    """Stop the trainer, the engines and the daemon of a run. A run that is not running is not an error: it is down.

    A trainer or engines that outlived their daemon are stopped too. When this returns, `rltop ps` no longer shows the
    run, and no process on this machine carries the marker of an engine of it.
    timeout_s: None: as `stop_daemon` has it.
    Raises RltopError: no such run; no name while several runs are alive; it, or an engine of it, does not end.
    """
    from rltop.daemon.spawn import stop_daemon

    living = [run.name for run in list_runs() if run.alive]
    if name is None and len(living) > 1:
        raise RltopError(
            "say which run to stop", where="down", why=f"alive: {', '.join(living)}", do=f"rltop down {living[0]}"
        )
    run = find_run(name)
    if run.alive:
        stop_daemon(run, timeout_s=timeout_s)
        left = _end_engines(run)
        more = f"; its daemon had left engine {', '.join(left)}, which is stopped now" if left else ""
        note(f"run {run.name} is down{more}")
        return 0
    trainer, engines = _stop_orphan(run), _end_engines(run)
    ended = [f"its trainer (process {trainer}) is stopped"] if trainer is not None else []
    ended += [f"engine {', '.join(engines)} of it is stopped"] if engines else []
    note(f"run {run.name} had no daemon; {', '.join(ended)}" if ended else f"run {run.name} is not running")
    return 0


def _end_engines(run: RunInfo) -> list[str]:
    """End the engines that a dead daemon left running; returns their ids. Raises RltopError when one lives on."""
    from rltop.daemon.engines_left import make_sure

    return make_sure(run.path, note)


def _stop_orphan(run: RunInfo) -> int | None:
    """End the trainer that a dead daemon left running; returns its pid, None when there is none."""
    from rltop.daemon.trainer_job import adopt_trainer, read_record

    record = read_record(run.path)
    job = adopt_trainer(record, run.path) if record is not None else None
    if job is None:
        return None
    asyncio.run(job.stop(note))
    return job.pid
