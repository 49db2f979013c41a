"""The trainer process that the daemon starts: its own session, its own log, and an end that leaves nothing behind.

It lives in its own session, so a daemon that is killed does not take it along (the next daemon adopts it); a daemon
that stops in good order stops it first. Stopping is: TERM to the process group, wait, KILL to the group, then KILL to
whatever still carries this job's marker in its environment (a trainer starts Ray, and Ray starts sessions of its own).
The marker is unique per start, so nothing that was not started here is ever hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rltop.errors import RltopError

POLL_S = 0.1
TERM_S = 8.0
MARKER = "RLTOP_JOB"
LAST_LINES_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Exit:
    """How the trainer ended."""

    code: int | None
    """Exit code; negative: the signal that ended it; None: it was not our child (adopted)."""
    state: str
    """State of the run that follows from it: done, failed, interrupted."""
    text: str


class TrainerJob:
    """One start of the trainer."""

    def __init__(self, process: subprocess.Popen[bytes] | psutil.Process, marker: str, log: Path) -> None:
        self._process = process
        self.marker = marker
        self.log = log
        self.pid = process.pid
        self.create_time = _create_time(process.pid)
        """Start time by the kernel's account, seconds since the epoch: with the pid it names one process for ever."""
        self._asked = False

    def running(self) -> bool:
        """Whether the process is there."""
        if isinstance(self._process, psutil.Process):
            return _alive(self._process)
        return self._process.poll() is None

    async def wait(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Exit:
        """Wait for its end."""
        while self.running():
            await sleep(POLL_S)
        if isinstance(self._process, psutil.Process):
            state = "interrupted" if self._asked else "failed"
            return Exit(None, state, "the trainer ended; its exit code went to the daemon before this one")
        code = self._process.poll()
        if code is None or self._asked or code in (130, -signal.SIGINT, -signal.SIGTERM):
            return Exit(code, "interrupted", f"stopped ({_name(code)})")
        if code == 0:
            return Exit(0, "done", "")
        last = last_line(self.log)
        return Exit(code, "failed", f"the trainer ended with {_name(code)}" + (f": {last}" if last else ""))

    async def stop(
        self, stage: Callable[[str], None] = lambda text: None, *, term_s: float = TERM_S, poll_s: float = POLL_S
    ) -> None:
        """End it and everything that it started. `stage` is told what is going on."""
        self._asked = True
        family = self._family()
        if self.running():
            stage(f"TERM to process group {self.pid}")
            self._signal_group(signal.SIGTERM)
            for _ in range(int(term_s / poll_s)):
                if not self.running():
                    break
                await asyncio.sleep(poll_s)
            else:
                stage(f"KILL to process group {self.pid}: still there after {term_s:.0f} s")
                self._signal_group(signal.SIGKILL)
                await self.wait()
        left = list(family | self._family())
        # Ray's processes notice the end of their driver within a second or two; who does not is helped.
        for _ in range(int(min(term_s, 3.0) / poll_s)):
            left = [process for process in left if _alive(process)]
            if not left:
                return
            await asyncio.sleep(poll_s)
        for process in left:
            stage(f"KILL to process {process.pid}, left over by the trainer")
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _family(self) -> set[psutil.Process]:
        """Every other process of this user that carries the marker."""
        found = set()
        for process in psutil.process_iter():
            if process.pid == self.pid:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.marker:
                    found.add(process)
        return found


def start_trainer(argv: Sequence[str], *, run_dir: Path, env: Mapping[str, str], marker: str) -> TrainerJob:
    """Start the trainer with its output appended to `<run_dir>/trainer.log`.

    env: its whole environment (RLTOP_INGEST, RLTOP_RUN and RLTOP_RUN_DIR are the caller's business).
    marker: unique text of this start.
    Raises RltopError when it cannot be started.
    """
    log = run_dir / "trainer.log"
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**env, MARKER: marker},
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise RltopError(
            "cannot start the trainer", where=argv[0] if argv else "trainer", why=str(error), exit_code=1
        ) from error
    return TrainerJob(process, marker, log)


def adopt_trainer(pid: int, create_time: float, marker: str, log: Path) -> TrainerJob | None:
    """The trainer that an earlier daemon of this run started, if exactly that process still lives; else None."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < 0.1 and process.environ().get(MARKER) == marker
    except (psutil.Error, OSError):
        return None
    return TrainerJob(process, marker, log) if same and _alive(process) else None


def last_line(log: Path) -> str:
    """The last line of a log that says anything; "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LAST_LINES_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _create_time(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def _name(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"code {code}"
