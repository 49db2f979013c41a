"""Queries beyond the ring, and what the daemon does with faults of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rltop.daemon.backend import DaemonBackend
from rltop.daemon.commands import Actions, Commands, Stage
from rltop.daemon.dump_pages import DumpReader
from rltop.daemon.events import MAX_TEXT, EventRing
from rltop.daemon.ingest import Ingest
from rltop.daemon.journal import Journal
from rltop.daemon.lines import SourceLines
from rltop.daemon.publish import Publisher
from rltop.daemon.queries import MAX_EVENT_CHARACTERS
from rltop.daemon.trainer_job import adopt_trainer, read_record
from rltop.daemon.verdicts import Verdicts
from rltop.protocol.messages import EventsQuery, SeriesQuery
from tests.daemon.fakes import FakeCore


async def _nothing(stage: Stage) -> str:
    return ""


async def _yes() -> bool:
    return True


def backend(core: FakeCore, journal: Path) -> DaemonBackend:
    actions = Actions(_nothing, _nothing, lambda: False, _yes, lambda *_: None, lambda _: False)
    return DaemonBackend(
        core,
        run="r",
        ingest=Ingest(core, host="here", alive=lambda pid: True),
        verdicts=Verdicts(core, None),
        commands=Commands(core, actions, epoch="e"),
        journal=journal,
        publisher=Publisher(core),
        lag_ms=lambda: 0.0,
        sources=SourceLines(journal.parent, dict),
        dumps=DumpReader(journal.parent, dict),
    )


@pytest.fixture
def core() -> FakeCore:
    found = FakeCore()
    found.ring = EventRing(10)
    return found


async def test_events_that_left_the_ring_come_from_the_journal_without_a_seam(core: FakeCore, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.start()
    for number in range(1, 41):
        journal.event(core.event("op" if number % 4 == 0 else "log", "info", f"Line {number}"))
    assert journal.close()
    asked = backend(core, journal.path)

    async def page(**query: object) -> tuple[list[int], bool]:
        answer = await asked.events(EventsQuery(**query))  # type: ignore[arg-type]  # the test's own keywords
        return [event["eseq"] for event in answer.events], answer.more

    assert await page(limit=5) == ([36, 37, 38, 39, 40], True)
    assert await page(limit=15) == (list(range(26, 41)), True)
    assert await page(limit=40) == (list(range(1, 41)), False)
    assert await page(lo=28, hi=33) == (list(range(28, 34)), False)
    assert await page(kinds=["op"], limit=4) == ([28, 32, 36, 40], True)
    assert await page(text="LINE 3", limit=100) == ([3, *range(30, 40)], False)
    assert await page(lo=35) == (list(range(35, 41)), False)


async def test_a_page_of_long_texts_stays_within_a_message(core: FakeCore, tmp_path: Path) -> None:
    core.ring = EventRing(3000)
    for _ in range(1500):
        core.event("log", "info", "𝕏" * MAX_TEXT)
    answer = await backend(core, tmp_path / "none").events(EventsQuery(limit=1500))
    assert answer.more
    assert len(answer.events) == MAX_EVENT_CHARACTERS // MAX_TEXT
    assert answer.events[-1]["eseq"] == 1500


async def test_very_many_buckets_are_made_fewer(core: FakeCore, tmp_path: Path) -> None:
    for key in range(100):
        for step in range(5):
            core.point(f"k{key}", step, 1.0)
    answer, blobs = await backend(core, tmp_path / "none").series(
        SeriesQuery([f"k{key}" for key in range(100)] * 2 + ["no"], buckets=10**9)
    )
    assert (len(answer.cols), len(blobs), answer.missing) == (100, 500, ["no"])


def test_a_fault_of_its_own_is_said_once_and_counted(core: FakeCore, tmp_path: Path) -> None:
    core.set("daemon", {"faults": 0})
    asked = backend(core, tmp_path / "none")
    for _ in range(3):
        asked.trouble("ingest", KeyError("x"))
    assert core.table.get("daemon")["faults"] == 3
    assert len(core.texts("log")) == 1


BROKEN = """
import sys
from rltop.daemon import sources
from rltop.daemon.__main__ import main
async def broken(self): raise RuntimeError("a bug of ours")
sources.EngineScraper.run = broken
sys.exit(main(sys.argv[1:]))
"""


def test_a_part_that_breaks_ends_the_daemon_but_not_the_trainer(tmp_path: Path) -> None:
    trainer = [sys.executable, "-c", "import time; time.sleep(600)"]
    run_dir = tmp_path / "t-1"
    argv = [sys.executable, "-c", BROKEN, "--run-dir", str(run_dir), "--", *trainer]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "a bug of ours" in done.stderr
    record = read_record(run_dir)
    assert record is not None
    job = adopt_trainer(record, run_dir)
    assert job is not None, "the trainer must not die of a fault in its monitor"
    psutil.Process(job.pid).kill()
