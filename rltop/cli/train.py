"""`rltop train`: GRPO on Ray actors. stdout is data (one JSON object with --json), everything else goes to stderr.

Exit codes: 0 done, 1 the run failed, 2 the input is at fault, 130 interrupted (SIGINT, SIGTERM or SIGHUP).
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Check the command line and what it points at, then run. Raises RltopError before anything has been started."""
    from rltop.train.arguments import parse_args
    from rltop.train.lifetime import Signals
    from rltop.train.preflight import preflight
    from rltop.train.supervisor import supervise

    signals = Signals()
    signals.install()
    try:
        config = parse_args(argv, default_ray_address=os.environ.get("RAY_ADDRESS") or None)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    preflight(config)
    return supervise(config, argv, os.environ, signals)
