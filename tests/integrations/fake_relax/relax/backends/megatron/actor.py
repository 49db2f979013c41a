"""A Megatron rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...utils.timer import Timer
from . import data, model


class MegatronTrainRayActor:
    """Of one of Relax's services."""

    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Load the model."""
        self.args, self.role, self.timer = args, role, Timer()
        self.weight_updater = SimpleNamespace(weight_version=0)
        return 0

    def train_async(self, rollout_id: int) -> None:
        """One rollout of the actor's."""
        data.log_rollout_data(rollout_id, self.args, {"loss_masks": []})
        self.timer.start("actor_train")
        self.timer.start("get_data_batch_1f2e3d4c")
        self.timer.end("get_data_batch_1f2e3d4c")
        model.train(self.args, rollout_id, 2)
        self.timer.end("actor_train")

    def compute(self, rollout_id: int) -> None:
        """One rollout of a role that runs forward alone."""
        self.timer.start("log_probs")
        self.timer.end("log_probs")
        data.log_perf_data_fwd(self.args, rollout_id)

    def update_weights_fully_async(self, rollout_id: int, rollout_only: bool = False) -> None:
        """Push them."""
        self.weight_updater.weight_version += 1
