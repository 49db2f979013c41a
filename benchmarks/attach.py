"""First paint of `rltop attach`: from exec to the frame that shows data of the run, on a real daemon and a real pty.

    python -m benchmarks.attach [--repeat N] [--steps N] [--series N]

The daemon serves a journal of 100,000 steps x 20 series. Two moments are taken: the first frame with the state of the
run (its name, verdicts, newest values), and the first frame with the curves of its whole history. Beside them, in the
same run: a bare Textual app with Header and Footer, which is the least any Textual program takes on this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.journal_seed import seed
from benchmarks.terminal import Terminal
from rltop import runs
from rltop.daemon.spawn import start_daemon, stop_daemon

TARGET_S = 0.4
PEER = """
from textual.app import App
from textual.widgets import Footer, Header, Static

class Peer(App[None]):
    BINDINGS = [("q", "quit", "quit")]
    def compose(self):
        yield Header()
        yield Static("PEER-READY")
        yield Footer()

Peer().run()
"""
"""The named peer: bare Textual with Header and Footer."""
_PATIENCE_S = 30.0


def _has_state(output: bytes) -> bool:
    return b"seeded-run" in output and b"reward" in output


def _has_curves(output: bytes) -> bool:
    # Braille patterns U+2801..U+28FF: only charts with history have them. One lone point has one or two.
    return output.count(b"\xe2\xa0") + output.count(b"\xe2\xa1") + output.count(b"\xe2\xa2") > 60


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds from exec to each moment, and the CPU seconds spent up to the last one."""

    wall_s: tuple[float, ...]
    cpu_s: float


def start(argv: Sequence[str], *moments: Callable[[bytes], bool], env: Mapping[str, str | None] | None = None) -> Start:
    """Start a program and wait for its moments. Raises RuntimeError with the output when one does not come."""
    with Terminal(argv, env=env or {}) as terminal:
        times = []
        for done in moments:
            seconds = terminal.until(done, _PATIENCE_S)
            if seconds is None:
                tail = terminal.output[-2000:]
                raise RuntimeError(f"{argv[-1][:60]}: nothing to see in {_PATIENCE_S:.0f} s:\n{tail!r}")
            times.append(seconds)
        cpu = terminal.cpu_s()
        terminal.type(b"q")
        terminal.wait(5.0)
        return Start(tuple(times), cpu)


def measure(*, repeat: int = 9, steps: int = 100_000, series: int = 20) -> tuple[list[Start], list[Start]]:
    """`repeat` starts of rltop and of the peer, in turns, after one warm-up of both."""
    with tempfile.TemporaryDirectory(prefix="rltop-") as folder, patch.dict(os.environ, {"RLTOP_DIR": folder}):
        run_dir = runs.make_run_dir("seeded-run")
        seed(Path(run_dir), steps=steps, series=series)
        run = start_daemon("seeded-run")
        # As after `pip install`: modules are compiled (by the warm-up), whatever this shell says about bytecode.
        env = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": f"{folder}/pyc"}
        try:
            ours, peers = [], []
            for _ in range(repeat + 1):
                attach = [sys.executable, "-m", "rltop", "attach", "seeded-run"]
                ours.append(start(attach, _has_state, _has_curves, env=env))
                peers.append(start([sys.executable, "-c", PEER], lambda output: b"PEER-READY" in output, env=env))
            return ours[1:], peers[1:]
        finally:
            stop_daemon(run)


def rows(*, repeat: int = 9, steps: int = 100_000, series: int = 20) -> list[tuple[str, str, str]]:
    """(what, measured, budget) for the table of all benchmarks."""
    ours, peers = measure(repeat=repeat, steps=steps, series=series)
    state = [one.wall_s[0] for one in ours]
    curves = [one.wall_s[1] for one in ours]
    bare = [one.wall_s[0] for one in peers]
    cpu = [statistics.median(one.cpu_s for one in starts) for starts in (ours, peers)]
    what = f"{steps:,} steps x {series} series"
    median = statistics.median

    def told(times: list[float]) -> str:
        return f"{median(times) * 1000:.0f} ms (best {min(times) * 1000:.0f})"

    return [
        (f"rltop attach, first frame with the state, {what}", told(state), f"<= {TARGET_S * 1000:.0f} ms"),
        ("rltop attach, first frame with all curves", told(curves), ""),
        ("peer: bare Textual app, Header and Footer", told(bare), ""),
        (
            "ratio to the peer: state, curves",
            f"{median(state) / median(bare):.2f}, {median(curves) / median(bare):.2f}",
            "",
        ),
        ("CPU until then: rltop with curves, peer", f"{cpu[0] * 1000:.0f} ms, {cpu[1] * 1000:.0f} ms", ""),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=20)
    options = parser.parse_args()
    for row in rows(repeat=options.repeat, steps=options.steps, series=options.series):
        print("  ".join(row))
