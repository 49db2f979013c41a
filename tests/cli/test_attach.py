"""`rltop attach` on this machine, in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import terminal
from tests.client.router import spec_daemon
from tests.daemon.util import wait_for


@pytest.mark.parametrize(("keys", "code"), [("q", 0), ("\x03", 130)])
def test_the_dashboard_is_painted_and_left(runs_dir: Path, keys: str, code: int) -> None:
    with spec_daemon() as (daemon, _), terminal("attach", env={}) as screen:
        screen.read_until("cedar-1", "live", "train.nan", "read-only")
        screen.type(keys)
        assert screen.end() == code
        wait_for(lambda: "bye" in daemon.heard, "the daemon was not told")
    assert "\x1b[?1049l" in screen.raw, "the terminal is given back"


def test_a_run_that_is_not_there_is_a_line_and_no_dashboard(runs_dir: Path) -> None:
    with terminal("attach", "nosuch", env={}) as screen:
        assert screen.end() == 2
    assert "rltop: there is no run 'nosuch'" in screen.text
    assert "\x1b[?1049h" not in screen.raw


def test_a_terminal_that_can_paint_nothing_is_refused(runs_dir: Path) -> None:
    with spec_daemon(), terminal("attach", env={"TERM": "dumb"}) as screen:
        assert screen.end() == 2
    assert "TERM is not set or dumb" in screen.text
