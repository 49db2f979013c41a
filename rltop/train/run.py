"""One run from arguments to exit: Ray, actors, loop, and everything down again whatever happens."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rltop.errors import RltopError
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.cluster import RayOptions, ray_cluster
from rltop.train.lifetime import Interrupted, Signals, no_child_left
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator
from rltop.train.preflight import require_checkpoint
from rltop.train.sides import RayRollouts, RayTrainer, bundles


@dataclass(slots=True)
class Run:
    """A run and what is known of it, also after it failed."""

    config: TrainConfig
    environ: Mapping[str, str]
    clock: Callable[[], float]
    signals: Signals
    history: History

    def go(self) -> None:
        """Train. Raises RltopError when it fails and `Interrupted` when a signal ends it; no child survives either."""
        self._preflight()
        with Reporter(role="trainer", rank=0) as reporter:
            narrator = Narrator(reporter, self.clock)
            try:
                with no_child_left(), self._work_dir() as work_dir:
                    self._train(narrator, work_dir)
            except Interrupted as stop:
                narrator.bye("interrupted", str(stop))
                raise
            except RltopError as error:
                narrator.bye("failed", error.what)
                raise
            except BaseException as error:
                narrator.bye("failed", f"{type(error).__name__}: {error}")
                raise
            narrator.bye("done")

    def _preflight(self) -> None:
        """What can be seen to fail before anything is started."""
        config = self.config
        for path, flag in ((config.hf_checkpoint, "--hf-checkpoint"), (config.ref_load, "--ref-load")):
            if path is not None:
                template = config.apply_chat_template and flag == "--hf-checkpoint"
                require_checkpoint(path, flag=flag, chat_template=template)
        if config.engine_python is not None and not config.engine_python.is_file():
            raise RltopError(
                "no such interpreter", where=f"--engine-python {config.engine_python}", why="there is no file"
            )
        if config.save_dir is not None:
            try:
                config.save_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RltopError(
                    "cannot write there", where=f"--save-dir {config.save_dir}", why=error.strerror or str(error)
                ) from error

    def _train(self, narrator: Narrator, work_dir: Path) -> None:
        config = self.config
        with ray_cluster(RayOptions(config.ray_address, bundles(config)), self.signals) as cluster:
            run = self.environ.get("RLTOP_RUN", "") or work_dir.name
            trainer = RayTrainer.place(cluster, config, work_dir)
            rollouts = RayRollouts.place(cluster, config, work_dir, run, narrator)
            loop = Loop(
                config=config,
                trainer=trainer,
                rollouts=rollouts,
                narrator=narrator,
                clock=self.clock,
                base_directory=(config.save_dir or work_dir) / "base",
                history=self.history,
            )
            try:
                loop.run()
            finally:
                # From here on everything is bounded; a second signal must not cut the cleaning short.
                self.signals.shield()
                rollouts.stop()

    @contextlib.contextmanager
    def _work_dir(self) -> Iterator[Path]:
        """Where the run writes: below the daemon's run directory, or --save-dir, or a directory that goes again."""
        home = self.environ.get("RLTOP_RUN_DIR") or self.config.save_dir
        if home is not None:
            directory = Path(home) / "train"
            directory.mkdir(parents=True, exist_ok=True)
            yield directory
            return
        directory = Path(tempfile.mkdtemp(prefix="rltop-train-"))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
