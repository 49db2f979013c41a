"""What one process of a Relax run tells the daemon. Relax is slime's relative: what is alike is slime's `Attachment`.

Other than in slime: roles that only run the model forward (`actor_fwd`, `reference`) log their times under
`actor_fwd/step` and are shown as roles of their own (`perf/actor_fwd/log_probs_time`); timers of single micro-batches
have names that never come again and are left out; a run says no goodbye, Relax's services are ended from outside.

Read file by file from redai-infra/Relax (docs/relax.md has the commits); a function that is not there is left out.

Failure policy: as `slime_attach`: no method raises or waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rltop.integrations.after_import import Patch
from rltop.integrations.slime_attach import Attachment, Clock, guarded
from rltop.integrations.slime_patches import (
    Around,
    engine_patch,
    log_metrics,
    picker,
    rollout_metrics,
    scoped,
    timer_patch,
    train_metrics,
    train_step,
    version_of,
    wrap,
    wrapping,
)

FORWARD = ("actor_fwd", "reference", "ref")
"""Roles without an optimizer."""
FORWARD_STEP = "actor_fwd/step"
_TIMERS = {
    "log_probs": "log_probs",
    "actor_train": "train",
    "update_weights": "update_weights",
    "update_weights_fully_async": "update_weights",
    "save_model": "save",
    "sleep": "sleep",
    "wake_up": "wake_up",
}
"""Relax's timers that are phases here."""


class RelaxAttachment(Attachment):
    """One process of a Relax run."""

    FRAMEWORK = "relax"
    CP_UTILS = "relax.backends.megatron.cp_utils"

    @guarded
    def trainer_up(self, role: Any, start_rollout_id: Any) -> None:
        """A Megatron rank has loaded its model; `role` is its service's."""
        super().trainer_up(role, start_rollout_id)
        if role in FORWARD:
            self.role = str(role)

    def _trains(self) -> None:
        if self.role not in FORWARD:
            super()._trains()

    def _logs_as(self, metrics: Mapping[str, Any], step_key: str) -> str:
        if self.role in FORWARD:
            return self.role
        return FORWARD[0] if step_key == FORWARD_STEP else super()._logs_as(metrics, step_key)

    def _named(self, role: str, name: str) -> str:
        # The actor's own times have the same names.
        return f"perf/{role}/{name.removeprefix('perf/')}" if role in FORWARD and name.startswith("perf/") else name

    def phase_of(self, name: str) -> str | None:
        """Of a timer that is a phase; those of single micro-batches are not."""
        return _TIMERS.get(name)


def patches(attachment: RelaxAttachment) -> dict[str, Patch]:
    """Module -> patch, for `AfterImport`."""
    a = attachment
    megatron = "relax.backends.megatron"
    return {
        "relax.utils.tracking_utils": wrapping(a, {"log": log_metrics}),
        "relax.utils.timer": lambda module: timer_patch(module, a),
        "relax.distributed.ray.rollout": wrapping(
            a, {"_log_rollout_data": rollout_metrics, "_log_eval_rollout_data": scoped}
        ),
        f"{megatron}.data": wrapping(a, {"log_rollout_data": train_metrics, "gather_log_data": scoped}),
        f"{megatron}.model": wrapping(a, {"train_one_step": train_step}),
        f"{megatron}.actor": lambda module: _actor(module, a),
        "relax.utils.training.train_metric_utils": wrapping(a, {"log_perf_data_raw": scoped}),
        "relax.backends.sglang.sglang_engine": lambda module: engine_patch(module, a),
    }


def _actor(module: ModuleType, a: RelaxAttachment) -> None:
    cls = getattr(module, "MegatronTrainRayActor", None)
    if cls is None:
        return
    role = picker(getattr(cls, "init", len), "role")

    def init(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        a.trainer_up(role(args, kwargs), result)
        return result

    def in_rollout(name: str) -> Around:
        rollout_id = picker(getattr(cls, name), "rollout_id")

        def around(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = a.enter_scope(rollout_id(args, kwargs))
            try:
                return original(*args, **kwargs)
            finally:
                a.leave_scope(before)

        return around

    def update(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, clock, ok = version_of(args[0]), Clock(), False
        try:
            result = original(*args, **kwargs)
            ok = True
            return result
        finally:
            if (version := version_of(args[0])) is not None and (version != before or not ok):
                a.weights(version, ok=ok, args=getattr(args[0], "args", None), elapsed_s=clock.seconds)

    wrap(cls, "init", init)
    for name in ("train", "train_async", "train_hybrid"):
        if callable(getattr(cls, name, None)):
            wrap(cls, name, in_rollout(name))
    for name in ("update_weights", "update_weights_fully_async"):
        if callable(getattr(cls, name, None)):
            wrap(cls, name, update)
