"""slime's own code for external engines, one command a line: JSON on stdin, JSON on stdout.

`SGLangEngine` and `discover_external_engines` are slime's, from the checkout on PYTHONPATH. Stand-ins: SGLang's
`ServerArgs` (names of fields only; none is launched here), its `kill_process_tree`, the number of a GPU, and Ray's
actors (the class is used as it is). The order of a push is that of slime's `RayTrainGroup`
(`_reload_rollout_weights_from_disk`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

FIELDS = """
    model_path trust_remote_code random_seed enable_memory_saver host port nccl_port nnodes node_rank dist_init_addr
    gpu_id_step base_gpu_id tp_size dp_size pp_size ep_size skip_server_warmup enable_draft_weights_cpu_backup
    enable_metrics dtype enable_return_routed_experts
"""


def stand_in(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(attributes)
    sys.modules[name] = module


def engines(addresses: list[str], router: str) -> list[Any]:
    """Attached as slime's rollout manager does it."""
    from slime.backends.sglang_utils import external
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine, accelerator

    accelerator.resolve_visible_device_id = lambda base: base

    ip, _, port = router.rpartition(":")
    args = Namespace(
        rollout_external=True,
        rollout_external_engine_addrs=addresses,
        num_gpus_per_node=8,
        rollout_num_gpus_per_engine=1,
        colocate=False,
        debug_rollout_only=False,
        actor_num_gpus_per_node=1,
        actor_num_nodes=1,
        hf_checkpoint="",
        seed=1,
        offload_rollout=False,
        sglang_dp_size=1,
        sglang_pp_size=1,
        sglang_ep_size=1,
        use_rollout_routing_replay=False,
        fp16=False,
        sglang_router_ip=ip,
        sglang_router_port=int(port),
    )
    found = []
    for rank, info in enumerate(external.discover_external_engines(addresses)):
        engine = SGLangEngine(args, rank, info.worker_type, base_gpu_id=0, num_gpus_per_engine=info.num_gpus)
        engine.init(**external.external_engine_init_kwargs(info), router_ip=ip, router_port=int(port))
        found.append(engine)
    return found


def push(attached: list[Any], path: str, version: str) -> None:
    for engine in attached:
        engine.pause_generation()
    for engine in attached:
        engine.flush_cache()
    for engine in attached:
        engine.update_weights_from_disk(model_path=path, weight_version=version)
    for engine in attached:
        engine.continue_generation()


def main() -> None:
    server_args = dataclasses.make_dataclass("ServerArgs", [(name, Any, None) for name in FIELDS.split()])
    stand_in("sglang")
    stand_in("sglang.srt")
    stand_in("sglang.srt.server_args", ServerArgs=server_args)
    stand_in("sglang.srt.utils", kill_process_tree=lambda pid: None)
    attached: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        try:
            match command.pop("do"):
                case "attach":
                    attached = engines(**command)
                case "push":
                    push(attached, **command)
                case "health":
                    assert all(engine.health_generate() for engine in attached)
            answer = {"ok": True, "urls": [engine.get_url() for engine in attached]}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
