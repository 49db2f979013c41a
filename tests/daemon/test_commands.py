"""Commands: once per id, journal before run, operations that every viewer sees and that can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rltop.daemon.commands import KEEP_OPERATIONS, Actions, Commands, Stage
from rltop.protocol.messages import Accepted, Command, Rejected
from tests.daemon.fakes import FakeCore


class Desk:
    """Commands over a fake core; the trainer's stop waits until the test lets it go."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.release = asyncio.Event()
        self.running = True
        self.shutdown_begins = False
        self.order: list[str] = []
        self.mutes: dict[str, tuple[str, str]] = {}
        actions = Actions(
            stop_trainer=self._stop,
            shutdown=self._shutdown,
            trainer_running=lambda: self.running,
            committed=self._committed,
            mute=lambda check_id, reason, who, since: self.mutes.__setitem__(check_id, (reason, who)),
            unmute=lambda check_id: self.mutes.pop(check_id, None) is not None,
        )
        self.commands = Commands(self.core, actions, epoch="e1")

    async def _committed(self) -> bool:
        self.order.append(f"journal holds {len(self.core.written.told('operation'))}")
        return True

    async def _stop(self, stage: Stage) -> str:
        self.order.append("stop begins")
        stage("TERM")
        await self.release.wait()
        return "stopped"

    async def _shutdown(self, stage: Stage) -> str:
        if self.shutdown_begins:
            return await self._stop(stage)
        raise OSError("no power to do so")

    async def take(self, name: str, command_id: str, **fields: Any) -> Accepted | Rejected:
        return await self.commands.take(Command(name, **fields), command_id, who="ana", role="control")

    async def ended(self, op: str) -> dict[str, Any]:
        await self.until(lambda: self.core.table.get(f"op/{op}")["state"] not in ("queued", "running"))
        return dict(self.core.table.get(f"op/{op}"))

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something that the core was told makes it true."""
        changed = asyncio.Event()
        self.core.changed = changed.set
        while not true():
            changed.clear()
            await changed.wait()


@pytest.fixture
async def desk() -> Desk:
    return Desk()


async def test_a_note_is_told_to_everybody_once(desk: Desk) -> None:
    answer = await desk.take("note", "1", args={"text": "  restarting node 7 "}, reason="ticket 4")
    assert isinstance(answer, Accepted)
    shown = await desk.ended(answer.op)
    assert (shown["state"], shown["who"], shown["reason"]) == ("done", "ana", "ticket 4")
    assert desk.core.texts("op") == ["note: restarting node 7 [ana]"]


async def test_the_same_id_gets_the_same_answer_and_acts_once(desk: Desk) -> None:
    first, second = await asyncio.gather(desk.take("stop-run", "1"), desk.take("stop-run", "1"))
    third = await desk.take("note", "1", args={"text": "other body, same id"})
    assert first == second == third
    desk.release.set()
    await desk.ended("1")
    assert desk.order.count("stop begins") == 1


async def test_who_when_and_why_are_in_the_journal_before_anything_happens(desk: Desk) -> None:
    await desk.take("stop-run", "id-1", reason="NaN")
    desk.release.set()
    await desk.ended("1")
    assert desk.order == ["journal holds 1", "stop begins"]
    (row,) = desk.core.written.told("operation")[0]
    expected = ("id-1", "ana", "control", "NaN", "queued", 1000.0)
    assert tuple(row[key] for key in ("cmd_id", "who", "role", "reason", "state", "t")) == expected
    states = [row["state"] for (row,) in desk.core.written.told("operation")]
    assert states == ["queued", "running", "running", "done"]


async def test_an_operation_can_be_cancelled(desk: Desk) -> None:
    await desk.take("stop-run", "1")
    await desk.until(lambda: desk.core.table.get("op/1")["stage"] == "TERM")
    answer = await desk.take("cancel", "2", target="1")
    assert isinstance(answer, Accepted)
    assert (await desk.ended("2"))["state"] == "done"
    assert desk.core.table.get("op/1")["state"] == "cancelled"
    assert desk.core.table.get("op/1")["text"] == "called off"


async def test_a_shutdown_cannot_be_called_off_halfway(desk: Desk) -> None:
    """Its engines would be stopped under a daemon that lives on."""
    desk.shutdown_begins = True
    await desk.take("shutdown", "1")
    await desk.until(lambda: desk.core.table.get("op/1")["stage"] == "TERM")
    answer = await desk.take("cancel", "2", target="1")
    assert isinstance(answer, Rejected)
    assert "a shutdown is not called off" in answer.why
    desk.release.set()
    assert (await desk.ended("1"))["state"] == "done"


async def test_an_operation_that_raises_has_failed_and_says_why(desk: Desk) -> None:
    await desk.take("shutdown", "1")
    shown = await desk.ended("1")
    assert (shown["state"], shown["text"]) == ("failed", "OSError: no power to do so")


async def test_a_dry_run_says_the_plan_and_does_nothing(desk: Desk) -> None:
    answer = await desk.take("stop-run", "1", dry_run=True)
    assert isinstance(answer, Accepted)
    assert answer.op == ""
    assert answer.plan
    assert desk.core.written.rows == []
    assert isinstance(await desk.take("stop-run", "1"), Accepted), "the id is still fresh"
    await desk.commands.finish()


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("dance", {}, "unknown-command"),
        ("note", {}, "bad-args"),
        ("note", {"args": {"text": "  "}}, "bad-args"),
        ("note", {"args": {"text": 7}}, "bad-args"),
        ("cancel", {"target": "99"}, "bad-args"),
        ("note", {"args": {"text": "x"}, "if_epoch": "e0"}, "stale-epoch"),
        ("note", {"args": {"text": "x"}, "if_gen": 1, "target": "0"}, "bad-args"),
    ],
)
async def test_what_cannot_be_done_is_rejected_and_changes_nothing(
    desk: Desk, name: str, fields: dict[str, Any], code: str
) -> None:
    answer = await desk.take(name, "1", **fields)
    assert isinstance(answer, Rejected)
    assert answer.code == code
    assert desk.core.written.rows == []


async def test_a_command_for_an_engine_that_was_restarted_meanwhile_is_stale(desk: Desk) -> None:
    desk.core.set("engine/0", {"generation": 8})
    answer = await desk.take("note", "1", args={"text": "x"}, target="0", if_gen=7)
    assert isinstance(answer, Rejected)
    assert (answer.code, "generation 8" in answer.why) == ("stale-generation", True)
    assert isinstance(await desk.take("note", "2", args={"text": "x"}, target="0", if_gen=8), Accepted)


async def test_stopping_a_trainer_that_is_not_ours_is_refused(desk: Desk) -> None:
    desk.running = False
    answer = await desk.take("stop-run", "1")
    assert isinstance(answer, Rejected)
    assert "no trainer" in answer.why


async def test_the_next_daemon_knows_old_commands_and_fails_what_was_left_undone(desk: Desk) -> None:
    await desk.take("note", "id-note", args={"text": "x"})
    await desk.ended("1")
    await desk.take("stop-run", "id-stop")
    rows = {row["op"]: row for (row,) in desk.core.written.told("operation")}
    again = Desk()
    again.commands.restore(list(rows.values()))
    assert again.core.table.get("op/2")["state"] == "failed"
    assert "daemon ended" in again.core.table.get("op/2")["text"]
    assert await again.take("stop-run", "id-stop") == Accepted(
        "2", ["TERM the trainer's process group", "KILL what is left"]
    )
    assert again.order == []
    fresh = await again.take("note", "id-3", args={"text": "y"})
    assert isinstance(fresh, Accepted)
    assert fresh.op == "3"
    await desk.commands.finish()


async def test_finished_operations_leave_the_table_after_a_while(desk: Desk) -> None:
    for number in range(KEEP_OPERATIONS + 5):
        await desk.take("note", str(number), args={"text": "x"})
        await desk.ended(str(number + 1))
    assert len(desk.core.table.keys("op/")) == KEEP_OPERATIONS
    assert "op/5" not in desk.core.table


async def test_a_mute_needs_a_check_and_a_reason_and_outlives_the_daemon(desk: Desk) -> None:
    desk.core.set("check/train.nan", {"id": "train.nan", "status": "fail"})
    assert isinstance(await desk.take("mute", "1", target="train.nan"), Rejected)
    assert isinstance(await desk.take("mute", "2", target="no.such", reason="x"), Rejected)
    answer = await desk.take("mute", "3", target="train.nan", reason="known, ticket 4")
    assert isinstance(answer, Accepted)
    await desk.ended(answer.op)
    assert desk.mutes == {"train.nan": ("known, ticket 4", "ana")}
    later = Desk()
    later.commands.restore([row for (row,) in desk.core.written.told("operation")])
    assert later.mutes == desk.mutes
    answer = await desk.take("unmute", "4", target="train.nan")
    assert isinstance(answer, Accepted)
    await desk.ended(answer.op)
    assert desk.mutes == {}
