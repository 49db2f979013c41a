"""The trainer process that the daemon starts: its own session, its own log, and an end that leaves nothing behind.

It lives in its own session, so a daemon that is killed does not take it along (the next daemon adopts it); a daemon
that stops in good order stops it first. Between the two stands a keeper (`rltop.engines.keeper`), which leaves in
`trainer.json` who the trainer is and how it ended, also while no daemon is there. A process is taken for the trainer
only when pid, start time and marker all agree: a pid that was given to somebody else is never touched.

Stopping is: TERM to the process group, wait, KILL to the group, then KILL to whatever still carries this job's marker
in its environment (a trainer starts Ray, and Ray starts sessions of its own). The marker is unique per start, so
nothing that was not started here is ever hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rltop.engines.keeper import birth
from rltop.engines.spawn import start_keeper
from rltop.errors import RltopError

MARKER = "RLTOP_JOB"
"""Environment variable of the trainer and whatever it starts."""
POLL_S = 0.1
TERM_S = 8.0
LAST_LINES_BYTES = 4000
RECORD = "trainer.json"
RECORD_S = 3.0
"""From the end of the trainer to its keeper's word about it, when nobody sees the keeper."""
LEAVING_S = 120.0
"""The same while the keeper is there: it speaks when the last thread has ended. A trainer that holds tens of GiB of a
GPU and of pinned host memory looks ended (a zombie) seconds before that."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How the trainer ended."""

    code: int | None
    """Exit code; negative: the signal that ended it; None: nobody knows (its keeper was killed)."""
    state: str
    """State of the run that follows from it: done, failed, interrupted."""
    text: str


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """What a keeper wrote about the newest start of the trainer."""

    marker: str
    pid: int = 0
    birth: str = ""
    error: str = ""
    """Why it could not be started."""
    code: int | None = None
    """Exit code; None: it runs, or its keeper was killed."""
    ended: float = 0.0
    keeper: int = 0
    """Pid."""
    keeper_birth: str = ""

    def kept(self) -> bool:
        """Whether the keeper is there and will still say how it ended."""
        if not self.keeper or birth(self.keeper) != self.keeper_birth:
            return False
        try:
            return _alive(psutil.Process(self.keeper))
        except psutil.Error:
            return False


class TrainerJob:
    """One start of the trainer, of this daemon or (adopted) of an earlier one."""

    def __init__(self, process: psutil.Process | None, record: TrainerRecord, run_dir: Path) -> None:
        self._process = process
        self._run_dir = run_dir
        self._asked = False
        self.keeper = 0
        """Its pid when it is a child of this process."""
        self.marker = record.marker
        self.birth = record.birth
        self.log = run_dir / "trainer.log"
        self.log_from = 0
        """Bytes that an earlier start left in it: they say nothing about this one."""
        self.pid = record.pid

    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and _alive(self._process)

    async def wait(self, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Exit:
        """Wait for its end, and a moment for its keeper's word about it."""
        while self.running():
            await sleep(POLL_S)
        record = read_record(self._run_dir)
        for at in range(int(LEAVING_S / POLL_S)):
            if record is None or record.marker != self.marker or record.code is not None:
                break
            if at >= RECORD_S / POLL_S and not record.kept():
                break
            await sleep(POLL_S)
            record = read_record(self._run_dir)
        for _ in range(int(RECORD_S / POLL_S)):
            if self._reaped():
                break
            await sleep(POLL_S)
        code = record.code if record is not None and record.marker == self.marker else None
        return how_it_ended(code, asked=self._asked, log=self.log, log_from=self.log_from)

    def _reaped(self) -> bool:
        if self.keeper:
            try:
                if os.waitpid(self.keeper, os.WNOHANG)[0] == 0:
                    return False
            except ChildProcessError:
                pass  # somebody else has seen its end
            self.keeper = 0
        return True

    async def stop(
        self, stage: Callable[[str], None] = lambda text: None, *, term_s: float = TERM_S, poll_s: float = POLL_S
    ) -> None:
        """End it and everything that it started. `stage` is told what is going on."""
        self._asked = True
        family = await asyncio.to_thread(self.family)
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
        # Ray's processes notice the end of their driver within a second or two; who does not is helped.
        await self.clear(stage, grace_s=min(term_s, 3.0), poll_s=poll_s, family=family)

    async def clear(
        self,
        stage: Callable[[str], None] = lambda text: None,
        *,
        grace_s: float = TERM_S,
        poll_s: float = POLL_S,
        family: set[psutil.Process] | None = None,
    ) -> int:
        """The trainer is gone: wait for what it started to go too, TERM it after a quarter of `grace_s`, KILL it at the
        end. Returns how many had to be killed."""
        left = list((family or set()) | await asyncio.to_thread(self.family))
        turns = int(grace_s / poll_s)
        for turn in range(turns):
            left = [process for process in left if _alive(process)]
            if not left:
                return 0
            if turn == turns // 4:
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.terminate()
            await asyncio.sleep(poll_s)
        left = [process for process in set(left) | await asyncio.to_thread(self.family) if _alive(process)]
        for process in left:
            stage(f"KILL to process {process.pid}, left over by the trainer")
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(left)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def family(self) -> set[psutil.Process]:
        """Every other process of this user that carries the marker. Looks at all of them: not for the loop's thread."""
        found = set()
        for process in psutil.process_iter():
            if process.pid == self.pid:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARKER) == self.marker:
                    found.add(process)
        return found


def start_trainer(argv: Sequence[str], *, run_dir: Path, env: Mapping[str, str], marker: str) -> TrainerJob:
    """Start the trainer under a keeper, with its output appended to `<run_dir>/trainer.log`. Waits until it lives.

    env: its whole environment (RLTOP_INGEST, RLTOP_RUN and RLTOP_RUN_DIR are the caller's business).
    marker: unique text of this start.
    Raises RltopError when it cannot be started.
    """
    where = argv[0] if argv else "trainer"
    order = {"record": str(run_dir / RECORD), "variable": MARKER, "marker": marker}
    environ = {name: value for name, value in env.items() if name != MARKER}
    try:
        with (run_dir / "trainer.log").open("ab") as log:
            child, told = start_keeper(order, argv, log=log.fileno(), env=environ)
    except (OSError, ValueError) as error:
        raise RltopError("cannot start the trainer", where=where, why=str(error), exit_code=1) from error
    why = ""
    try:
        record = _parse(told)
        why = record.error
    except ValueError:
        why = last_line(run_dir / "trainer.log") or "its keeper ended without a word"
    if why:
        os.waitpid(child, 0)
        raise RltopError("cannot start the trainer", where=where, why=why, exit_code=1)
    # It may have ended already. Its keeper has just told who it is: an environment that cannot be read (hidepid, a
    # program with other rights) is no reason to take it for gone.
    job = TrainerJob(_born(record), record, run_dir)
    job.keeper = child
    return job


def adopt_trainer(record: TrainerRecord, run_dir: Path) -> TrainerJob | None:
    """The trainer that an earlier daemon of this run started, if exactly that process still lives; else None."""
    process = _find(record)
    return None if process is None else TrainerJob(process, record, run_dir)


def _find(record: TrainerRecord) -> psutil.Process | None:
    process = _born(record)
    try:
        return process if process is not None and _environ(process).get(MARKER) == record.marker else None
    except (psutil.Error, OSError):
        return None


def _born(record: TrainerRecord) -> psutil.Process | None:
    """The process with that pid if it began when the record says, whatever its environment."""
    try:
        process = psutil.Process(record.pid)
        return process if record.birth and birth(record.pid) == record.birth and _alive(process) else None
    except (psutil.Error, OSError, ValueError):
        return None


def _environ(process: psutil.Process) -> dict[str, str]:
    """Its environment. In the moment of its exec a process has none yet: that is waited out."""
    for _ in range(100):
        if found := process.environ():
            return dict(found)
        time.sleep(0.01)
    return {}


def read_record(run_dir: Path) -> TrainerRecord | None:
    """What the keeper of the newest trainer of a run wrote; None when there is none or it cannot be read."""
    try:
        return _parse((run_dir / RECORD).read_bytes())
    except (OSError, ValueError):
        return None


def _parse(text: bytes) -> TrainerRecord:
    found: Any = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    code, pid, ended, keeper = (found.get(name) for name in ("code", "pid", "ended", "keeper"))
    return TrainerRecord(
        marker=str(found.get("marker", "")),
        pid=pid if isinstance(pid, int) else 0,
        birth=str(found.get("birth", "")),
        error=str(found.get("error", "")),
        code=code if isinstance(code, int) else None,
        ended=float(ended) if isinstance(ended, int | float) else 0.0,
        keeper=keeper if isinstance(keeper, int) else 0,
        keeper_birth=str(found.get("keeper_birth", "")),
    )


def how_it_ended(code: int | None, *, asked: bool, log: Path, log_from: int = 0) -> Exit:
    """The run's state and a sentence, from the exit code and the end of its log from byte `log_from` on.

    asked: whether somebody told it to stop.
    """
    if asked or code in (130, -signal.SIGINT, -signal.SIGTERM):
        return Exit(code, "interrupted", "stopped" + ("" if code is None else f" ({_name(code)})"))
    if code == 0:
        return Exit(0, "done", "")
    last = last_line(log, log_from)
    words = f": {last}" if last else ""
    if code is None:
        return Exit(None, "failed", f"the trainer ended, how is not known (its keeper is gone too){words}")
    return Exit(code, "failed", f"the trainer ended with {_name(code)}{words}")


def last_line(log: Path, start: int = 0) -> str:
    """The last line of a log that says why its program ended, from byte `start` on; "" when there is none.

    Lines that are indented (the `why` and `do` of an error of rltop, the frames of a traceback) belong to the line
    above them, and the JSON object of `--json` is no reason.
    """
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(start, file.tell() - LAST_LINES_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line[0].isspace() and not _is_object(line)]
    return (said or lines or [""])[-1].strip()[:500]


def _is_object(line: str) -> bool:
    return line.startswith('{"') and line.endswith("}")


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _name(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"code {code}"
