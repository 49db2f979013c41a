"""What the fault tests are made of: a real trainer whose progress can be read without any daemon, and ways to look."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from rltop import runs
from rltop.daemon import schema
from rltop.runs import RunInfo
from tests.daemon.util import Viewer, wait_for

_TRAINER = """
import mmap, os, signal, struct, subprocess, sys, time
from rltop.reporter import Reporter
path, engine = sys.argv[1], sys.argv[2]
with open(path, "w+b") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
if engine:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with Reporter() as reporter:
    reporter.run(framework="test", num_rollout=10**6)
    reporter.engine(id="0", state="HEALTHY", generation=1)
    step, slowest = 0, 0.0
    while True:
        began = time.monotonic()
        with reporter.phase("rollout", step):
            reporter.metrics({"rollout/raw_reward": float(step)}, step=step)
            reporter.log("info", f"line {step}")
        slowest = max(slowest, time.monotonic() - began)
        struct.pack_into("=qdqq", shared, 0, step, slowest, reporter.dropped, reporter.errors)
        print(f"step {step} " + 500 * ".", flush=True)
        step += 1
        time.sleep(0.01)
"""


class Trainer:
    """The trainer's side of the world: its command, and how far it is by its own account."""

    def __init__(self, folder: Path, *, engine: bool = False) -> None:
        self._file = folder / "progress"
        self.argv = [sys.executable, "-c", _TRAINER, str(self._file), "engine" if engine else ""]

    def _read(self) -> tuple[int, float, int, int]:
        import struct

        try:
            found = struct.unpack("=qdqq", self._file.read_bytes()[:32])
        except (OSError, struct.error):
            return (0, 0.0, 0, 0)
        return (int(found[0]), float(found[1]), int(found[2]), int(found[3]))

    @property
    def step(self) -> int:
        """Newest finished step."""
        return self._read()[0]

    @property
    def slowest_s(self) -> float:
        """Longest time that one step spent telling rltop about itself."""
        return self._read()[1]

    @property
    def errors(self) -> int:
        """Errors inside its reporter."""
        return self._read()[3]

    def goes_on(self, steps: int = 20) -> int:
        """Wait for so many more steps; returns how many there were."""
        before = self.step
        wait_for(lambda: self.step >= before + steps, "the trainer stands still")
        return self.step - before


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end of a child or a stranger."""
    process = psutil.Process(pid)
    process.kill()
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        process.wait(20)


def kill_daemon(run: RunInfo) -> None:
    """SIGKILL to the daemon; its lock is free afterwards, as soon as a program that it was just starting has its own
    descriptors."""
    kill(run.pid)
    wait_for(lambda: runs.lock_holder(run.path) is None, "its lock is held")


def journal_events(path: Path) -> dict[int, str]:
    """Sequence -> text of every event in the journal of a run directory."""
    with closing(schema.connect(path / "journal.sqlite", read_only=True)) as connection:
        return dict(connection.execute("SELECT eseq, text FROM events").fetchall())


def missing(viewer: Viewer, path: Path) -> list[int]:
    """Events that a viewer was shown and the journal does not hold."""
    kept = journal_events(path)
    return [event["eseq"] for event in viewer.events if kept.get(event["eseq"]) != event["text"]]


def seen(viewer: Viewer, lines: int) -> int:
    """Take frames until so many more events came; returns how many events it has seen in all."""
    wanted = len(viewer.events) + lines
    viewer.until(lambda message: len(viewer.events) >= wanted)
    return len(viewer.events)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def journal_message(viewer: Viewer, words: str) -> str:
    """The first event of the journal with these words, waited for."""
    find: Any = lambda: next(  # noqa: E731
        (e["text"] for e in viewer.events if e["source"] == "journal" and words in e["text"]), None
    )
    if find() is None:
        viewer.until(lambda message: find() is not None)
    return str(find())


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
