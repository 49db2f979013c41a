"""The fault table: every fault of the catalogue is one row, printed at the end of a session that ran any of them.

A test takes the fixture `row`, says which fault it is and fills in what it has seen. A row whose test failed or did not
run is printed too, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KEY = "fault"
COLUMNS = ("fault", "what was done", "run went on", "events kept", "message shown")
FAULTS = (
    "daemon kill -9",
    "daemon kill -9, pid reused",
    "daemon SIGSTOP",
    "journal: torn log",
    "journal: truncated file",
    "journal: garbage",
    "journal: newer schema",
    "two daemons",
    "slow viewer",
    "stuck viewer",
    "viewer off the ring",
    "viewer kill -9",
    "trainer kill -9",
    "trainer ends, no daemon",
    "disk full",
    "read-only disk at start",
    "read-only disk mid-run",
    "Ctrl-C in rltop up",
    "owner of the run kill -9",
    "command that can not start",
)


@dataclass(slots=True)
class Row:
    """One line of the table; it travels with the test's report, also between processes."""

    cells: dict[str, str] = field(default_factory=dict)

    def begin(self, fault: str, done: str) -> None:
        """Which fault, and what was done to cause it."""
        assert fault in FAULTS, fault
        self.cells.update({"fault": fault, "what was done": done})

    def say(self, *, went_on: str, kept: str, message: str) -> None:
        """What was seen; called when all of it has been asserted."""
        self.cells.update({"run went on": went_on, "events kept": kept, "message shown": message})


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table (a hook of pytest, imported by tests/conftest.py)."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            for key, cells in getattr(report, "user_properties", ()):
                if key == KEY and cells:
                    found[cells["fault"]] = (outcome, cells)
    if not found:
        return
    terminalreporter.section("fault table")
    terminalreporter.write_line(" | ".join(COLUMNS))
    for fault in FAULTS:
        outcome, cells = found.get(fault, ("NOT RUN", {"fault": fault}))
        line = " | ".join(_short(cells.get(column, "-")) for column in COLUMNS)
        terminalreporter.write_line(line if outcome == "passed" else f"{line} | {outcome.upper()}")


def _short(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
