"""The driver of a run, in a process of its own (`rltop.train.__main__`).

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
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.lifetime import Interrupted, Signals
from rltop.train.loop import History
from rltop.train.narrator import configure_console
from rltop.train.run import Run
from rltop.train.summary import summary
from rltop.train.supervisor import end_with_parent, without_lost_log


class Result:
    """The one object on stdout."""

    def __init__(self, config: TrainConfig, history: History, began: float) -> None:
        self._config, self._history, self._began = config, history, began
        self._told = False

    def tell(self, reason: str) -> bool:
        """Print it, with --json; False: that was done, or is being done right now. May be called by a signal."""
        if self._told:
            return False
        self._told = True
        if self._config.json:
            result = summary(self._config, self._history, reason=reason, seconds=time.monotonic() - self._began)
            # Not print: whatever the signal came into the middle of may hold the stream's lock.
            os.write(1, (json.dumps(result) + "\n").encode())
        return True


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code."""
    history, began, parent = History(), time.monotonic(), os.getppid()
    config = parse_args(argv[2:], default_ray_address=os.environ.get("RAY_ADDRESS") or None)
    result = Result(config, history, began)

    def at_once() -> None:
        """A second signal while everything is ended: the parent ends the rest, as long as it is there."""
        if os.getppid() == parent and result.tell("interrupted"):
            os._exit(Interrupted.exit_code)

    signals = Signals(at_once)
    reason, code = "done", 0
    try:
        signals.install()
        configure_console(sys.stderr)
        end_with_parent()
        Run(config, Path(argv[0]), Path(argv[1]), os.environ, time.monotonic, signals, history).go()
    except Interrupted as stop:
        reason, code = "interrupted", stop.exit_code
        print(f"rltop: interrupted by {stop}; every process of the run is gone", file=sys.stderr)
    except RltopError as error:
        reason, code = "failed", error.exit_code
        error = without_lost_log(error, config, Path(argv[0]), os.environ)
        print(f"rltop: {error}", file=sys.stderr)
    signals.shield()
    if code != 2:
        result.tell(reason)
    return code
