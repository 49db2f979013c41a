"""rltop in a Relax run: the functions that Relax and Ray load by path. They only watch.

*Launch*: `"worker_process_setup_hook": "rltop.integrations.relax.setup"` in the Ray runtime env attaches every worker
of the job. Relax's own launcher names a hook of Relax's there: ours runs that one afterwards, or what
RLTOP_RELAX_SETUP_PATH names. Without the runtime env, RELAX_EXTRA_MODULES=rltop.integrations.relax attaches the
processes that hold Megatron.

*Flags*: Relax's own

    --custom-rollout-log-function-path               rltop.integrations.relax.log_rollout_data
    --custom-eval-rollout-log-function-path          rltop.integrations.relax.log_eval_rollout_data
    --custom-megatron-init-path                      rltop.integrations.relax.megatron_init
    --custom-megatron-before-train-step-hook-path    rltop.integrations.relax.before_train_step

each attaches its process as the launch does. Both at once report once. A hook of your own goes on behind ours:
RLTOP_RELAX_<FUNCTION>_PATH. What it returns and raises is what Relax gets.

Where RLTOP_INGEST is not set nothing is wrapped. Failure policy: as `rltop.integrations.slime`. This module imports
neither zmq nor torch: a worker that cannot import it never starts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

from rltop.integrations.chain import chained, load

if TYPE_CHECKING:
    from rltop.integrations.relax_attach import RelaxAttachment

OWN_SETUP = "relax.utils.logging_utils.install_asyncio_noise_filter"
"""The hook that Relax's launcher sets where ours stands now."""
_chained = functools.partial(chained, "relax")


def setup() -> None:
    """Ray's `worker_process_setup_hook`: attach this process, then run the hook that was there before ours."""
    attach()
    if os.environ.get("RLTOP_RELAX_SETUP_PATH"):
        _chained("setup", None)
        return
    with contextlib.suppress(ImportError, AttributeError):  # an older Relax has none, and it only keeps a log quiet
        load(OWN_SETUP)()


def attach() -> RelaxAttachment | None:
    """Attach this process, once; None where RLTOP_INGEST is not set or something is wrong with rltop itself."""
    return _attached() if os.environ.get("RLTOP_INGEST") else None


@functools.cache
def _attached() -> RelaxAttachment | None:
    try:
        from rltop.integrations.after_import import AfterImport
        from rltop.integrations.relax_attach import RelaxAttachment, patches

        attachment = RelaxAttachment()
        AfterImport(patches(attachment)).install()
        return attachment
    except Exception:  # a broken installation of rltop costs the reports, never the run
        return None


# ---------------------------------------------------------------- Relax's flags


def log_rollout_data(rollout_id: Any, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: Any) -> Any:
    """`--custom-rollout-log-function-path`. False: Relax logs as always."""
    if (a := attach()) is not None:
        a.begin(args, rollout_id)
        a.samples(rollout_id, args, samples)
    return _chained(
        "log_rollout_data", args, rollout_id, args, samples, rollout_extra_metrics, rollout_time, none=False
    )


def log_eval_rollout_data(rollout_id: Any, args: Any, data: Any, extra_metrics: Any) -> Any:
    """`--custom-eval-rollout-log-function-path`. False: Relax logs as always."""
    if (a := attach()) is not None:
        a.begin(args, rollout_id)
    return _chained("log_eval_rollout_data", args, rollout_id, args, data, extra_metrics, none=False)


def megatron_init(args: Any) -> Any:
    """`--custom-megatron-init-path`, on every Megatron rank."""
    attach()
    return _chained("megatron_init", args, args)


def before_train_step(
    args: Any, rollout_id: Any, step_id: Any, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> Any:
    """`--custom-megatron-before-train-step-hook-path`: which step of which rollout begins."""
    if (a := attach()) is not None:
        a.train_step(rollout_id, step_id)
    return _chained("before_train_step", args, args, rollout_id, step_id, model, optimizer, opt_param_scheduler)


attach()
