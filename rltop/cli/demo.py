"""`rltop demo`: a tiny run on this CPU with its own daemon, in the dashboard or headless.

Whatever happens here, what was started is stopped: the start can not be interrupted half-way (the daemon would be lost
sight of), everything behind it unwinds through one `finally`, and the stop can not be interrupted either.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rltop.cli.extra import require_train
from rltop.cli.output import note
from rltop.cli.signals import held, raised
from rltop.runs import RunInfo
from rltop.runs.own_python import own_python


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo runs."""

    deterministic: bool = False
    seed: int = 1
    num_rollout: int | None = None
    """None: as many as the preset needs to learn its task."""
    inject: tuple[str, ...] = ()
    keep: bool = False
    """Leave the run going at the end."""


def demo(options: DemoOptions, *, headless: bool, as_json: bool, control: bool, ascii_only: bool) -> int:
    """Start, show (or follow), stop. Returns the exit code.

    Raises RltopError: no terminal and not headless, the train extra is missing, a fault that does not exist, the daemon
    does not start.
    """
    began = time.monotonic()
    if not headless:
        from rltop.cli.attach import require_terminal

        require_terminal("demo", "rltop demo --headless follows it in text")
    require_train("demo")
    with raised(), started(options) as run:
        if headless:
            from rltop.cli.headless import follow

            return follow(run, began=began, as_json=as_json)
        return _dashboard(run, control=control, ascii_only=ascii_only)


@contextlib.contextmanager
def started(options: DemoOptions) -> Iterator[RunInfo]:
    """Daemon and trainer, gone again at the end of the block unless they are to be kept."""
    from rltop.daemon.spawn import start_daemon, stop_daemon
    from rltop.daemon.tether import Tether
    from rltop.train.arguments import parse_args
    from rltop.train.presets import demo_args

    args = demo_args(
        seed=options.seed,
        deterministic=options.deterministic,
        num_rollout=options.num_rollout,
        inject=options.inject,
    )
    parse_args(args)  # a fault that does not exist is said here, not in the log of a trainer
    note("starting the daemon and the trainer …")
    run: RunInfo | None = None
    tether = Tether()  # a demo that is killed takes its run along
    try:
        with held():
            argv = [*own_python("rltop"), "train", *args]
            run = start_daemon(None, trainer=argv, config={"demo": args, "engines": {}}, tether=tether)
        yield run
    finally:
        if run is not None and options.keep:
            tether.release()
            note(f"run {run.name} goes on: rltop attach {run.name}   (rltop down {run.name} stops it)")
        elif run is not None:
            note(f"stopping run {run.name} and its trainer …")
            with held(lambda: note("still stopping; nothing is left behind in a moment …")):
                stop_daemon(run)
            note(f"run {run.name} is down; what it left is in {run.path}")


def _dashboard(run: RunInfo, *, control: bool, ascii_only: bool) -> int:
    from rltop.cli.attach import show
    from rltop.client import local_client
    from rltop.tui.app import RltopApp

    client = local_client(run, role="control" if control else "view")
    return show(RltopApp(client, control=control, ascii_only=ascii_only, title="demo"))
