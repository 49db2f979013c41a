"""A wrong command line is one message on stderr, nothing on stdout, and exit code 2."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rltop import __version__
from rltop.cli.main import main
from tests.cli.conftest import rltop
from tests.client.model import ModelDaemon
from tests.client.router import spec_daemon


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["gte"], "No such command 'gte'. Did you mean 'get'?"),
        (["attach", "--contrl"], "No such option: --contrl (Possible options: --control"),
        (["attach", "--fps", "fast"], "--fps"),
        (["attach", "--fps", "100"], "--fps"),
        (["attach", "--json"], "--json goes with --once"),
        (["attach", "--once", "http://x"], "this is not an ssh target"),
        (["attach"], "the dashboard needs a terminal"),
        (["attach", "--once"], "no run is alive"),
        (["attach", "--once", "nosuch"], "there is no run 'nosuch'"),
        (["attach", "--once", "no/such"], "cannot be the name of a run"),
        (["attach", "--once", "ssh://-oProxyCommand=id/x"], "no host or user has"),
        (["get"], "Missing argument 'WHAT'"),
        (["get", "chekcs"], "did you mean 'checks'?"),
        (["get", "series"], "series needs metric names"),
        (["get", "around"], "around needs one step"),
        (["get", "around", "x"], "'x' is not a step"),
        (["get", "metrics", "x"], "metrics takes no further words"),
        (["get", "metrics", "--buckets", "0"], "--buckets"),
        (["proxy"], "rltop proxy --stdio"),
        (["proxy", "--stdio", "--role", "root"], "--role"),
        (["up"], "Missing argument 'CONFIG.toml'"),
        (["up", "/nosuch.toml"], "can not read the file"),
        (["down", "nosuch"], "there is no run 'nosuch'"),
    ],
)
def test_a_wrong_command_line(argv: list[str], said: str, runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rltop: ")
    assert said in err
    assert "Traceback" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rltop {__version__}\n"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: rltop" in capsys.readouterr().out


def test_a_reader_of_stdout_that_leaves_is_no_traceback(runs_dir: Path) -> None:
    with spec_daemon():
        command = [sys.executable, "-m", "rltop", "get", "snapshot", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(30) == 141


def test_an_interrupt_is_130_without_a_traceback(runs_dir: Path) -> None:
    """Interrupted while it waits for the state, which the daemon does not send before."""
    started: queue.Queue[int] = queue.Queue()

    def interrupt(model: ModelDaemon) -> None:
        os.kill(started.get(timeout=30), signal.SIGINT)

    with spec_daemon(fill=interrupt):
        command = [sys.executable, "-m", "rltop", "get", "snapshot"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.put(process.pid)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_dead_run_that_left_nothing_is_said(runs_dir: Path) -> None:
    with spec_daemon():
        pass
    ended = rltop("get", "snapshot", "--run", "cedar-1")
    assert ended.returncode == 1
    assert "run 'cedar-1' left no journal" in ended.stderr
    controlled = rltop("proxy", "--stdio", "--role", "control", "cedar-1")
    assert controlled.returncode == 1, "it can not be reached"
    assert "run 'cedar-1' is not running: there is nothing to control" in controlled.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "args", ["ps", "ps --json", "ps --all --json", "--help", "get --help", "--version", "attach --once", "down --help"]
)
def test_a_stdout_that_takes_nothing_is_one_error(args: str, unbuffered: str, runs_dir: Path) -> None:
    with spec_daemon(), open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "rltop", *args.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "rltop: stdout: cannot write the answer\n  why: No space left on device\n"


def test_a_closed_stdout_is_one_error(runs_dir: Path) -> None:
    command = f"{sys.executable} -m rltop ps --json >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "rltop: stdout: cannot write the answer\n  why: it is closed\n"


def test_json_is_json_on_a_stdout_that_is_no_utf8(runs_dir: Path) -> None:
    def fill(model: ModelDaemon) -> None:
        model.set("run", {"name": "cedar-1", "text": "Überlauf"})

    with spec_daemon(fill=fill):
        ended = rltop("get", "snapshot", "--json", env={"PYTHONIOENCODING": "ascii"})
        plain = rltop("attach", "--once", env={"PYTHONIOENCODING": "ascii"})
    assert json.loads(ended.stdout)["state"]["run"]["text"] == "Überlauf"
    assert plain.returncode == 0
    assert "berlauf" in plain.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["up", "{}"],
        ["doctor", "{}"],
        ["check", "--config", "{}", "x"],
        ["slime-flags", "cuda_graph=off", "--script", "{}"],
        ["slime-env", "--merge", "{}"],
    ],
)
def test_a_file_that_can_not_be_read_is_said_in_words_with_advice(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, why in ((tmp_path, "it is a directory"), (tmp_path / "none.toml", "there is no such file")):
        assert main([word.format(given) for word in argv]) == 2
        err = capsys.readouterr().err
        assert why in err
        assert "  do:  " in err
        assert "Errno" not in err


def test_an_interrupt_in_what_python_executes_as_text_is_exit_code_130(tmp_path: Path) -> None:
    """As when a module with a dataclass is imported at that moment."""
    (tmp_path / "sitecustomize.py").write_text(
        "import rltop.cli.main\n"
        "def main():\n"
        "    try: exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt: return 130\n"
        "rltop.cli.main.main = main\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "rltop"], env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 130
