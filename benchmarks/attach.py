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
from pathlib import Path

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


def first_paint(
    argv: Sequence[str], *moments: Callable[[bytes], bool], env: Mapping[str, str | None] | None = None
) -> list[float]:
    """Seconds from exec to each moment. Raises RuntimeError with the output when one does not come."""
    with Terminal(argv, env=env or {}) as terminal:
        times = []
        for done in moments:
            seconds = terminal.until(done, _PATIENCE_S)
            if seconds is None:
                raise RuntimeError(
                    f"{argv[-1][:60]}: nothing to see in {_PATIENCE_S:.0f} s:\n{terminal.output[-2000:]!r}"
                )
            times.append(seconds)
        terminal.type(b"q")
        terminal.wait(5.0)
        return times


def measure(*, repeat: int = 9, steps: int = 100_000, series: int = 20) -> dict[str, list[float]]:
    """Seconds of `repeat` starts each, rltop and peer in turns, after one warm-up of both."""
    with tempfile.TemporaryDirectory(prefix="rltop-") as folder:
        os.environ["RLTOP_DIR"] = folder
        run_dir = runs.make_run_dir("seeded-run")
        seed(Path(run_dir), steps=steps, series=series)
        run = start_daemon("seeded-run")
        # As after `pip install`: modules are compiled (by the warm-up), whatever this shell says about bytecode.
        env = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": f"{folder}/pyc"}
        try:
            attach = [sys.executable, "-m", "rltop", "attach", "seeded-run"]
            peer = [sys.executable, "-c", PEER]
            times: dict[str, list[float]] = {"state": [], "curves": [], "peer": []}
            for number in range(repeat + 1):
                state, curves = first_paint(attach, _has_state, _has_curves, env=env)
                (bare,) = first_paint(peer, lambda output: b"PEER-READY" in output, env=env)
                if number:
                    times["state"].append(state)
                    times["curves"].append(curves)
                    times["peer"].append(bare)
            return times
        finally:
            stop_daemon(run)


def rows(*, repeat: int = 9, steps: int = 100_000, series: int = 20) -> list[tuple[str, str, str]]:
    """(what, measured, budget) for the table of all benchmarks."""
    times = measure(repeat=repeat, steps=steps, series=series)
    middle = {name: statistics.median(column) for name, column in times.items()}
    what = f"{steps:,} steps x {series} series"

    def told(name: str) -> str:
        return f"{middle[name] * 1000:.0f} ms (best {min(times[name]) * 1000:.0f})"

    return [
        (f"rltop attach, first frame with the state, {what}", told("state"), f"<= {TARGET_S * 1000:.0f} ms"),
        ("rltop attach, first frame with all curves", told("curves"), ""),
        ("peer: bare Textual app, Header and Footer", told("peer"), ""),
        (
            "ratio to the peer: state, curves",
            f"{middle['state'] / middle['peer']:.2f}, {middle['curves'] / middle['peer']:.2f}",
            "",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=20)
    options = parser.parse_args()
    for row in rows(repeat=options.repeat, steps=options.steps, series=options.series):
        print("  ".join(row))
