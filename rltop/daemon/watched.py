"""`rltop watch --log`: the parts of a daemon that follow a run which knows nothing of rltop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltop.daemon.core import Core
from rltop.daemon.ingest import Ingest
from rltop.daemon.others import Others
from rltop.daemon.verdicts import Verdicts
from rltop.daemon.watched_cluster import Cluster
from rltop.daemon.watched_engines import NamedEngines
from rltop.daemon.watched_files import LogFiles, WatchOptions
from rltop.daemon.watched_gpus import Gpus
from rltop.daemon.watched_logs import LogReader
from rltop.daemon.watched_run import ROLE, WatchedRun
from rltop.evidence.launch_file import read_launch_file
from rltop.evidence.metric_names import Names
from rltop.evidence.sink import Sink

SWITCH_S = 0.001
"""After so long the thread that reads a log hands over to the loop, each time that the loop comes back from a call of
the system; Python's own 5 ms add up to a lag that people see."""
LOG_SOURCE = f"{ROLE}/0"
"""Name of the source that stands for all logs together."""


class Watched:
    """Follows what the configuration's key `watch` names; without logs and cluster it does nothing."""

    def __init__(
        self,
        core: Core,
        config: Mapping[str, Any],
        *,
        ingest: Ingest,
        verdicts: Verdicts,
        others: Others,
        run_dir: Path,
        names: Names | None = None,
    ) -> None:
        options = WatchOptions.of(config)
        self._known = Sink()
        if options.args:
            read_launch_file(Path(options.args), self._known)
        self._files = LogFiles(options.logs)
        self._cluster = Cluster(core, options.ray, changed=self._judge)
        self._run = WatchedRun(
            core,
            ingest,
            verdicts,
            LogReader(self._files, from_end=options.from_end, names=names),
            NamedEngines(core, others),
            run_dir=run_dir,
            host=socket.gethostname(),
            extra=self._beside,
        )
        self._gpus = Gpus(core)
        self._logs = bool(options.logs)
        self._asks = bool(options.ray)

    async def run(self) -> None:
        """Until cancelled."""
        if self._logs:
            sys.setswitchinterval(SWITCH_S)
            await asyncio.to_thread(_import_early)
            gc.freeze()  # what was imported is no garbage: looking through it holds everybody up
        parts = ((self._run.run, self._logs), (self._cluster.run, self._asks), (self._gpus.run, self._logs))
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.Event().wait())
            for part, wanted in parts:
                if wanted:
                    group.create_task(part())

    def ages(self) -> dict[str, float]:
        """Log -> seconds since it last grew."""
        return self._run.ages() if self._logs else {}

    def paths(self) -> dict[str, tuple[Path, int]]:
        """Logs that are followed, by the name that evidence has for them."""
        return {name: (path, 0) for name, path in self._files.paths.items()}

    def before(self) -> dict[str, int]:
        """Log -> lines that it had before it was replaced or cut: its line numbers go on from there."""
        return self._run.before() if self._logs else {}

    def _judge(self) -> None:
        if self._logs:
            self._run.judge()

    def _beside(self) -> Sink:
        known = self._known
        return Sink(args=known.args, scripts=known.scripts, documents=known.documents, ray=self._cluster.snapshots())


def _import_early() -> None:
    """What asks an engine is imported when the first one is asked, in the loop; where a log may name one at any moment,
    while another is being read, that would hold everybody up for a second."""
    for name in ("httpx", "rltop.engines.client", "rltop.engines.scrape", "rltop.engines.verify"):
        importlib.import_module(name)
