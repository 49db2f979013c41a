"""Rows of the fault table: a disk that is full, and one that cannot be written.

A real small file system where this user may mount one (`tmpfs`, root in a container); else the fault is injected, and
the row says so: RLIMIT_FSIZE for "full", a read-only directory or SQLite's own error for "read-only".
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rltop.daemon import spawn
from tests.daemon.util import Viewer, real_daemon, wait_for
from tests.faults.table import Row
from tests.faults.world import Trainer, journal_message, kill_daemon, missing, seen


@contextmanager
def mounted(*argv: str, at: Path) -> Iterator[bool]:
    """A mount for the duration of the block; gives whether it worked (it takes root and a kernel that lets it)."""
    at.mkdir(exist_ok=True)
    may = os.getuid() == 0 and shutil.which("mount") is not None
    done = subprocess.run(["mount", *argv, str(at)], capture_output=True, check=False) if may else None
    ok = done is not None and done.returncode == 0
    try:
        yield ok
    finally:
        if ok:
            subprocess.run(["umount", "-l", str(at)], check=True)


@contextmanager
def fillable(folder: Path) -> Iterator[tuple[str, Callable[[int], None], Callable[[int], None]]]:
    """How the disk under `folder` is filled: in words, and two functions of the daemon's pid that fill and free it."""
    with mounted("-t", "tmpfs", "-o", "size=3m", "tmpfs", at=folder) as real:
        filler, done = folder / "filler", threading.Event()

        def fill_on() -> None:
            """Whoever fills a disk takes what others give back too: SQLite does, when it closes its journal."""
            with filler.open("wb", buffering=0) as file:
                while not done.wait(0.01):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(4096))

        thread = threading.Thread(target=fill_on, daemon=True)

        def free(pid: int) -> None:
            done.set()
            thread.join()
            filler.unlink()

        def limit(pid: int, size: int) -> None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        if real:
            yield "a tmpfs of 3 MiB filled to the last page (ENOSPC)", lambda pid: thread.start(), free
            done.set()
        else:
            yield (
                "RLIMIT_FSIZE 0 on the daemon (no mount allowed here)",
                lambda pid: limit(pid, 0),
                lambda pid: limit(pid, resource.RLIM_INFINITY),
            )


def test_a_full_disk(tmp_path: Path, row: Row) -> None:
    trainer = Trainer(tmp_path)
    with fillable(tmp_path / "disk") as (how, fill, free), real_daemon(tmp_path / "disk", trainer=trainer.argv) as run:
        row.begin("disk full", how)
        with Viewer(run) as one, Viewer(run) as two:
            for viewer in (one, two):
                viewer.hello()
                seen(viewer, 20)
            fill(run.pid)
            messages = [journal_message(viewer, "goes on in memory") for viewer in (one, two)]
            assert "full" in messages[0] or "disk I/O error" in messages[0]
            assert messages[0] == messages[1]
            for viewer in (one, two):
                viewer.until_state(lambda s: s["daemon"]["journal"] != "ok")
                seen(viewer, 60)
            steps = trainer.goes_on(50)
            with Viewer(run) as late:  # also who comes now is told
                late.hello()
                late.until_state(lambda s: s["daemon"]["journal"] != "ok")
            with closing(sqlite3.connect(f"{(run.path / 'journal.sqlite').as_uri()}?immutable=1", uri=True)) as disk:
                on_disk = {eseq for (eseq,) in disk.execute("SELECT eseq FROM events")}
            behind = len([event for event in one.events if event["eseq"] not in on_disk])
            assert behind > 40, "the disk really took nothing"
            free(run.pid)
            again = journal_message(one, "works again")
            assert "0 rows were lost" in again
            one.until_state(lambda s: s["daemon"]["journal"] == "ok")
            seen(one, 20)
            kill_daemon(run)
            assert missing(one, run.path) == [], "what was shown in the meantime is written when there is room"
            shown = len(one.events)
        run = spawn.start_daemon("t-1", trainer=trainer.argv)
        spawn.stop_daemon(run)
    row.say(
        went_on=f"yes, {steps} steps while it was full",
        kept=f"all of {shown}, {behind} of them written when there was room",
        message=f"{messages[0]}; then: {again}",
    )


def test_a_disk_that_is_read_only_from_the_start(tmp_path: Path, row: Row) -> None:
    disk = tmp_path / "disk"
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", at=disk) as real:
        (disk / "t-1").mkdir(mode=0o700)
        argv = [sys.executable, "-m", "rltop.daemon", "--run-dir", str(disk / "t-1")]
        if real:
            how = "tmpfs remounted read-only (EROFS)"
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        elif os.getuid() == 0:  # permissions do not bind root
            how = "RLIMIT_FSIZE 0 on the daemon (no mount allowed here)"
            argv = ["bash", "-c", 'ulimit -f 0; exec "$0" "$@"', *argv]
        else:
            how = "directory without write permission (EACCES)"
            (disk / "t-1").chmod(0o500)
        row.begin("read-only disk at start", how)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert "cannot write in the run directory" in done.stderr
        (disk / "t-1").chmod(0o700) if not real else None
    row.say(went_on="refused, exit 2", kept="nothing was touched", message=" ".join(done.stderr.split()))


_INJECTED = """
import sqlite3, sys
from pathlib import Path
from rltop.daemon import schema
flag, plain = Path(sys.argv.pop(1)), schema.connect
class Connection(sqlite3.Connection):
    def execute(self, statement, *values):
        if flag.exists() and statement.startswith(("BEGIN", "PRAGMA journal_mode")):
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return super().execute(statement, *values)
def connect(path, *, read_only=False):
    if read_only:
        return plain(path, read_only=True)
    uri = f"{path.absolute().as_uri()}?mode=rwc"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, factory=Connection)
schema.connect = connect
from rltop.daemon.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_becomes_read_only(tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    row.begin("read-only disk mid-run", "SQLITE_READONLY injected into every write (a mount in use stays as it is)")
    trainer, flag = Trainer(tmp_path), tmp_path / "read-only"
    plain = spawn._spawn

    def injected(argv: list[str], *more: object) -> int:
        place = argv.index("rltop.daemon")
        changed = [argv[0], "-c", _INJECTED, str(flag), *argv[place + 1 :]]
        return plain(changed, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(spawn, "_spawn", injected)
    with real_daemon(tmp_path, trainer=trainer.argv) as run, Viewer(run) as viewer:
        viewer.hello()
        seen(viewer, 20)
        flag.touch()
        message = journal_message(viewer, "readonly database")
        viewer.until_state(lambda s: s["daemon"]["journal"] != "ok")
        seen(viewer, 50)
        steps = trainer.goes_on()
        assert missing(viewer, run.path)
        flag.unlink()
        again = journal_message(viewer, "works again")
        wait_for(lambda: not missing(viewer, run.path))
    row.say(went_on=f"yes, {steps} steps", kept="all, when it could be written again", message=f"{message}; {again}")
