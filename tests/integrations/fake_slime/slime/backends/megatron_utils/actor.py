"""A trainer rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...observability import train_metric_utils
from ...observability.timer import Timer
from .model import train


class MegatronTrainRayActor:
    """One rank."""

    def init(self, args: Any, role: str, with_ref: bool = False) -> int:
        """Load the model; returns the first rollout."""
        self.args, self.role, self.timer = args, role, Timer()
        self.weight_updater = SimpleNamespace(weight_version=0)
        return 0

    def train(self, rollout_id: int, rollout_data: dict[str, Any], steps: int = 1) -> None:
        """One rollout."""
        train_metric_utils.log_rollout_data(rollout_id, self.args, rollout_data)
        self.timer.start("actor_train")
        train(rollout_id, self.args, steps)
        self.timer.end("actor_train")
        train_metric_utils.log_perf_data(rollout_id, self.args)

    def update_weights(self, fail: bool = False) -> None:
        """Push them to the engines."""
        self.timer.start("update_weights")
        self.weight_updater.weight_version += 1
        self.timer.end("update_weights")
        if fail:
            raise RuntimeError("an engine refused")
