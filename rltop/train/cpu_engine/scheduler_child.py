"""The small process that stands for SGLang's scheduler in the CPU engine's process tree: `python -I -S this_file`.

SGLang's scheduler is a child of the process that serves HTTP, and every crash starts there: the child dies first, tells
its parent with SIGQUIT, and the parent kills the whole tree. The CPU engine computes in its one big process, because a
second one with torch in it would double start-up time and memory; this child, a few MiB, is what its faults kill and
what an operator may kill. It imports nothing of rltop, so that it costs next to nothing.

It obeys one word per line on stdin and ends, with 0, when stdin does:
    exception    SIGQUIT to the parent, then exit 1: an exception in the scheduler's loop
    abort        SIGABRT to itself, without a core file: what a C++ library does
    quit         SIGQUIT to the parent, and it lives on: SGLang's watchdog
    orphan N     a grandchild in a session of its own lives N seconds, ignores SIGTERM, and keeps inherited locks
Its parent's death kills it, as in SGLang (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

NAME = b"rltop-scheduler"
"""In `ps`; the kernel keeps 15 characters."""


def main() -> int:
    """Obey until stdin ends. Returns the exit status."""
    parent = os.getppid()
    for quiet in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(quiet, signal.SIG_IGN)  # the terminal's, meant for the parent
    _prctl(15, NAME)  # PR_SET_NAME
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return 0
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "exception":
            os.kill(parent, signal.SIGQUIT)
            return 1
        if word == "abort":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        if word == "quit":
            os.kill(parent, signal.SIGQUIT)
        if word == "orphan":
            _orphan(float(rest))
    return 0


def _orphan(seconds: float) -> None:
    """Fork twice, so that nobody in the tree is its parent."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for ignored in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    _prctl(15, b"rltop-orphan")
    os.close(0)
    print(f"INJECTED FAULT: orphan {os.getpid()} lives {seconds:g} s, whatever happens to its engine", flush=True)
    time.sleep(seconds)
    os._exit(0)


def _prctl(option: int, value: bytes | int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: then the end of stdin has to do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
