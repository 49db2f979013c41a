"""Taking turns on shared devices: `--colocate`, in slime's order.

    rollout -> engines release everything -> trainer wakes up -> log-probs, steps -> it sleeps, but for its weights
            -> engines resume(weights) -> weight update -> its weights sleep too -> engines resume(kv_cache, cuda_graph)

One difference to slime: slime sleeps whole before the push and pushes from a host copy; here the trainer's weights stay
on the device until they are pushed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig
from rltop.train.engine_memory import CACHES, SETTLE_S, WEIGHTS
from rltop.train.narrator import Narrator
from rltop.train.ports import Holding, MemoryLook, Rollouts, Trainer

LATE, NO_UPDATE = "late-release", "no-update-after-resume"
"""Planted faults of the swap."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Hands the devices from one side to the other; every method does nothing for a side that does not offload."""

    config: TrainConfig
    trainer: Trainer
    rollouts: Rollouts
    narrator: Narrator
    clock: Callable[[], float]

    def begin(self) -> None:
        """Before the engines start: the trainer lets go of all but the weights that they are compared with."""
        if self.config.offloads_train:
            self._sleep(None, weights=False)

    def begun(self) -> None:
        """The engines are up and hold the weights."""
        if self.config.offloads_train:
            self._sleep(None, weights=True)

    def to_trainer(self, rollout_id: int, perf: MutableMapping[str, float]) -> None:
        """The rollout is done. Raises RltopError where an engine still holds what the trainer needs."""
        if self.config.offloads_rollout:
            with self.narrator.phase("offload", rollout_id):
                self.rollouts.offload(late=self._planted(LATE, rollout_id))
        if not self.config.offloads_train:
            self._check_room()
            return
        started = self.clock()
        with self.narrator.phase("wake_up", rollout_id):
            self._check_room()
            self._told("wake_up model", self.trainer.wake_up())
        perf["perf/wake_up_time"] = self.clock() - started

    def before_push(self, rollout_id: int, perf: MutableMapping[str, float]) -> None:
        """The steps are done: room for the engines' weights, and they come back for the update."""
        if self.config.offloads_train:
            perf["perf/sleep_time"] = self._sleep(rollout_id, weights=False)
        if self.config.offloads_rollout:
            with self.narrator.phase("onload", rollout_id):
                self.rollouts.onload(WEIGHTS)

    def after_push(self, rollout_id: int, perf: MutableMapping[str, float]) -> None:
        """The weights are pushed: the engines take all that is left."""
        if self.config.offloads_train:
            perf["perf/sleep_time"] = perf.get("perf/sleep_time", 0.0) + self._sleep(rollout_id, weights=True)
        if self.config.offloads_rollout:
            with self.narrator.phase("onload", rollout_id):
                self.rollouts.onload(CACHES, no_update=self._planted(NO_UPDATE, rollout_id))

    @contextlib.contextmanager
    def weights_awake(self) -> Iterator[None]:
        """For a push in the middle of a rollout, or a save: the trainer's weights are on the device inside."""
        if not self.config.offloads_train:
            yield
            return
        self.trainer.wake_up(weights_only=True)
        try:
            yield
        finally:
            self.trainer.sleep(weights=True)

    def _planted(self, name: str, rollout_id: int) -> bool:
        if not self.config.plants(name):
            return False
        from rltop.train.inject import active, parse_fault  # needs torch, which a run without faults spares its driver

        return active([parse_fault(text) for text in self.config.inject], name, rollout_id)

    def _sleep(self, rollout_id: int | None, *, weights: bool) -> float:
        started = self.clock()
        with self.narrator.phase("sleep", rollout_id):
            self._told("offload weights" if weights else "offload model", self.trainer.sleep(weights=weights))
        return self.clock() - started

    def _told(self, what: str, looks: Sequence[MemoryLook]) -> None:
        for look in looks:
            self.narrator.memory(look.rank, f"before {what}", look.before)
            self.narrator.memory(look.rank, f"after {what}", look.after)

    def _check_room(self) -> None:
        """Name the engines that did not let go, before the trainer runs out of memory because of them."""
        if not self.config.offloads_rollout:
            return
        holdings = self.rollouts.holdings()
        held = [one for one in holdings if one.held]
        if not held:
            return
        who = "; ".join(_held(one) for one in held)
        self.narrator.log(
            "error",
            f"wake_up: memory of device {held[0].device} is still held {SETTLE_S:g} s after its release: {who}",
        )
        raise RltopError(
            "an engine still holds the memory that the trainer needs",
            where="wake_up",
            why=who + (" (injected)" if any(fault.startswith(LATE) for fault in self.config.inject) else ""),
            do="its log says whether /release_memory_occupation was asked and answered; was it started with "
            "--enable-memory-saver? The trainer must not wake up before every rank has released",
            exit_code=1,
        )


def _held(one: Holding) -> str:
    what = f"{one.now_gb:.3f} GB, {one.before_gb:.3f} GB before, {one.said_gb:.3f} GB of them weights and KV cache"
    return f"engine {one.engine} (pid {one.pid}) {what}"
