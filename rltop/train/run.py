"""One run inside the driver: Ray, actors, loop, and everything down again whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rltop.errors import RltopError
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.cluster import RayOptions, ray_cluster
from rltop.train.lifetime import Interrupted, Signals, no_child_left
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator
from rltop.train.resume import find_checkpoint
from rltop.train.sides import RayRollouts, RayTrainer, bundles


@dataclass(frozen=True, slots=True)
class Run:
    """What a run is made of. `history` says how far it came, also after it failed."""

    config: TrainConfig
    work_dir: Path
    ray_dir: Path
    environ: Mapping[str, str]
    clock: Callable[[], float]
    signals: Signals
    history: History

    def go(self) -> None:
        """Train. Raises RltopError when it fails and `Interrupted` when a signal ends it; no child survives either."""
        with Reporter(role="trainer", rank=0) as reporter:
            narrator = Narrator(reporter, self.clock)
            try:
                with no_child_left():
                    self._train(narrator)
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

    def _train(self, narrator: Narrator) -> None:
        config = self.config
        with ray_cluster(RayOptions(config.ray_address, bundles(config), self.ray_dir), self.signals) as cluster:
            if cluster.exposed:
                narrator.log("warn", cluster.exposed)
            # The first weights of the run that is resumed are kept: they may lie there under the other name.
            resumes = config.load is not None and find_checkpoint(config.load) is not None
            run = self.environ.get("RLTOP_RUN") or self.work_dir.name
            rollouts = RayRollouts.place(cluster, config, self.work_dir, run, narrator)
            loop = Loop(
                config=config,
                trainer=RayTrainer.place(cluster, config, self.work_dir),
                rollouts=rollouts,
                narrator=narrator,
                clock=self.clock,
                base_directory=(config.save_dir or self.work_dir).absolute() / ("resumed" if resumes else "initial"),
                history=self.history,
            )
            try:
                loop.run()
            except RltopError:
                # The death of an engine explains a broken connection better than the connection does.
                rollouts.look(wait_s=1.0)
                raise
            finally:
                # From here on everything is bounded; a second signal must not cut the cleaning short.
                self.signals.shield()
                rollouts.stop()
