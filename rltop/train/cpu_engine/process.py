"""The CPU engine as processes: its tree, its signals, and its ends, which are SGLang's.

    main (HTTP and computing) -> scheduler child (`scheduler_child.py`), small, the one that dies first

A scheduler that dies sends SIGQUIT; the main process then waits `RLTOP_CPU_ENGINE_CRASH_S` seconds (SGLang: 5) with its
HTTP dead, kills its tree and itself with SIGKILL. SIGTERM drains without a time limit; then release 0.5.23 ends with 0
and 0.5.14 with SIGKILL. SIGINT ends with 130 after running requests were answered as aborted. `--parent-pid` gone: the
same, with 0. While it starts, the child's death ends it with 1 (`Rank 0 scheduler died during initialization`).

One difference is meant: SGLang looks every 5 s whether SIGTERM came, this engine at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil
import uvicorn

from rltop.train.cpu_engine.engine import Engine
from rltop.train.cpu_engine.faults import Fault
from rltop.train.cpu_engine.injection import Death, SchedulerDied
from rltop.train.cpu_engine.server import make_app

LOGGER = logging.getLogger("rltop.cpu_engine")

GRACE_S = 3
"""How long connections may take to finish when the engine ends; running requests are over by then."""

CRASH_VARIABLE = "RLTOP_CPU_ENGINE_CRASH_S"
"""Environment variable: seconds between a scheduler's death and the end of the tree. SGLang sleeps 5."""

CRASH_S = 5.0


class Tree:
    """The main process's side of the tree. `start` it before the load, `close` it at the end; only the main thread."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._settle_s = _seconds(environ.get(CRASH_VARIABLE, ""))
        self._child: subprocess.Popen[bytes] | None = None
        self._serving = False
        self._over = False
        """An end is under way: the child's death means nothing any more."""
        self._handler_before: Any = None
        self.last_words: Callable[[], object] = lambda: None
        """Called by a dying engine that served, before anything else."""

    @property
    def scheduler_pid(self) -> int:
        """Of the child, or this process where there is none."""
        return os.getpid() if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child and watch it. SIGQUIT is this tree's from now on."""
        self._handler_before = signal.signal(signal.SIGQUIT, lambda number, frame: self.die())
        script = Path(__file__).with_name("scheduler_child.py")
        # Inherited descriptors (a supervisor's lock) are passed on, as by SGLang's children.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script)], stdin=subprocess.PIPE, close_fds=False
        )
        threading.Thread(target=self._watch, name="subprocess-watchdog", daemon=True).start()

    def serve(self) -> None:
        """The start is over: deaths are now those of a serving engine."""
        self._serving = True

    def orphan(self, fault: Fault) -> None:
        """Let the child leave a process behind."""
        self._tell(f"orphan {fault.number('seconds', 600):g}")

    def scheduler_died(self, died: SchedulerDied) -> None:
        """The scheduler's loop is over: the child dies of it, in this way. From any thread."""
        words: dict[Death, str] = {"exception": "exception", "abort": "abort", "watchdog": "quit"}
        if died.death == "watchdog":
            LOGGER.error("Scheduler watchdog timeout (self.watchdog_timeout=%g, self.soft=False)", died.seconds)
            print(flush=True)
            time.sleep(self._settle_s)
        self._tell(words[died.death])

    def wait_for_the_end(self) -> NoReturn:
        """The child's death ends this process: by signal, or by the watch."""
        while True:
            time.sleep(GRACE_S)

    def kill_child(self) -> None:
        """As the host's out-of-memory killer would."""
        if self._child is not None:
            self._child.kill()

    def _tell(self, word: str) -> None:
        if self._child is None or self._child.stdin is None:
            return
        try:
            self._child.stdin.write(f"{word}\n".encode())
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead: the watch knows

    def _watch(self) -> None:
        """In a thread: what SGLang's SubprocessWatchdog does."""
        assert self._child is not None, "started before"
        code = self._child.wait()
        if self._over:
            return
        if not self._serving:
            self._over = True
            print(
                f"RuntimeError: Rank 0 scheduler died during initialization (exit code: {code}). "
                "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
                "Run `dmesg -T | grep -i oom` to check.",
                flush=True,
            )
            os._exit(1)
        if code not in (0, 1):  # an exception's SIGQUIT is on its way already
            LOGGER.error(
                "Subprocess scheduler_0 (pid=%d) crashed with exit code %d. Triggering SIGQUIT for cleanup...",
                self._child.pid,
                code,
            )
            os.kill(os.getpid(), signal.SIGQUIT)

    def die(self) -> NoReturn:
        """SIGQUIT: end as SGLang does after its scheduler died. HTTP is dead from here on."""
        self._over = True
        if self._serving:
            LOGGER.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
            self.last_words()
            LOGGER.info("Sleeping %g seconds before crash diagnostics to let GPU activity settle.", self._settle_s)
            time.sleep(self._settle_s)
            if self._child is None or self._child.poll() is not None:
                LOGGER.error("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        else:
            LOGGER.error("Received sigquit from a child process. It usually means the child failed.")
        self.kill()

    def kill(self) -> NoReturn:
        """SGLang's kill_process_tree: SIGKILL to every descendant and to itself."""
        self._over = True
        pid = os.getpid()
        LOGGER.info("kill_process_tree called: parent_pid=%d, include_parent=True, pid=%d", pid, pid)
        logging.shutdown()
        for child in psutil.Process(pid).children(recursive=True):
            try:
                child.kill()
            except psutil.Error:
                continue
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("SIGKILL ends a process")

    def close(self) -> None:
        """End the child: nothing more happens in this tree."""
        self._over = True
        if self._child is not None and self._child.stdin is not None:
            signal.signal(signal.SIGQUIT, self._handler_before)
            self._child.stdin.close()
            try:
                self._child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()


def _seconds(text: str) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return CRASH_S


def serve(engine: Engine, listener: socket.socket, tree: Tree) -> int:
    """Serve until a signal, the parent's death or the scheduler's. Returns the exit status, where it returns."""
    scheduler = engine.scheduler
    if engine.injection.strike("port-in-use"):
        where = (engine.args.host, engine.args.port)
        logging.getLogger("uvicorn.error").error(
            "[Errno 98] error while attempting to bind on address %r: address already in use", where
        )
        return 1
    scheduler.on_death = tree.scheduler_died
    tree.last_words = engine.crash_dump.write
    server = _Server(engine, tree)
    thread = threading.Thread(target=scheduler.run, name="scheduler", daemon=True)
    received: list[int] = []
    # uvicorn raises the signals that it caught again when it is done; these handlers then only take note.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: received.append(caught))
    thread.start()
    tree.serve()
    asyncio.run(server.serve_until_told(listener))
    scheduler.stop()
    thread.join(timeout=GRACE_S)
    if server.drained and not engine.args.modern:
        tree.kill()
    return 130 if signal.SIGINT in received else 0


class _Server(uvicorn.Server):
    """uvicorn with SGLang's start line, its drain, and an end for more reasons than signals."""

    def __init__(self, engine: Engine, tree: Tree) -> None:
        config = uvicorn.Config(
            make_app(engine),
            host=engine.args.host,
            port=engine.args.port,
            log_config=None,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self.engine, self.tree = engine, tree
        self.drained = False
        """SIGTERM came, and every request was answered."""
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve_until_told(self, listener: socket.socket) -> None:
        """Serve on the bound socket."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGQUIT, self.tree.die)
        watch = asyncio.ensure_future(self._watch_parent()) if self.engine.args.parent_pid else None
        await self.serve(sockets=[listener])
        if watch is not None:
            watch.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so: log lines, port file."""
        await super().startup(sockets)
        # Given a ready-made socket, uvicorn is silent about this, and log readers wait for the sentence.
        logging.getLogger("uvicorn.error").info(
            "Uvicorn running on http://%s:%d (Press CTRL+C to quit)", self.config.host, self.engine.args.port
        )
        if self.engine.args.port_file is not None:
            _write_port(self.engine.args.port_file, self.engine.args.port)
        if wait := self.engine.warm_up_s:
            asyncio.get_running_loop().call_later(wait, self._ready)
        else:
            self._ready()

    def _ready(self) -> None:
        self.engine.ready = True
        LOGGER.info("The server is fired up and ready to roll!")

    def handle_exit(self, sig: int, frame: object) -> None:
        """SIGTERM drains; SIGINT answers what is running as aborted, then ends."""
        if sig != signal.SIGTERM:
            self.engine.scheduler.abort(everything=True)
            super().handle_exit(sig, frame)  # type: ignore[arg-type]  # a frame that nobody reads
        elif self._loop is not None:
            # A handler runs between any two instructions, also of a log line: what it wants is done by the loop.
            self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._draining is None:
            LOGGER.warning("SIGTERM received. signum=15 frame=None. Draining requests and shutting down...")
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """Until no request is left, without a time limit, as SGLang does it."""
        engine, told = self.engine, 0.0
        stuck = engine.injection.strike("drain-stuck") is not None
        while True:
            if engine.unhealthy:
                LOGGER.error("Signal SIGTERM received while health check failed. Force exiting.")
                break
            if os.environ.get("SGL_FORCE_SHUTDOWN", "").lower() in ("1", "true"):
                LOGGER.error("Signal SIGTERM received while force shutdown flag set. Force exiting.")
                break
            if time.monotonic() - told >= 5:
                told = time.monotonic()
                LOGGER.info("Gracefully exiting... Remaining number of requests %d.", engine.open_requests)
            if not engine.open_requests and not stuck:
                break
            await asyncio.sleep(0.02)
        self.drained = self.should_exit = True

    async def _watch_parent(self) -> None:
        parent = self.engine.args.parent_pid
        assert parent is not None, "started only with a parent"
        await _gone(parent)
        LOGGER.info("Parent process %d is gone. Shutting down.", parent)
        self.engine.scheduler.abort(everything=True)
        self.should_exit = True


async def _gone(pid: int) -> None:
    """Return when the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except AttributeError:  # not Linux
        while psutil.pid_exists(pid):  # noqa: ASYNC110 - nothing to wait on but the clock
            await asyncio.sleep(1)
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _write_port(path: Path, port: int) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    staging.write_text(f"{port}\n")
    os.replace(staging, path)
