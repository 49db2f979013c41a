"""Starting and stopping engine processes: with a small script as the server, and with the CPU engine itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rltop.engines import ports
from rltop.engines.client import EngineClient
from rltop.engines.launch import READY_LINE, EngineSpec, launch_engine, tail
from rltop.engines.launcher import MARKER, server_argv
from rltop.errors import RltopError
from rltop.train.cpu_engine.__main__ import main
from tests.engines.contract import PROMPT


def _script(tmp_path: Path, body: str) -> Path:
    """A stand-in for an interpreter: it ignores its arguments and runs `body`, in the shell."""
    path = tmp_path / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _fake(tmp_path: Path, body: str, **fields: object) -> EngineSpec:
    values: dict[str, object] = {
        "kind": "sglang",
        "model_path": tmp_path,
        "directory": tmp_path / "engine",
        "run": "test",
        "engine_id": "e0",
        "python": _script(tmp_path, body),
    }
    return EngineSpec(**(values | fields))  # type: ignore[arg-type]  # a table of keyword arguments


SERVE = f"echo '{READY_LINE}'; sleep 600 & wait"


def _always(url: str) -> bool:
    return True


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# ---------------------------------------------------------------------- with a script


def test_an_engine_runs_in_its_own_session_and_carries_its_marker(tmp_path: Path) -> None:
    engine = launch_engine(_fake(tmp_path, SERVE, generation=4), ready=_always)
    try:
        assert os.getsid(engine.pid) == engine.pid
        assert psutil.Process(engine.pid).environ()[MARKER] == "test/e0/4"
        assert engine.url == f"http://127.0.0.1:{engine.port}"
        assert engine.poll() is None
    finally:
        engine.stop(0)


def test_an_interpreter_is_looked_for_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _script(tmp_path, SERVE)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    engine = launch_engine(_fake(tmp_path, SERVE, python=Path(script.name)), ready=_always)
    assert engine.poll() is None
    engine.stop(0)


def test_stop_ends_the_children_too(tmp_path: Path) -> None:
    engine = launch_engine(_fake(tmp_path, SERVE), ready=_always)
    engine.note_descendants()
    children = psutil.Process(engine.pid).children()
    assert children
    assert engine.stop() == -signal.SIGTERM
    assert not any(_alive(child.pid) for child in children)
    assert engine.stop() == -signal.SIGTERM, "stopping twice is harmless"


def test_stop_kills_what_ignores_sigterm(tmp_path: Path) -> None:
    stubborn = f"trap '' TERM; echo '{READY_LINE}'; while :; do sleep 600; done"
    engine = launch_engine(_fake(tmp_path, stubborn), ready=_always)
    assert engine.stop(timeout_s=0.2) == -signal.SIGKILL


def test_a_child_that_left_the_session_is_found_when_the_engine_is_already_gone(tmp_path: Path) -> None:
    engine = launch_engine(_fake(tmp_path, f"setsid sleep 600 & echo '{READY_LINE}'; wait"), ready=_always)
    (child,) = psutil.Process(engine.pid).children()
    engine.note_descendants()
    os.kill(engine.pid, signal.SIGKILL)
    engine.process.wait()
    engine.stop()
    assert not _alive(child.pid)


def test_an_engine_that_ends_while_it_starts_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="ended while it started") as failed:
        launch_engine(_fake(tmp_path, "echo loading; echo 'no such kernel' >&2; exit 3"))
    assert "exit status 3" in failed.value.why
    assert "loading\nno such kernel" in failed.value.why
    assert failed.value.exit_code == 1


def test_an_engine_that_printed_nothing_is_said_to_have(tmp_path: Path) -> None:
    with pytest.raises(RltopError, match="ended while it started") as failed:
        launch_engine(_fake(tmp_path, "exit 0"))
    assert failed.value.why == "exit status 0; it printed nothing"
    assert failed.value.do == f"has {tmp_path}/fake-python the server installed?"


def test_an_engine_that_is_not_ready_in_time_is_killed_and_reported(tmp_path: Path) -> None:
    ticks = iter([0.0, 1.0, 200.0])
    with pytest.raises(RltopError, match="did not start in time") as failed:
        launch_engine(
            _fake(tmp_path, f"echo $$ > {tmp_path}/pid; echo still loading; sleep 600 & wait"),
            clock=lambda: next(ticks) if (tmp_path / "pid").exists() else 0.0,
        )
    assert "not ready after 120 s" in failed.value.why
    assert not _alive(int((tmp_path / "pid").read_text()))


def test_a_taken_port_is_named_with_its_holder_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RltopError, match=f"port {port} is in use") as failed:
            launch_engine(_fake(tmp_path, SERVE, port=port))
    assert f"held by pid {os.getpid()}" in failed.value.why
    assert not (tmp_path / "engine" / "stdout.log").exists()
    assert failed.value.exit_code == 2


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(RltopError, match="cannot bind"):
        ports.bind("192.0.2.1", 0)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 3) == ""
    log.write_text("".join(f"line {index}\n" for index in range(1000)))
    assert tail(log, 2) == "line 998\nline 999"


@pytest.mark.parametrize(
    ("name", "version", "safe"),
    [
        ("python3.12", "", True),
        ("python3.11", "", True),
        ("python3.10", "", False),
        ("python", "version = 3.13.1", True),
        ("python", "version_info = 3.11.7.final.0", True),
        ("python", "version = 3.9.2", False),
        ("python", "", False),
        ("in-container", "", False),
    ],
)
def test_sglang_leaves_out_the_current_directory_where_its_interpreter_can(
    name: str, version: str, safe: bool, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / name
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    python.chmod(0o755)
    (tmp_path / "pyvenv.cfg").write_text(f"home = /usr/bin\n{version}\n")
    argv = server_argv("sglang", str(python), ("--tp", "2"), tmp_path / "port", {})
    assert argv == [
        str(python),
        *(["-P"] if safe else []),
        "-m",
        "sglang.launch_server",
        "--enable-metrics",
        "--tp",
        "2",
    ]
    assert not (tmp_path / "ran").exists(), "it may be anything"


def test_modules_of_the_users_that_an_engine_is_to_load_may_lie_in_the_current_directory(tmp_path: Path) -> None:
    def safe(*args: str, **env: str) -> bool:
        return "-P" in server_argv("sglang", sys.executable, args, tmp_path / "port", env)

    assert safe("--tp", "2", SGLANG_X="my_models")
    assert not safe("--custom-weight-loader", "mine.load")
    assert not safe("--custom-weight-loader=mine.load")
    assert not safe(SGLANG_EXTERNAL_MODEL_PACKAGE="my_models")


# ---------------------------------------------------------------------- with the CPU engine


def _spec(model_path: Path, directory: Path, **fields: object) -> EngineSpec:
    values: dict[str, object] = {"model_path": model_path, "directory": directory, "run": "test", "engine_id": "e0"}
    return EngineSpec(kind="cpu", **(values | fields))  # type: ignore[arg-type]  # a table of keyword arguments


def test_sigterm_waits_for_what_runs_and_ends_with_0(model_path: Path, tmp_path: Path) -> None:
    engine = launch_engine(_spec(model_path, tmp_path))
    answers: list[dict[str, object]] = []

    def generate() -> None:
        with EngineClient(engine.url) as client:
            payload = {"text": PROMPT, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
            answers.extend(client.generate(payload))

    with EngineClient(engine.url) as client:
        thread = threading.Thread(target=generate)
        thread.start()
        while client.loads()["loads"][0]["num_running_reqs"] == 0:
            assert thread.is_alive()
        assert client.server_info()["port"] == engine.port
    assert engine.stop() == 0
    thread.join()
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"  # type: ignore[index]  # JSON
    log = engine.log_tail(100)
    assert "stand-in for SGLang" in log.splitlines()[0]
    assert f"Uvicorn running on http://127.0.0.1:{engine.port} (Press CTRL+C to quit)" in log
    assert "Traceback" not in log


def test_sigint_ends_with_130(model_path: Path, tmp_path: Path) -> None:
    engine = launch_engine(_spec(model_path, tmp_path))
    engine.process.send_signal(signal.SIGINT)
    assert engine.process.wait() == 130
    assert "Traceback" not in engine.log_tail(100)


PARENT = """
import sys
from pathlib import Path
from rltop.engines.launch import EngineSpec, launch_engine
spec = EngineSpec(kind="cpu", model_path=Path(sys.argv[1]), directory=Path(sys.argv[2]), run="test", engine_id="e0")
print(launch_engine(spec).pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_does_not_outlive_its_launcher(model_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(model_path), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([engine], timeout=30)
    assert not engine.is_running()
    assert f"Parent process {parent.pid} is gone" in tail(tmp_path / "stdout.log", 100)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model-path", "/nowhere"], "/nowhere/config.json: cannot read the checkpoint"),
        (["--model-path", "{broken}"], "cannot read the checkpoint"),
        (["--model-path", "{model}", "--port", "{taken}"], "port {taken} is in use"),
        (["--model-path", "{model}", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--model-path", "{model}", "--context-length", "5000"], "--context-length: context too long for the model"),
    ],
    ids=["no checkpoint", "broken checkpoint", "taken port", "unknown flag", "context too long"],
)
def test_bad_input_is_one_message_and_status_2(
    args: list[str],
    expected: str,
    model_path: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model_path.iterdir():
        kept = -100 if file.suffix == ".safetensors" else None
        (broken / file.name).write_bytes(file.read_bytes()[:kept])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"model": model_path, "broken": broken, "taken": taken.getsockname()[1]}
        try:
            status: object = main(["--port", "0", *(arg.format(**names) for arg in args)])
        except SystemExit as stopped:  # argparse
            status = stopped.code
    assert status == 2
    error = capfd.readouterr().err
    assert expected.format(**names) in error
    assert "Traceback" not in error


def test_the_launcher_passes_the_engines_own_message_on(tmp_path: Path) -> None:
    with pytest.raises(RltopError) as failed:
        launch_engine(_spec(tmp_path / "nowhere", tmp_path / "engine"))
    assert failed.value.exit_code == 2
    assert failed.value.why.startswith(f"{tmp_path}/nowhere/config.json: cannot read the checkpoint")
    assert "Traceback" not in str(failed.value)
