"""A daemon's own engines, real processes (the CPU engine): started, changed, kept over its death, ended at last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltop.cli.main import main
from rltop.daemon.engines_left import left_engines
from rltop.runs import RunInfo, find_run
from tests.daemon.util import Viewer, wait_for

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]
Capture = pytest.CaptureFixture[str]
START_S = 120.0
"""Engines import torch; on a busy machine that takes a while."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("m") / "model", TinyModelConfig(seed=1))


def table(model: Path) -> str:
    """`[engines]` with one engine of the daemon's."""
    return f'[engines]\nmodel_path = "{model}"\nkind = "cpu"\n'


@pytest.fixture
def config(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file for `rltop up` with one engine and no trainer; the run is gone afterwards, whatever happens."""
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "r"))
    file = tmp_path / "up.toml"
    file.write_text(
        f'[run]\nname = "alone"\n\n[engines]\nmodel_path = "{model}"\nkind = "cpu"\n\n[engines.env]\nA_B = "1"\n'
    )
    yield file
    assert main(["down", "alone"]) == 0
    assert left_engines(tmp_path / "r" / "runs" / "alone") == []


def until(run: RunInfo, matches: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The state once it matches."""
    with Viewer(run) as viewer:
        viewer.hello()
        return dict(viewer.until_state(matches, patience_s=START_S))


def processes(run: str) -> list[psutil.Process]:
    """Living processes of the engines of this very run; another on this machine may have its name."""
    folder = str(find_run(run).path)
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            ours = variables.get("RLTOP_ENGINE", "").startswith(f"{run}/")
            if ours and variables.get("RLTOP_ENGINE_DIR", "").startswith(folder) and process.status() != "zombie":
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_engines_alone_from_start_to_end(config: Path, capsys: Capture) -> None:
    """Started by the file; a restart is going on when the daemon is killed; the next one adopts and ends it."""
    assert main(["up", str(config)]) == 0
    run = find_run("alone")
    state = until(run, lambda state: state["engine/0"]["state"] == "HEALTHY")
    engine = state["engine/0"]
    assert (engine["owner"], engine["kind"], engine["generation"], engine["weight_version"]) == (
        "rltop",
        "cpu",
        1,
        "default",
    )
    assert state["op/1"]["name"] == "engines-start"
    assert state["fleet"]["required"] == {"version": "default", "source": "base"}
    assert state["toggles/0"]["cuda_graph"]["value"] == "on"
    kept = json.loads((run.path / "run.json").read_text())["config"]["engines"]
    assert kept["env"] == ["A_B"], "names only: a value may be a secret"
    capsys.readouterr()
    assert main(["engine", "set", "cuda_graph=off", "--engine", "0", "--no-wait", "--reason", "ticket 4"]) == 0
    op = capsys.readouterr().out.split()[1]
    # The new process is there: killed between stop and start, the daemon leaves none, and the next one starts it.
    until(run, lambda state: state["engine/0"]["generation"] == 2 and state["engine/0"]["pid"])
    os.kill(run.pid, signal.SIGKILL)
    wait_for(lambda: not find_run("alone").alive)
    assert left_engines(run.path) == ["0"], "an engine survives its daemon"
    assert main(["ps", "--all", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["state"] == "orphaned"
    assert "engine 0 still runs" in row["text"]
    for named in ([], ["--run", "alone"]):
        assert main(["engine", "restart", "--engine", "0", *named]) == 1
        err = capsys.readouterr().err
        assert "its daemon is gone, engine 0 runs on" in err
        assert "rltop up CONFIG --name alone gives it a daemon again" in err

    assert main(["up", str(config)]) == 0
    run = find_run("alone")
    state = until(run, lambda state: state[f"op/{op}"]["state"] not in ("queued", "running"))
    assert (state[f"op/{op}"]["state"], state[f"op/{op}"]["reason"]) == ("done", "ticket 4")
    state = until(run, lambda state: state["engine/0"]["state"] == "HEALTHY")
    assert (state["engine/0"]["generation"], state["engine/0"]["toggles"]["cuda_graph"]) == (2, "off")
    capsys.readouterr()
    assert main(["engine", "logs", "--engine", "0", "-n", "500"]) == 0
    assert "fired up and ready to roll" in capsys.readouterr().out
    assert len({process.environ()["RLTOP_ENGINE"] for process in processes("alone")}) == 1, "one generation lives"
    assert main(["down", "alone"]) == 0
    assert processes("alone") == []


def test_engines_whose_daemon_was_killed_are_ended_by_down(config: Path, capsys: Capture) -> None:
    assert main(["up", str(config)]) == 0
    run = find_run("alone")
    until(run, lambda state: state["engine/0"]["pid"])
    os.kill(run.pid, signal.SIGKILL)
    wait_for(lambda: not find_run("alone").alive)
    assert left_engines(run.path) == ["0"]
    (run.path / "engines" / "0" / "slot.json").write_text("")  # as a machine that went down leaves it
    assert main(["down", "alone"]) == 0
    assert "engine 0 of it is stopped" in capsys.readouterr().err
    assert processes("alone") == []
    assert main(["down", "alone"]) == 0
    assert "is not running" in capsys.readouterr().err


@pytest.mark.soak
def test_engines_of_a_trainer_that_ended_meanwhile_are_ended_by_the_next_daemon(
    config: Path, model: Path, capsys: Capture
) -> None:
    """Daemon and trainer are killed; the name is started again."""
    config.write_text(f'[run]\nname = "alone"\n[trainer]\ncommand = ["sleep", "600"]\n{table(model)}')
    assert main(["up", str(config)]) == 0
    run = find_run("alone")
    first = until(run, lambda state: state["engine/0"]["state"] == "HEALTHY")
    os.kill(run.pid, signal.SIGKILL)
    os.kill(first["trainer"]["pid"], signal.SIGKILL)
    wait_for(lambda: not find_run("alone").alive)
    assert left_engines(run.path) == ["0"]
    assert main(["up", str(config)]) == 0
    run = find_run("alone")
    state = until(run, lambda state: state["engine/0"]["state"] == "HEALTHY" and state["run"]["attempt"] == 2)
    assert state["engine/0"]["generation"] > 1, "it is not the process of the attempt before"
    with Viewer(run) as viewer:
        viewer.hello()
        assert viewer.event_page(text="the trainer of these engines is gone").events
    os.kill(state["trainer"]["pid"], signal.SIGTERM)
    until(run, lambda state: state["engine/0"]["state"] == "STOPPED")
    assert processes("alone") == [], "engines end with their trainer"


def test_a_daemon_without_engines_is_as_light_as_before() -> None:
    script = "import sys, rltop.daemon.__main__, rltop.daemon.spawn; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "rltop.daemon.engines" in loaded
    heavy = {"httpx", "ray", "torch", "textual", "rltop.engines.fleet", "rltop.engines.local", "rltop.engines.toggles"}
    assert not heavy & set(loaded)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python without any packages."""
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parent.parent)], check=True)
    return python


@pytest.mark.parametrize(
    ("lines", "line", "words"),
    [
        ('kind = "cpu"\nargs = ["--bogus", "1"]', 5, "engine 0 would not start: unrecognized arguments: --bogus 1"),
        ('kind = "cpu"\npython = "/no/python"', 5, "python = /no/python: there is no such program"),
        ('args = ["--port", "1"]', 4, "--port in its args is not its owner's to give"),
    ],
)
def test_engines_that_no_process_can_be_made_of_are_an_error_of_up(
    config: Path, model: Path, capsys: Capture, lines: str, line: int, words: str
) -> None:
    config.write_text(f'[run]\nname = "alone"\n[engines]\n{lines}\nmodel_path = "{model}"\n')
    assert main(["up", str(config)]) == 2
    err = capsys.readouterr().err
    assert f"{config}:{line}: the engines can not be started" in err
    assert words in err
    assert not (config.parent / "r" / "runs" / "alone").exists(), "nothing was begun"
    config.write_text(f'[run]\nname = "alone"\n[trainer]\ncommand = ["true"]\n{table(model)}')
    assert main(["up", str(config)]) == 0  # the fixture takes it down


@pytest.mark.parametrize("kind", ["cpu", "sglang"])
def test_a_model_path_that_is_not_there_is_an_error_of_up(config: Path, capsys: Capture, kind: str) -> None:
    config.write_text(f'[run]\nname = "alone"\n[engines]\nkind = "{kind}"\nmodel_path = "/nonexistent"\n')
    assert main(["up", str(config)]) == 2
    assert f"{config}:5: the engines can not be started" in (err := capsys.readouterr().err)
    assert "there is no /nonexistent" in err
    config.write_text('[run]\nname = "alone"\n[trainer]\ncommand = ["true"]\n')
    assert main(["up", str(config)]) == 0


def test_engines_whose_python_has_no_server_are_an_error_of_up_before_anything_starts(
    config: Path, model: Path, bare: Path, capsys: Capture
) -> None:
    text = f'[run]\nname = "alone"\n[engines]\nkind = "sglang"\nmodel_path = "{model}"\npython = "{bare}"\n'
    config.write_text(text)
    assert main(["up", str(config)]) == 2
    err = capsys.readouterr().err
    assert f"{config}:6: the engines can not be started" in err
    assert "has no module sglang" in err
    assert not (config.parent / "r" / "runs" / "alone").exists(), "nothing was begun"
    config.write_text('[run]\nname = "alone"\n[trainer]\ncommand = ["true"]\n')
    assert main(["up", str(config)]) == 0  # the fixture takes it down


def test_engines_whose_module_is_missing_are_an_error_of_up_and_nothing_stays(
    config: Path, model: Path, bare: Path, tmp_path: Path, capsys: Capture
) -> None:
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text("import sgl_kernel_of_nobody\n")
    config.write_text(
        f'[run]\nname = "alone"\n[engines]\nkind = "sglang"\ncount = 2\nmodel_path = "{model}"\npython = "{bare}"\n'
        f'env = {{ PYTHONPATH = "{package.parent}" }}\n'
    )
    assert main(["up", str(config)]) == 2
    err = capsys.readouterr().err
    assert "the engines of run 'alone' ended at once" in err
    assert "What it needs cannot be imported at the start" in err
    assert "No module named 'sgl_kernel_of_nobody'" in err
    assert "/engines/0/1/stdout.log" in err or "/engines/1/1/stdout.log" in err
    assert "  do:  less " in err
    assert not find_run("alone").alive


def test_file_and_line_of_a_wrong_table_and_nothing_starts(config: Path, capsys: Capture) -> None:
    config.write_text('[run]\nname = "alone"\n[engines]\nmodel_path = "/m"\nrestart = "always"\n')
    assert main(["up", str(config)]) == 2
    assert f'{config}:5: restart must be "auto" or "never"' in capsys.readouterr().err
    config.write_text('[run]\nname = "alone"\n[trainer]\ncommand = ["sleep", "1"]\n')
    assert main(["up", str(config)]) == 0
