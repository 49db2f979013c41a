"""`rltop train` as people run it: a process, Ray below it, and nothing left when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rltop.protocol.messages import Record
from rltop.runs.own_python import own_python
from rltop.train import supervisor
from rltop.train.arguments import TrainConfig
from rltop.train.driver import Result
from rltop.train.lifetime import Interrupted, Signals
from rltop.train.loop import History
from rltop.train.run import Run
from tests.hostile import hostile
from tests.train.local import ingest, records_until_bye

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

TINY = [
    *("--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "2"),
    *("--apply-chat-template", "--cold-start-steps", "10", "--use-kl-loss", "--deterministic", "--json"),
]


@dataclass(frozen=True)
class Ended:
    """A finished run."""

    code: int
    result: dict[str, Any]
    stderr: str
    records: list[Record]


def environment(address: str = "", directory: Path | None = None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RLTOP_", "RAY_"))}
    env |= {"RLTOP_INGEST": address, "RLTOP_RUN": "test"}
    return env | ({"TMPDIR": str(directory)} if directory else {})


def train(directory: Path, *flags: str, base: Sequence[str] = TINY) -> Ended:
    with ingest() as (address, socket):
        done = subprocess.run(
            [sys.executable, "-m", "rltop", "train", *base, *flags],
            capture_output=True,
            text=True,
            env=environment(address, directory),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Ended(done.returncode, json.loads(done.stdout), done.stderr, records_until_bye(socket))


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="session")
def ended(scratch: Path) -> Ended:
    return train(scratch)


def test_a_run_ends_with_one_json_object_on_stdout(ended: Ended) -> None:
    result = ended.result
    assert result["reason"] == "done"
    assert len(result["rewards"]) == 3
    assert result["steps"] == 6
    assert result["syncs"] == 4
    assert result["weight_mismatches"] == []
    assert result["train_rollout_logprob_abs_diff_max"] < 1e-5
    assert result["first_step"]["ppo_kl"] == 0.0
    assert result["first_step"]["kl_loss"] == 0.0
    assert "CPU engine" in result["stand_ins"][0]


def test_a_run_starts_wherever_it_is_started(tmp_path: Path) -> None:
    """Neither the driver nor a worker of Ray nor an engine imports what lies in the current directory."""
    folder = hostile(tmp_path)
    done = subprocess.run(
        [*own_python("rltop"), "train", *TINY, "--num-rollout", "1", "--cold-start-steps", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "of the current directory" not in done.stderr


def test_the_records_tell_the_whole_run_in_order(ended: Ended) -> None:
    records = ended.records
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    assert {record.source.name for record in records} == {"trainer/0"}
    assert records[-1].payload == {"reason": "done", "text": ""}
    kinds = {record.kind for record in records}
    assert kinds == {"run", "metrics", "samples", "phase", "weights", "engine", "log", "bye"}
    (run,) = [record.payload for record in records if record.kind == "run"]
    assert run["vocab_size"] == 260
    assert run["backend"].startswith("megatron-core")
    states = [record.payload["state"] for record in records if record.kind == "engine"]
    assert states == ["HEALTHY", "STOPPED"]
    steps = [r.payload for r in records if r.kind == "metrics" and r.payload["axis"] == "train"]
    assert [(step["step"], step["rollout_id"], step["step_in_rollout"]) for step in steps] == [
        (2 * rollout + step, rollout, step) for rollout in range(3) for step in range(2)
    ]
    phases = {record.payload["name"] for record in records if record.kind == "phase"}
    assert phases == {"start", "cold_start", "rollout", "log_probs", "ref_log_probs", "train", "update_weights"}


def test_the_lines_on_stderr_are_those_that_slime_users_know(ended: Ended) -> None:
    for words in ("Timer update_weights end (elapsed: ", "rollout 2: {'rollout/", "step 5: {'train/loss'", "perf 0: {"):
        assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_nothing_stays_in_the_temporary_directory(ended: Ended, scratch: Path) -> None:
    assert ended.code == 0
    assert [path.name for path in scratch.iterdir() if path.name.startswith("rltop-")] == []


def test_the_same_seed_gives_the_same_bits(ended: Ended, scratch: Path) -> None:
    again = train(scratch).result
    for name in ("rewards", "losses", "grad_norms", "first_rollout"):
        assert again[name] == ended.result[name]


class Family:
    """Everything that a process ever had below it, by pid and start time."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        with contextlib.suppress(psutil.Error):
            self._seen |= set(self._root.children(recursive=True))

    def named(self, words: str) -> list[psutil.Process]:
        self.look()
        found = []
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def alive(self) -> list[psutil.Process]:
        """Those that still run; a process that was killed a moment ago may be a zombie of somebody else."""
        _, alive = psutil.wait_procs(self._seen, timeout=5)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@contextlib.contextmanager
def running(directory: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Family]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rltop", "train", *TINY, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(directory=directory),
        start_new_session=True,
    )
    try:
        yield process, Family(process.pid)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], words: str, family: Family) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        family.look()
        if words in line:
            return
    raise AssertionError(f"the run ended before it said {words!r}")


def test_an_interrupt_in_the_middle_of_a_run_is_130_and_leaves_no_child(tmp_path: Path) -> None:
    """The signal goes to the whole group, as a terminal's Ctrl-C and the daemon's TERM do."""
    with running(tmp_path, "--num-rollout", "1000") as (process, family):
        read_until(process, "step 0: ", family)
        assert family.named("rltop.train.cpu_engine")
        assert family.named("raylet")
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate()
        assert process.returncode == 130
        assert family.alive() == []
    assert json.loads(output)["reason"] == "interrupted"
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rltop-")] == []


STOP_AT = """
import os, sys
class Here:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and {process!r} in sys.orig_argv:
            sys.meta_path.remove(self)
            with open({here!r}, "w") as told:
                told.write("here")
            with open({go!r}) as wait:
                wait.read(1)
sys.meta_path.insert(0, Here())
"""


@pytest.mark.parametrize(
    ("process", "module"),
    [
        ("train", "rltop.train.supervisor"),
        ("rltop.train", "rltop.train"),
        ("rltop.train", "rltop.train.driver"),
        ("rltop.train", "rltop.train.loop"),
    ],
)
def test_an_interrupt_while_modules_are_imported_says_nothing(process: str, module: str, tmp_path: Path) -> None:
    here, go = str(tmp_path / "here"), str(tmp_path / "go")
    os.mkfifo(here)
    os.mkfifo(go)
    gate = os.open(go, os.O_RDWR)
    code = STOP_AT.format(module=module, process=process, here=here, go=go)
    (tmp_path / "sitecustomize.py").write_text(code)
    env = environment(directory=tmp_path)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    command = subprocess.Popen(
        [sys.executable, "-m", "rltop", "train", *TINY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    with command:
        try:
            assert Path(here).read_text() == "here"
            os.killpg(command.pid, signal.SIGINT)  # as a terminal does
            for child in psutil.Process(command.pid).children():
                child.send_signal(signal.SIGINT)
            os.write(gate, b"g")
            output, errors = command.communicate(timeout=60)
        finally:
            command.kill()
            os.close(gate)
    assert (command.returncode, output, errors) == (130, "", "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rltop-")] == []


@pytest.mark.parametrize("kept", [False, True])
def test_a_log_is_only_pointed_at_when_it_is_kept(kept: bool, tmp_path: Path) -> None:
    python = tmp_path / "python"
    asked = '[ "$1" = -c ] && { echo rltop-module-found; exit 0; }'  # whether it has SGLang
    python.write_text(f"#!/bin/sh\n{asked}\necho no such kernel\nexit 3\n")
    python.chmod(0o755)
    flags = ["--engine", "sglang", "--engine-python", str(python)]
    flags += ["--save-dir", str(tmp_path / "kept")] if kept else []
    done = subprocess.run(
        [sys.executable, "-m", "rltop", "train", *TINY, *flags],
        capture_output=True,
        text=True,
        env=environment(directory=tmp_path),
        check=False,
    )
    assert done.returncode == 1, done.stderr
    error = done.stderr[done.stderr.index("rltop: ") :]
    assert "why: exit status 3; its last lines:\nno such kernel" in error
    logs = re.findall(r"/[^ ]*stdout\.log", error)
    assert [Path(log).read_text() for log in logs] == (["no such kernel\n"] if kept else [])
    assert ("--save-dir DIR, which keeps the log" in error) != kept


SLOW = """
import os, signal, sys, time
seen = []
def arrived(number, frame):
    seen.append(number)
    if len(seen) == 1:
        os.write(1, b"cleaning\\n")
    elif {answers}:
        os.write(1, b"the result")
        os._exit(130)
signal.signal(signal.SIGINT, arrived)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("answers", [True, False])
def test_a_second_interrupt_still_gets_the_result(
    answers: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "AGAIN_S", 30.0 if answers else 0.05)
    script = [sys.executable, "-c", SLOW.replace("{answers}", str(answers))]
    signals = Signals()
    with subprocess.Popen(script, stdout=subprocess.PIPE, process_group=0) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"

        def impatient(limit_s: float) -> int:
            if not signals.seen:
                assert driver.stdout is not None
                assert driver.stdout.readline() == b"cleaning\n"
                signals._arrived(signal.SIGINT, None)
            return real(limit_s)

        real = driver.wait
        monkeypatch.setattr(driver, "wait", impatient)
        assert supervisor._interrupt(driver, Interrupted(signal.SIGINT), signals) == 130
        monkeypatch.undo()
        told = driver.stdout.read()
    err = capsys.readouterr().err
    assert (told, "told no result" in err) == ((b"the result", False) if answers else (b"", True))


def test_the_result_is_told_once_whatever_comes_between(capfd: pytest.CaptureFixture[str]) -> None:
    result = Result(TrainConfig(json=True), History(), 0.0)
    assert (result.tell("interrupted"), result.tell("done")) == (True, False)
    assert json.loads(capfd.readouterr().out)["reason"] == "interrupted"
    came: list[int] = []
    signals = Signals(lambda: came.append(1))
    with pytest.raises(Interrupted):
        signals._arrived(signal.SIGINT, None)
    signals._arrived(signal.SIGINT, None)
    assert came == [1], "the first one is the run's"


def test_an_interrupt_that_ray_noticed_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its waits Ray raises a KeyboardInterrupt of its own."""

    def train(run: Run, narrator: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_train", train)
    with ingest() as (address, socket):
        monkeypatch.setenv("RLTOP_INGEST", address)
        run = Run(TrainConfig(), tmp_path, tmp_path, {}, time.monotonic, Signals(), History())
        with pytest.raises(Interrupted) as caught:
            run.go()
        assert caught.value.exit_code == 130
        assert records_until_bye(socket)[-1].payload == {"reason": "interrupted", "text": "SIGINT"}


def test_a_dead_engine_ends_the_run_with_its_name_and_log(tmp_path: Path) -> None:
    with running(tmp_path, "--num-rollout", "1000") as (process, family):
        read_until(process, "step 0: ", family)
        for engine in family.named("rltop.train.cpu_engine"):
            engine.kill()
        _, errors = process.communicate()
        assert process.returncode == 1
        assert family.alive() == []
    assert "rltop: " in errors
    assert "engine 0 died" in errors
    assert "Traceback" not in errors


@pytest.mark.soak
def test_a_dead_trainer_is_named(tmp_path: Path) -> None:
    with running(tmp_path, "--num-rollout", "1000") as (process, family):
        read_until(process, "step 0: ", family)
        for actor in family.named("ray::TrainActor"):
            actor.kill()
        _, errors = process.communicate()
        assert process.returncode == 1
        assert family.alive() == []
    assert "the trainer died" in errors
    assert "Traceback" not in errors
