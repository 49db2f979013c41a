"""What one report costs the training program: microseconds per call, beside TensorBoard's and W&B's offline logging.

The same dictionary of 20 scalars per step, one process. `python -m benchmarks.reporter`. What is not installed is named
as not installed. rltop is measured with a daemon's socket that takes the records, with one that does not (stopped), and
with nobody there at all: the training program must not notice the difference.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from rltop.reporter import Reporter

VALUES = {f"train/metric_{i}": 0.1 * i for i in range(20)}
WARM_UP = 200


def measure(call: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Median and 99th percentile of one call, microseconds."""
    for step in range(WARM_UP):
        call(step)
    times = []
    for step in range(WARM_UP, WARM_UP + steps):
        began = time.perf_counter_ns()
        call(step)
        times.append((time.perf_counter_ns() - began) / 1000)
    times.sort()
    return statistics.median(times), times[int(len(times) * 0.99)]


@contextmanager
def listener(address: str, *, reads: bool) -> Iterator[None]:
    """A PULL socket in a child process that reads everything, or is stopped and reads nothing."""
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if child == 0:
        context = zmq.Context()
        pull = context.socket(zmq.PULL)
        pull.bind(address)
        os.write(ready_w, b"x")
        while True:
            pull.recv_multipart() if reads else time.sleep(60)
    os.read(ready_r, 1)
    try:
        yield
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready_r)
        os.close(ready_w)


def rltop_rows(folder: Path, steps: int) -> Iterator[tuple[str, str]]:
    """The reporter with a reading, a stuck and no daemon."""
    for name, reads in (("reading daemon", True), ("stuck daemon", False), ("no daemon", None)):
        address = f"ipc://{folder}/{name.split()[0]}.sock"
        if reads is None:
            yield f"rltop Reporter.metrics, {name}", _rltop(address, steps)
        else:
            with listener(address, reads=reads):
                yield f"rltop Reporter.metrics, {name}", _rltop(address, steps)


def _rltop(address: str, steps: int) -> str:
    with Reporter(address=address) as reporter:
        # At a training step's pace the queue never fills; here it may, and the drops are part of the measurement.
        cost = measure(lambda step: reporter.metrics(VALUES, step=step, axis="train"), steps)
        dropped = reporter.dropped
        reporter.close()
    return _show(*cost) + (f"   {dropped} dropped" if dropped else "")


def tensorboard_row(folder: Path, steps: int) -> str:
    """`SummaryWriter.add_scalar` for each of the values."""
    if importlib.util.find_spec("tensorboard") is None or importlib.util.find_spec("torch") is None:
        return "not installed"
    module = importlib.import_module("torch.utils.tensorboard")
    writer = module.SummaryWriter(str(folder / "tensorboard"))

    def call(step: int) -> None:
        for name, value in VALUES.items():
            writer.add_scalar(name, value, step)

    cost = measure(call, steps)
    writer.close()
    return _show(*cost)


def wandb_row(folder: Path, steps: int) -> str:
    """`wandb.log` of the same dictionary, offline."""
    if importlib.util.find_spec("wandb") is None:
        return "not installed"
    wandb = importlib.import_module("wandb")
    run = wandb.init(mode="offline", dir=str(folder), project="rltop-benchmark", settings=wandb.Settings(silent=True))
    cost = measure(lambda step: run.log(VALUES, step=step), steps)
    run.finish()
    return _show(*cost)


def _show(median: float, p99: float) -> str:
    return f"{median:9.1f} us median {p99:9.1f} us p99"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args(argv).steps
    print(f"one call with {len(VALUES)} scalars, {steps} calls")
    with tempfile.TemporaryDirectory(prefix="rltop-") as name:
        folder = Path(name)
        for label, text in rltop_rows(folder, steps):
            print(f"  {label:45} {text}")
        print(f"  {'tensorboard SummaryWriter.add_scalar':45} {tensorboard_row(folder, steps)}")
        print(f"  {'wandb offline run.log':45} {wandb_row(folder, steps)}")


if __name__ == "__main__":
    main()
