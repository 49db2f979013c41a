"""Starts or adopts the trainer, shows it under the key `trainer`, and turns its end into the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rltop.daemon.core import Core
from rltop.daemon.trainer_job import TrainerJob, adopt_trainer, start_trainer
from rltop.errors import RltopError


class TrainerSupervisor:
    """At most one trainer per daemon.

    ended: told the state of the run, a sentence and the source when the trainer ends.
    epoch: makes the marker of this start unique. ingest: path of the ingest socket.
    """

    def __init__(
        self, core: Core, ended: Callable[[str, str, str], None], *, run_dir: Path, epoch: str, ingest: Path
    ) -> None:
        self._core = core
        self._ended = ended
        self._run_dir = run_dir
        self._epoch = epoch
        self._ingest = ingest
        self._job: TrainerJob | None = None
        self._watcher: asyncio.Task[None] | None = None

    def running(self) -> bool:
        """Whether there is a trainer of ours and it has not ended."""
        return self._job is not None and self._job.running()

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Adopt the trainer that the state table knows as running; else start `argv`, if any."""
        self._job = self._adopt()
        if self._job is None and argv:
            name = self._run_dir.name
            mine = {"RLTOP_INGEST": f"ipc://{self._ingest}", "RLTOP_RUN": name, "RLTOP_RUN_DIR": str(self._run_dir)}
            marker = f"{name}/{self._epoch}"
            try:
                self._job = start_trainer(argv, run_dir=self._run_dir, env={**env, **mine}, marker=marker)
            except RltopError as error:
                self._core.set("trainer", {"pid": 0, "state": "failed", "exit_code": None, "log": ""})
                self._ended("failed", str(error), "daemon")
            else:
                # Over the directory of an earlier run: how that one ended says nothing about this one.
                self._core.update("run", state="waiting", text="", ended=None)
        if self._job is not None:
            self._show(self._job, "running", None)
            self._watcher = asyncio.get_running_loop().create_task(self._watch(self._job))

    async def stop(self, stage: Callable[[str], None]) -> str:
        """Stop the trainer and everything that it started; a closing sentence."""
        if self._job is None or self._watcher is None:
            return "there was no trainer"
        running = self._job.running()
        await self._job.stop(stage)
        await asyncio.wait([self._watcher])
        return "the trainer is stopped" if running else "the trainer had already ended"

    def _adopt(self) -> TrainerJob | None:
        before = self._core.table.get("trainer")
        if before is None or before["state"] != "running":
            return None
        job = adopt_trainer(before["pid"], before["create_time"], before["marker"], Path(before["log"]))
        if job is None:
            self._core.update("trainer", state="gone")
            self._ended("lost", f"the trainer (process {before['pid']}) ended while no daemon was there", "daemon")
        else:
            self._core.event("run", "info", f"found the trainer again: process {job.pid}", "daemon", state="running")
        return job

    async def _watch(self, job: TrainerJob) -> None:
        end = await job.wait()
        self._show(job, "exited", end.code)
        self._ended(end.state, end.text, "daemon")

    def _show(self, job: TrainerJob, state: str, code: int | None) -> None:
        self._core.set(
            "trainer",
            {
                "pid": job.pid,
                "create_time": job.create_time,
                "marker": job.marker,
                "state": state,
                "exit_code": code,
                "log": str(job.log),
            },
        )
