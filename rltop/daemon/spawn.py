"""Starting and stopping daemons from another process: `rltop up`, `rltop demo`, `rltop down`, tests."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import zmq

from rltop import runs
from rltop.daemon.engines_left import MARGIN_S, has_engines
from rltop.daemon.supervisor import size_of
from rltop.daemon.tether import Tether
from rltop.daemon.trainer_job import RECORD, Exit, how_it_ended, read_record
from rltop.errors import RltopError
from rltop.protocol.codec import WireError, decode, encode
from rltop.protocol.messages import PROTO_MAX, PROTO_MIN, Hello
from rltop.runs import RunInfo
from rltop.runs.own_python import own_python

START_S = 30.0
STOP_S = 20.0
LOCK_PATIENCE_S = 0.3
"""A daemon that is just ending gets so long to let its lock go."""
POLL_S = 0.02
TAIL_BYTES = 3000
TETHER_FD = 9


def start_daemon(
    name: str | None,
    *,
    trainer: list[str] | None = None,
    env: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    tether: Tether | None = None,
    ingest_tcp: str = "",
    module: str = "rltop.daemon",
) -> RunInfo:
    """Start a detached daemon (its own session, output in `<run>/daemon.log`) and return once its sockets answer.

    name: run name; an existing dead run of that name is continued; None makes a new one.
    trainer: argv that the daemon starts and supervises; RLTOP_INGEST, RLTOP_RUN and RLTOP_RUN_DIR are set for it.
    env: variables added to the environment of daemon and trainer.
    tether: ties the run to this process, see `rltop.daemon.tether`.
    ingest_tcp: HOST:PORT where producers on other machines may connect, with CURVE keys.
    module: what is run; tests have daemons of their own.
    Raises RltopError, with the end of the daemon's log, when it does not come up. However this function is left, there
    is either a run that was returned or no daemon.
    """
    fresh = name is None or not (runs.runs_root() / name).exists()
    run_dir = runs.make_run_dir(name)
    _refuse_second(run_dir)
    try:
        return _start(run_dir, trainer or [], env or {}, config or {}, tether, ingest_tcp, module)
    except BaseException as error:
        # A run that never was: no list of runs has it. Unless somebody else takes the name at this moment.
        if fresh and not (run_dir / RECORD).exists() and runs.lock_holder(run_dir) is None:
            shutil.rmtree(run_dir, ignore_errors=True)
            if isinstance(error, RltopError):
                error.where = ""  # its log is gone too; what it said stands in the reason
        raise


def _refuse_second(run_dir: Path) -> None:
    """Raise when a daemon lives there, before anything of it is touched."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (pid := runs.lock_holder(run_dir)) is not None:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    else:
        return
    name, record = run_dir.name, read_record(run_dir)
    if record is not None and record.code is not None:
        raise RltopError(
            f"run {name!r} has ended, but its daemon is still up",
            where=str(run_dir),
            why=f"process {pid} shows how it ended; one daemon watches one start",
            do=f"rltop down {name} first, then start it again",
        )
    raise RltopError(
        f"a daemon is already running for run {name!r}",
        where=str(run_dir),
        why=f"process {pid or 'unknown'} holds lock",
        do=f"rltop attach {name}, or rltop down {name} first",
    )


def _start(
    run_dir: Path,
    trainer: list[str],
    env: Mapping[str, str],
    config: Mapping[str, Any],
    tether: Tether | None,
    ingest_tcp: str,
    module: str,
) -> RunInfo:
    config_file = run_dir / "config.json"
    try:
        config_file.write_text(json.dumps(dict(config), indent=1), encoding="utf-8")
        config_file.chmod(0o600)
    except OSError as error:
        raise RltopError("cannot write in the run directory", where=str(config_file), why=str(error)) from error
    argv = [*own_python(module), "--run-dir", str(run_dir), "--config", str(config_file)]
    if tether is not None:
        argv += ["--tether", str(TETHER_FD)]
    if ingest_tcp:
        argv += ["--ingest-tcp", ingest_tcp]
    if trainer:
        argv += ["--", *trainer]
    log = run_dir / "daemon.log"
    log_from = size_of(log)
    pid = _spawn(argv, {**os.environ, **env}, log, tether)
    try:
        return _wait_for(pid, run_dir, log, log_from)
    except BaseException:
        _end(pid)
        raise


def _wait_for(pid: int, run_dir: Path, log: Path, log_from: int) -> RunInfo:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if runs.lock_holder(run_dir) == pid:
            run = runs.read_run(run_dir)
            if run is not None and run.alive and _run_json(run_dir).get("pid") == pid and _answers(run.sockets["view"]):
                return run
        if (status := _reap(pid)) is not None:
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGINT:  # Ctrl-C hit it before it had a session of its own: it was meant for us
                raise KeyboardInterrupt
            raise _failed(run_dir.name, log, log_from, f"it ended with exit code {code}")
        time.sleep(POLL_S)
    raise _failed(run_dir.name, log, log_from, f"it did not answer within {START_S:.0f} s and was stopped")


def _end(pid: int, *, patience_s: float = 15.0) -> None:
    """End a daemon that was started in vain: it stops its trainer first, if it got so far as to have one."""
    number: signal.Signals | None = signal.SIGTERM
    deadline = time.monotonic() + patience_s
    while True:
        try:  # a pid that was not waited for is still the daemon's: nobody else is hit
            found, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # it ended and somebody has seen it
            return
        if found:
            return
        if number is not None:
            os.kill(pid, number)
            number = None
        if time.monotonic() > deadline:
            number, deadline = signal.SIGKILL, time.monotonic() + patience_s
        time.sleep(POLL_S)


def early_end(run: RunInfo, *, within_s: float, log_from: int = 0) -> Exit | None:
    """How the trainer of a run that was just started ended, if it does within that time; None: it runs.

    Looks at what its keeper writes, so it costs nothing but the waiting. log_from: bytes in its log before the start.
    """
    epoch = _run_json(run.path).get("epoch")
    deadline = time.monotonic() + within_s
    while True:
        record = read_record(run.path)
        if record is not None and record.marker == f"{run.name}/{epoch}":
            if record.error:
                return Exit(None, "failed", record.error)
            if record.code is not None:
                return how_it_ended(record.code, asked=False, log=run.path / "trainer.log", log_from=log_from)
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)


def stop_daemon(run: RunInfo, *, timeout_s: float | None = None) -> None:
    """Stop the daemon of a run, and with it the trainer and engines that it started; returns when its process is gone
    and its lock is free, so that nobody sees the run alive after that.

    A daemon that does not react within `timeout_s` (default 20, and 45 more where it has engines) is killed, and an
    RltopError says what may be left.
    """
    if timeout_s is None:
        timeout_s = STOP_S + (MARGIN_S if has_engines(run.path) else 0.0)
    deadline = time.monotonic() + timeout_s
    while (pid := runs.lock_holder(run.path)) == 0 and time.monotonic() < deadline:
        time.sleep(POLL_S)  # it is just starting and has not said its pid
    if not pid:
        return
    process = _process(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    while time.monotonic() < deadline:
        _reap(pid)
        if runs.lock_holder(run.path) != pid and not _there(process):
            return
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _reap(pid, wait=True)
    raise RltopError(
        f"the daemon of run {run.name!r} did not stop within {timeout_s:g} s and was killed",
        where=str(run.path),
        why=f"process {pid} did not react to SIGTERM",
        do=f"its trainer and engines may be alive: rltop down {run.name} stops them",
        exit_code=1,
    )


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _there(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _spawn(argv: list[str], env: Mapping[str, str], log: Path, tether: Tether | None) -> int:
    # Not subprocess: the daemon outlives us on purpose, and a Popen object that is dropped while its child runs warns.
    with log.open("ab") as output, open(os.devnull, "rb") as nothing, contextlib.ExitStack() as kept:
        actions = [
            (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        if tether is not None:
            # From another number: a descriptor that is copied onto itself would be closed in the child.
            high = fcntl.fcntl(tether.reader, fcntl.F_DUPFD_CLOEXEC, TETHER_FD + 1)
            kept.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, TETHER_FD))
        return os.posix_spawn(argv[0], argv, env, setsid=True, file_actions=actions)


def _reap(pid: int, *, wait: bool = False) -> int | None:
    """Wait status if `pid` was a child of ours and has ended."""
    try:
        found, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return None
    return status if found == pid else None


def _run_json(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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


def log_tail(log: Path, start: int = 0) -> str:
    """The end of a log, from byte `start` on; "" when there is nothing or it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(start, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _failed(name: str, log: Path, log_from: int, why: str) -> RltopError:
    tail = log_tail(log, log_from)
    text = f"{why}; its log ends:\n{tail}" if tail else f"{why}; its log is empty"
    return RltopError(f"the daemon of run {name!r} did not start", where=str(log), why=text, exit_code=2)
