"""On a real pseudo-terminal: exit codes, colours, sizes, and a terminal that is left as it was found."""

from __future__ import annotations

import os
import re
import signal
import sys

from benchmarks.terminal import Terminal

PATIENCE_S = 60.0
LEAVE_ALTERNATE = b"\x1b[?1049l"
SGR = re.compile(rb"\x1b\[([\d;]*)m")
SCENE = [sys.executable, "-m", "tests.tui.scenes"]


def started(terminal: Terminal) -> None:
    """The first picture is there."""
    assert terminal.until(lambda output: b"train.nan" in output, PATIENCE_S) is not None, terminal.output[-2000:]


def test_resized_to_nothing_and_back_then_left_with_q() -> None:
    # An exported size, as CI and `watch` have it, must not hide the real one.
    with Terminal([*SCENE, "failing"], env={"COLUMNS": "120", "LINES": "40"}) as terminal:
        started(terminal)
        terminal.resize(20, 5)
        assert terminal.until(lambda output: b"needs 40x12" in output, PATIENCE_S) is not None
        before = len(terminal.output)
        terminal.resize(80, 24)
        assert terminal.until(lambda output: b"train.nan" in output[before:], PATIENCE_S) is not None
        terminal.type(b"q")
        assert terminal.wait(PATIENCE_S) == 0
        assert LEAVE_ALTERNATE in terminal.output


def test_ctrl_c_leaves_with_130_and_restores_the_terminal() -> None:
    with Terminal([*SCENE, "healthy"]) as terminal:
        started(terminal)
        terminal.type(b"\x03")
        assert terminal.wait(PATIENCE_S) == 130
        assert LEAVE_ALTERNATE in terminal.output


def test_a_crash_and_a_termination_restore_the_terminal() -> None:
    with Terminal([*SCENE, "crash"]) as terminal:
        assert terminal.until(lambda output: b"planted crash" in output, PATIENCE_S) is not None
        assert terminal.wait(PATIENCE_S) == 1
        assert LEAVE_ALTERNATE in terminal.output
    with Terminal([*SCENE, "healthy"]) as terminal:
        started(terminal)
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert LEAVE_ALTERNATE in terminal.output


def test_no_color_paints_no_colour_and_still_tells_fail_from_pass() -> None:
    with Terminal([*SCENE, "failing"], env={"NO_COLOR": "1"}) as terminal:
        started(terminal)
        terminal.type(b"q")
        assert terminal.wait(PATIENCE_S) == 0
        assert "✗ FAIL".encode() in terminal.output
        codes = {int(code) for sgr in SGR.findall(terminal.output) for code in sgr.split(b";") if code}
        assert codes <= {0, 1, 2, 7, 39, 49}, "only reset, bold, dim, reverse and the default colours"
