"""What holds for every test: no verdict depends on how busy the machine is, nor on how the tests were started."""

import signal

from hypothesis import HealthCheck, settings

from tests.examples import WANTED
from tests.faults.table import pytest_terminal_summary as pytest_terminal_summary

settings.register_profile(
    "rltop", max_examples=max(100, WANTED), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("rltop")

# `nohup make test &` ignores Ctrl-C, and every program that a test starts would inherit that and rightly obey it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
