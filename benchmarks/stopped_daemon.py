"""Does training wait for a daemon that has stopped? `python -m benchmarks.stopped_daemon`

Median step time of a real `rltop train` with its daemon under SIGSTOP against the same run with its daemon at work;
goal: a ratio of at most 1.05. Both are measured in one run, in alternating blocks of 30 s (the order changes from pair
to pair), so that what else the machine does falls on both alike; a step that a SIGSTOP or SIGCONT falls into counts for
neither. The step times are the trainer's own, from its log; the learning rate is almost 0, so that the work of a step
does not drift. Needs the train extra and some five minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import msgspec

from rltop.daemon import schema
from rltop.daemon.spawn import start_daemon, stop_daemon
from rltop.runs import RunInfo
from rltop.train.arguments import TrainConfig, to_argv

GOAL = 1.05
BLOCK_S = 30.0
PAIRS = 4
WARM_UP = 5
_STEP = re.compile(rb" perf (\d+): .*'perf/step_time': ([0-9.e-]+)")


@dataclass(slots=True)
class Blocks:
    """Steps that lie wholly in blocks of one kind, and the median of each block."""

    steps: list[range] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Steps in all blocks."""
        return sum(map(len, self.steps))

    def times(self, by_step: dict[int, float]) -> list[float]:
        """Step times, seconds."""
        return [by_step[step] for block in self.steps for step in block if step in by_step]


def workload() -> list[str]:
    """Arguments of a run whose steps take a third of a second or so on two cores."""
    return to_argv(
        TrainConfig(
            num_rollout=100_000,
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            global_batch_size=16,
            rollout_max_response_len=24,
            apply_chat_template=True,
            lr=1e-9,
            use_kl_loss=True,
            log_probs_pass="always",
        )
    )


def step_times(run: RunInfo) -> dict[int, float]:
    """Step -> seconds, by the trainer's own log: the daemon may be stopped."""
    try:
        text = (run.path / "trainer.log").read_bytes()
    except OSError:
        return {}
    return {int(step): float(seconds) for step, seconds in _STEP.findall(text)}


def newest_step(run: RunInfo) -> int:
    """The newest step that the trainer has finished."""
    return max(step_times(run), default=-1)


def measure(run: RunInfo, steps: int, block_s: float, patience_s: float) -> tuple[Blocks, Blocks]:
    """(untouched, stopped): alternating blocks until there are enough pairs and both kinds have so many steps."""
    untouched, stopped = Blocks(), Blocks()
    deadline = time.monotonic() + patience_s
    while newest_step(run) < WARM_UP:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step in {patience_s:.0f} s; see {run.path / 'trainer.log'}")
        time.sleep(0.2)
    while min(untouched.count, stopped.count) < steps or len(stopped.steps) < PAIRS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {untouched.count} and {stopped.count} steps in {patience_s:.0f} s")
        for blocks in (untouched, stopped) if len(stopped.steps) % 2 == 0 else (stopped, untouched):
            if blocks is stopped:
                os.kill(run.pid, signal.SIGSTOP)
            first = newest_step(run) + 2  # the next one is under way already
            time.sleep(block_s)
            blocks.steps.append(range(first, newest_step(run) + 1))
            os.kill(run.pid, signal.SIGCONT)
    return untouched, stopped


def lost_records(run: RunInfo) -> int:
    """What the trainer's reporter dropped because nobody took it, as the daemon counts it."""
    with closing(schema.connect(run.path / "journal.sqlite", read_only=True)) as connection:
        rows = connection.execute("SELECT value FROM state WHERE key LIKE 'source/%'").fetchall()
    return sum(int(msgspec.msgpack.decode(value)["dropped"]) for (value,) in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Exit code 1 when the goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stopped_daemon", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of each kind")
    parser.add_argument("--block", type=float, default=BLOCK_S, metavar="S", help="length of one stop")
    parser.add_argument("--patience", type=float, default=900, metavar="S")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rltop-bench-") as folder:
        os.environ["RLTOP_DIR"] = folder
        run = start_daemon("bench", trainer=[sys.executable, "-m", "rltop", "train", *workload()])
        try:
            untouched, stopped = measure(run, options.steps, options.block, options.patience)
        finally:
            os.kill(run.pid, signal.SIGCONT)
            stop_daemon(run, timeout_s=60)
        code = report(untouched, stopped, step_times(run))
        print(f"records that the reporter dropped, and counted, while nobody took them: {lost_records(run)}")
        return code


def report(untouched: Blocks, stopped: Blocks, by_step: dict[int, float]) -> int:
    """Print what was found; returns the exit code."""
    medians = []
    for name, blocks in (("daemon at work", untouched), ("daemon SIGSTOP", stopped)):
        times = sorted(blocks.times(by_step))
        medians.append(statistics.median(times))
        p90 = times[int(len(times) * 0.9)]
        print(f"{name}: {len(times)} steps in {len(blocks.steps)} blocks, median {medians[-1]:.4f} s, p90 {p90:.4f} s")
    pairs = [
        statistics.median(by_step[step] for step in two) / statistics.median(by_step[step] for step in one)
        for one, two in zip(untouched.steps, stopped.steps, strict=True)
    ]
    ratio = statistics.median(pairs)
    print(f"median step-time ratio of all steps {medians[1] / medians[0]:.3f}")
    print(
        f"by pair of neighbouring blocks {', '.join(f'{pair:.3f}' for pair in pairs)}: median {ratio:.3f}, goal {GOAL}"
    )
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
