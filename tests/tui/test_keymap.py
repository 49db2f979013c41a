"""One table of keys: what the footer, the help screen and the palette offer works, and nothing else is offered."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from rltop.tui.keymap import Context, find, help_groups, hints, works
from rltop.tui.keytable import KEYS, PANES
from rltop.tui.rows import plain_text, row_cells
from rltop.tui.widgets.bars import footer_row


def test_no_key_has_two_meanings_and_no_action_two_entries() -> None:
    keys = Counter((screen, name) for key in KEYS for name in key.keys for screen in key.screens)
    assert [name for name, count in keys.items() if count > 1] == []
    assert [action for action, count in Counter(key.action for key in KEYS).items() if count > 1] == []


LANGUAGE = (
    "q question_mark slash colon ctrl+p up down left right j k g G enter escape tab 1 5 left_square_bracket "
    "right_square_bracket space y l f plus minus s ctrl+z ctrl+c"
)


@pytest.mark.parametrize("name", LANGUAGE.split())
def test_the_common_key_language_is_bound(name: str) -> None:
    assert any(name in key.keys and "live" in key.screens for key in KEYS)


def test_the_engine_screen_speaks_the_common_language_too() -> None:
    shared = "question_mark slash colon ctrl+p up down j k g G escape y P T ctrl+c ctrl+z f"
    assert all(any(name in key.keys and "engines" in key.screens for key in KEYS) for name in shared.split())


def test_dangerous_actions_do_not_exist_without_control_or_connection() -> None:
    dangerous = [key for key in KEYS if key.dangerous]
    engines = {"diff", "restart", "revert", "stop", "ab-run", "http", "cancel-op"}
    bisect = {"bisect-start", "bisect-pause", "bisect-stop"}
    assert {key.action for key in dangerous} == {"mute", "note", "stop-run"} | engines | bisect
    for key in dangerous:
        there = Context(screen=key.screens[0], engines=True, owned=True, staged=True, previous=True, operation=True)
        there = replace(there, bisection="" if key.action == "bisect-start" else "running")
        assert not works(key, replace(there, control=False, live=True))
        assert not works(key, replace(there, control=True, live=False))
        assert works(key, replace(there, control=True, live=True))
    offered = {key.action for _, keys in help_groups(Context(control=False)) for key in keys}
    assert not offered & {"note", "stop-run"}
    reader = Context(control=False, screen="engines", pane="toggles")
    told = {key.action: key.help for _, keys in help_groups(reader) for key in keys}
    assert not {"value", "drop", "choose-right"} & set(told)
    assert not [text for text in told.values() if "tage" in text], "nothing can be staged"
    assert (
        "Stage"
        in {key.action: key.help for _, keys in help_groups(replace(reader, control=True)) for key in keys}[
            "choose-left"
        ]
    )


def test_the_footer_offers_only_what_works_now() -> None:
    charts = dict(hints(Context(pane="charts")))
    assert "l" in charts
    assert "s" not in charts
    assert "-" not in charts
    assert "-" in dict(hints(Context(pane="charts", zoom=1)))
    assert dict(hints(Context(pane="engines")))["s"] == "sort"
    assert dict(hints(Context(paused=True)))["space"] == "resume"
    assert "esc" not in dict(hints(Context()))
    assert dict(hints(Context(filtered=True)))["esc"] == "clear filter"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("pane", PANES)
def test_a_narrow_footer_drops_whole_hints_and_keeps_help(width: int, pane: str) -> None:
    everything = list(hints(Context(pane=pane, control=True, live=True, paused=True)))
    row = footer_row(everything, width)
    text = plain_text([row])
    assert row_cells(row) <= max(width, 7)
    assert text.endswith("? help")
    shown = [f"{keys} {label}" for keys, label in everything if f" {keys} {label}" in text]
    assert text.split() == " ".join(shown).split()


def test_every_action_of_the_footer_is_in_the_help_screen() -> None:
    for screen in ("live", "engines"):
        context = Context(screen=screen, control=True, live=True)
        listed = {key.action for _, keys in help_groups(context) for key in keys}
        assert {key.action for key in KEYS if key.footer and screen in key.screens} <= listed


def test_an_unknown_action_is_an_error() -> None:
    with pytest.raises(KeyError):
        find("no-such-action")
