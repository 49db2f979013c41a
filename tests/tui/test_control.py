"""Read-only is the default; with control, actions name their target and ask."""

from __future__ import annotations

from rltop.protocol.messages import Rejected
from rltop.tui.picture import check_counts, check_views
from tests.tui.dash import dash


async def test_read_only_offers_and_does_nothing_that_changes_the_run() -> None:
    async with dash("healthy") as board:
        assert "read-only" in board.text
        assert "note" not in board.footer
        await board.press("n", "ctrl+x", "y")
        assert board.app.screen is board.app.live
        assert not board.app.live.asking
        await board.press("colon")
        await board.shows("Commands")
        assert "no such command" in await board.press(*"lineinto")
        assert board.client.sent == []


async def test_control_that_the_daemon_did_not_give_is_no_control() -> None:
    async with dash("healthy", control=True, role="view") as board:
        assert "read-only" in board.text
        await board.press("n")
        assert not board.app.live.asking


async def test_a_note_goes_to_everybody() -> None:
    async with dash("healthy", control=True) as board:
        assert "CONTROL" in board.text
        assert "n note" in board.footer
        await board.press("n", *"hi", "enter")
        await board.until(lambda: bool(board.client.sent))
        assert board.client.sent == [("note", "", {"text": "hi"})]
        await board.pilot.pause()
        assert "note accepted" in board.footer


async def test_an_empty_or_abandoned_note_sends_nothing() -> None:
    async with dash("healthy", control=True) as board:
        await board.press("n", "enter")
        await board.press("n", "x", "escape")
        assert board.client.sent == []


async def test_stopping_the_run_names_it_and_only_y_does_it() -> None:
    async with dash("healthy", control=True) as board:
        await board.press("ctrl+x")
        await board.shows("Stop the trainer of run night-shift (pid 4242)?")
        await board.press("enter")
        await board.until(lambda: "nothing was stopped" in board.footer)
        assert board.client.sent == []
        await board.press("ctrl+x")
        await board.shows("Are you sure?")
        await board.press("y")
        await board.until(lambda: bool(board.client.sent))
        assert board.client.sent == [("stop-run", "", {})]


async def test_a_refusal_is_told_with_what_to_do() -> None:
    async with dash("healthy", control=True) as board:
        board.client.answer = Rejected("busy", "another operation runs", "wait for op 7")
        await board.press("n", "x", "enter")
        await board.until(lambda: bool(board.client.sent))
        await board.pilot.pause()
        assert "note refused: another operation runs wait for op 7" in board.footer


async def test_without_a_connection_or_a_trainer_there_is_nothing_to_stop() -> None:
    async with dash("healthy", control=True) as board:
        board.client.lose()
        await board.tick(10)
        assert "note" not in board.footer
        await board.press("n")
        assert not board.app.live.asking
        board.client.connect()
        del board.client.mirror.state["trainer"]
        await board.tick()
        assert "n note" in board.footer
        assert "stop run" not in board.footer


async def test_a_mute_asks_for_its_reason_and_is_shown_behind_what_calls() -> None:
    async with dash("failing", control=True) as board:
        first = next(view for view in check_views(board.client.mirror.state) if view.status == "fail")
        assert "m mute" in board.footer
        await board.press("m", "enter")
        assert board.client.sent == []
        assert "needs a reason" in board.footer
        await board.press("m", *"known", "enter")
        await board.until(lambda: bool(board.client.sent))
        assert board.client.sent == [("mute", first.id, {})]
        value = board.client.mirror.state[f"check/{first.id}"]
        board.client.put(f"check/{first.id}", {**value, "muted": {"who": "ana", "reason": "known"}})
        await board.shows("  muted  ")
        views = check_views(board.client.mirror.state)
        assert next(view for view in views if view.id == first.id).muted == "known (ana)"
        assert views[0].id != first.id
        assert sum(check_counts(views).values()) < len(views)
