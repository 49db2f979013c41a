"""Ten thousand sequences without a process, a hundred with real ones: in no order is anything lost that was seen.

The seed of a sequence is its number; a failure names it, and RLTOP_SEQUENCES="17" runs only that one.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from rltop import runs
from rltop.daemon import schema, spawn
from rltop.daemon.trainer_job import read_record
from rltop.runs import RunInfo
from tests.daemon.util import Producer, Viewer, wait_for
from tests.faults.test_run_faults import family
from tests.faults.world import Trainer, alive, journal_events, kill, kill_daemon, missing, stop_process

pytestmark = pytest.mark.soak

PURE = (
    "tests/protocol/test_codec.py",
    "tests/client/test_mirror.py",
    "tests/daemon/test_sessions.py",
    "tests/daemon/test_series.py",
    "tests/faults/test_sequences.py",
)
SEQUENCES = os.environ.get("RLTOP_SEQUENCES", "")
LENGTH = 12


@pytest.mark.parametrize("path", PURE)
def test_ten_thousand_examples(path: str) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "--timeout=3000", path]
    env = {**os.environ, "RLTOP_EXAMPLES": os.environ.get("RLTOP_EXAMPLES", "10000")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


class Life:
    """One run, its daemons, its trainer, its producers and its viewers."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        self.dice = dice
        self.trainer = Trainer(root)
        self.dir = root / "runs" / "t-1"
        self.run: RunInfo | None = None
        self.viewers: list[Viewer] = []
        self.shown: dict[int, str] = {}
        self.lines = 0
        self.log: list[str] = []
        self.pid = 0

    def daemon(self) -> RunInfo:
        """The living daemon, started if there is none."""
        if self.run is None:
            self.run = spawn.start_daemon("t-1", trainer=self.trainer.argv)
            record = wait_for(lambda: read_record(self.dir))
            assert self.pid in (0, record.pid), "a second trainer was started"
            self.pid = record.pid
        return self.run

    def produce(self) -> None:
        """Another source sends some records."""
        with Producer(self.daemon(), role="extra", rank=self.lines, pid=self.lines + 1) as producer:
            for _ in range(self.dice.randrange(1, 200)):
                self.lines += 1
                producer.send("log", {"level": "info", "text": f"extra {self.lines}"})
                producer.metrics(self.lines, extra=float(self.lines))

    def view(self) -> None:
        """A viewer comes, and sees the state."""
        viewer = Viewer(self.daemon())
        self.viewers.append(viewer)
        viewer.hello(fps=self.dice.choice([1.0, 5.0, 30.0]))
        viewer.until_state(lambda s: s["trainer"]["pid"] == self.pid)

    def read(self) -> None:
        """Every viewer takes a few frames."""
        self.daemon()
        for viewer in self.viewers:
            for _ in range(self.dice.randrange(1, 5)):
                viewer.receive()

    def leave(self) -> None:
        """A viewer goes without a word."""
        if self.viewers:
            self.close(self.viewers.pop(self.dice.randrange(len(self.viewers))))

    def stop_and_continue(self) -> None:
        """The daemon is stopped while the trainer makes some steps."""
        pid = self.daemon().pid
        stop_process(pid)
        self.trainer.goes_on(self.dice.randrange(1, 60))
        os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """The daemon is killed; the trainer goes on."""
        run = self.daemon()
        kill_daemon(run)
        self.run = None
        for viewer in self.viewers:
            self.close(viewer)
        self.viewers.clear()
        kept = journal_events(self.dir)
        lost = {eseq: text for eseq, text in self.shown.items() if kept.get(eseq) != text}
        assert not lost, "events that were shown are not in the journal"
        self.trainer.goes_on(3)

    def close(self, viewer: Viewer) -> None:
        """Remember what it has seen: it must be on disk already."""
        assert missing(viewer, self.dir) == []
        assert viewer.gaps == []
        self.shown |= {event["eseq"]: event["text"] for event in viewer.events}
        viewer.close()

    def end(self) -> None:
        """Stop in good order, or by the trainer's death, and look at what is left."""
        run = self.daemon()
        record = read_record(self.dir)
        assert record is not None
        assert alive(record.pid), "the trainer must not die of any of this"
        if self.dice.random() < 0.3:
            kill(record.pid)
            with Viewer(run) as viewer:
                viewer.hello()
                viewer.until_state(lambda s: s["run"]["state"] == "failed" and s["trainer"]["exit_code"] == -9)
        for viewer in self.viewers:
            self.close(viewer)
        spawn.stop_daemon(run)
        wait_for(lambda: not family(record.marker), "something of the run is left")
        assert runs.lock_holder(self.dir) is None
        kept = journal_events(self.dir)
        assert sorted(kept) == list(range(1, len(kept) + 1)), "the journal has holes"
        assert {eseq: kept[eseq] for eseq in self.shown} == self.shown
        with closing(schema.connect(self.dir / "journal.sqlite", read_only=True)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert not list(self.dir.glob("journal.damaged*"))

    def play(self) -> None:
        """One sequence."""
        actions: list[Callable[[], None]] = [
            self.produce,
            self.produce,
            self.view,
            self.view,
            self.read,
            self.read,
            self.leave,
            self.stop_and_continue,
            self.kill,
        ]
        for _ in range(LENGTH):
            action = self.dice.choice(actions)
            self.log.append(action.__name__)
            action()
        self.log.append("end")
        self.end()

    def clean(self) -> None:
        """After a failure: leave nothing behind."""
        if (pid := runs.lock_holder(self.dir)) is not None and pid:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):  # it may be ending this very moment
                os.kill(pid, signal.SIGCONT)
                kill(pid)
        if (record := read_record(self.dir)) is not None:
            for pid in family(record.marker):
                kill(pid)


@pytest.mark.timeout(3600)
def test_a_hundred_sequences_of_real_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [int(word) for word in SEQUENCES.split(",")] if SEQUENCES else list(range(100))
    for seed in seeds:
        root = tmp_path / str(seed)
        root.mkdir()
        monkeypatch.setenv("RLTOP_DIR", str(root))
        life = Life(root, random.Random(seed))
        try:
            life.play()
        except Exception as error:
            raise AssertionError(f"sequence {seed}: {', '.join(life.log)}") from error
        finally:
            life.clean()
