"""The demo without its hour on the processor: what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rltop.cli.main import main
from rltop.errors import RltopError
from rltop.runs import list_runs
from rltop.train import arguments
from tests.daemon.util import wait_for


@pytest.mark.parametrize("argv", [["demo", "--headless"], ["train", "--num-rollout", "1"], ["up", "up.toml"]])
def test_a_missing_extra_is_one_message_with_the_pip_command(argv: list[str], runs_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "up.toml").write_text("[trainer]\nnum_rollout = 1\n")
    script = "import sys; sys.modules['ray'] = None; from rltop.cli.main import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(
        f"rltop: {argv[0]}: this installation can watch, but not train\n  why: not installed"
    )
    assert f'{sys.executable} -m pip install "rltop[train]"' in ended.stderr
    assert not list_runs(), "nothing was started"


def test_what_the_trainer_would_refuse_is_said_before_anything_starts(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here its parser is a stand-in: the real one needs torch, seconds of it, to know the faults."""

    def refuse(argv: Sequence[str]) -> None:
        assert argv[list(argv).index("--inject") + 1] == "nosuch"
        raise RltopError("unknown fault 'nosuch'")

    monkeypatch.setattr(arguments, "parse_args", refuse)
    assert main(["demo", "--headless", "--inject", "nosuch"]) == 2
    assert "unknown fault 'nosuch'" in capsys.readouterr().err
    assert not list_runs()


@pytest.mark.train
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_while_it_starts_leaves_no_daemon_and_no_trainer(
    number: signal.Signals, code: int, runs_dir: Path
) -> None:
    command = [sys.executable, "-m", "rltop", "demo", "--headless"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_for(lambda: any(run.alive for run in list_runs()), "no daemon was started")
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == code, said
    assert "Traceback" not in said
    assert "is down; what it left is in" in said
    assert [run.alive for run in list_runs()] == [False]
    wait_for(lambda: not processes_below(runs_dir), "processes are left")


def processes_below(runs_dir: Path) -> list[str]:
    """Processes whose environment says that they belong to a run of `runs_dir`, other than this one."""
    mark = f"RLTOP_DIR={runs_dir}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue  # gone, or somebody else's
    return found
