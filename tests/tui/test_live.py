"""The Live screen under the fingers: panes, lists, charts, filter, pause, copy, sizes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rltop.tui.widgets.chart import ChartsView
from tests.tui.dash import dash
from tests.tui.fake import FakeClient, series
from tests.tui.scenes import GAP


async def test_the_first_picture_is_there_without_waiting_for_the_timer() -> None:
    async with dash("healthy") as board:
        assert "reward                  0.867" in board.text
        assert any("⠀" < char <= "⣿" for char in board.text), "the charts have their history"
        asked = {key for keys, _, _ in board.client.queries for key in keys}
        assert asked == set(board.app.model.chart_keys())


async def test_number_keys_tab_and_brackets_reach_every_pane() -> None:
    async with dash("healthy", (80, 24)) as board:
        for number, words in enumerate(
            ("rollout.text", "log-prob gap", "CPU engine", "rollout 42:", "40 + 2", "seed"), 1
        ):
            assert words in await board.press(str(number)), f"pane {number}"
        await board.press("1", "tab")
        assert board.app.live.active == "charts"
        await board.press("shift+tab", "right_square_bracket")
        assert board.app.live.active == "charts"
        await board.press("4", "left_square_bracket")
        assert board.app.live.active == "engines"


async def test_at_120x40_events_rollouts_and_run_share_a_place_and_the_rest_is_always_there() -> None:
    async with dash("healthy") as board:
        text = await board.press("5")
        assert "40 + 2 = → 42" in text
        assert "logprob.magnitude" in text
        assert "log-prob gap" in text
        assert "actor" not in await board.press("right_square_bracket")
        assert "--lr" in board.text
        await board.press("1", "right_square_bracket")
        assert board.app.live.active == "events"


async def test_full_screen_and_back() -> None:
    async with dash("healthy") as board:
        text = await board.press("2", "f")
        assert "healthy" not in text
        assert "f restore" in board.footer
        text = await board.press("escape")
        assert "1/1 healthy" in text
        assert "f full screen" in board.footer


async def test_moving_in_the_checks_tells_another_story_and_enter_gives_it_the_room() -> None:
    async with dash("failing") as board:
        assert "── train.nan" in board.text
        text = await board.press("j", "j")
        assert "── logprob.train-rollout" in text
        assert "rltop dump diff" in text
        assert "── rollout.text" in await board.press("down")
        assert "train.grad-zero" not in await board.press("enter")
        assert "train.grad-zero" in await board.press("escape")
        assert "── kl.on-policy" in await board.press("G")
        assert "── train.nan" in await board.press("g")


async def test_the_selected_check_stays_selected_when_the_order_changes() -> None:
    async with dash("failing") as board:
        await board.press("j", "j")
        board.client.put("check/train.nan", board.client.mirror.state["check/train.nan"] | {"status": "pass"})
        text = await board.tick()
        assert "── logprob.train-rollout" in text


async def test_the_filter_narrows_while_typing_enter_keeps_it_and_escape_clears_it() -> None:
    async with dash("healthy") as board:
        await board.press("slash", "g", "r", "a", "d")
        assert "filter checks:  grad" in board.footer
        assert "rollout.text" not in board.text
        await board.press("enter")
        assert "/grad" in board.text
        assert "esc clear filter" in board.footer
        assert "rollout.text" in await board.press("escape")
        await board.press("slash", "x", "q", "escape")
        assert "rollout.text" in board.text
        assert not board.app.live.asking


async def test_letters_go_into_an_open_filter_and_not_into_actions() -> None:
    async with dash("healthy") as board:
        await board.press("4", "slash", "q", "space", "f")
        assert board.app.is_running
        assert not board.app.model.paused
        assert board.app.live.events_view.filter == "q f"
        assert "none of" in board.text


async def test_the_event_feed_follows_the_newest_until_the_operator_moves_up() -> None:
    async with dash("healthy") as board:
        for number in range(30):
            board.client.event(f"line {number}")
        assert "line 29" in await board.tick()
        await board.press("4", "k", "k", "k")
        assert "not following" in board.text
        for number in range(30, 60):
            board.client.event(f"line {number}")
        text = await board.tick()
        assert "line 26" in text
        assert "line 59" not in text
        assert "line 59" in await board.press("G")


async def test_levels_hide_what_is_less_and_the_gap_is_shown() -> None:
    async with dash("failing") as board:
        assert "3 events missed (9 to 11)" in board.text
        text = await board.press("4", "v")
        assert "warn and worse" in text
        assert "rollout 42: reward" not in text
        assert "records 811 to 822" in text
        assert "records 811 to 822" not in await board.press("v")
        assert "train.nan: pass -> fail" in board.text


async def test_the_first_event_in_sight_asks_for_older_ones() -> None:
    client = FakeClient()
    client.first_event = 501
    client.old_events = [
        {"eseq": seq, "t": 0.0, "kind": "log", "level": "info", "text": f"old {seq}"} for seq in range(1, 501)
    ]
    async with dash("healthy", client=client) as board:
        assert board.app.model.oldest_event == 501
        await board.press("4", "g")
        await board.until(lambda: board.app.model.oldest_event == 301)
        assert "old 500" in await board.press("k")


async def test_pause_freezes_the_picture_says_so_and_how_old_it_is_and_misses_nothing() -> None:
    async with dash("healthy") as board:
        await board.press("space")
        assert "space resume" in board.footer
        board.client.metric("rollout/raw_reward", 43, 0.123)
        board.client.event("while paused")
        text = await board.tick(12)
        assert "paused 12s" in text
        assert "0.867" in text
        assert "while paused" not in text
        text = await board.press("space")
        assert "0.123" in text
        assert "while paused" in text
        assert "paused" not in text.splitlines()[0]


async def test_nan_is_marked_counted_and_named() -> None:
    async with dash("failing") as board:
        assert "grad_norm NaN×1" in board.text
        board.client.metric("train/grad_norm", 43, math.nan, nan=2)
        text = await board.tick()
        assert "NaN×2" in text
        assert "NaN " in next(line for line in board.lines if "grad_norm NaN×2" in line).split("NaN×2")[1]


async def test_live_points_are_appended_and_holes_are_asked_for_again() -> None:
    async with dash("healthy") as board:
        asked = len(board.client.queries)
        board.client.metric("rollout/raw_reward", 43, 0.9)
        await board.tick()
        assert board.app.model.histories["rollout/raw_reward"].buckets[-1].step == 43
        assert board.client.queries[asked:] == []
        board.client.metric("rollout/raw_reward", 50, 0.91)
        board.client.history["rollout/raw_reward"] = series([0.5] * 51)
        await board.tick(20)
        await board.until(lambda: len(board.client.queries) > asked)
        assert board.client.queries[-1][0] == ("rollout/raw_reward",)


async def test_zooming_asks_for_the_finer_series_of_both_axes() -> None:
    async with dash("healthy") as board:
        text = await board.press("2", "plus")
        assert "1/2 of the run" in text
        train, rollout = board.client.queries[-2:]
        assert {key.split("/")[0] for key in train[0]} == {"train"}
        assert {key.split("/")[0] for key in rollout[0]} == {"rollout"}
        assert train[1:] == rollout[1:]
        assert train[1] is not None
        assert 42 / 2.5 < train[1] < 42 / 1.5
        assert train[2] == 42
        assert "- wider" in board.footer
        assert "of the run" not in await board.press("minus")
        assert "- wider" not in board.footer


async def test_the_cursor_shows_the_same_step_in_every_chart() -> None:
    async with dash("healthy") as board:
        text = await board.press("2", "left")
        assert text.count("@42") == 6
        text = await board.press("left", "left", "left", "left")
        assert "@42" not in text
        assert "esc back" in board.footer
        assert "@" not in (await board.press("escape")).split("Engines")[0]


async def test_log_axis_single_chart_and_selection() -> None:
    async with dash("healthy") as board:
        await board.press("2", "down", "l")
        assert "grad_norm log" in board.text
        text = await board.press("enter")
        assert "response length" not in text
        assert "step 0" in text
        assert "log-prob gap" in await board.press("right_square_bracket", "right_square_bracket")
        assert "response length" in await board.press("escape")


async def test_sorting_and_opening_an_engine() -> None:
    async with dash("fleet") as board:
        await board.press("3")
        assert "✗ CRASHED" in board.text
        text = await board.press("enter")
        assert "connection refused" in text
        assert "by id" in await board.press("s")
        await board.press("slash", "4", "1", "space", "o", "l", "d", "enter")
        engines = board.app.live.views["engines"]
        assert engines.filter == "41 old"
        assert "31 " in board.text


@pytest.mark.parametrize("scope", ["XDG_STATE_HOME", "RLTOP_DIR"])
async def test_copy_sends_osc52_text_and_keeps_a_private_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str
) -> None:
    monkeypatch.delenv("RLTOP_DIR", raising=False)
    monkeypatch.setenv(scope, str(tmp_path if scope == "XDG_STATE_HOME" else tmp_path / "rltop"))
    async with dash("failing") as board:
        await board.press("y")
        assert board.app.clipboard.startswith("FAIL train.nan")
        kept = tmp_path / "rltop" / "clipboard.txt"
        assert kept.read_text().startswith("FAIL train.nan")
        assert kept.stat().st_mode & 0o777 == 0o600
        assert "OSC 52" in board.footer
        await board.tick(6)
        assert "OSC 52" not in board.footer


async def test_a_screenshot_is_saved_here_and_its_name_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    async with dash("healthy") as board:
        await board.press("P")
        name = board.footer.split("saved ")[1].split()[0].removeprefix("./")
        assert name.startswith("rltop-night-shift-")
        assert "<svg" in (tmp_path / name).read_text()[:200]


async def test_help_shows_the_keys_and_what_healthy_means_and_closes() -> None:
    async with dash("healthy", (80, 24)) as board:
        await board.press("question_mark")
        text = await board.shows("Help")
        assert "Show only rows that contain a text" in text
        await board.press("end")
        await board.shows("○ skip")
        await board.press("escape")
        await board.until(lambda: board.app.screen is board.app.live)
        assert "Help" not in board.text


async def test_the_palette_finds_and_does_an_action() -> None:
    async with dash("healthy") as board:
        await board.press("colon")
        await board.shows("Commands")
        await board.press("g", "o", "space", "e", "n", "g")
        assert "Go to engines" in board.text
        await board.press("enter")
        await board.until(lambda: board.app.live.active == "engines")
        await board.press("ctrl+p")
        await board.shows("Commands")
        await board.press("z", "z", "z")
        assert "no such command" in board.text
        await board.press("enter")
        await board.until(lambda: board.app.screen is board.app.live)


async def test_another_theme_repaints_everything() -> None:
    async with dash("healthy") as board:
        await board.press("T")
        await board.shows("Theme")
        await board.press("n", "o", "r", "d", "enter")
        await board.until(lambda: board.app.theme == "nord")
        await board.until(lambda: board.app.screen is board.app.live)
        assert "reward" in board.text


async def test_down_to_20x5_there_is_one_clear_message_and_everything_comes_back() -> None:
    async with dash("healthy") as board:
        before = board.text
        await board.pilot.resize_terminal(20, 5)
        await board.pilot.pause()
        shown = [line for line in board.lines if line]
        assert shown == ["needs 40x12, is 20x5"]
        await board.press("1", "slash", "question_mark", "f", "plus", "space")
        assert board.app.is_running
        await board.tick(0)
        await board.pilot.resize_terminal(3, 2)
        await board.pilot.pause()
        await board.pilot.resize_terminal(120, 40)
        await board.pilot.pause()
        assert board.text == before


@pytest.mark.parametrize("size", [(40, 12), (60, 20), (80, 24), (100, 30), (80, 50), (200, 60)])
async def test_every_pane_at_every_size_is_inside_the_screen(size: tuple[int, int]) -> None:
    async with dash("failing", size) as board:
        for key in "123456":
            lines = (await board.press(key)).splitlines()
            assert "night-shift" in lines[0]
            assert board.footer.endswith("? help")
            assert f"{key} " in board.text


async def test_the_mouse_selects_tabs_and_rows() -> None:
    async with dash("failing", (80, 24)) as board:
        tabs = next(y for y, line in enumerate(board.lines) if "1 Checks" in line)
        at = board.lines[tabs].index("4 Events")
        await board.pilot.click(offset=(at + 2, tabs))
        assert board.app.live.active == "events"
        await board.press("1")
        row = next(y for y, line in enumerate(board.lines) if "rollout.text" in line)
        await board.pilot.click(offset=(5, row))
        assert "── rollout.text" in board.text


async def test_only_what_changed_is_repainted() -> None:
    async with dash("fleet") as board:
        live = board.app.live
        assert live.paint(set()) == 0
        board.client.put("engine/0", board.client.mirror.state["engine/0"] | {"running": 1})
        dirty = board.app.model.pull()
        assert dirty == {"engine/0"}
        assert live.paint(dirty) == 1


async def test_a_metric_that_no_chart_shows_costs_no_history() -> None:
    async with dash("healthy") as board:
        board.client.metric("train/something_else", 1, 1.0)
        await board.tick()
        assert set(board.app.model.histories) == set(board.app.model.chart_keys())
        assert GAP in board.app.model.histories


async def test_charts_fall_back_to_the_metric_that_the_run_has() -> None:
    async with dash("healthy") as board:
        board.client.mirror.state.pop("metric/train/kl_loss")
        board.client.metric("train/ppo_kl", 42, 0.01)
        assert "KL (ppo_kl)" in await board.tick()
        assert isinstance(board.app.live.views["charts"], ChartsView)


async def test_a_history_that_comes_before_the_screen_counts_as_mounted_is_painted_with_the_next_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with dash("healthy", size=(120, 40)) as board:
        app = board.app
        painted: list[set[str] | None] = []
        monkeypatch.setattr(app.live, "paint", painted.append)
        monkeypatch.setattr(type(app.live), "is_mounted", property(lambda _self: False))
        await app._load(["train/grad_norm"])
        assert painted == []
        monkeypatch.undo()
        monkeypatch.setattr(app.live, "paint", painted.append)
        app.tick()
        assert any(dirty is None or "metric/train/grad_norm" in dirty for dirty in painted)
