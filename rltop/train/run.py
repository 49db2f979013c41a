"""One run inside the driver: Ray, actors, loop, and everything down again whatever happens."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rltop.errors import RltopError
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.cluster import Cluster, RayOptions, ray_cluster
from rltop.train.dump_claim import claimed, earlier
from rltop.train.fleet_link import FleetLink
from rltop.train.lifetime import Interrupted, Signals, no_child_left
from rltop.train.loop import History, Loop
from rltop.train.narrator import Narrator
from rltop.train.ports import Rollouts
from rltop.train.replayed_rollouts import ReplayedRollouts
from rltop.train.resume import find_checkpoint
from rltop.train.rollout_only import RolloutLoop
from rltop.train.sides import NAMESPACE, Joined, RayRollouts, RayTrainer, bundles, place_fleet

FLEET = "RLTOP_FLEET"
"""Environment variable: the control socket of the daemon that owns the engines. Without it the run has its own."""


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
            except KeyboardInterrupt as error:
                # Ray waits in C++ and raises one of its own for the signal that it noticed there.
                noticed = Interrupted(self.signals.seen or signal.SIGINT)
                narrator.bye("interrupted", str(noticed))
                raise noticed from error
            except RltopError as error:
                narrator.bye("failed", error.what)
                raise
            except BaseException as error:
                narrator.bye("failed", f"{type(error).__name__}: {error}")
                raise
            narrator.bye("done")

    def _train(self, narrator: Narrator) -> None:
        config = self.config
        fleet = self.environ.get(FLEET, "") if config.engine_count else ""  # nothing is asked of it without engines
        run = self.environ.get("RLTOP_RUN") or self.work_dir.name
        joined = config.ray_address is not None
        group = f"rltop-{run}-{secrets.token_hex(4)}" if fleet and joined else ""
        options = RayOptions(
            config.ray_address,
            # Engines that the daemon starts on this machine take no part in a private Ray.
            bundles(config, engines=joined or not fleet),
            self.ray_dir,
            name=group,
            namespace=NAMESPACE if group else None,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(claimed(config, run))
            for there in earlier(config, self._first()):
                narrator.log("warn", there)
            cluster = stack.enter_context(ray_cluster(options, self.signals))
            if cluster.exposed:
                narrator.log("warn", cluster.exposed)
            if fleet:
                run_dir = self.environ.get("RLTOP_RUN_DIR")
                link = stack.enter_context(FleetLink(fleet, Path(run_dir) if run_dir else None))
                ray = {"address": cluster.address, "namespace": NAMESPACE, "token_file": self._token_file()}
                where = Joined(group, ray) if joined else None
                side = place_fleet(cluster, config, self.work_dir, run, narrator, link, self.clock, where)
                self._loop(cluster, side, narrator).run()
            elif not config.engine_count:
                self._loop(cluster, ReplayedRollouts.place(cluster, config), narrator).run()
            else:
                self._with_own_engines(
                    cluster, RayRollouts.place(cluster, config, self.work_dir, run, narrator), narrator
                )

    def _with_own_engines(self, cluster: Cluster, rollouts: RayRollouts, narrator: Narrator) -> None:
        try:
            self._loop(cluster, rollouts, narrator).run()
        except RltopError:
            # The death of an engine explains a broken connection better than the connection does.
            rollouts.look(wait_s=1.0)
            raise
        finally:
            # From here on everything is bounded; a second signal must not cut the cleaning short.
            self.signals.shield()
            rollouts.stop()

    def _loop(self, cluster: Cluster, rollouts: Rollouts, narrator: Narrator) -> Loop | RolloutLoop:
        config = self.config
        if not config.trainer_ranks:
            return RolloutLoop(config, rollouts, narrator, self.history)
        # The first weights of the run that is resumed are kept: they may lie there under the other name.
        resumes = self._first() > 0
        return Loop(
            config=config,
            trainer=RayTrainer.place(cluster, config, self.work_dir),
            rollouts=rollouts,
            narrator=narrator,
            clock=self.clock,
            base_directory=(config.save_dir or self.work_dir).absolute() / ("resumed" if resumes else "initial"),
            history=self.history,
        )

    def _first(self) -> int:
        """The first rollout to come: 0, or the one after the checkpoint that is resumed."""
        found = find_checkpoint(self.config.load) if self.config.load is not None else None
        return 0 if found is None else found.iteration + 1

    def _token_file(self) -> str:
        """Where the joined cluster's token can be read: Ray's own file, or one for the token in our environment."""
        given, token = self.environ.get("RAY_AUTH_TOKEN_PATH", ""), self.environ.get("RAY_AUTH_TOKEN", "")
        if given or not token:
            default = Path.home() / ".ray" / "auth_token"
            return given or (str(default) if default.is_file() else "")
        path = self.work_dir / "ray-token"
        path.unlink(missing_ok=True)
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(token)
        return str(path)
