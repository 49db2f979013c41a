"""rltop in a slime run: the functions that slime and Ray load by path. They only watch.

*Launch*: `"worker_process_setup_hook": "rltop.integrations.slime.setup"` in the Ray runtime env (`rltop slime-env`
prints it) attaches every worker of the job; slime is not changed and gets no flag.

*Flags*, where the runtime env cannot be edited: slime's own

    --custom-rollout-log-function-path               rltop.integrations.slime.log_rollout_data
    --custom-eval-rollout-log-function-path          rltop.integrations.slime.log_eval_rollout_data
    --rollout-data-postprocess-path                  rltop.integrations.slime.rollout_data_postprocess
    --custom-megatron-init-path                      rltop.integrations.slime.megatron_init
    --custom-megatron-before-train-step-hook-path    rltop.integrations.slime.before_train_step

each attaches its process as the launch does. Both at once report once. A hook of your own goes on behind ours:
`rltop_<function>_path` in the file of `--custom-config-path`, or RLTOP_SLIME_<FUNCTION>_PATH, for example
`rltop_log_rollout_data_path: mine.log`. What it returns and raises is what slime gets.

Where RLTOP_INGEST is not set nothing is wrapped and nothing costs anything. Failure policy: no call site of slime's
catches exceptions, so nothing of ours raises or waits; it counts (`slime_attach`). This module imports neither zmq
nor torch: a worker that cannot import it never starts.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from rltop.integrations.chain import chained

if TYPE_CHECKING:
    from rltop.integrations.slime_attach import Attachment

_chained = functools.partial(chained, "slime")


def setup() -> None:
    """Ray's `worker_process_setup_hook`: attach this process, then run the hook that was there before ours
    (RLTOP_SLIME_SETUP_PATH). What that one raises passes, as it would without rltop."""
    attach()
    _chained("setup", None)


def attach() -> Attachment | None:
    """Attach this process, once; None where RLTOP_INGEST is not set or something is wrong with rltop itself."""
    return _attached() if os.environ.get("RLTOP_INGEST") else None


@functools.cache
def _attached() -> Attachment | None:
    try:
        from rltop.integrations.after_import import AfterImport
        from rltop.integrations.slime_attach import Attachment
        from rltop.integrations.slime_patches import patches

        attachment = Attachment()
        AfterImport(patches(attachment), lambda text: attachment.say("warn", text)).install()
        return attachment
    except Exception:  # a broken installation of rltop costs the reports, never the run
        return None


# ---------------------------------------------------------------- slime's flags


def log_rollout_data(rollout_id: Any, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: Any) -> Any:
    """`--custom-rollout-log-function-path`. False: slime logs as always."""
    if (a := attach()) is not None:
        a.begin(args, rollout_id)
        a.samples(rollout_id, args, samples)
    return _chained(
        "log_rollout_data", args, rollout_id, args, samples, rollout_extra_metrics, rollout_time, none=False
    )


def log_eval_rollout_data(rollout_id: Any, args: Any, data: Any, extra_metrics: Any) -> Any:
    """`--custom-eval-rollout-log-function-path`. False: slime logs as always."""
    if (a := attach()) is not None:
        a.begin(args, rollout_id)
    return _chained("log_eval_rollout_data", args, rollout_id, args, data, extra_metrics, none=False)


def rollout_data_postprocess(args: Any, rollout_id: Any, rollout_data: Any) -> Any:
    """`--rollout-data-postprocess-path`, on every Megatron rank before the optimizer. Changes nothing of the data."""
    if (a := attach()) is not None:
        a.rollout_data(rollout_id, args, rollout_data)
    return _chained("rollout_data_postprocess", args, args, rollout_id, rollout_data)


def megatron_init(args: Any) -> Any:
    """`--custom-megatron-init-path`, on every Megatron rank before its model is built."""
    attach()
    return _chained("megatron_init", args, args)


def before_train_step(
    args: Any, rollout_id: Any, step_id: Any, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> Any:
    """`--custom-megatron-before-train-step-hook-path`: the one place where slime tells rollout and step apart."""
    if (a := attach()) is not None:
        a.train_step(rollout_id, step_id)
    return _chained("before_train_step", args, args, rollout_id, step_id, model, optimizer, opt_param_scheduler)


attach()
