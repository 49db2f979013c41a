"""Starts or adopts the trainer, shows it under the key `trainer`, and turns its end into the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rltop.daemon.core import Core
from rltop.daemon.trainer_job import (
    Exit,
    TrainerJob,
    TrainerRecord,
    adopt_trainer,
    how_it_ended,
    read_record,
    start_trainer,
)
from rltop.errors import RltopError


class TrainerSupervisor:
    """At most one trainer per daemon.

    ended: told the state of the run, a sentence and the source when the trainer ends.
    epoch: makes the marker of this start unique. ingest: gives the value of RLTOP_INGEST. fleet: that of RLTOP_FLEET;
    "" where the daemon owns no engines.
    """

    def __init__(
        self,
        core: Core,
        ended: Callable[[str, str, str], None],
        *,
        run_dir: Path,
        epoch: str,
        ingest: Callable[[], str],
        fleet: str = "",
    ) -> None:
        self._core = core
        self._ended = ended
        self._run_dir = run_dir
        self._epoch = epoch
        self._ingest = ingest
        self._fleet = fleet
        self._job: TrainerJob | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._log_from = 0
        self._starting: asyncio.Event | None = None
        """Set when the start is over; None when none is under way. Viewers are served meanwhile."""

    def running(self) -> bool:
        """Whether there is a trainer of ours, or one on its way, and it has not ended."""
        return self._starting is not None or (self._job is not None and self._job.running())

    def adopted(self) -> bool:
        """Whether the trainer is one that an earlier daemon started."""
        return self._job is not None and self._job.marker != f"{self._run_dir.name}/{self._epoch}"

    async def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Adopt the trainer of an earlier daemon if it lives; else start `argv`, if any."""
        self._starting = over = asyncio.Event() if argv else None
        try:
            await self._start(argv, env)
        finally:
            self._starting = None
            if over is not None:
                over.set()

    async def _start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._job = self._adopt(read_record(self._run_dir))
        if self._job is None and argv:
            name = self._run_dir.name
            mine = {"RLTOP_INGEST": self._ingest(), "RLTOP_RUN": name, "RLTOP_RUN_DIR": str(self._run_dir)}
            env = {key: value for key, value in env.items() if key != "RLTOP_FLEET"}  # of a run around this one
            if self._fleet:
                mine["RLTOP_FLEET"] = self._fleet
            marker = f"{name}/{self._epoch}"
            self._log_from = size_of(self._run_dir / "trainer.log")
            try:
                self._job = await asyncio.to_thread(
                    start_trainer, argv, run_dir=self._run_dir, env={**env, **mine}, marker=marker
                )
            except RltopError as error:
                self._core.set("trainer", {"pid": 0, "state": "failed", "exit_code": None, "log": ""})
                self._core.update("run", state="waiting")
                self._ended("failed", str(error), "daemon")
            else:
                # Over the directory of an earlier run: how that one ended says nothing about this one.
                self._core.update("run", state="waiting", text="", ended=None)
        if self._job is not None:
            self._job.log_from = self._log_from
            self._show(self._job, "running", None)
            self._watcher = asyncio.get_running_loop().create_task(self._watch(self._job))

    async def stop(self, stage: Callable[[str], None]) -> str:
        """Stop the trainer and everything that it started, also one that is only being started; a closing sentence."""
        if self._starting is not None:
            stage("waiting for its start")
            await self._starting.wait()
        if self._job is None or self._watcher is None:
            return "there was no trainer"
        running = self._job.running()
        await self._job.stop(stage)
        await asyncio.wait([self._watcher])
        return "the trainer is stopped" if running else "the trainer had already ended"

    def _adopt(self, record: TrainerRecord | None) -> TrainerJob | None:
        known = self._core.table.get("trainer") or {}
        self._log_from = int(known.get("log_from") or 0)
        job = adopt_trainer(record, self._run_dir) if record is not None and record.code is None else None
        if job is not None:
            self._core.event("run", "info", f"found the trainer again: process {job.pid}", "daemon", state="running")
        elif known.get("state") == "running":
            pid = known.get("pid")
            if record is not None and record.marker == known.get("marker") and record.code is not None:
                log = Path(known.get("log") or "")
                end = how_it_ended(record.code, asked=False, log=log, log_from=self._log_from)
                self._core.update("trainer", state="exited", exit_code=end.code)
                words = f"the trainer (process {pid}) ended while no daemon was there"
                self._ended(end.state, f"{words}: {end.text}" if end.text else words, "daemon")
            else:
                self._core.update("trainer", state="gone")
                self._ended("lost", f"the trainer (process {pid}) ended while no daemon was there", "daemon")
        return job

    async def _watch(self, job: TrainerJob) -> None:
        end = await job.wait()
        self._show(job, "exited", end.code)
        self._ended(end.state, end.text, "daemon")
        await self._clear(job, end)

    async def _clear(self, job: TrainerJob, end: Exit) -> None:
        """What a trainer that failed leaves behind (engines, Ray) holds memory and ports: it must not stay.

        One that is done may leave something on purpose: that is named, not touched.
        """
        family = await asyncio.to_thread(job.family)
        if end.state != "done":
            killed = await job.clear()
            if left := len(family):
                how = f"{killed} of them had to be killed" if killed else "they ended by themselves"
                self._core.event("run", "warn", f"the trainer left {left} processes behind; {how}", "daemon")
        elif family:
            pids = ", ".join(str(process.pid) for process in sorted(family, key=lambda found: found.pid)[:10])
            text = f"the trainer is done and left {len(family)} processes running: {pids}"
            self._core.event("run", "warn", text, "daemon")

    def _show(self, job: TrainerJob, state: str, code: int | None) -> None:
        self._core.set(
            "trainer",
            {
                "pid": job.pid,
                "birth": job.birth,
                "marker": job.marker,
                "state": state,
                "exit_code": code,
                "log": str(job.log),
                "log_from": self._log_from,
            },
        )


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
