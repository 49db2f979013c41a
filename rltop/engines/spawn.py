"""Starts a keeper (`rltop.engines.keeper`) with the process that it keeps, and hears from it whether that lives.

`start_keeper` is for any process (the daemon's trainer too), `start_engine` for a generation of an engine slot: its
directory, lock, port, environment and command line. What cannot be started is one `RltopError`, and leaves nothing.

Not `subprocess`: a keeper outlives whoever starts it on purpose, and a Popen object that is dropped while its child
runs warns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltop.engines import keeper, ports, processes
from rltop.engines.launcher import (
    CRASH_DUMP,
    CRASH_DUMP_FOLDER,
    DIRECTORY,
    LOG,
    MARKER,
    PORT,
    RECORD,
    STAND_INS,
    LaunchSpec,
    marks,
    server_argv,
)
from rltop.engines.processes import Ident
from rltop.engines.toggle_table import CORE_DUMP
from rltop.errors import RltopError

HELD_FD = 10
"""Where the keeper finds a descriptor that it is to keep open (`hold` of its order)."""
_REPORT_FD = 9
FOREIGN = ("RLTOP_JOB", MARKER)
"""Markers of others. An engine that carried its trainer's would be cleared away with it."""


def start_keeper(
    order: keeper.Spec,
    command: Sequence[str],
    *,
    log: int,
    env: Mapping[str, str],
    held: int | None = None,
    fresh: bool = False,
) -> tuple[int, bytes]:
    """Start it and wait for its first word: the pid of our child, and what it told (JSON; b"" if it just ended).

    order: see `keeper.Spec`. log: descriptor of the output. env: the whole environment. held: a descriptor for the
    keeper alone. fresh: signals are as in a login shell, whatever this process ignores or blocks.
    Raises OSError or ValueError when it cannot be started.
    """
    reader, writer = os.pipe()
    try:
        words = [sys.executable, "-I", "-S", keeper.__file__, str(_REPORT_FD), json.dumps(order), *command]
        child = _spawn(words, {1: log, 2: log, _REPORT_FD: writer, HELD_FD: held}, env, fresh=fresh)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with open(reader, "rb") as pipe:
        return child, pipe.read()


def _spawn(words: list[str], wanted: Mapping[int, int | None], env: Mapping[str, str], *, fresh: bool) -> int:
    copies: list[int] = []
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    try:
        for number, descriptor in wanted.items():
            if descriptor is not None:
                # From a high number: a descriptor that is copied onto itself would be closed in the child.
                copies.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HELD_FD + 1))
                actions.append((os.POSIX_SPAWN_DUP2, copies[-1], number))
        if not fresh:
            return os.posix_spawn(sys.executable, words, env, setsid=True, file_actions=actions)
        usual = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD]
        return os.posix_spawn(
            sys.executable, words, env, setsid=True, file_actions=actions, setsigmask=[], setsigdef=usual
        )
    finally:
        for descriptor in copies:
            os.close(descriptor)


# ---------------------------------------------------------------------- engines


def start_engine(spec: LaunchSpec, *, bind: str, environ: Mapping[str, str], tether: Ident | None) -> dict[str, Any]:
    """Start a generation; returns its first record. Raises RltopError as `Launcher.start` says.

    bind: address to listen on. environ: what it inherits. tether: a process after whose end it is ended too.
    """
    directory = Path(spec.directory)
    with contextlib.ExitStack() as stack:
        held = _port(spec, bind)
        port = 0
        if held is not None:
            stack.enter_context(contextlib.closing(held))
            port = held.getsockname()[1]
        if not _free(Path(spec.lock)):
            raise _locked(spec)  # before its record and port are touched: they may be all that is known of it
        log = _prepare(directory, Path(spec.lock))
        stack.enter_context(contextlib.closing(log))
        told = _keep(spec, bind, port, environ, tether, log=log.fileno(), held=None if held is None else held.fileno())
    if told.get("held"):
        raise _locked(spec)
    if error := told.get("error"):
        raise _unstartable(spec, str(error), str(told.get("file", "")))
    return told


def _keep(
    spec: LaunchSpec,
    bind: str,
    port: int,
    environ: Mapping[str, str],
    tether: Ident | None,
    *,
    log: int,
    held: int | None,
) -> dict[str, Any]:
    directory = Path(spec.directory)
    gone = {*FOREIGN, *spec.unset}
    env = {name: value for name, value in {**environ, **spec.env}.items() if name not in gone}
    env |= {"PYTHONUNBUFFERED": "1", DIRECTORY: marks(spec.marker, directory)[DIRECTORY]}
    if spec.kind in STAND_INS and "SGLANG_CUDA_COREDUMP" not in env:
        env.setdefault(CORE_DUMP, "0")  # a crash dump alone would turn core dumps on, as in SGLang
    order = {
        "record": str(directory / RECORD),
        "variable": MARKER,
        "marker": spec.marker,
        "lock": spec.lock,
        "detach": True,
        "hold": [] if held is None else [HELD_FD],
        "tether": tether,
        "extra": {
            "port": port,
            "host": _reachable(bind),
            "lock": spec.lock,
            "gpus": env.get("CUDA_VISIBLE_DEVICES"),
        },
    }
    try:
        command = _argv(spec, bind, port, directory)
        child, text = start_keeper(order, command, log=log, env=env, held=held, fresh=True)
    except (OSError, ValueError) as error:
        raise _unstartable(spec, str(error), sys.executable) from error
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, nothing is left to wait for
        os.waitpid(child, 0)  # it has forked: the keeper itself is nobody's child here
    try:
        told: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"error": "its keeper ended without a word", "file": str(directory / LOG)}
    return told


def _free(lock: Path) -> bool:
    """A tree that is just ending lets it go."""
    deadline = time.monotonic() + keeper.LOCK_PATIENCE_S
    while processes.locked(lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _locked(spec: LaunchSpec) -> RltopError:
    found = ", ".join(f"{pid} ({name})" for pid, name in processes.named_holders(Path(spec.lock)))
    return RltopError(
        f"engine {spec.engine_id} still has a process: a second one is not started",
        where=spec.lock,
        why=f"its lock is held by process {found}",
        do="stop the engine first; what is left of an engine that is gone is ended by its next stop",
        exit_code=1,
    )


def _argv(spec: LaunchSpec, bind: str, port: int, directory: Path) -> list[str]:
    address = ("--model-path", spec.model_path, "--host", bind, "--port", str(port))
    args = (*address, *spec.args, *_crash_dump(spec, directory))
    return server_argv(spec.kind, spec.python, args, directory / PORT, spec.env)


def _crash_dump(spec: LaunchSpec, directory: Path) -> tuple[str, ...]:
    """Where SGLang leaves its last requests, unless the arguments say so themselves. No other setting follows from it:
    SGLang sets the core dump's variables with it where they are not set, so that they must be, to on or off."""
    if any(one.partition("=")[0] == CRASH_DUMP for one in spec.args):
        return ()
    return (CRASH_DUMP, str(directory / CRASH_DUMP_FOLDER)) if spec.kind in STAND_INS or CORE_DUMP in spec.env else ()


def _port(spec: LaunchSpec, bind: str) -> socket.socket | None:
    """The port, kept: a taken one is known now and not after minutes of loading. None: the engine finds its own."""
    if spec.port:
        return ports.bind(bind, spec.port)
    return None if spec.kind in STAND_INS else ports.reserve(bind)


def _prepare(directory: Path, lock: Path) -> Any:
    """The directory of the generation, empty of what an earlier try left, and its open log."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / "coredump").mkdir(exist_ok=True, mode=0o700)  # CUDA makes no folder for its dumps
        (directory / CRASH_DUMP_FOLDER).mkdir(exist_ok=True, mode=0o700)  # SGLang's has prompts
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (PORT, RECORD):
            (directory / name).unlink(missing_ok=True)
        return (directory / LOG).open("ab")
    except OSError as error:
        raise RltopError(
            "cannot write in the engine's directory",
            where=str(error.filename or directory),
            why=error.strerror or str(error),
            do="make room or give rights there, or set RLTOP_DIR elsewhere",
        ) from error


def _unstartable(spec: LaunchSpec, why: str, where: str) -> RltopError:
    return RltopError(
        f"cannot start engine {spec.engine_id}",
        where=where or spec.python,
        why=why,
        do=f"is {spec.python} an interpreter that has the server installed?",
    )


def _reachable(bind: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)
