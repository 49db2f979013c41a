"""What the functions have in common that slime and Relax load by path: they attach their process once, and a hook of
the user's own goes on behind them.

Failure policy: no call site of theirs catches exceptions, so nothing of ours raises; what the user's own hook raises
passes, as it would without rltop. This module imports neither zmq nor torch: a worker that cannot import it never
starts.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltop.integrations.after_import import Patch
    from rltop.integrations.slime_attach import Attachment


class Hooks:
    """The hooks of one framework, whose module `rltop.integrations.<framework>` has this as HOOKS."""

    def __init__(self, framework: str, make: Callable[[], tuple[Attachment, Mapping[str, Patch]]]) -> None:
        """make: gives what this process tells, and which modules are changed for it. Called once, if at all."""
        self.framework = framework
        self._make = make
        self._attachment: Attachment | None = None
        self._tried = False

    def __reduce__(self) -> tuple[Callable[[str], Hooks], tuple[str]]:
        # One that travels to another process inside a user's own function is the hook of that process.
        return _hooks_of, (self.framework,)

    def attach(self) -> Attachment | None:
        """Attach this process, once; None where RLTOP_INGEST is not set or something is wrong with rltop itself."""
        if not os.environ.get("RLTOP_INGEST"):
            return None
        if not self._tried:
            self._tried = True
            self._attachment = self._attach()
        return self._attachment

    def _attach(self) -> Attachment | None:
        try:
            from rltop.integrations.after_import import AfterImport

            attachment, patches = self._make()
            AfterImport(patches, lambda text: attachment.say("warn", text)).install()
            return attachment
        except Exception:  # a broken installation of rltop costs the reports, never the run
            return None

    def chained(self, name: str, settings: Any, *args: Any, none: Any = None) -> Any:
        """Call the user's own hook, if there is one, and give back what it returns. What it raises passes.

        It is named by `rltop_<name>_path` in the trainer's arguments (`settings`) or by RLTOP_<FRAMEWORK>_<NAME>_PATH.
        """
        variable = f"RLTOP_{self.framework}_{name}_PATH".upper()
        path = getattr(settings, f"rltop_{name}_path", None) or os.environ.get(variable)
        return load(path)(*args) if isinstance(path, str) and path else none

    # ---------------------------------------------------------------- flags, called with the names of their arguments

    def log_rollout_data(
        self, rollout_id: Any, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: Any
    ) -> Any:
        """`--custom-rollout-log-function-path`. False: the framework logs as always."""
        if (a := self.attach()) is not None:
            a.begin(args, rollout_id)
            a.samples(rollout_id, args, samples)
        given = (rollout_id, args, samples, rollout_extra_metrics, rollout_time)
        return self.chained("log_rollout_data", args, *given, none=False)

    def log_eval_rollout_data(self, rollout_id: Any, args: Any, data: Any, extra_metrics: Any) -> Any:
        """`--custom-eval-rollout-log-function-path`. False: the framework logs as always."""
        if (a := self.attach()) is not None:
            a.begin(args, rollout_id)
        return self.chained("log_eval_rollout_data", args, rollout_id, args, data, extra_metrics, none=False)

    def rollout_data_postprocess(self, args: Any, rollout_id: Any, rollout_data: Any) -> Any:
        """`--rollout-data-postprocess-path`, on every Megatron rank before the optimizer. Changes nothing of the
        data."""
        if (a := self.attach()) is not None:
            a.rollout_data(rollout_id, args, rollout_data)
        return self.chained("rollout_data_postprocess", args, args, rollout_id, rollout_data)

    def megatron_init(self, args: Any) -> Any:
        """`--custom-megatron-init-path`, on every Megatron rank before its model is built."""
        self.attach()
        return self.chained("megatron_init", args, args)

    def before_train_step(
        self, args: Any, rollout_id: Any, step_id: Any, model: Any, optimizer: Any, opt_param_scheduler: Any
    ) -> Any:
        """`--custom-megatron-before-train-step-hook-path`: the one place that tells rollout and step apart."""
        if (a := self.attach()) is not None:
            a.train_step(rollout_id, step_id)
        given = (args, rollout_id, step_id, model, optimizer, opt_param_scheduler)
        return self.chained("before_train_step", args, *given)


def _hooks_of(framework: str) -> Hooks:
    found: Hooks = load(f"rltop.integrations.{framework}.HOOKS")
    return found


@functools.cache
def load(path: str) -> Any:
    """`module.attribute`, imported."""
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
