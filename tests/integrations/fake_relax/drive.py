"""One process that does what Relax's processes do, with the stand-in package beside this file. Prints JSON.

`python drive.py launch|flags|both|env ROLE`: how rltop gets in, and whose Megatron rank this is.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOOKS = "rltop.integrations.relax"


def main(how: str, role: str) -> None:
    """Drive."""
    sys.path.insert(0, str(Path(__file__).parent))
    args = SimpleNamespace(finetune=True, num_rollout=3, lr=1e-6, custom_rollout_log_function_path=None)
    if how in ("launch", "both"):
        importlib.import_module(HOOKS).setup()
    if how == "env":  # as `rltop slime-env --merge` chains it
        importlib.import_module("rltop.integrations.slime").setup()
    if how in ("flags", "both"):
        args.custom_rollout_log_function_path = f"{HOOKS}.log_rollout_data"
    rollout = importlib.import_module("relax.distributed.ray.rollout")
    tracking = importlib.import_module("relax.utils.tracking_utils")
    sample = SimpleNamespace(index=0, group_index=0, prompt="2+2=", response="4", reward=1.0, tokens=[1, 2, 3])
    if role == "rollout":
        for rollout_id in (0, 1):
            rollout._log_rollout_data(rollout_id, args, [sample], {}, 12.5)
        rollout._log_eval_rollout_data(1, args, {})
    else:
        actor = importlib.import_module("relax.backends.megatron.actor").MegatronTrainRayActor()
        actor.init(args, role)
        for rollout_id in (0, 1):
            if role == "actor":
                actor.train_async(rollout_id)
                actor.update_weights_fully_async(rollout_id)
            else:
                actor.compute(rollout_id)
    attached: Any = importlib.import_module(HOOKS).attach()
    seen = {
        "logged": len(tracking.LOGGED),
        "errors": None if attached is None else attached.errors,
        "last_error": "" if attached is None else attached.last_error,
        "wrapped": hasattr(tracking.log, "__rltop_wrapped__"),
        "filtered": len(importlib.import_module("relax.utils.logging_utils").FILTERED),
        "heavy": sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "textual", "ray", "numpy"}),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
