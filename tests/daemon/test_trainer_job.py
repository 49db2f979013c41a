"""The supervised trainer: its exit becomes the run's state, and stopping it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rltop.daemon.trainer_job import (
    MARKER,
    TrainerJob,
    TrainerRecord,
    adopt_trainer,
    last_line,
    read_record,
    start_trainer,
)
from rltop.engines.keeper import birth
from rltop.errors import RltopError
from tests.daemon.util import wait_for


def start(tmp_path: Path, code: str, marker: str = "") -> TrainerJob:
    """A trainer that runs Python code; it says `ready` when it has set itself up.

    The marker is the test's own by default: a second test run beside this one must not find these processes.
    """
    marker = marker or str(tmp_path)
    return start_trainer([sys.executable, "-c", code], run_dir=tmp_path, env=dict(os.environ), marker=marker)


def ready(job: TrainerJob) -> None:
    wait_for(lambda: "ready" in job.log.read_text(), "the trainer did not get ready")


SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
# A child in a session of its own that ignores TERM, as Ray's daemons live in sessions of their own.
SPAWNS = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', \"import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)\"], "
    "start_new_session=True); print('child', p.pid, flush=True); p.wait()"
)


@pytest.mark.parametrize(
    ("code", "exit_code", "state"),
    [
        ("print('fine')", 0, "done"),
        ("raise SystemExit(3)", 3, "failed"),
        ("raise SystemExit(130)", 130, "interrupted"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "failed"),
    ],
)
async def test_the_exit_code_becomes_the_state_of_the_run(
    tmp_path: Path, code: str, exit_code: int, state: str
) -> None:
    end = await start(tmp_path, code).wait()
    assert (end.code, end.state) == (exit_code, state)


async def test_a_failure_is_told_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    end = await start(tmp_path, "raise RuntimeError('the disk ate it')").wait()
    assert end.text == "the trainer ended with code 1: RuntimeError: the disk ate it"


async def test_it_is_a_session_of_its_own_and_writes_to_its_log(tmp_path: Path) -> None:
    job = start(tmp_path, "import os; print('sid', os.getsid(0) == os.getpid())")
    await job.wait()
    assert (tmp_path / "trainer.log").read_text() == "sid True\n"
    assert last_line(job.log) == "sid True"


async def test_stop_asks_first(tmp_path: Path) -> None:
    job = start(tmp_path, SLEEPS)
    ready(job)
    stages: list[str] = []
    await job.stop(stages.append)
    end = await job.wait()
    assert (end.code, end.state) == (-15, "interrupted")
    assert [stage.split()[0] for stage in stages] == ["TERM"]


async def test_stop_insists(tmp_path: Path) -> None:
    job = start(tmp_path, STUBBORN)
    ready(job)
    stages: list[str] = []
    await job.stop(stages.append, term_s=0.2, poll_s=0.02)
    assert not job.running()
    assert [stage.split()[0] for stage in stages] == ["TERM", "KILL"]


async def test_processes_in_sessions_of_their_own_are_found_by_their_marker(tmp_path: Path) -> None:
    job = start(tmp_path, SPAWNS)
    ready(job)
    child = int(job.log.read_text().split("child ")[1].split()[0])
    stages: list[str] = []
    await job.stop(stages.append, term_s=0.2, poll_s=0.02)
    assert f"KILL to process {child}, left over by the trainer" in stages
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


async def test_processes_of_other_starts_are_not_touched(tmp_path: Path) -> None:
    other_dir = tmp_path / "other"
    other_dir.mkdir()
    job, other = start(tmp_path, SLEEPS), start(other_dir, SLEEPS)
    ready(job)
    ready(other)
    stages: list[str] = []
    await job.stop(stages.append, term_s=0.2, poll_s=0.02)
    assert not [stage for stage in stages if "left over" in stage]
    assert other.running()
    await other.stop()


async def test_a_trainer_of_an_earlier_daemon_is_adopted_by_marker_and_start_time(tmp_path: Path) -> None:
    job = start(tmp_path, SLEEPS + "; raise SystemExit(7)")
    ready(job)
    record = read_record(tmp_path)
    assert record is not None
    assert (record.pid, record.marker, record.code) == (job.pid, str(tmp_path), None)
    assert adopt_trainer(replace(record, marker="another"), tmp_path) is None
    assert adopt_trainer(replace(record, birth=record.birth[:-1] + "x"), tmp_path) is None
    assert adopt_trainer(replace(record, birth=""), tmp_path) is None
    adopted = adopt_trainer(record, tmp_path)
    assert adopted is not None
    await adopted.stop()
    end = await adopted.wait()
    assert (end.state, end.code) == ("interrupted", -15), "the keeper tells it to whoever asks"
    await job.wait()
    assert adopt_trainer(record, tmp_path) is None


async def test_a_reused_pid_is_not_adopted_even_with_the_marker(tmp_path: Path) -> None:
    """The worst case: the pid was given to a process that inherited the marker, an engine of the same trainer."""
    job = start(tmp_path, SLEEPS)
    ready(job)
    record = read_record(tmp_path)
    assert record is not None
    with sleeper({**os.environ, MARKER: record.marker}) as stranger, sleeper(dict(os.environ)) as plain:
        assert adopt_trainer(replace(record, pid=stranger), tmp_path) is None
        assert adopt_trainer(replace(record, pid=plain, birth=birth(plain)), tmp_path) is None
        assert adopt_trainer(record, tmp_path) is not None
    await job.stop()


@contextmanager
def sleeper(env: dict[str, str]) -> Iterator[int]:
    """Some other process, by its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env) as process:
        wait_for(lambda: psutil.Process(process.pid).cmdline())
        yield process.pid
        process.kill()


LEAVES_SLOWLY = """
import ctypes, os, threading, time
def last():
    print('ready', flush=True)
    time.sleep(1.0)
    os._exit(0)
threading.Thread(target=last).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_a_trainer_that_takes_long_to_leave_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first thread has ended, so it is a zombie, and another one still frees what it held."""
    monkeypatch.setattr("rltop.daemon.trainer_job.RECORD_S", 0.2)
    job = start(tmp_path, LEAVES_SLOWLY)
    ready(job)
    wait_for(lambda: not job.running(), "the first thread does not end")
    record = read_record(tmp_path)
    assert record is not None
    assert record.code is None, "nothing is told yet"
    end = await job.wait()
    assert (end.code, end.state) == (0, "done")


async def test_without_its_keeper_the_trainer_goes_on_and_its_exit_code_is_unknown(tmp_path: Path) -> None:
    job = start(tmp_path, SLEEPS)
    ready(job)
    os.kill(job.keeper, signal.SIGKILL)
    wait_for(lambda: psutil.Process(job.keeper).status() == psutil.STATUS_ZOMBIE)
    assert job.running()
    adopted = adopt_trainer(read_record(tmp_path) or TrainerRecord(""), tmp_path)
    assert adopted is not None
    psutil.Process(job.pid).kill()
    end = await adopted.wait()
    assert (end.code, end.state) == (None, "failed")
    assert "how is not known" in end.text


async def test_the_keeper_survives_what_is_meant_for_the_trainer(tmp_path: Path) -> None:
    job = start(tmp_path, SLEEPS)
    ready(job)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(job.keeper, number)
    assert job.running()
    os.kill(job.pid, signal.SIGINT)
    end = await job.wait()
    assert end.code == -2, "SIGINT is not ignored in the trainer though its keeper ignores it"


@pytest.mark.parametrize("text", ["", "[]", '{"pid": "x", "code": "y", "ended": []}', "{"])
def test_a_broken_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer.json").write_text(text)
    record = read_record(tmp_path)
    assert record is None or (record.pid, record.code) == (0, None)
    assert record is None or adopt_trainer(record, tmp_path) is None


@pytest.mark.parametrize(("name", "why"), [("/no/such/trainer", "No such file"), ("plain", "Permission denied")])
def test_a_program_that_can_not_be_started_is_a_message(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "plain").write_text("not a program")
    where = name if name.startswith("/") else str(tmp_path / name)
    with pytest.raises(RltopError, match="cannot start the trainer") as caught:
        start_trainer([where], run_dir=tmp_path, env={}, marker="m")
    assert caught.value.where == where
    assert why in caught.value.why


async def test_the_marker_is_in_its_environment(tmp_path: Path) -> None:
    job = start(tmp_path, f"import os; print(os.environ['{MARKER}'])", marker="amber-1/abc")
    await job.wait()
    assert last_line(job.log) == "amber-1/abc"


async def test_room_for_the_log_is_reserved_and_given_back(tmp_path: Path) -> None:
    job = start(tmp_path, SLEEPS)
    ready(job)
    wait_for(lambda: job.log.stat().st_blocks * 512 >= 1 << 18, "nothing was reserved")
    assert job.log.read_text() == "ready\n", "what is reserved is not in the file"
    await job.stop()
    await job.wait()
    assert job.log.stat().st_blocks * 512 < 1 << 18


def test_the_reason_of_an_end_is_the_first_line_of_an_error(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("before\nrltop: --lr: bad value\n  why: it is -1\n  do:  --lr 1e-3\n")
    assert last_line(log) == "rltop: --lr: bad value"
    with log.open("a") as file:
        file.write('{"schema": 1, "reason": "failed"}\n')
    assert last_line(log) == "rltop: --lr: bad value"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no\n')
    assert last_line(log) == "ValueError: no"
    log.write_text("  only this\n")
    assert last_line(log) == "only this"
