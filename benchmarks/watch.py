"""A daemon that follows a log of 50,000 lines a second: the lag of its loop, what it leaves out, its memory.

    python -m benchmarks.watch [--seconds 10] [--rate 50000]

A process of its own appends the lines: batch lines of engines, as most of a rollout's log are (`batch`), or the whole
log of a slime run again and again (`run`), which holds a metric row in every 25 lines and is no log that anybody has.
The lag of a second is the longest that the daemon's loop was late in it, as its tick tells every viewer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from rltop.daemon.spawn import start_daemon, stop_daemon
from tests.daemon.slime_log import Plan, lines
from tests.daemon.util import Viewer

LAG_MS = 100.0
"""The 99th percentile of a second's longest lag stays below it on an idle machine."""
AFTER_S = 5.0


def write(path: Path, kind: str, seconds: float, rate: int) -> None:
    """Append lines, evenly."""
    found = [f"{line}\n" for _, line in lines(Plan(garbled_from=None, dies_in=None))]
    body = [line for line in found if "Decode batch" in line] if kind == "batch" else found
    begun, count = time.monotonic(), 0
    with path.open("a") as log:
        while count < seconds * rate:
            log.write("".join(body[(count + at) % len(body)] for at in range(500)))
            log.flush()
            count += 500
            time.sleep(max(0.0, begun + count / rate - time.monotonic()))


def measure(kind: str, seconds: float, rate: int) -> list[tuple[str, str, str]]:
    """One run. Rows: what, measured, budget."""
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as name:
        os.environ["RLTOP_DIR"] = name
        log = Path(name) / "run.log"
        log.touch()
        run = start_daemon("bench", config={"watch": {"logs": [str(log)]}})
        argv = [sys.executable, "-m", "benchmarks.watch", "--write", str(log), "--kind", kind]
        writer = subprocess.Popen([*argv, "--seconds", str(seconds), "--rate", str(rate)])
        try:
            lags, memory, state = _follow(run, writer, seconds)
        finally:
            writer.kill()
            writer.wait()
            stop_daemon(run)
    cell = state["log/run.log"]
    usual, worst = sorted(lags)[len(lags) // 2], quantiles(lags, n=100)[98]
    return [
        (f"{kind}: lines written", f"{seconds * rate:,.0f}", ""),
        (f"{kind}: read, left out, bytes waiting", f"{cell['lines']:,}, {cell['dropped']:,}, {cell['behind']:,}", ""),
        (f"{kind}: loop lag, p50 and p99 of seconds", f"{usual:.0f} ms, {worst:.0f} ms", f"{LAG_MS:.0f} ms"),
        (f"{kind}: memory, first and most", f"{memory[0] >> 20} MiB, {max(memory) >> 20} MiB", "flat"),
    ]


def _follow(run: Any, writer: subprocess.Popen[bytes], seconds: float) -> tuple[list[float], list[int], dict[str, Any]]:
    daemon, last = psutil.Process(run.pid), None
    lags: list[float] = []
    memory: list[int] = []
    until = time.monotonic() + seconds + AFTER_S
    with Viewer(run) as viewer:
        viewer.hello(want=["log/*"])
        while time.monotonic() < until or writer.poll() is None:
            viewer.receive(1.0)
            if viewer.tick is not None and viewer.tick is not last:
                last = viewer.tick
                lags.append(last.lag_ms)
                memory.append(daemon.memory_info().rss)
        return lags, memory, viewer.state


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=50_000)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="", help="batch or run; default: both")
    options = parser.parse_args(argv)
    if options.write is not None:
        write(options.write, options.kind, options.seconds, options.rate)
        return 0
    for kind in [options.kind] if options.kind else ["batch", "run"]:
        for what, told, budget in measure(kind, options.seconds, options.rate):
            print(f"{what:<48}  {told:<32}  {budget}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
