"""The parent of a run: it starts the driver, takes the signals, and sees to it that nothing survives.

The driver talks to Ray through a C++ library that ends the whole process when its cluster breaks, sometimes by abort.
So the promises of `rltop train` (exit codes, no child left, no directory left) are kept one process further up, by a
parent that is too simple to die of it. The driver has a process group of its own: Ctrl-C, or a TERM to the group of
the parent, reaches the parent alone and never pulls Ray away from under the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rltop.engines.launcher import LOG, NOTHING
from rltop.errors import RltopError
from rltop.runs.leftovers import owned_dir
from rltop.runs.own_python import own_python
from rltop.train.arguments import TrainConfig
from rltop.train.lifetime import SIGNALS, Interrupted, Signals, no_child_left

GRACE_S = 7.0
"""What the driver gets to end in good order. The daemon gives the whole run ten seconds."""
AGAIN_S = 2.0
"""What it gets after a second signal, to say what it has."""


def supervise(config: TrainConfig, argv: Sequence[str], environ: Mapping[str, str], signals: Signals) -> int:
    """Run the driver with `argv` to its end; returns the exit code of `rltop train`.

    Raises RltopError if the driver died instead of ending.
    """
    with work_directory(config, environ) as work_dir, ray_directory() as ray_dir, no_child_left():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the driver inherits it, see there
        try:
            driver = subprocess.Popen(
                [*own_python("rltop.train"), str(work_dir), str(ray_dir), *argv],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            code = driver.wait()
        except Interrupted as stop:
            return _interrupt(driver, stop, signals)
        if code < 0:
            raise RltopError(
                f"the trainer's driver died of {signal.Signals(-code).name}",
                why="Ray's library ends the process when its cluster breaks" if -code == signal.SIGABRT else "",
                do="out of memory? look at `dmesg | tail`; the lines above may say more",
                exit_code=1,
            )
        return code


def _interrupt(driver: subprocess.Popen[bytes], stop: Interrupted, signals: Signals) -> int:
    """Pass it on and wait; a second signal from an impatient operator is passed on too and ends the waiting.

    Always as SIGINT, because Ray has ideas of its own about SIGTERM. At the second one the driver says what it has and
    goes; the rest of the cleaning is this process's.
    """
    signals.rearm()
    driver.send_signal(signal.SIGINT)
    try:
        driver.wait(GRACE_S)
    except Interrupted:
        signals.shield()
        driver.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(AGAIN_S)
    except subprocess.TimeoutExpired:
        pass
    signals.shield()
    if driver.poll() is None:
        # Not TERM: Ray's library answers it with a stack trace.
        driver.kill()
        print("rltop: the driver did not end in time and was killed: it told no result", file=sys.stderr)
    return stop.exit_code


@contextlib.contextmanager
def work_directory(config: TrainConfig, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where the run writes: below the daemon's run directory, or --save-dir, or a directory that goes again."""
    home = _home(config, environ)
    if home is not None:
        directory = Path(home).absolute() / "train"
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with owned_dir("rltop-train-") as directory:
        yield directory


def _home(config: TrainConfig, environ: Mapping[str, str]) -> Path | str | None:
    return environ.get("RLTOP_RUN_DIR") or config.save_dir


def without_lost_log(error: RltopError, config: TrainConfig, work_dir: Path, environ: Mapping[str, str]) -> RltopError:
    """The error as it is true when the command has ended: a log in a directory that goes again is not to be read."""
    log = Path(error.where)
    if _home(config, environ) is not None or log.name != LOG or not log.is_relative_to(work_dir):
        return error
    keep = "start again with --save-dir DIR, which keeps the log (this one is deleted)"
    do = f"{keep}, and {error.do}" if error.do and NOTHING not in error.why else error.do
    return RltopError(error.what, why=error.why, do=do, exit_code=error.exit_code)


@contextlib.contextmanager
def ray_directory() -> Iterator[Path]:
    """A new directory for a private cluster, removed at the end.

    In /tmp unless the temporary directory is as short: Ray's unix sockets below it must fit into 107 bytes.
    """
    parent = tempfile.gettempdir()
    if len(parent) > 20 and Path("/tmp").is_dir():
        parent = "/tmp"
    with owned_dir("rltop-ray-", Path(parent)) as directory:
        yield directory


def end_with_parent() -> None:
    """Called by the driver: it gets SIGINT when its parent dies in whatever way (Linux)."""
    if sys.platform.startswith("linux"):
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            raise Interrupted(signal.SIGINT)
