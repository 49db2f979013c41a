"""Starts and stops engine processes on this host: the CPU engine, or a real SGLang server.

An engine runs in its own session, so that a Ctrl-C in the operator's terminal does not reach it and one signal reaches
all of its children. It carries `RLTOP_ENGINE=<run>/<id>/<generation>` in its environment: that, and never a bare pid,
is how a later rltop recognises its own. With `die_with_parent` it does not outlive the process that launched it.

`launch_engine` returns when the engine serves, or raises with the end of its log. `stop` sends SIGTERM, waits, then
SIGKILLs the group and every descendant seen before, and reaps. SIGTERM goes to the group's leader alone: SGLang's main
process takes a scheduler that was terminated beside it for a crash, and ends in SIGKILL after its crash diagnostics.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rltop.engines import ports, processes
from rltop.engines.launcher import NOTHING, STAND_INS, Kind, marks, server_argv
from rltop.engines.processes import Ident
from rltop.errors import RltopError

READY_LINE = "The server is fired up and ready to roll!"
"""Printed by SGLang, and by the CPU engine, once requests are served."""

LOG_TAIL_LINES = 20

POLL_S = 0.05

KILL_WAIT_S = 5.0
"""How long SIGKILL may take: a process inside a system call ends when that returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What to start."""

    kind: Kind
    model_path: Path
    directory: Path
    """Receives `stdout.log` and, for the CPU engine, `port`. By convention `<run>/engines/<id>/<generation>`."""
    run: str
    engine_id: str
    generation: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one. The CPU engine binds it itself; for SGLang it is chosen just before the start."""
    args: tuple[str, ...] = ()
    """Further arguments of the server, SGLang's names. `--enable-metrics` is always given."""
    python: Path = field(default_factory=lambda: Path(sys.executable))
    """Interpreter that has the server installed (for SGLang usually another environment than rltop's)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """On top of this process's environment."""
    start_timeout_s: float = 120.0
    die_with_parent: bool = True
    """False: the engine survives its launcher (a daemon that re-adopts it after its own restart)."""

    @property
    def marker(self) -> str:
        """Value of `RLTOP_ENGINE`."""
        return f"{self.run}/{self.engine_id}/{self.generation}"


@dataclass(slots=True)
class EngineProcess:
    """A running engine. Made by `launch_engine`."""

    spec: EngineSpec
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    _descendants: set[Ident] = field(default_factory=set)

    @property
    def pid(self) -> int:
        """Leader of the engine's session and process group."""
        return self.process.pid

    @property
    def url(self) -> str:
        """Base of the HTTP API."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"

    def poll(self) -> int | None:
        """Exit status, or None while it runs. SGLang kills itself for most causes: the number says little."""
        return self.process.poll()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its output."""
        return tail(self.log, lines)

    def note_descendants(self) -> None:
        """Remember the children that exist now, so that `stop` finds those that left the group or were orphaned."""
        rows = processes.table()
        self._descendants |= {rows[pid].ident for pid in processes.below(rows, [self.pid])}

    def stop(self, timeout_s: float = 20.0) -> int:
        """End it and everything it started; return its exit status. Safe to repeat.

        timeout_s: how long SIGTERM may take before SIGKILL. SGLang polls for it every 5 s and then needs up to 15 s.
        """
        self.note_descendants()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL to whatever is left: the leader, the descendants seen so far, and whoever carries the marker.

        Nothing is killed by number alone: the leader is our unreaped child, the others are compared by birth.
        """
        if self.process.poll() is None:
            self.process.kill()
        left = {
            one
            for one in self._descendants | processes.marked(marks(self.spec.marker, self.spec.directory))
            if one.pid != self.pid
        }
        deadline = time.monotonic() + KILL_WAIT_S
        while (left := {one for one in left if processes.alive(one)}) and time.monotonic() < deadline:
            for one in left:
                processes.send(one, signal.SIGKILL)
            time.sleep(POLL_S)
        self._descendants.clear()


def launch_engine(
    spec: EngineSpec, *, clock: Callable[[], float] = time.monotonic, ready: Callable[[str], bool] | None = None
) -> EngineProcess:
    """Start the engine and wait until it serves. Raises `RltopError` with the end of its log; then nothing runs.

    ready: asks the engine at a URL whether it serves; by default `GET /model_info` is 200.
    """
    ready = ready or _serves
    spec.directory.mkdir(parents=True, exist_ok=True)
    port_file, log = spec.directory / "port", spec.directory / "stdout.log"
    port_file.unlink(missing_ok=True)
    port = _reserve(spec)
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(spec, port, port_file),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | dict(spec.env) | marks(spec.marker, spec.directory) | {"PYTHONUNBUFFERED": "1"},
        )
    engine = EngineProcess(spec, process, port, log)
    try:
        _wait_until_ready(engine, port_file, clock() + spec.start_timeout_s, clock, ready)
    except BaseException:
        engine.note_descendants()
        engine.kill()
        process.wait()
        raise
    engine.note_descendants()
    return engine


def _command(spec: EngineSpec, port: int, port_file: Path) -> list[str]:
    own = ["--parent-pid", str(os.getpid())] if spec.kind in STAND_INS and spec.die_with_parent else []
    server = server_argv(
        spec.kind,
        str(spec.python),
        ("--model-path", str(spec.model_path), "--host", spec.host, "--port", str(port), *own, *spec.args),
        port_file,
        spec.env,
    )
    if spec.kind == "sglang" and spec.die_with_parent:
        return [sys.executable, "-I", "-c", _DIE_WITH_PARENT, *server]
    return server


_DIE_WITH_PARENT = """
import ctypes, os, sys
parent = os.getppid()
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: nobody is left to escalate from SIGTERM
if os.getppid() != parent: os._exit(1)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Run between fork and SGLang. In a process of its own, because code between fork and exec in a threaded parent may
deadlock. The kernel sends the signal when the *thread* that launched ends: launch SGLang from one that stays."""


def _reserve(spec: EngineSpec) -> int:
    """Fail early on a taken port, which SGLang would only notice after loading the model; pick one for SGLang if 0."""
    if spec.port == 0 and spec.kind in STAND_INS:
        return 0
    with contextlib.closing(ports.bind(spec.host, spec.port)) as probe:
        chosen: int = probe.getsockname()[1]
    return chosen


def _wait_until_ready(
    engine: EngineProcess, port_file: Path, deadline: float, clock: Callable[[], float], ready: Callable[[str], bool]
) -> None:
    while clock() < deadline:
        # Waiting on the process is the clock tick: its death ends the wait at once.
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = engine.process.wait(POLL_S)
            raise _died(engine, status)
        if engine.port == 0 and port_file.exists():
            engine.port = int(port_file.read_text())
        if engine.port and _fired_up(engine.log) and ready(engine.url):
            return
    raise RltopError(
        "the engine did not start in time",
        where=str(engine.log),
        why=f"not ready after {engine.spec.start_timeout_s:g} s; {last_words(engine.log_tail())}",
        do="raise start_timeout_s, or run its command by hand",
        exit_code=1,
    )


def _fired_up(log: Path) -> bool:
    return READY_LINE.encode() in log.read_bytes()


def _serves(url: str) -> bool:
    try:  # it is plain HTTP: `verify` spares reading the certificates that are trusted, 40 ms a time
        return httpx.get(f"{url}/model_info", timeout=5, trust_env=False, verify=False).status_code == 200
    except httpx.HTTPError:
        return False


def _died(engine: EngineProcess, status: int) -> RltopError:
    log = engine.log_tail()
    # The CPU engine's own message is the better one: what, why, what to do.
    own = re.search(r"^error: (.*)", log, re.MULTILINE | re.DOTALL)
    advice = FROM_ITS_FIRST_ERROR if log.strip() else f"has {engine.spec.python} the server installed?"
    return RltopError(
        "the engine ended while it started",
        where=str(engine.log),
        why=own.group(1) if own else f"exit status {status}; {last_words(log)}",
        do="" if own else advice,
        exit_code=2 if status == 2 else 1,
    )


FROM_ITS_FIRST_ERROR = "read the log from its first error on"


def last_words(log: str, indent: str = "") -> str:
    """The end of a log in an error's reason; one that is empty is said to be."""
    if not log.strip():
        return NOTHING
    return "its last lines:\n" + "\n".join(indent + line for line in log.splitlines())


def tail(path: Path, lines: int) -> str:
    """The last lines of a text file; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
