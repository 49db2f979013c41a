"""One process that does what slime's processes do, with the stand-in package beside this file. Prints JSON.

`python drive.py launch|flags|both`: how rltop gets in. Everything runs here, one role after the other.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOOKS = "rltop.integrations.slime"
CHAINED: list[tuple[str, int]] = []


def mine(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """A user's own hook."""
    CHAINED.append(("rollout", rollout_id))
    return False


def broken(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    """A user's own hook that raises."""
    raise KeyError("mine")


def heavy() -> list[str]:
    """What must not be there before slime brings it."""
    return sorted({name.partition(".")[0] for name in sys.modules} & {"zmq", "torch", "textual", "ray", "numpy"})


def main(how: str) -> None:
    """Drive."""
    sys.path.insert(0, str(Path(__file__).parent))
    sys.modules["drive"] = sys.modules["__main__"]
    args = SimpleNamespace(finetune=True, num_rollout=7, lr=1e-6, wandb_key="hide me", update_weight_transport="nccl")
    seen: dict[str, Any] = {}
    if how in ("launch", "both"):
        importlib.import_module(HOOKS).setup()
        seen["after_setup"] = heavy()
    if how in ("flags", "both"):
        args.custom_rollout_log_function_path = f"{HOOKS}.log_rollout_data"
        args.custom_eval_rollout_log_function_path = f"{HOOKS}.log_eval_rollout_data"
        args.rltop_log_rollout_data_path = "drive.mine"
    metrics = importlib.import_module("slime.observability.rollout_metrics")
    if how == "flags":
        importlib.import_module(f"{HOOKS}")
    base = importlib.import_module("slime.rollout.base_types")
    actor_module = importlib.import_module("slime.backends.megatron_utils.actor")
    engine = importlib.import_module("slime.backends.sglang_utils.sglang_engine").SGLangEngine(args, 3)

    engine.init(15000)
    actor = actor_module.MegatronTrainRayActor()
    actor.init(args, "actor")
    actor.update_weights()
    for rollout in (0, 1):
        samples = base.call_rollout_fn(_generate, args, rollout, None, evaluation=False)
        metrics.log_rollout_data(rollout, args, samples, {"rollout/custom": rollout}, 12.5)
        engine.release_memory_occupation()
        actor.train(rollout, {"loss_masks": []}, steps=2 - rollout)
        engine.resume_memory_occupation(["weights"])
        actor.update_weights()
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    base.call_rollout_fn(_generate, args, 1, None, evaluation=True)
    if how == "both":
        args.rltop_log_eval_rollout_data_path = "drive.broken"
        try:
            metrics.log_eval_rollout_data(1, args, {})
        except KeyError as error:
            seen["raised"] = str(error)
    else:
        metrics.log_eval_rollout_data(1, args, {})
    try:
        actor.update_weights(fail=True)
    except RuntimeError as error:
        seen["refused"] = str(error)
    logging = importlib.import_module("slime.observability.logging_utils")
    logging.finish_tracking(args)
    attached = importlib.import_module(HOOKS).attach()
    seen |= {"errors": attached and attached.errors, "last_error": attached and attached.last_error}
    seen |= {"logged": len(logging.LOGGED), "chained": CHAINED, "wrapped": hasattr(logging.log, "__wrapped__")}
    print(json.dumps(seen | {"pid": os.getpid()}))


def _generate(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> list[Any]:
    return [[_sample(index) for index in range(2 * group, 2 * group + 2)] for group in range(8)]


def _sample(index: int) -> Any:
    status = SimpleNamespace(value="completed")
    tokens, log_probs = [1, 2, 3, 10 + index], [-0.5, -0.25]
    facts = {"index": index, "group_index": index // 2, "prompt": "2+2=", "response": f"4 {'!' * index}", "label": "4"}
    facts |= {"reward": 1.0, "tokens": tokens, "response_length": 2, "rollout_log_probs": log_probs, "status": status}
    return SimpleNamespace(**facts, weight_versions=["1"])


if __name__ == "__main__":
    main(sys.argv[1])
