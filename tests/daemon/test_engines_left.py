"""Whether a run's engines are really gone, told by the processes themselves: `sleep` with an engine's environment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltop.cli.main import main
from rltop.daemon import engines_left
from rltop.daemon.engines_left import living, make_sure
from rltop.engines import processes
from rltop.errors import RltopError
from rltop.runs import acquire_lock

Begin = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "r"))
    path = tmp_path / "r" / "runs" / "left"
    (path / "engines").mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


@pytest.fixture
def begin(run_dir: Path) -> Iterator[Begin]:
    """Starts a process that says it is of engine `name`, generation 1, in `folder`."""
    started = []

    def start(
        name: str, *, run: str = "left", folder: Path = run_dir, words: tuple[str, ...] = ("sleep", "600")
    ) -> Any:
        mine = {
            "RLTOP_ENGINE": f"{run}/{name}/1",
            "RLTOP_ENGINE_DIR": os.path.realpath(folder / "engines" / name / "1"),
        }
        env = {**os.environ, **mine}
        started.append(subprocess.Popen(words, env=env, start_new_session=True, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_only_processes_with_marker_and_folder_of_the_run_are_its_engines(
    run_dir: Path, begin: Begin, tmp_path: Path
) -> None:
    mine = [begin("0"), begin("a-b")]
    others = [begin("0", run="left2"), begin("0", folder=tmp_path / "other" / "left"), begin("0", run="lef")]
    found = living(run_dir)
    assert {one.pid: name for one, name in found.items()} == {mine[0].pid: "0", mine[1].pid: "a-b"}
    assert make_sure(run_dir, lambda text: None) == ["0", "a-b"]
    assert [process.wait(5) for process in mine] == [-signal.SIGTERM] * 2
    assert [process.poll() for process in others] == [None] * 3


def test_down_ends_what_no_file_tells_of_and_says_so(
    run_dir: Path, begin: Begin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the processes is left: no slot file, no lock, no record. One of them ignores TERM."""
    monkeypatch.setattr(engines_left, "TERM_S", 0.5)
    deaf = begin("1", words=("sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"))
    assert deaf.stdout is not None
    assert deaf.stdout.readline() == b"deaf\n"
    plain = begin("0")
    assert main(["down", "left"]) == 0
    assert "run left had no daemon; engine 0, 1 of it is stopped" in capsys.readouterr().err
    assert (plain.wait(5), deaf.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)
    assert main(["down", "left"]) == 0
    assert "run left is not running" in capsys.readouterr().err


def test_a_process_in_the_middle_of_its_exec_is_looked_at_again(
    run_dir: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux lets who started it go on before its environment is there to be read."""
    process, real, blank = begin("0"), psutil.Process.environ, [3]

    def environ(self: psutil.Process) -> dict[str, str]:
        if self.pid == process.pid and blank[0]:
            blank[0] -= 1
            return {}
        return real(self)

    monkeypatch.setattr(psutil.Process, "environ", environ)
    assert list(living(run_dir).values()) == ["0"]
    assert blank == [0]


def test_down_is_no_success_while_an_engine_lives(
    run_dir: Path, begin: Begin, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a process inside a system call: signals do nothing to it."""
    process = begin("7")
    monkeypatch.setattr(engines_left, "TERM_S", 0.1)
    monkeypatch.setattr(engines_left, "KILL_S", 0.1)
    monkeypatch.setattr(processes, "send", lambda one, number: False)
    assert main(["down", "left"]) == 1
    said = capsys.readouterr().err
    assert "run 'left' is not down: it has engines that live" in said
    assert f"engine 7: process {process.pid} (sleep 600)" in said
    assert process.poll() is None


def test_a_fleet_that_refuses_does_not_keep_engines_alive(run_dir: Path, begin: Begin) -> None:
    """Slots of a newer rltop are not touched; their processes end."""
    slot = run_dir / "engines" / "0" / "slot.json"
    slot.parent.mkdir()
    slot.write_text('{"schema": 2}')
    process, told = begin("0"), list[str]()
    assert make_sure(run_dir, told.append) == ["0"]
    assert process.wait(5) == -signal.SIGTERM
    assert "written by a newer rltop" in told[0]
    assert slot.read_text() == '{"schema": 2}'


def test_engines_of_a_run_that_a_daemon_has_taken_up_are_left_alone(run_dir: Path, begin: Begin) -> None:
    process, lock = begin("0"), acquire_lock(run_dir)
    try:
        with pytest.raises(RltopError, match="a daemon is already running"):
            make_sure(run_dir, lambda text: None)
    finally:
        os.close(lock)
    assert process.poll() is None
