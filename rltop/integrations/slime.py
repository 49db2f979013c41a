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

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rltop.integrations.hooks import Hooks

if TYPE_CHECKING:
    from rltop.integrations.after_import import Patch
    from rltop.integrations.slime_attach import Attachment


def _make() -> tuple[Attachment, Mapping[str, Patch]]:
    from rltop.integrations.slime_attach import Attachment
    from rltop.integrations.slime_patches import patches

    attachment = Attachment()
    return attachment, patches(attachment)


HOOKS = Hooks("slime", _make)
attach = HOOKS.attach
log_rollout_data = HOOKS.log_rollout_data
log_eval_rollout_data = HOOKS.log_eval_rollout_data
rollout_data_postprocess = HOOKS.rollout_data_postprocess
megatron_init = HOOKS.megatron_init
before_train_step = HOOKS.before_train_step


def setup() -> None:
    """Ray's `worker_process_setup_hook`: attach this process, then run the hook that was there before ours
    (RLTOP_SLIME_SETUP_PATH). What that one raises passes, as it would without rltop."""
    attach()
    HOOKS.chained("setup", None)


attach()
