"""What the screen looks like, character by character.

`RLTOP_UPDATE_SNAPSHOTS=1 pytest tests/tui/test_snapshots.py` takes new ones.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from rltop.tui.rows import plain_text
from rltop.tui.widgets.pane import Pane
from tests.tui.dash import dash

FOLDER = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize(
    ("name", "scene", "size", "keys"),
    [
        ("fresh-80x24", "fresh", (80, 24), ""),
        ("healthy-120x40", "healthy", (120, 40), ""),
        ("failing-80x24", "failing", (80, 24), ""),
        ("failing-120x40", "failing", (120, 40), ""),
        ("failing-charts-80x24", "failing", (80, 24), "2"),
        ("failing-ascii-80x24", "failing", (80, 24), "ascii"),
        ("fleet-120x40", "fleet", (120, 40), ""),
        ("fleet-engines-80x24", "fleet", (80, 24), "3 enter"),
        ("healthy-rollouts-80x24", "healthy", (80, 24), "5"),
        ("healthy-run-80x24", "healthy", (80, 24), "6"),
        ("healthy-filter-80x24", "healthy", (80, 24), "slash g r a d"),
        ("healthy-paused-80x24", "healthy", (80, 24), "space"),
        ("engines-table-80x24", "engines", (80, 24), "3"),
        ("engines-status-80x24", "operation", (80, 24), "control e j j"),
        ("engines-toggles-80x24", "engines", (80, 24), "control e e right j j j right right"),
        ("engines-toggles-120x40", "engines", (120, 40), "control e e right j j j right right"),
        ("engines-ab-120x40", "ab", (120, 40), "control e tab tab tab tab"),
        ("engines-ascii-80x24", "engines", (80, 24), "ascii control e j j"),
        ("bisect-80x24", "bisecting", (80, 24), "control B"),
        ("bisect-120x40", "bisected", (120, 40), "B"),
        ("bisect-ascii-80x24", "bisected", (80, 24), "ascii B"),
        ("help-80x24", "healthy", (80, 24), "2 question_mark"),
        ("lost-120x40", "lost", (120, 40), ""),
    ],
)
async def test_the_screen_looks_as_it_should(name: str, scene: str, size: tuple[int, int], keys: str) -> None:
    words = keys.split()
    async with dash(scene, size, ascii_only="ascii" in words, control="control" in words) as board:
        for key in (word for word in words if word not in ("ascii", "control")):
            await board.press(key)
            await board.pilot.pause()
        dialog = "question_mark" in keys
        if dialog:
            await board.shows("esc closes")
        await board.tick(0)
        await board.tick(0)
        shown = plain_text(board.app.screen.query_one(Pane).rows) if dialog else board.text
    compare(name, shown + "\n")


def compare(name: str, shown: str) -> None:
    """The snapshot `name` must be these characters."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("RLTOP_UPDATE_SNAPSHOTS"):
        path.write_text(shown, encoding="utf-8")
    wanted = path.read_text(encoding="utf-8") if path.exists() else ""
    if shown != wanted:
        changes = difflib.unified_diff(wanted.splitlines(), shown.splitlines(), "snapshot", "screen", lineterm="", n=0)
        pytest.fail(f"{name} changed (RLTOP_UPDATE_SNAPSHOTS=1 takes the new one):\n" + "\n".join(changes))
