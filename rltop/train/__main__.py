"""The driver of a run: `python -m rltop.train WORK_DIR RAY_DIR FLAGS…`, started by `rltop.train.supervisor`.

stdout is data (one JSON object with --json), everything else goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rltop.errors import RltopError
from rltop.train.arguments import parse_args
from rltop.train.lifetime import Interrupted, Signals
from rltop.train.loop import History
from rltop.train.narrator import configure_console
from rltop.train.run import Run
from rltop.train.summary import summary
from rltop.train.supervisor import end_with_parent


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code."""
    signals, history, began = Signals(), History(), time.monotonic()
    signals.install()
    configure_console(sys.stderr)
    config = parse_args(argv[2:], default_ray_address=os.environ.get("RAY_ADDRESS") or None)
    reason, code = "done", 0
    try:
        end_with_parent()
        Run(config, Path(argv[0]), Path(argv[1]), os.environ, time.monotonic, signals, history).go()
    except Interrupted as stop:
        reason, code = "interrupted", stop.exit_code
        print(f"rltop: interrupted by {stop}; every process of the run is gone", file=sys.stderr)
    except RltopError as error:
        reason, code = "failed", error.exit_code
        print(f"rltop: {error}", file=sys.stderr)
    signals.shield()
    if config.json and code != 2:
        result = summary(config, history, reason=reason, seconds=time.monotonic() - began)
        print(json.dumps(result), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
