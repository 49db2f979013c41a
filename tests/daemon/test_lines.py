"""Lines around evidence: bounded, read-only, never from outside the run, also of a run that is dead."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rltop.client import local_client
from rltop.daemon import lines
from rltop.daemon.lines import SourceLines
from rltop.protocol.messages import LinesAnswer, LinesQuery
from tests.daemon.util import Viewer, real_daemon

OOM = "(MegatronTrainRayActor pid=41) [2026-03-01 10:00:00] model.py:9 - torch.OutOfMemoryError: CUDA out of memory. "
OOM += "Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.00 GiB is free."


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "r"
    (folder / "keys").mkdir(parents=True)
    (folder / "keys" / "trainer.secret").write_text("secret\n")
    (folder / "trainer.log").write_text("".join(f"line {i}\n" for i in range(1, 1001)))
    (tmp_path / "outside.log").write_text("not of this run\n")
    return folder


def ask(run: Path, source: str, line: int = 1, *, logs: dict[str, Path] | None = None, **more: int) -> LinesAnswer:
    sources = SourceLines(run, lambda: logs or {})
    query = LinesQuery(source, line, **more)
    return sources.answer(query, sources.find(source))


@pytest.mark.parametrize(
    ("line", "before", "after", "first", "last"),
    [(500, 2, 3, 498, 503), (1, 5, 1, 1, 2), (1000, 1, 50, 999, 1000), (-1, 0, 0, 1, 1), (600, -5, -5, 600, 600)],
)
def test_the_lines_around_one(run: Path, line: int, before: int, after: int, first: int, last: int) -> None:
    found = ask(run, "trainer.log", line, before=before, after=after)
    assert (found.first, found.lines[0], found.lines[-1]) == (first, f"line {first}", f"line {last}")
    assert len(found.lines) == last - first + 1
    assert found.why == ""


def test_line_0_is_the_end_of_the_log(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(run, "trainer.log", 0, before=3)
    assert (found.first, found.lines) == (0, ["line 998", "line 999", "line 1000"])
    assert len(ask(run, "trainer.log", 0, before=10_000).lines) == 500
    (run / "open.log").write_bytes(b"one\r\ntw\xff")
    assert ask(run, "open.log", 0).lines == ["one", "tw\ufffd"]
    (run / "empty.log").touch()
    assert ask(run, "empty.log", 0).why == "it is empty"
    (run / "binary.log").write_bytes(b"\0\1")
    assert ask(run, "binary.log", 0).why == "it is no text"
    assert ask(run, "../outside.log", 0).lines == []
    monkeypatch.setattr(lines, "MOST_BYTES", 25)
    assert ask(run, "trainer.log", 0).lines == ["line 999", "line 1000"], "a line that was cut is left out"


def test_numbers_are_those_of_an_editor_whatever_the_sizes_of_reads(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(lines, "_CHUNK", chunk)
        assert ask(run, "trainer.log", 777, before=0, after=0).lines == ["line 777"]


def test_a_line_that_is_gone_says_how_many_there_are(run: Path) -> None:
    assert "has 1000 lines, so line 1001 was" in ask(run, "trainer.log", 1001, before=1).why
    assert "has 1000 lines, so line 5000 was" in ask(run, "trainer.log", 5000).why
    (run / "cut.log").write_text("one\ntwo")
    assert ask(run, "cut.log", 2).lines == ["one", "two"]
    assert "has 2 lines" in ask(run, "cut.log", 3, before=0).why
    assert "has 2 lines" in ask(run, "cut.log", 300, before=0).why
    (run / "empty.log").write_text("")
    assert "has 0 lines" in ask(run, "empty.log", 1).why


def test_nothing_outside_the_run_is_read_and_no_key(run: Path) -> None:
    (run / "link.log").symlink_to(run.parents[1] / "outside.log")
    (run / "keylink.log").symlink_to(run / "keys" / "trainer.secret")
    (run / "round.log").symlink_to("round.log")
    for source in (
        "../../outside.log",
        str(run.parents[1] / "outside.log"),
        "link.log",
        "keys/trainer.secret",
        "keylink.log",
        "x/../keys/trainer.secret",
        "round.log",
        "",
        ".",
        "a\0b",
        "x" * 5000,
        "/etc/passwd",
        "train/grad_norm@3",
    ):
        found = ask(run, source)
        assert (found.lines, "neither a log that" in found.why) == ([], True), source


def test_a_log_that_the_daemon_follows_is_read_wherever_it_lies(run: Path) -> None:
    engine = run.parents[1] / "outside.log"
    assert ask(run, str(engine), logs={str(engine): engine}).lines == ["not of this run"]
    (run / "inner.log").symlink_to(run / "trainer.log")
    assert ask(run, "inner.log", 1, after=0).lines == ["line 1"], "a link that stays inside"


def test_what_is_no_text_and_no_file_is_not_read(run: Path) -> None:
    (run / "journal.sqlite").write_bytes(b"SQLite\0\1\2\n")
    os.mkfifo(run / "pipe.log")
    assert ask(run, "journal.sqlite").why == "it is no text"
    assert ask(run, "pipe.log").lines == []
    assert ask(run, "pipe", logs={"pipe": run / "pipe.log"}).why == "it is no regular file"
    assert ask(run, "gone", logs={"gone": run / "gone.log"}).why == "No such file or directory"


def test_an_answer_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "wide.log").write_bytes(b"".join(b"x" * 100_000 + b"\n" for _ in range(400)) + b"\xff end\n")
    found = ask(run, "wide.log", 200, before=10**9, after=10**9)
    assert len(found.lines) <= lines.MOST_BYTES // lines.MOST_LINE
    assert set(map(len, found.lines)) == {lines.MOST_LINE}
    assert ask(run, "wide.log", 401, before=0).lines == ["\ufffd end"]
    assert len(ask(run, "trainer.log", 500, before=10**9, after=10**9).lines) <= 2 * lines.MOST_AROUND + 1
    monkeypatch.setattr(lines, "MOST_SCAN", 1 << 20)
    assert "behind the first" in ask(run, "wide.log", 300, before=0).why


async def test_a_viewer_opens_the_line_of_a_verdict_also_when_the_run_is_dead(tmp_path: Path) -> None:
    program = f"import sys, time; print('calm'); print({OOM!r}); sys.stdout.flush(); time.sleep(600)"
    with real_daemon(tmp_path, trainer=[sys.executable, "-c", program]) as run, Viewer(run) as viewer:
        viewer.hello()
        state = viewer.until_state(lambda s: s.get("check/train.oom", {}).get("status") == "fail")
        evidence = state["check/train.oom"]["evidence"][0]
        answer = viewer.ask("lines?", LinesQuery(evidence["source"], evidence["line"])).body
        assert isinstance(answer, LinesAnswer)
        assert (answer.first, answer.lines[:2]) == (1, ["calm", OOM])
        refused = viewer.ask("lines?", LinesQuery("/etc/passwd", 1)).body
        assert isinstance(refused, LinesAnswer)
        assert refused.lines == []
    client = local_client(run)  # its daemon is gone: this shows the archive
    task = asyncio.create_task(client.run())
    try:
        assert await client.lines("trainer.log", 2, before=0, after=0) == LinesAnswer("trainer.log", 2, [OOM])
        assert (await client.lines("keys", 1)).lines == []
    finally:
        await client.close()
        await task


def test_the_lines_of_a_log_that_was_replaced_are_counted_on(run: Path) -> None:
    sources = SourceLines(run, dict, lambda: {"trainer.log": 50})
    path = sources.find("trainer.log")
    found = sources.answer(LinesQuery("trainer.log", 53, 1, 1), path)
    assert (found.first, found.lines) == (52, ["line 2", "line 3", "line 4"])
    assert "this one begins with line 51" in sources.answer(LinesQuery("trainer.log", 50), path).why
    assert "its line 1 is counted as 51" in sources.answer(LinesQuery("trainer.log", 1051), path).why
