"""`python -m rltop.daemon --run-dir DIR [--config FILE] [-- TRAINER ARGV]`: one daemon in the foreground.

People use `rltop up`; this is what it starts. Exit codes: 0 stopped, 2 bad input or refused, 1 a fault, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltop import runs
from rltop.checks.known import KnownCrash
from rltop.checks.thresholds import DEFAULTS, Thresholds, override
from rltop.daemon.app import DaemonOptions, serve
from rltop.daemon.engines import MakeFleet, make_fleet
from rltop.daemon.live_checks import LiveChecks
from rltop.errors import RltopError
from rltop.evidence.known import table_path, with_table
from rltop.evidence.metric_names import load
from rltop.settings import load_settings, names_path

SWITCH_S = 0.001
"""A thread that computes (verdicts, the journal's packing) gives the loop the interpreter back so soon. Reading a
record lets go of it, so Python's default of 5 ms could be paid at every one."""


def main(argv: list[str] | None = None, *, fleet: MakeFleet = make_fleet) -> int:
    """Parse arguments, run the daemon, return the exit code. fleet: tests pass one without processes."""
    parser = argparse.ArgumentParser(prog="python -m rltop.daemon")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run-dir", type=Path, help="run directory, made if need be; an existing run is continued")
    where.add_argument("--run", help="name of the run in the usual place; default: a new name")
    parser.add_argument("--config", type=Path, help="JSON file that is kept in run.json")
    parser.add_argument("--tether", type=int, metavar="FD", help="pipe of the process that owns this run")
    parser.add_argument("--ingest-tcp", default="", metavar="HOST:PORT", help="take records over TCP too (CURVE only)")
    parser.add_argument("trainer", nargs="*", help="argv of the trainer to start and supervise, after --")
    options = parser.parse_args(argv)
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_S)
    try:
        run_dir = runs.private_dir(options.run_dir) if options.run_dir else runs.make_run_dir(options.run)
        runs.check_name(run_dir.name)
        daemon = DaemonOptions(
            run_dir=run_dir,
            trainer=options.trainer,
            config=_config(options.config),
            settings=load_settings(),
            names=load(names_path()),
            tether=options.tether,
            ingest_tcp=options.ingest_tcp,
        )
        checks = LiveChecks(_thresholds(daemon.config), known_crashes=_known_crashes(daemon.config))
        return asyncio.run(serve(daemon, checks=checks, fleet=fleet))
    except RltopError as error:
        print(f"rltop daemon: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _thresholds(config: Mapping[str, Any]) -> Thresholds:
    checks = config.get("checks")
    values = checks.get("thresholds") if isinstance(checks, dict) else None
    return override(values) if isinstance(values, dict) else DEFAULTS


def _known_crashes(config: Mapping[str, Any]) -> tuple[KnownCrash, ...]:
    """The shipped table with the run's own on top. Raises RltopError for one that can not be used."""
    return with_table(table_path(config.get("checks"), Path(), where="[checks]"))


def _config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RltopError("cannot read the configuration", where=str(path), why=str(error)) from error
    if not isinstance(found, dict):
        raise RltopError("the configuration is not a JSON object", where=str(path))
    return found


if __name__ == "__main__":
    sys.exit(main())
