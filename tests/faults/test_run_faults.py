"""Rows of the fault table: the trainer dies, and the commands that start and own runs are interrupted or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rltop import runs
from rltop.cli.main import main
from rltop.daemon.trainer_job import MARKER, RECORD, read_record
from tests.daemon.util import Viewer, real_daemon, wait_for
from tests.faults.table import Row
from tests.faults.world import Trainer, alive, kill, missing, seen


def family(marker: str) -> list[int]:
    """Every process with this marker in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_trainer_killed(tmp_path: Path, row: Row) -> None:
    row.begin("trainer kill -9", "with an engine in a session of its own")
    trainer = Trainer(tmp_path, engine=True)
    with real_daemon(tmp_path, trainer=trainer.argv) as run, Viewer(run) as viewer:
        viewer.hello()
        seen(viewer, 30)
        viewer.until_state(lambda s: s["trainer"]["state"] == "running")
        marker, pid = viewer.state["trainer"]["marker"], viewer.state["trainer"]["pid"]
        (engine,) = [found for found in family(marker) if found != pid]
        kill(pid)
        viewer.until_state(lambda s: s["run"]["state"] == "failed" and s["trainer"]["state"] == "exited")
        text = viewer.state["run"]["text"]
        assert "SIGKILL" in text
        assert ": step " in text, "its last words"
        cleaned = viewer.until(lambda m: any("left 1 processes behind" in e["text"] for e in viewer.events))
        assert cleaned is not None
        assert not alive(engine)
        assert family(marker) == []
        assert viewer.state["trainer"]["exit_code"] == -9
        assert missing(viewer, run.path) == []
        left = next(e["text"] for e in viewer.events if "processes behind" in e["text"])
    row.say(went_on="it failed; the daemon goes on", kept="all", message=f"{text}; {left}")


# ---------------------------------------------------------------- rltop up


def config(folder: Path, command: list[str]) -> Path:
    path = folder / "run.toml"
    path.write_text(f'[run]\nname = "tiny"\n[trainer]\ncommand = {command}\n')
    return path


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "its run directory": lambda run: run.exists(),
    "its daemon": lambda run: runs.lock_holder(run) is not None,
    "its trainer": lambda run: (run / RECORD).exists(),
}


def test_ctrl_c_in_up(tmp_path: Path, row: Row) -> None:
    row.begin("Ctrl-C in rltop up", f"as soon as there is {', '.join(MOMENTS)}")
    path = config(tmp_path, ["sleep", "1000"])
    for number, (moment, there) in enumerate(MOMENTS.items()):
        root = tmp_path / str(number)
        env = {**os.environ, "RLTOP_DIR": str(root)}
        argv = [sys.executable, "-m", "rltop", "up", str(path)]
        with subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            run = root / "runs" / "tiny"
            wait_for(lambda: there(run))  # noqa: B023 - called here and now
            os.killpg(process.pid, signal.SIGINT)
            assert process.stderr is not None
            told = process.stderr.read()
            assert process.wait(60) == 130, (moment, told)
        assert runs.lock_holder(run) is None, f"a daemon is left, interrupted at {moment}"
        record = read_record(run)
        if record is not None:
            assert family(record.marker) == [], moment
        assert "Traceback" not in told
    row.say(went_on="no: the start is taken back, exit 130", kept="-", message=" ".join(told.split()))


def test_a_command_that_can_not_start(
    tmp_path: Path, row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row.begin("command that can not start", "a program that does not exist; one that dies at once")
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path))
    plain = tmp_path / "plain"
    plain.write_text("no program")
    for command, why in (["nosuchprogram", "x"], "no such program"), ([str(plain)], "not executable"):
        assert main(["up", str(config(tmp_path, command))]) == 2
        err = capsys.readouterr().err
        assert f"{tmp_path / 'run.toml'}:4" in err
        assert why in err
        assert not (tmp_path / "runs").exists(), "nothing was started"
    code = "import sys; print('line 1'); sys.exit('no GPU here')"
    assert main(["up", str(config(tmp_path, [sys.executable, "-c", code]))]) == 1
    err = capsys.readouterr().err
    assert "line 1" in err
    assert "no GPU here" in err
    assert runs.lock_holder(tmp_path / "runs" / "tiny") is None
    bad = config(tmp_path, [str(tmp_path / "interpreter")])
    (tmp_path / "interpreter").write_text("#!/no/such/interpreter\n")
    (tmp_path / "interpreter").chmod(0o755)
    assert main(["up", str(bad)]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["up", str(config(tmp_path, ["true"]))]) == 0, "a trainer that is done at once is done"
    assert "done already" in capsys.readouterr().err
    assert main(["down", "tiny"]) == 0
    row.say(went_on="not started: exit 2, and 1", kept="its log", message=" ".join(err.split()))


# ---------------------------------------------------------------- rltop demo


_OWNER = """
import sys
from rltop.daemon.spawn import start_daemon
from rltop.daemon.tether import Tether
tether = Tether()
run = start_daemon("t-1", trainer=[sys.executable, "-c", "import time; time.sleep(600)"], tether=tether)
if sys.argv[1] == "keep":
    tether.release()
print("up", flush=True)
input()
"""


@pytest.mark.parametrize("keep", [False, True])
def test_an_owner_killed(tmp_path: Path, row: Row, keep: bool) -> None:
    """`rltop demo` holds its run as this owner does (tests/cli/test_demo.py drives the command itself)."""
    if not keep:
        row.begin("owner of the run kill -9", "the process that holds the run as rltop demo does")
    env = {**os.environ, "RLTOP_DIR": str(tmp_path)}
    argv = [sys.executable, "-c", _OWNER, "keep" if keep else "-"]
    run = tmp_path / "runs" / "t-1"
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        wait_for(lambda: read_record(run) is not None)
        record = read_record(run)
        assert record is not None
        info = runs.read_run(run)
        assert info is not None
        with Viewer(info) as viewer:
            viewer.hello()
            viewer.until_state(lambda s: s["trainer"]["state"] == "running")
            kill(owner.pid)
            if keep:
                for _ in range(2):
                    viewer.until(lambda message: message.header.t == "tick")
                assert runs.lock_holder(run) == info.pid
                os.kill(info.pid, signal.SIGTERM)
            text = viewer.until_event(kind="run", source="daemon", level="info" if keep else "warn")["text"]
            viewer.until(lambda message: message.header.t == "bye")
    wait_for(lambda: runs.lock_holder(run) is None)
    wait_for(lambda: not alive(record.pid))
    if not keep:
        row.say(went_on="no: daemon and trainer ended with it", kept="all", message=text)
