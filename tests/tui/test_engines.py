"""The engine screen under the fingers: select, look, stage, see the plan, send, be told, cancel, revert, compare."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rltop.protocol.messages import Accepted, LinesAnswer, Rejected
from rltop.tui.fleet import engine_views
from rltop.tui.picture import Link
from rltop.tui.rows import plain_text
from rltop.tui.screens.engines import EnginesScreen
from rltop.tui.screens.plan import PlanDialog
from rltop.tui.staging import Staging
from rltop.tui.toggle_views import ToggleView, merge, toggle_views
from rltop.tui.view import Frame
from rltop.tui.widgets.engine_cells import said, weights_cell
from rltop.tui.widgets.engine_details import status_rows
from rltop.tui.widgets.toggles import effect_text, toggle_row
from tests.tui.dash import Dash, dash
from tests.tui.engine_scenes import owned
from tests.tui.fake import NOW

PLAN = Accepted(
    "",
    [
        "engine 0: generation 2 -> 3",
        "  - --cuda-graph-max-bs 8",
        "  + --disable-cuda-graph",
        "rolling, 1 keeps serving",
    ],
)


@asynccontextmanager
async def desk(
    scene: str = "engines", size: tuple[int, int] = (120, 40), *, control: bool = True
) -> AsyncIterator[Dash]:
    """The engine screen of a scene, open."""
    async with dash(scene, size, control=control) as board:
        board.client.plan = PLAN
        await board.press("e")
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        await board.tick(0)
        yield board


def screen(board: Dash) -> EnginesScreen:
    found = board.app.engines
    assert found is not None
    return found


async def plan(board: Dash, *keys: str, shows: str = "enter goes on") -> PlanDialog:
    """Press keys that open a plan; returns it once the daemon has answered."""
    await board.press(*keys)
    await board.shows(shows)
    dialog = board.app.screen
    assert isinstance(dialog, PlanDialog)
    return dialog


async def send(board: Dash, reason: str = "why") -> None:
    """Type a reason and send."""
    sent = len(board.client.sent)
    await board.press("enter")
    await board.shows("reason:")
    await board.press(*reason, "enter")
    await board.until(lambda: len(board.client.sent) > sent)


# ---------------------------------------------------------------- looking


async def test_everything_about_the_engine_under_the_cursor_is_said() -> None:
    async with desk() as board:
        text = await board.press("j", "j")
        for words in (
            "✗ BACKOFF for 7s",
            "again in 13s",
            "illegal memory access in fused_moe_kernel, third time",
            "ima:fused_moe_kernel:3f2a",
            "P ✗ process   scheduler gone, signal 3",
            "G ? progress  unknown",
            "T ✓ trainer   the trainer's requests succeed",
            "v7, digest a3f09c77e1b2",
            "2, before it 1, restarted 2×",
            "a stand-in, not SGLang",
        ):
            assert words in text, words
        assert "v6, required is v7: the trainer pushes it" in await board.press("k")
        assert "at most 56s more" in board.text


async def test_toggles_say_what_was_wanted_what_is_and_how_that_is_known() -> None:
    async with desk() as board:
        text = await board.press("tab", "tab")
        assert "radix_cache          on, wanted off" in text
        assert "custom_all_reduce    on, not verified" in text
        assert "/proc/PID/environ" in text
        await board.press("tab", "tab", "j", "j", "j")
        assert "✗ radix_cache          on, ignores off" in await board.press("e")
        await board.press(*["j"] * 7)
        assert "asked for off, but the engine ignores it: on is in effect" in board.text


async def test_the_log_is_that_of_the_engine_and_follows_its_end() -> None:
    async with desk() as board:
        assert "Decode batch" not in await board.press("j", "j")
        await board.press("l")
        await board.tick(0)
        await board.shows("CUDA error: an illegal memory access")
        assert board.client.opened[-1] == ("engines/2/2/stdout.log", 0)
        asked = len(board.client.opened)
        await board.tick(1.0)
        assert len(board.client.opened) == asked
        board.client.logs["engines/2/2/stdout.log"] = LinesAnswer("engines/2/2/stdout.log", 0, ["the newest line"])
        await board.tick(1.5)
        await board.shows("the newest line")
        board.client.busy = True
        await board.tick(2.5)
        await board.shows("no answer to 'lines?'")


async def test_good_http_requests_are_left_out_of_the_log_until_asked_for() -> None:
    async with desk() as board:
        await board.press("l", "f")
        await board.tick(0)
        text = await board.shows("1 HTTP lines hidden (v)")
        assert "200 OK" not in text
        await board.press("v", "pageup")
        assert "200 OK" in await board.tick(0)
        assert "hidden" not in board.text


async def test_what_was_staged_is_still_there_when_the_screen_is_opened_again() -> None:
    async with desk() as board:
        await board.press("e", "right", "q")
        await board.shows("3 Engines")
        await board.press("e")
        await board.shows("staged for engine 0: cuda_graph off")


@pytest.mark.parametrize(
    ("held", "required", "told"),
    [("6", "7", "v6 of 7"), ("481", "482", "481/482"), ("base", "7", "base of 7"), ("step_1000", "step_1001", "st")],
)
def test_the_weights_that_are_missing_fit_whatever_they_are_called(held: str, required: str, told: str) -> None:
    state = {
        "fleet": {"required": {"version": required}},
        "engine/0": owned("0", 0, weight_version=held, state="STALE"),
    }
    text, style = weights_cell(engine_views(state)[0], Frame(state=state, link=Link("live", 0.0)), 9)
    assert text.startswith(told)
    assert len(text) <= 9
    assert style == "warn"


async def test_a_read_only_session_shows_everything_and_sends_nothing() -> None:
    async with desk(control=False) as board:
        text = await board.press("e", "j", "j", "right", "left", "right")
        assert "attach with --control to change it" in text
        assert "this device has no prefill graph" in text
        for key in ("d", "r", "u", "s", "b", "h", "c", "equals_sign"):
            await board.press(key)
            assert "attach with --control" in board.footer, key
        for word in ("diff", "restart", "revert", "stop", "cancel"):
            assert word not in (await board.tick(9)).splitlines()[-1], word
        assert board.client.orders == []
        assert not screen(board).staging.changes


async def test_engines_of_others_can_only_be_asked_over_http() -> None:
    async with desk() as board:
        await board.press("G")
        assert "restart" not in board.footer
        assert "h http" in board.footer
        await board.press("r")
        assert "engine 4 is not rltop's" in board.footer
        await board.press("h")
        await board.shows("Pause generation")
        dialog = await plan(board, *"pause", "enter")
        assert dialog.proposal.name == "engine-http"
        await send(board)
        assert board.client.sent == [("engine-http", "4", {"action": "pause", "generations": {"4": 2}})]


async def test_copy_gives_what_has_the_keyboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    async with desk() as board:
        await board.press("j", "j", "y")
        assert board.app.clipboard.startswith("engine 2\n ✗ BACKOFF")
        await board.press("e", "y")
        assert "chunked_prefill\t8192\t8192\t/server_info" in board.app.clipboard
        await board.press("l")
        await board.tick(0)
        await board.shows("CUDA error")
        await board.press("y")
        assert board.app.clipboard.endswith("CUDA error: an illegal memory access")


# ---------------------------------------------------------------- staging


async def test_a_change_pins_its_engine_and_the_cursor_never_carries_it_away() -> None:
    async with desk() as board:
        await board.press("e", "right", "escape", "j")
        assert "staged for engine 0: cuda_graph off" in board.text
        dialog = await plan(board, "d")
        assert dialog.proposal.engines == ("0",)
        await board.press("escape")
        assert "staged for" not in await board.press("x")


async def test_one_several_and_all_engines_are_selected_and_their_differences_are_said() -> None:
    async with desk() as board:
        client = board.client
        client.put("toggles/1", client.mirror.state["toggles/1"] | {"cuda_graph": {"value": "off", "wanted": "off"}})
        refuses = {"off": "it needs the graph"}
        three = client.mirror.state["toggles/3"]
        client.put("toggles/3", three | {"overlap_schedule": three["overlap_schedule"] | {"refused": refuses}})
        await board.press("space", "space", "e")
        assert "Toggles of engines 0, 1" in board.text
        assert "cuda_graph           mixed" in board.text
        unknown = {name: value | {"value": None} for name, value in client.mirror.state["toggles/0"].items()}
        client.put("toggles/1", unknown)
        assert "cuda_graph           on " in await board.tick(), "an engine that starts does not make it differ"
        await board.press("escape", "j", "space", "e", *["j"] * 6, "right")
        assert "engine 3: it needs the graph" in board.text
        assert not screen(board).staging.changes
        await board.press("escape", "escape", "a")
        assert screen(board).staging.selected == {"0", "1", "2", "3"}, "4 is somebody else's"
        await board.press("a")
        assert screen(board).staging.selected == set()


async def test_a_refused_choice_says_why_and_is_not_staged() -> None:
    async with desk() as board:
        await board.press("e", "j", "j", "j", "right")
        assert "→ NGRAM" in board.text
        await board.press("right")
        assert "[EAGLE]" in board.text
        assert "needs --speculative-draft-model-path" in board.text
        assert "staged for" not in board.text
        await board.press("right")
        assert "needs --speculative" not in board.text
        await board.press("left")
        assert "(EAGLE)" not in board.text
        await board.press("down")
        assert "two sides: engine off, trainer off" in board.text


async def test_a_toggle_that_cannot_be_changed_at_all_says_why() -> None:
    async with desk() as board:
        client = board.client
        locked = {"value": "on", "choices": [], "refused": {"": "its arguments can not be read"}, "free": "N"}
        client.put("toggles/0", client.mirror.state["toggles/0"] | {"cuda_graph": locked})
        await board.press("e")
        assert "cannot be changed: its arguments can not be read" in board.text
        assert "= types" not in board.text
        for keys in (("right",), ("left",), ("equals_sign", "3", "enter")):
            await board.press(*keys)
            assert "its arguments can not be read" in board.footer
        assert not screen(board).staging.changes


async def test_a_value_can_be_typed() -> None:
    async with desk() as board:
        await board.press("e", "G", "k", "equals_sign")
        assert "= types a value: a share between 0 and 1" in board.text
        assert "mem_fraction_static:" in board.footer
        await board.press(*"0.65", "enter")
        assert "staged for engine 0: mem_fraction_static 0.65" in board.text
        await board.press("equals_sign", "escape")
        assert "0.65" in board.text
        assert "staged for" not in await board.press("x")


async def test_the_filter_narrows_the_list_and_all_means_what_it_shows() -> None:
    async with desk() as board:
        await board.press("slash", *"back", "enter", "a")
        assert screen(board).staging.selected == {"2"}
        assert "/back" in board.text
        assert "STALE" in await board.press("escape")


# ---------------------------------------------------------------- sending


async def test_nothing_is_sent_before_plan_and_reason_and_then_with_what_was_seen() -> None:
    async with desk() as board:
        dialog = await plan(board, "e", "right", "d")
        assert "- --cuda-graph-max-bs 8" in board.text
        assert dialog.args == {"changes": {"cuda_graph": "off"}, "mode": "rolling", "when": "now", "keep": 1}
        await board.press("enter", "enter")
        assert "it needs a reason" in board.text
        assert board.client.sent == []
        await board.press(*"graph?", "enter")
        await board.until(lambda: bool(board.client.sent))
        args = {"changes": {"cuda_graph": "off"}, "mode": "rolling", "when": "now", "keep": 1}
        assert board.client.sent == [("engine-set", "0", args | {"generations": {"0": 2}})]
        assert board.client.orders[-1][3] == {"dry_run": False, "reason": "graph?", "if_gen": 2}
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        assert "engine-set accepted, operation op1" in board.footer
        assert "staged for" not in board.text


async def test_each_option_is_planned_anew() -> None:
    async with desk() as board:
        await plan(board, "e", "right", "d", "m")
        assert "all at once" in board.text
        await board.press("w")
        await board.shows("at the next safe point")
        await board.press("m", "plus", "plus", "minus")
        await board.shows("rolling, 2 keep serving")
        await board.shows("enter goes on")
        asked = board.client.orders[-1][2]
        assert (asked["mode"], asked["keep"], asked["when"]) == ("rolling", 2, "safe-point")
        assert "keep" not in board.client.orders[1][2]
        await send(board)
        assert board.client.sent[0][2]["keep"] == 2


async def test_rules_refuse_before_anything_is_sent() -> None:
    async with desk() as board:
        board.client.plan = Rejected("refused-by-rules", "engine 0: DeepEP normal turns graphs off", "stage both")
        await plan(board, "e", "right", "d", shows="refused-by-rules")
        assert "engine 0: DeepEP normal turns graphs off" in board.text
        assert "stage both" in board.text
        await board.press("enter", "x", "enter")
        assert board.client.sent == []
        await board.press("escape")
        assert "staged for engine 0" in await board.shows("nothing was sent")


async def test_somebody_else_was_quicker_and_what_they_did_is_shown() -> None:
    async with desk() as board:
        await plan(board, "e", "right", "d")
        client = board.client
        client.answer = Rejected("stale-generation", "engine 0 is at generation 3, not 2", "look again, then repeat")
        client.put("engine/0", client.mirror.state["engine/0"] | {"generation": 3, "state": "LOADING"})
        toggles = client.mirror.state["toggles/0"]
        client.put(
            "toggles/0", toggles | {"core_dump": {}, "speculative": toggles["speculative"] | {"wanted": "NGRAM"}}
        )
        op = {"op": "9", "name": "engine-set", "target": "0", "who": "bo", "reason": "faster", "state": "running"}
        client.put("op/9", op | {"t": NOW - 1})
        await send(board)
        await board.shows("Somebody else changed it since you looked.")
        assert "engine 0 is at generation 3, not 2" in board.text
        assert "generation 2 -> 3, LOADING; speculative off -> NGRAM (by bo: faster)" in board.text
        assert "core_dump" not in board.text.split("Somebody else")[1].split("looks again")[0]
        client.answer = Accepted("10")
        await board.press("r")
        await board.shows("enter goes on")
        await send(board)
        assert client.sent[-1][2]["generations"] == {"0": 3}


async def test_no_answer_is_not_taken_for_a_yes() -> None:
    async with desk() as board:
        await plan(board, "e", "right", "d")
        board.client.busy = True
        await board.press("enter", "x", "enter")
        await board.shows("it may have been taken all the same")
        await board.press("escape")
        assert "staged for engine 0" in await board.shows("nothing was sent")


async def test_restart_stop_start_and_revert_are_for_the_selected_engines() -> None:
    async with desk() as board:
        await board.press("space", "space")
        await plan(board, "r")
        await send(board)
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        await plan(board, "u")
        assert "generation before" in board.text
        await send(board)
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        await plan(board, "s")
        await send(board)
        for index in "01":
            board.client.put(f"engine/{index}", board.client.mirror.state[f"engine/{index}"] | {"state": "STOPPED"})
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        await board.tick(9)
        assert "s start" in board.footer
        await plan(board, "s")
        await send(board)
        sent = [(name, target) for name, target, _ in board.client.sent]
        names = ("engine-restart", "engine-revert", "engine-stop", "engine-start")
        assert sent == [(name, "0,1") for name in names]
        assert all(args["generations"] == {"0": 2, "1": 2} for _, _, args in board.client.sent)
        options = [sorted(set(args) - {"generations"}) for _, _, args in board.client.sent]
        assert options == [["keep", "mode", "when"], ["keep", "mode", "when"], ["when"], []]


async def test_an_operation_is_followed_stage_by_stage_and_cancelled() -> None:
    async with desk("operation", (80, 24)) as board:
        assert "engine 1: loading 4.0s  60%" in board.text
        assert "0.4s  engine 0: draining" in board.text
        assert "1.2s  engine 0: stopping" in board.text
        assert "5.0s  60%" in await board.tick(1.0)
        assert "c cancel" in board.footer
        await board.press("c")
        await board.shows("Cancel engine-set 0,1 (operation 7)?")
        await board.press("n")
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        assert board.client.sent == []
        await board.press("c")
        await board.shows("Are you sure?")
        await board.press("y")
        await board.until(lambda: bool(board.client.sent))
        assert board.client.sent == [("cancel", "7", {})]
        ended = board.client.mirror.state["op/7"] | {
            "state": "cancelled",
            "ended": NOW,
            "text": "engine 1 is as before",
        }
        board.client.put("op/7", ended)
        text = await board.tick(9)
        assert "c cancel" not in board.footer
        assert "engine 1 is as before" in text


async def test_an_ab_run_is_started_watched_and_ended() -> None:
    async with desk() as board:
        await board.press("b")
        assert "nothing is staged" in board.footer
        dialog = await plan(board, "e", "right", "b")
        assert dialog.proposal.title == "A/B: half of engines 0, 1, 2, 3 with cuda_graph off"
        await send(board)
        name, target, args = board.client.sent[0]
        assert (name, target, args["changes"]) == ("engine-ab", "0,1,2,3", {"cuda_graph": "off"})
        assert args["generations"] == {"0": 2, "1": 2, "2": 2, "3": 2}
    async with desk("ab") as board:
        text = await board.press(*["tab"] * 4)
        assert "tokens/s              412     388    -23.8  -31 to -16.5     240  sure" in text
        assert "accept length           -       -        -  -                0" in text
        assert "engines 2, 3: cuda_graph off for 4m00s" in text
        assert "no difference in the log-prob" in text
        assert "b end A/B" in board.footer
        dialog = await plan(board, "b")
        assert dialog.proposal.name == "engine-ab-end"


# ---------------------------------------------------------------- the frame of it


async def test_it_opens_at_the_engine_of_the_table_and_goes_back() -> None:
    async with dash("engines", control=True) as board:
        await board.press("3", "j")
        await board.press("e")
        await board.shows("Status of engine 1")
        await board.press("escape")
        assert "Charts" in await board.shows("3 Engines")
        await board.press("e")
        await board.shows("Status of engine 1")
        await board.press("q")
        await board.shows("3 Engines")
        assert board.app.is_running


def test_an_engine_that_is_told_to_go_is_on_its_way_and_not_unwell() -> None:
    states = ("DRAINING", "STOPPING", "RECLAIMING", "LOADING", "CRASHED", "BACKOFF", "SUSPECT", "HEALTHY")
    state = {f"engine/{at}": owned(str(at), at, state=name) for at, name in enumerate(states)}
    assert [view.trouble for view in engine_views(state)] == [1, 1, 1, 1, 0, 0, 0, 3]


async def test_of_what_went_well_long_ago_only_one_line_is_left() -> None:
    async with desk("operation") as board:
        op = board.client.mirror.state["op/7"] | {"state": "done", "text": "engine 0: healthy 12.3 s"}
        board.client.put("op/7", op | {"ended": NOW - 5})
        assert "engine 0: healthy 12.3 s" in await board.tick()
        board.client.put("op/7", op | {"ended": NOW - 500})
        text = await board.tick()
        assert "engine 0: healthy 12.3 s" not in text
        assert "engine-set done 8m2" in text
        assert "by ana (unverified): is it the" in text


async def test_ascii_is_ascii() -> None:
    async with dash("ab", (80, 24), control=True, ascii_only=True) as board:
        board.client.plan = PLAN
        await board.press("e")
        await board.press("e", "right")
        assert "left right change" in board.footer
        text = board.text + await board.press("tab", "tab")
        assert "?" not in text.replace("? help", "").replace("pid ?", "")
        await plan(board, "d")
        assert (text + board.text).isascii()


async def test_nobody_acts_on_a_frozen_picture() -> None:
    async with dash("engines", control=True) as board:
        await board.press("space", "e")
        await board.shows("Status of engine 0")
        assert not board.app.model.paused


async def test_an_unchanged_engine_is_the_same_view_and_a_changed_one_is_not() -> None:
    async with desk() as board:
        before = board.app.model.frame().engines()
        cell = board.client.mirror.state["engine/3"]
        board.client.put("engine/3", cell | {"running": 1})
        after = board.app.model.frame().engines()
        assert [old is new for old, new in zip(before, after, strict=True)] == [True, True, True, False, True]
        board.client.put("fleet", board.client.mirror.state["fleet"] | {"required": {"version": "8"}})
        assert all(view.required == "8" for view in board.app.model.frame().engines())
        del board.client.mirror.state["engine/1"]
        assert [view.id for view in board.app.model.frame().engines()] == ["0", "2", "3", "4"]


def test_only_engines_that_rltop_does_not_keep_are_old_while_they_serve() -> None:
    # A push is seen by the next scrape only: without this, every row would flash at every weight sync.
    state = {
        "fleet": {"required": {"version": "8"}},
        "engine/0": owned("0", 0, weight_version="7"),
        "engine/1": owned("1", 1, weight_version="7", state="STALE"),
        "engine/2": owned("2", 2, weight_version="7", owner="other"),
    }
    state["engine/3"] = owned("3", 3, weight_version="7", state="STOPPED")
    assert [view.old for view in engine_views(state)] == [False, True, True, False]


async def test_help_and_palette_are_those_of_the_screen() -> None:
    async with desk() as board:
        await board.press("question_mark")
        text = await board.shows("Help")
        assert "time range" not in text
        await board.press("pagedown")
        assert "Stage another value" in board.text
        assert "time range" not in board.text
        await board.press("end")
        await board.shows("ignores what it was asked for")
        await board.press("escape")
        await board.until(lambda: isinstance(board.app.screen, EnginesScreen))
        await board.press("colon")
        await board.shows("Commands")
        await board.press(*"restart the")
        assert "shows the plan first" in board.text
        await board.press("enter")
        await board.shows("enter goes on")
        assert board.client.orders[-1][0] == "engine-restart"


async def test_ctrl_c_leaves_from_every_dialog_of_it() -> None:
    async with desk() as board:
        await plan(board, "r")
        await board.press("enter", "ctrl+c")
        await board.until(lambda: board.app.return_value == 130)


async def test_a_lost_connection_says_so_and_offers_nothing() -> None:
    async with desk() as board:
        await board.press("e", "right")
        board.client.lose("ssh: Connection reset by peer")
        await board.tick(20)
        assert "restart" not in board.footer
        await board.press("r")
        assert "not connected" in board.footer
        assert "Connection reset" in board.text


async def test_an_engine_that_goes_away_takes_its_selection_along() -> None:
    async with desk() as board:
        await board.press("space", "k", "e", "right")
        del board.client.mirror.state["engine/0"]
        assert "staged for" not in await board.tick()
        assert screen(board).staging.selected == set()


@pytest.mark.parametrize("size", [(40, 12), (60, 20), (80, 24), (100, 30), (200, 60)])
async def test_every_part_at_every_size(size: tuple[int, int]) -> None:
    async with desk("ab", size) as board:
        for _ in range(6):
            lines = (await board.press("tab")).splitlines()
            assert "night-shift" in lines[0]
            assert lines[-1].endswith("? help")
            assert all(len(line) <= size[0] for line in lines)
        await board.press("e", "right", "f")
        assert "Toggles" in board.text
        await board.pilot.resize_terminal(20, 5)
        await board.pilot.pause()
        assert [line for line in board.lines if line] == ["needs 40x12, is 20x5"]
        await board.press("d", "space", "tab")
        await board.pilot.resize_terminal(*size)
        await board.pilot.pause()
        assert "staged for engine 0" in board.text


async def test_the_mouse_selects_engines_and_toggles() -> None:
    async with desk() as board:
        row = next(y for y, line in enumerate(board.lines) if " 2    ✗ BACKOFF" in line)
        await board.pilot.click(offset=(8, row))
        assert "Status of engine 2" in board.text
        await board.pilot.click(offset=(0, row))
        assert screen(board).staging.selected == {"2"}
        row = next(y for y, line in enumerate(board.lines) if " deepep " in line)
        await board.pilot.click(offset=(60, row))
        assert "two sides:" in board.text


async def test_hostile_text_of_engines_stays_text() -> None:
    async with desk() as board:
        evil = "\x1b]0;x\x07[bold]名\u202e\nsecond"
        cell = board.client.mirror.state["engine/0"]
        board.client.put("engine/0", cell | {"cause": evil, "state": "SUSPECT", "stage": "", "fingerprint": evil})
        board.client.put("toggles/0", {evil: {"value": evil, "choices": [evil], "verify": evil}})
        board.client.logs[cell["log"]] = LinesAnswer(cell["log"], 0, [evil])
        text = await board.press("e", "right", "l")
        text += await board.tick(3)
        assert "[bold]名" in text
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_the_graph_column_tells_what_is_in_effect_and_not_what_an_idle_gauge_says() -> None:
    def graph(**more: object) -> bool | None:
        return engine_views({"engine/0": owned("0", 0, **more)})[0].graph

    assert graph(running=0, cuda_graph=False, toggles={"cuda_graph": "on"}) is True
    assert graph(running=9, cuda_graph=True, toggles={"cuda_graph": "off"}) is False
    assert graph(running=9, cuda_graph=False) is False
    assert graph(running=0, cuda_graph=False) is None, "of the last batch, whenever that was"
    assert graph(running=None, cuda_graph=None) is None


def test_a_paused_engine_says_by_whom_and_since_and_needs_a_look() -> None:
    paused = {"by": "ana (unverified; root, uid 0)", "since": NOW - 65}
    (view,) = engine_views({"engine/0": owned("0", 0, paused=paused)})
    assert (view.paused, view.paused_at, view.trouble) == ("ana", NOW - 65, 2)
    frame = Frame(state={}, link=Link("live", 0.0), server_now=NOW)
    assert plain_text([said(view, frame)]) == "paused by ana since 1m05s"


def test_a_fingerprint_beside_an_engine_that_runs_is_called_that_of_its_last_crash() -> None:
    def text(state: str) -> str:
        (view,) = engine_views({"engine/0": owned("0", 0, state=state, fingerprint="silent/serve/exit-9")})
        frame = Frame(state={}, link=Link("live", 0.0), server_now=NOW)
        return plain_text(status_rows(view, frame, None, None, 80))

    assert "last crash  silent/serve/exit-9" in text("SUSPECT")
    assert "fingerprint" not in text("SUSPECT")
    assert "fingerprint silent/serve/exit-9" in text("BACKOFF")


def test_two_engines_that_run_alike_differ_in_nothing_whoever_wrote_it_out() -> None:
    def merged(*two: Mapping[str, object], states: tuple[str, str] = ("HEALTHY", "HEALTHY")) -> ToggleView:
        state = {
            f"{key}/{index}": value
            for index, (one, word) in enumerate(zip(two, states, strict=True))
            for key, value in (("toggles", {"x": one}), ("engine", owned(str(index), index, state=word)))
        }
        return merge([(name, toggle_views(state, name)) for name in ("0", "1")])[0]

    pinned, derived = {"value": "fa3", "wanted": "fa3"}, {"value": "fa3", "wanted": None}
    both = merged(pinned, derived)
    assert (both.value, both.wanted, both.wrong) == ("fa3", "fa3", False)
    restarted = merged(pinned, {"value": None, "wanted": None}, states=("HEALTHY", "LOADING"))
    assert (restarted.value, restarted.wanted, restarted.wrong, restarted.starting) == ("fa3", "fa3", False, True)
    ignores = merged(pinned, {"value": "fa3", "wanted": "triton"})
    assert (ignores.value, ignores.wanted, ignores.wrong) == ("fa3", "mixed", True)
    other = merged(pinned, {"value": "triton", "wanted": None})
    assert (other.value, other.wanted, other.wrong) == ("mixed", "mixed", False)


def test_while_an_engine_starts_its_toggles_are_not_called_unverified() -> None:
    def text(engine: str) -> str:
        named = {"cuda_graph": {"value": None, "wanted": "off", "choices": ["on", "off"], "verify": "/server_info"}}
        (view,) = toggle_views({"toggles/0": named, "engine/0": owned("0", 0, state=engine)}, "0")
        frame = Frame(state={}, link=Link("live", 0.0), server_now=NOW)
        return plain_text([toggle_row(view, Staging(), frame, 80)]) + effect_text(view)

    assert "off, starting" in text("LOADING")
    assert "seen when the engine has started" in text("LOADING")
    assert "off, not verified" in text("HEALTHY")
