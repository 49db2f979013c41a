"""What one report costs the training program: microseconds per call, beside TensorBoard's and W&B's offline logging.

The same dictionary of 20 scalars per step, one process, one run. `python -m benchmarks.reporter`. The other two are the
dependency group `bench` (`pip install --group bench`); what is not installed is named as not installed. rltop is
measured with a daemon's socket that takes the records (unix socket, and TCP with CURVE), with one that does not
(stopped), and with nobody there at all: the training program must not notice the difference. The goal: the cheapest of
the three in the median and no worse in the 99th percentile.
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import zmq

from rltop import keys
from rltop.integrations.outbox import Outbox
from rltop.integrations.slime_attach import Attachment
from rltop.integrations.slime_patches import patches
from rltop.reporter import Reporter

VALUES = {f"train/metric_{i}": 0.1 * i for i in range(20)}
WARM_UP = 200


@dataclass(frozen=True)
class Cost:
    """Microseconds of one call."""

    median: float
    p99: float
    dropped: int = 0

    def __str__(self) -> str:
        text = f"{self.median:9.1f} us median {self.p99:9.1f} us p99"
        return text + (f"   {self.dropped} dropped" if self.dropped else "")


def measure(call: Callable[[int], None], steps: int, pause_s: float = 0.0) -> Cost:
    """Cost of one call, after `WARM_UP` others. pause_s: between two calls, as between two optimizer steps."""
    for step in range(WARM_UP):
        call(step)
    times = []
    for step in range(WARM_UP, WARM_UP + steps):
        if pause_s:
            time.sleep(pause_s)
        began = time.perf_counter_ns()
        call(step)
        times.append((time.perf_counter_ns() - began) / 1000)
    times.sort()
    return Cost(statistics.median(times), times[int(len(times) * 0.99)])


@contextmanager
def listener(address: str, *, reads: bool, server: keys.Pair | None = None) -> Iterator[str]:
    """A PULL socket in a child process that reads everything, or is stopped and reads nothing. Yields its endpoint.

    server: a CURVE pair; whoever knows its public key may send.
    """
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if child == 0:
        context = zmq.Context()
        pull = context.socket(zmq.PULL)
        if server is not None:
            pull.curve_server, pull.curve_publickey, pull.curve_secretkey = True, server.public, server.secret
        pull.bind(address)
        os.write(ready_w, bytes(pull.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0"))
        while True:
            pull.recv_multipart() if reads else time.sleep(60)
    endpoint = os.read(ready_r, 1000).decode()
    try:
        yield endpoint
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(ready_r)
        os.close(ready_w)


def rltop_rows(folder: Path, steps: int) -> Iterator[tuple[str, Cost]]:
    """The reporter with a reading, a stuck and no daemon."""
    for name, reads in (("reading daemon", True), ("stuck daemon", False), ("no daemon", None)):
        address = f"ipc://{folder}/{name.split()[0]}.sock"
        if reads is None:
            yield f"rltop Reporter.metrics, {name}", _rltop(address, steps)
        else:
            with listener(address, reads=reads):
                yield f"rltop Reporter.metrics, {name}", _rltop(address, steps)
    server = keys.server_pair(folder / "keys")
    client = keys.add_client(folder / "keys", "bench")
    with listener("tcp://127.0.0.1:*", reads=True, server=server) as endpoint:
        address = keys.Ingest(endpoint, server.public, client).url()
        yield "rltop Reporter.metrics, TCP with CURVE", _rltop(address, steps)


def _rltop(address: str, steps: int) -> Cost:
    with Reporter(address=address) as reporter:
        # At a training step's pace the queue never fills; here it may, and the drops are part of the measurement.
        cost = measure(lambda step: reporter.metrics(VALUES, step=step, axis="train"), steps)
        return Cost(cost.median, cost.p99, reporter.dropped)


def slime_rows(folder: Path, steps: int) -> Iterator[tuple[str, Cost]]:
    """slime's `log(args, metrics, step_key)` as it is, and as a worker with rltop's setup hook has it.

    The function itself does nothing here (no W&B, no TensorBoard), so the difference is what the wrapper costs.
    """
    for name, reads in (("not wrapped", None), ("wrapped, reading daemon", True), ("wrapped, stuck daemon", False)):
        module = ModuleType("slime.observability.logging_utils")
        exec("def log(args, metrics, step_key): pass", module.__dict__)
        if reads is None:
            yield f"slime's log(), {name}", _slime(module, steps)
            continue
        address = f"ipc://{folder}/slime-{name.split()[1]}.sock"
        with listener(address, reads=reads):
            attachment = Attachment(_outboxes(address), {"RLTOP_INGEST": address})
            patches(attachment)[module.__name__](module)
            cost = _slime(module, steps)
            yield f"slime's log(), {name}", Cost(cost.median, cost.p99, attachment.dropped)
            attachment.settle()


def _outboxes(address: str) -> Callable[[str, int], Outbox]:
    def reporter(role: str, rank: int) -> Reporter:
        return Reporter(role=role, rank=rank, address=address)

    return lambda role, rank: Outbox(role, rank, make=reporter)


def _slime(module: ModuleType, steps: int) -> Cost:
    def call(step: int) -> None:
        module.log(None, VALUES | {"train/step": step}, step_key="train/step")

    return measure(call, steps, pause_s=0.001)


def tensorboard_row(folder: Path, steps: int) -> Cost | None:
    """`SummaryWriter.add_scalar` for each of the values; None: not installed."""
    if importlib.util.find_spec("tensorboard") is None or importlib.util.find_spec("torch") is None:
        return None
    module = importlib.import_module("torch.utils.tensorboard")
    writer = module.SummaryWriter(str(folder / "tensorboard"))

    def call(step: int) -> None:
        for name, value in VALUES.items():
            writer.add_scalar(name, value, step)

    cost = measure(call, steps)
    writer.close()
    return cost


def wandb_row(folder: Path, steps: int) -> Cost | None:
    """`wandb.log` of the same dictionary, offline; None: not installed."""
    if importlib.util.find_spec("wandb") is None:
        return None
    wandb = importlib.import_module("wandb")
    run = wandb.init(mode="offline", dir=str(folder), project="rltop-benchmark", settings=wandb.Settings(silent=True))
    cost = measure(lambda step: run.log(VALUES, step=step), steps)
    run.finish()
    return cost


def verdict(ours: Sequence[Cost], others: Sequence[Cost | None]) -> str:
    """Whether the goal is met: our dearest way against the cheapest of the others that are installed."""
    found = [other for other in others if other is not None]
    if not found:
        return "goal: nothing to compare with (pip install --group bench)"
    median = max(cost.median for cost in ours) <= min(other.median for other in found)
    p99 = max(cost.p99 for cost in ours) <= min(other.p99 for other in found)
    told = {True: "yes", False: "NO"}
    left = "" if len(found) == len(others) else f", with {len(found)} of {len(others)} installed"
    return f"goal: cheapest in the median {told[median]}, in p99 {told[p99]}{left}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args(argv).steps
    print(f"one call with {len(VALUES)} scalars, {steps} calls")
    with tempfile.TemporaryDirectory(prefix="rltop-") as name:
        folder = Path(name)
        ours = []
        for label, cost in rltop_rows(folder, steps):
            ours.append(cost)
            print(f"  {label:45} {cost}")
        for label, cost in slime_rows(folder, steps):
            print(f"  {label:45} {cost}")
        others = [tensorboard_row(folder, steps), wandb_row(folder, steps)]
        for label, other in zip(("tensorboard SummaryWriter.add_scalar", "wandb offline run.log"), others, strict=True):
            print(f"  {label:45} {other or 'not installed'}")
        print(f"  {verdict(ours, others)}")


if __name__ == "__main__":
    main()
