"""Dumps over the wire: only the run's own, in a process of their own, of a living run and of a dead one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import termios
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rltop.client import local_client
from rltop.daemon.dump_pages import DumpReader, Places, known_dumps, places
from rltop.evidence import dump_find
from rltop.evidence.dump_pages import listed
from rltop.protocol.messages import DumpPageAnswer, DumpPageQuery, DumpsAnswer, DumpsQuery
from tests.daemon.util import Producer, Viewer, real_daemon, wait_for
from tests.evidence import dump_files


def test_where_a_run_has_its_dumps(tmp_path: Path) -> None:
    run, cwd = tmp_path / "run", tmp_path / "cwd"
    assert places({}, run, cwd) == Places([f"{run}/dumps"], [])
    args = {"save_debug_rollout_data": "d/{rollout_id}.pt", "dump_details": "/x", "load_debug_rollout_data": None}
    assert places(args | {"hf_checkpoint": "~/m"}, run, cwd) == Places(
        [f"{cwd}/d/{{rollout_id}}.pt", "/x", f"{run}/dumps"],
        [],
        [str(Path("~/m").expanduser())],
    )
    hostile = {"save_debug_rollout_data": 3, "dump_details": ["x"], "save_debug_train_data": "  "}
    assert places(hostile, run, cwd) == Places([f"{run}/dumps"], [])


def test_dumps_are_listed_by_rollout_with_their_train_dumps_and_holes(tmp_path: Path) -> None:
    for number in (0, 1, 4):
        dump_files.rollout(tmp_path / "r" / f"{number}.pt", 2, rollout_id=number)
    dump_files.rollout(tmp_path / "r" / "eval_1.pt", 2, rollout_id=1)
    for rank in (0, 1):
        dump_files.train(tmp_path / "t" / f"1_{rank}.pt", [dump_files.sample(0)], rollout_id=1)
    refs = known_dumps([f"{tmp_path}/r/{{rollout_id}}.pt"], [f"{tmp_path}/t/{{rollout_id}}_{{rank}}.pt"])
    found = listed(refs, [])
    assert [(one["rollout_id"], one["eval"], len(one["train"])) for one in found.dumps] == [
        (0, False, 0),
        (1, False, 2),
        (1, True, 0),
        (4, False, 0),
    ]
    assert found.holes == [2, 3]
    (alone,) = known_dumps([], [f"{tmp_path}/t/1_0.pt"])
    assert alone.kind == "train-v2"
    assert "no dump lies at /nowhere" in listed(known_dumps(["/nowhere/{rollout_id}.pt"], []), ["/nowhere"]).why


def ask(viewer: Viewer, path: str, **query: Any) -> DumpPageAnswer:
    """A page, asked for until it is complete."""

    def answered() -> DumpPageAnswer | None:
        answer = viewer.ask("dump-page?", DumpPageQuery(path, **query)).body
        assert isinstance(answer, DumpPageAnswer), answer
        return answer if answer.done else None

    found: DumpPageAnswer = wait_for(answered)
    return found


async def test_a_viewer_pages_through_the_runs_dumps_also_when_it_is_dead(tmp_path: Path) -> None:
    kept, other = tmp_path / "kept" / "rollout_data" / "3.pt", tmp_path / "other" / "3.pt"
    dump_files.rollout(kept, 40)
    dump_files.rollout(other)
    secret = tmp_path / "secret.pt"
    secret.write_text("not a dump")
    (kept.parent / "9.pt").symlink_to(secret)
    with real_daemon(tmp_path) as run, Producer(run) as trainer, Viewer(run) as viewer:
        viewer.hello()
        nothing = viewer.ask("dumps?", DumpsQuery()).body
        assert isinstance(nothing, DumpsAnswer)
        assert (nothing.dumps, "no dump lies at" in nothing.why) == ([], True)
        trainer.send("run", {"framework": "slime", "args": {"dump_details": str(tmp_path / "kept")}})
        viewer.until_state(lambda state: state["run"]["framework"] == "slime")
        there = viewer.ask("dumps?", DumpsQuery()).body
        assert isinstance(there, DumpsAnswer)
        assert [one["path"] for one in there.dumps if not one["problem"]] == [str(kept)]
        page = ask(viewer, str(kept), filter="reward=1", start=1, stop=3)
        assert [row["at"] for row in page.rows] == [3, 5]
        whole = ask(viewer, str(kept), want="whole", start=3)
        assert whole.samples[0]["response"] == "answer 3 is 9"
        for path in (str(other), str(kept.parent / "x" / ".." / "3.pt"), "/etc/passwd", "", "a\0b"):
            refused = ask(viewer, path)
            assert (refused.rows, refused.why) == ([], "it is not one of this run's dumps"), path
        broken = ask(viewer, str(kept.parent / "9.pt"))
        assert broken.rows == []
        assert broken.why
        (child,) = readers(run.pid)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        assert ask(viewer, str(kept), stop=1).rows, "the next question gets another one"
        (child,) = readers(run.pid)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running(), "it ends with the daemon"
    client = local_client(run)  # this shows the archive
    task = asyncio.create_task(client.run())
    try:
        assert [one["path"] for one in (await client.dumps()).dumps if not one["problem"]] == [str(kept)]
        assert len((await client.dump_page(DumpPageQuery(str(kept), stop=3))).rows) == 3
    finally:
        await client.close()
        await task


def readers(daemon: int) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(daemon).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended, perhaps a moment ago
            if "rltop.daemon.dump_pages" in one.cmdline():
                found.append(one)
    return found


def unread(process: psutil.Process) -> int:
    """Bytes in its stdin that it has not taken."""
    pipe = os.open(f"/proc/{process.pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
    finally:
        os.close(pipe)


async def test_a_reader_that_hangs_or_dies_is_an_answer(tmp_path: Path) -> None:
    path = dump_files.rollout(tmp_path / "dumps" / "1.pt", 2)
    reader = DumpReader(tmp_path, dict, answer_s=0.0)
    assert "took longer than 0 s" in (await reader.page(DumpPageQuery(str(path)))).why
    assert "took longer than 0 s" in (await reader.dumps(DumpsQuery())).why
    await reader.close()
    reader = DumpReader(tmp_path, dict)
    try:
        assert len((await reader.dumps(DumpsQuery())).dumps) == 1
        (child,) = readers(os.getpid())
        child.suspend()
        asked = asyncio.create_task(reader.page(DumpPageQuery(str(path))))
        await asyncio.to_thread(wait_for, lambda: unread(child) > 0)
        child.kill()
        assert "died (exit code -9)" in (await asked).why
        assert len((await reader.page(DumpPageQuery(str(path)))).rows) == 2
    finally:
        await reader.close()


async def test_relative_paths_are_those_of_where_the_run_was_started(tmp_path: Path) -> None:
    dump_files.rollout(tmp_path / "work" / "d" / "1.pt", 2)
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_bytes(msgspec.json.encode({"cwd": str(tmp_path / "work")}))
    reader = DumpReader(run, lambda: {"save_debug_rollout_data": "d/{rollout_id}.pt"})
    try:
        assert [one["path"] for one in (await reader.dumps(DumpsQuery())).dumps] == [str(tmp_path / "work/d/1.pt")]
    finally:
        await reader.close()


def test_files_that_did_not_change_are_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in (1, 2):
        dump_files.rollout(tmp_path / f"{at}.pt", 2, rollout_id=at)
    opened: list[Path] = []
    really = dump_find._looked

    def looked(path: Path, size: int) -> dump_find.DumpRef:
        opened.append(path)
        return really(path, size)

    monkeypatch.setattr(dump_find, "_looked", looked)
    seen: dump_find.Known = {}
    assert [ref.rollout_id for ref in known_dumps([str(tmp_path)], [], seen)] == [1, 2]
    dump_files.rollout(tmp_path / "3.pt", 2, rollout_id=3)
    dump_files.rollout(tmp_path / "2.pt", 3, rollout_id=2)
    assert [ref.rollout_id for ref in known_dumps([str(tmp_path)], [], seen)] == [1, 2, 3]
    assert [path.name for path in opened] == ["1.pt", "2.pt", "2.pt", "3.pt"]
