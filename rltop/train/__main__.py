"""The driver's process: `python -m rltop.train WORK_DIR RAY_DIR FLAGS…`, started by `rltop.train.supervisor`.

It is born with the signals that end a run held back. Until `driver.main` takes them nothing is there to be cleaned up,
so they end the process without a word, whatever it is importing: an exception there would be a traceback, or be lost.
"""

import signal
import sys


def main() -> int:
    """Import the driver and run it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    from rltop.train.driver import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
