"""Connecting, quiet, lost, back, another epoch: the picture stays, and its age is told."""

from __future__ import annotations

from tests.tui.dash import Dash, dash
from tests.tui.fake import NOW, FakeClient
from tests.tui.scenes import healthy


async def left(board: Dash) -> None:
    """Wait until the dashboard has ended."""
    await board.until(lambda: not board.app.is_running)


async def test_before_the_first_frame_it_says_that_it_is_connecting_and_why_not_yet() -> None:
    client = FakeClient()
    client.problem = "ssh: could not resolve host"
    async with dash("fresh", client=client) as board:
        assert "connecting" in board.text
        assert "could not resolve host" in board.text
        assert "no verdicts yet" in board.text
        healthy(board.client)
        await board.until(lambda: bool(board.client.queries))
        assert "rollout 42/60" in await board.tick()


async def test_a_lost_connection_keeps_the_picture_grey_with_its_age_and_comes_back() -> None:
    async with dash("healthy") as board:
        before = board.text.splitlines()[2:18]
        board.client.lose("ssh: Connection reset by peer")
        text = await board.tick(34)
        assert "lost, picture is 34s old" in text
        assert "Connection reset by peer" in text
        assert "● was running" in text
        assert next(line for line in before if "train.nan" in line) in text
        assert board.app.live._panes["checks"]._flag == "+grey"
        assert "lost, picture is 40s old" in await board.tick(6)
        board.client.connect()
        text = await board.tick()
        assert "lost" not in text
        assert text.splitlines()[2:18] == before
        assert board.app.live._panes["checks"]._flag == ""


async def test_the_phase_clock_does_not_run_on_while_the_connection_is_lost() -> None:
    async with dash("healthy") as board:
        board.client.lose()
        await board.tick(5)
        text = await board.tick(100)
        assert "train 0.8s" in text


async def test_after_coming_back_the_history_is_asked_for_again() -> None:
    async with dash("healthy") as board:
        asked = len(board.client.queries)
        board.client.lose()
        await board.tick(8)
        board.client.connect()
        await board.tick()
        await board.until(lambda: len(board.client.queries) > asked)


async def test_quiet_is_not_dead() -> None:
    async with dash("healthy") as board:
        board.client.connect(ages={"trainer/0": 50.0, "engine/0": 44.0})
        text = await board.tick()
        assert "live, run quiet for 44s" in text
        assert "lost" not in text


async def test_a_run_that_ended_is_not_called_quiet() -> None:
    async with dash("healthy") as board:
        board.client.put("run", board.client.mirror.state["run"] | {"state": "done", "ended": NOW - 30})
        board.client.connect(ages={"trainer/0": 500.0})
        text = await board.tick()
        assert "quiet" not in text
        assert "✓ done 30s ago" in text


async def test_another_epoch_drops_histories_and_events_of_the_old_one() -> None:
    async with dash("healthy") as board:
        mirror = board.client.mirror
        mirror.epoch = "e2"
        mirror.dirty |= set(mirror.state)
        for key in [key for key in mirror.state if key.startswith("metric/")]:
            del mirror.state[key]
        mirror.events.clear()
        board.client.history.clear()
        board.client.event("the daemon is new")
        text = await board.tick()
        assert "the daemon is new" in text
        assert "rollout 42: reward" not in text
        assert text.count("not reported yet") == 6


async def test_a_failing_query_is_asked_again() -> None:
    client = FakeClient()
    async with dash("fresh", client=client) as board:
        client.busy = True
        healthy(client)
        await board.until(lambda: len(client.queries) == 1)
        await board.tick()
        await board.until(lambda: len(client.queries) == 2)
        client.busy = False
        await board.tick()
        await board.until(lambda: len(client.queries) == 3)
        assert "whole run" in await board.tick()


async def test_leaving_closes_the_client() -> None:
    async with dash("healthy") as board:
        await board.press("q")
        await left(board)
        assert board.app.return_code == 0
    assert board.client.closed


async def test_ctrl_c_leaves_with_130_from_a_dialog_too() -> None:
    for key, words in (
        ("1", "rollout.text"),
        ("question_mark", "Help"),
        ("colon", "Commands"),
        ("slash", "filter checks"),
    ):
        async with dash("healthy") as board:
            await board.press(key)
            await board.shows(words)
            await board.pilot.press("ctrl+c")
            await left(board)
            assert board.app.return_code == 130, key


async def test_a_journal_that_can_not_be_written_is_in_the_header_until_it_works_again() -> None:
    async with dash("healthy") as board:
        told = {**board.client.mirror.state.get("daemon", {}), "journal": "cannot write: no space left"}
        board.client.mirror.state["daemon"] = told
        assert "history is in memory only: cannot write: no space left" in await board.tick()
        board.client.mirror.state["daemon"] = {**told, "journal": "ok"}
        assert "memory only" not in await board.tick()
