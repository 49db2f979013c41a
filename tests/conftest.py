"""What holds for every test: no verdict depends on how busy the machine is, nor on how the tests were started."""

import signal
from pathlib import Path

import pytest
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

SLOWEST = (
    "train/test_run.py",
    "train/test_debug_session.py",
    "daemon/test_bisect_culprits.py",
    "train/test_fleet_run.py",
    "train/test_loop_faults.py",
    "train/test_run_ranks.py",
    "train/test_fleet_rollouts.py",
    "train/test_ranks.py",
    "faults/test_daemon_faults.py",
    "faults/test_run_faults.py",
    "daemon/test_bisect_kernel.py",
    "cli/test_bisect_cli.py",
    "train/test_resume.py",
    "train/test_swap.py",
    "engines/test_fleet_processes.py",
    "engines/test_ray_launcher.py",
    "engines/test_engine_faults.py",
    "cli/test_ps.py",
    "cli/test_drill.py",
    "cli/test_changed.py",
)
"""Files of more than about ten seconds, the longest first: one that began last would keep one worker alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first; the others as they were."""
    tests = Path(__file__).parent
    place = {tests / name: at for at, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
