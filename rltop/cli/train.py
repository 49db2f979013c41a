"""`rltop train`: GRPO on Ray actors. stdout is data (one JSON object with --json), everything else goes to stderr.

Exit codes: 0 done, 1 the run failed, 2 the input is at fault, 130 interrupted (SIGINT, SIGTERM or SIGHUP).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args


def main(argv: Sequence[str]) -> int:
    """Run the trainer in this process. Raises RltopError for bad input, before anything has been started."""
    try:
        config = parse_args(argv, default_ray_address=os.environ.get("RAY_ADDRESS") or None)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    return _run(config)


def _run(config: TrainConfig) -> int:
    from rltop.train.lifetime import Interrupted, Signals
    from rltop.train.loop import History
    from rltop.train.narrator import configure_console
    from rltop.train.run import Run
    from rltop.train.summary import summary

    signals, history, began = Signals(), History(), time.monotonic()
    signals.install()
    configure_console(sys.stderr)
    reason, code = "done", 0
    try:
        Run(config, os.environ, time.monotonic, signals, history).go()
    except Interrupted as stop:
        reason, code = "interrupted", stop.exit_code
        print(f"rltop: interrupted by {stop}; every process of the run is gone", file=sys.stderr)
    except RltopError as error:
        if error.exit_code == 2 and not history.rewards:
            raise
        reason, code = "failed", error.exit_code
        print(f"rltop: {error}", file=sys.stderr)
    if config.json:
        result = summary(config, history, reason=reason, seconds=time.monotonic() - began)
        print(json.dumps(result), flush=True)
    return code
