"""Lives and deaths of processes: Ctrl-C at any moment ends the run and leaves no child behind.

Every process that the run starts, however indirectly, stays below this one: on Linux it declares itself a *subreaper*,
so a grandchild whose parent died (an engine whose Ray worker was killed) comes back here instead of going to init. At
the end whatever is still below is killed. Nothing is ever found by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run."""
_PR_SET_CHILD_SUBREAPER = 36


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP arrived. All of them end the run with exit code 130, which rltop's daemon reads as
    "somebody stopped it"."""

    exit_code = 130

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Signals:
    """Turns the first of SIGINT, SIGTERM and SIGHUP into `Interrupted`; later ones are only remembered.

    A library may install handlers of its own (Ray does, for SIGTERM) or swallow the exception in a destructor: call
    `install` again after it, and `check` between two steps of the run.
    """

    def __init__(self, again: Callable[[], None] = lambda: None) -> None:
        """again: called for every signal after the first one."""
        self._seen: int | None = None
        self._shielded = False
        self._again = again

    def install(self) -> None:
        """Take the signals, except those that the parent told us to ignore (`nohup`)."""
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._arrived)

    def check(self) -> None:
        """Raise `Interrupted` if a signal came before and its exception went missing."""
        if self._seen is not None and not self._shielded:
            raise Interrupted(self._seen)

    def shield(self) -> None:
        """From now on signals are only remembered: the run is being cleaned up, which takes bounded time."""
        self._shielded = True

    def rearm(self) -> None:
        """Take the next signal as if it were the first."""
        self._seen = None

    @property
    def seen(self) -> int | None:
        """The first signal that came, if any."""
        return self._seen

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        first = self._seen is None
        self._seen = self._seen if self._seen is not None else signum
        if first and not self._shielded:
            raise Interrupted(signum)
        if not first:
            self._again()


@contextlib.contextmanager
def no_child_left(*, grace_s: float = 3.0) -> Iterator[None]:
    """On leaving, end every process below this one that was not there on entering: TERM, `grace_s` seconds, KILL."""
    adopt_orphans()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        yield
    finally:
        end_descendants(before, grace_s=grace_s)


def adopt_orphans() -> bool:
    """Become the subreaper of everything below. False where the system has no such thing (macOS)."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def end_descendants(keep: set[int], *, grace_s: float) -> list[int]:
    """Kill every descendant whose pid is not in `keep`; returns the pids that had to be killed.

    Runs until none is left, because a process that dies may hand its own children up to us; gives up ten seconds after
    the grace, when what is left can only be stuck in the kernel.
    """
    killed: list[int] = []
    deadline = time.monotonic() + grace_s
    while True:
        found = [child for child in psutil.Process().children(recursive=True) if child.pid not in keep]
        if not found or time.monotonic() > deadline + 10:
            return killed
        late = time.monotonic() >= deadline
        for child in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                if late:
                    child.kill()
                    killed.append(child.pid)
                else:
                    child.terminate()
        psutil.wait_procs(found, timeout=0.2 if late else max(0.0, deadline - time.monotonic()))
