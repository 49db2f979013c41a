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
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rltop.integrations.hooks import Hooks, load

if TYPE_CHECKING:
    from rltop.integrations.after_import import Patch
    from rltop.integrations.slime_attach import Attachment

OWN_SETUP = "relax.utils.logging_utils.install_asyncio_noise_filter"
"""The hook that Relax's launcher sets where ours stands now."""


def _make() -> tuple[Attachment, Mapping[str, Patch]]:
    from rltop.integrations.relax_attach import RelaxAttachment, patches

    attachment = RelaxAttachment()
    return attachment, patches(attachment)


HOOKS = Hooks("relax", _make)
attach = HOOKS.attach
log_rollout_data = HOOKS.log_rollout_data
log_eval_rollout_data = HOOKS.log_eval_rollout_data
megatron_init = HOOKS.megatron_init
before_train_step = HOOKS.before_train_step


def setup() -> None:
    """Ray's `worker_process_setup_hook`: attach this process, then run the hook that was there before ours."""
    attach()
    if os.environ.get("RLTOP_RELAX_SETUP_PATH"):
        HOOKS.chained("setup", None)
        return
    with contextlib.suppress(ImportError, AttributeError):  # an older Relax has none, and it only keeps a log quiet
        load(OWN_SETUP)()


attach()
