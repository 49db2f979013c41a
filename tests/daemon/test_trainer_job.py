"""The supervised trainer: its exit becomes the run's state, and stopping it leaves nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from rltop.daemon.trainer_job import MARKER, TrainerJob, adopt_trainer, last_line, start_trainer
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
    job = start(tmp_path, SLEEPS)
    ready(job)
    assert adopt_trainer(job.pid, job.create_time, "another", job.log) is None
    assert adopt_trainer(job.pid, job.create_time - 5, job.marker, job.log) is None
    adopted = adopt_trainer(job.pid, job.create_time, job.marker, job.log)
    assert adopted is not None
    await adopted.stop()
    assert (await adopted.wait()).state == "interrupted"
    await job.wait()
    assert adopt_trainer(job.pid, job.create_time, job.marker, job.log) is None


def test_a_program_that_does_not_exist_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="cannot start the trainer") as caught:
        start_trainer(["/no/such/trainer"], run_dir=tmp_path, env={}, marker="m")
    assert caught.value.where == "/no/such/trainer"


async def test_the_marker_is_in_its_environment(tmp_path: Path) -> None:
    job = start(tmp_path, f"import os; print(os.environ['{MARKER}'])", marker="amber-1/abc")
    await job.wait()
    assert last_line(job.log) == "amber-1/abc"
