"""What changed since the last good run, and a run of which only the journal is left, in the dashboard."""

from __future__ import annotations

from typing import Any

import pytest

from rltop.tui.picture import Link
from rltop.tui.rows import plain_text, row_cells
from rltop.tui.screens.changed import changed_rows
from rltop.tui.theme import ASCII, UNICODE
from rltop.tui.view import Frame
from rltop.tui.widgets.header import header_rows
from tests.tui.dash import dash
from tests.tui.fake import NOW, stamp

FOUND: dict[str, Any] = {
    "before": "good-1",
    "after": "bad-2",
    "why": "the newest run before it with rollouts, passed checks and no failed one",
    "changes": [
        {"kind": "argument", "name": "attention_backend", "before": "fa3", "after": None, "why": "other kernels"},
        {"kind": "environment", "name": "X\x1b[31m", "before": None, "after": "1\n2", "why": "a variable"},
    ],
    "more": 3,
    "unknown": ["good-1: no manifest"],
}


def frame(state: dict[str, Any], link: Link, ascii_only: bool = False) -> Frame:
    return Frame(state=state, link=link, server_now=NOW, clock=stamp, glyphs=ASCII if ascii_only else UNICODE)


def text_of(found: dict[str, Any], width: int = 70, *, ascii_only: bool = False) -> str:
    rows = list(changed_rows(found, frame({}, Link("live", 0.1), ascii_only), width))
    assert all(row_cells(row) <= width for row in rows)
    return plain_text(rows)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_likeliest_culprit_comes_first_with_its_reason(ascii_only: bool) -> None:
    shown = text_of(FOUND, ascii_only=ascii_only)
    lines = [line.strip() for line in shown.splitlines()]
    at = lines.index("1  --attention-backend")
    assert lines[at : at + 4] == ["1  --attention-backend", "- fa3", "+ (not there)", "other kernels"]
    assert "3 less likely ones: rltop changed bad-2 --all" in lines
    assert lines[-2:] == ["not known", "good-1: no manifest"]
    assert "\x1b" not in shown
    assert not ascii_only or shown.isascii()


def test_without_a_good_run_before_it_says_so() -> None:
    assert "no good run before" in text_of({"before": None, "after": "b-2", "why": "no good run before 'b-2'"})
    nothing = text_of({**FOUND, "changes": [], "more": 0})
    assert "nothing that is known of both runs differs" in nothing


async def test_its_key_opens_it() -> None:
    async with dash("healthy", size=(80, 24)) as running:
        await running.press("w")
        await running.shows("not compared yet")
        await running.press("escape")
        await running.until(lambda: "not compared yet" not in running.text)


def test_a_run_without_daemon_is_no_live_one() -> None:
    run = {"name": "r", "state": "lost", "text": "the daemon was killed", "ended": NOW - 7200}
    shown = plain_text(header_rows(frame({"run": run}, Link("live", 0.1, archive=True)), 100))
    assert "no daemon, from its journal" in shown
    assert "lost 2h00m ago" in shown
    assert "the daemon was killed" in shown
    assert "● live" not in shown


def test_engines_without_a_trainer_wait_for_nobody() -> None:
    run = {"name": "r", "state": "waiting"}
    engine = {"engine/0": {"id": "0", "state": "HEALTHY"}}
    for more, told in (({}, "waiting for the first record"), (engine, "engines alone, no record yet"),
                       (engine | {"trainer": {"state": "running"}}, "waiting for the first record")):  # fmt: skip
        assert told in plain_text(header_rows(frame({"run": run} | more, Link("live", 0.1)), 100))
