"""Starting and stopping daemons from another process: `rltop up`, `rltop demo`, `rltop down`, tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from rltop import runs
from rltop.errors import RltopError
from rltop.protocol.codec import WireError, decode, encode
from rltop.protocol.messages import PROTO_MAX, PROTO_MIN, Hello
from rltop.runs import RunInfo

START_S = 30.0
POLL_S = 0.02
TAIL_BYTES = 3000


def start_daemon(
    name: str | None,
    *,
    trainer: list[str] | None = None,
    env: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
) -> RunInfo:
    """Start a detached daemon (its own session, output in `<run>/daemon.log`) and return once its sockets answer.

    name: run name; an existing dead run of that name is continued; None makes a new one.
    trainer: argv that the daemon starts and supervises; RLTOP_INGEST, RLTOP_RUN and RLTOP_RUN_DIR are set for it.
    env: variables added to the environment of daemon and trainer.
    Raises RltopError, with the end of the daemon's log, when it does not come up.
    """
    run_dir = runs.make_run_dir(name)
    config_file = run_dir / "config.json"
    try:
        config_file.write_text(json.dumps(config or {}, indent=1), encoding="utf-8")
        config_file.chmod(0o600)
    except OSError as error:
        raise RltopError("cannot write in the run directory", where=str(config_file), why=str(error)) from error
    argv = [sys.executable, "-m", "rltop.daemon", "--run-dir", str(run_dir), "--config", str(config_file)]
    if trainer:
        argv += ["--", *trainer]
    log = run_dir / "daemon.log"
    pid = _spawn(argv, {**os.environ, **(env or {})}, log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if runs.lock_holder(run_dir) == pid:
            run = runs.read_run(run_dir)
            if run is not None and run.alive and _pid_in_run_json(run_dir) == pid and _answers(run.sockets["view"]):
                return run
        if (status := _reap(pid)) is not None:
            raise _failed(run_dir.name, log, f"it ended with exit code {os.waitstatus_to_exitcode(status)}")
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _reap(pid, wait=True)
    raise _failed(run_dir.name, log, f"it did not answer within {START_S:.0f} s and was stopped")


def stop_daemon(run: RunInfo, *, timeout_s: float = 20) -> None:
    """Stop the daemon of a run, and with it the trainer that it started; returns when it is gone.

    A daemon that does not react within `timeout_s` is killed, and an RltopError says what may be left.
    """
    pid = runs.lock_holder(run.path)
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        _reap(pid)
        if runs.lock_holder(run.path) != pid:
            return
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _reap(pid, wait=True)
    raise RltopError(
        f"the daemon of run {run.name!r} did not stop within {timeout_s:g} s and was killed",
        where=str(run.path),
        why=f"process {pid} did not react to SIGTERM",
        do=f"its trainer may be alive: rltop up --name {run.name} finds it again",
        exit_code=1,
    )


def _spawn(argv: list[str], env: Mapping[str, str], log: Path) -> int:
    # Not subprocess: the daemon outlives us on purpose, and a Popen object that is dropped while its child runs warns.
    with log.open("ab") as output, open(os.devnull, "rb") as nothing:
        return os.posix_spawn(
            argv[0],
            argv,
            env,
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
            ],
        )


def _reap(pid: int, *, wait: bool = False) -> int | None:
    """Wait status if `pid` was a child of ours and has ended."""
    try:
        found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found == pid else None


def _pid_in_run_json(run_dir: Path) -> int:
    try:
        return int(json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _answers(address: str, timeout_ms: int = 1000) -> bool:
    hello = Hello(proto=(PROTO_MIN, PROTO_MAX), client="rltop/spawn", want=[])
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        socket.send_multipart(encode("hello", hello, id="1"))
        if not socket.poll(timeout_ms):
            return False
        try:
            answered = decode(socket.recv_multipart()).header.t == "welcome"
        except WireError:
            return False
        socket.linger = 100
        return answered


def _failed(name: str, log: Path, why: str) -> RltopError:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
    except OSError:
        tail = ""
    text = f"{why}; its log ends:\n{tail}" if tail else f"{why}; its log is empty"
    return RltopError(f"the daemon of run {name!r} did not start", where=str(log), why=text, exit_code=2)
