"""Overrides in the process, with slime's own ServerGroup, RolloutServer.recover and RolloutManager, on real Ray.

`python override.py WISH.json`: stand-ins are the engines (`stub_engines.py`) and what needs a GPU. Prints what the
engines were given before and after.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# isort: off
import attached  # type: ignore[import-not-found]  # noqa: F401  before everything else
# isort: on

import ray
from ray.util.placement_group import placement_group
from slime.observability import rollout_metrics
from slime.ray import rollout as rollout_module
from stub_engines import StubEngine  # type: ignore[import-not-found]


def main(wish: Path) -> None:
    """Start three engines, override the second after rollout 0, recover it as a weight sync does."""
    path = os.environ["PYTHONPATH"]
    ray.init(num_cpus=6, num_gpus=3, runtime_env={"env_vars": {"PYTHONPATH": path}}, include_dashboard=False)
    group = placement_group([{"GPU": 1, "CPU": 1}] * 3)
    ray.get(group.ready())
    rollout_module.SGLangEngine = StubEngine
    rollout_module._allocate_rollout_engine_addr_and_ports_normal = lambda **k: (
        {rank: {} for rank, _ in k["rollout_engines"]},
        {},
    )
    args = SimpleNamespace(
        debug_train_only=False,
        debug_rollout_only=True,
        num_gpus_per_node=3,
        rollout_num_gpus=3,
        rollout_num_gpus_per_engine=1,
        use_fault_tolerance=True,
        rollout_external=False,
        finetune=True,
    )
    placed = (group, [0, 1, 2], [0, 1, 2])
    servers = rollout_module.ServerGroup(args, placed, [None] * 3, 1, 0)
    handles, _ = servers.start_engines()
    ray.get(handles)
    servers.num_new_engines = 0  # slime's trainer has connected to them
    server = rollout_module.RolloutServer([servers])
    manager = Manager(args, server)
    before = manager.told()
    wish.write_text(
        json.dumps({"engine": 1, "server_args": {"disable_cuda_graph": True}, "env": {"CUDA_LAUNCH_BLOCKING": "1"}})
    )
    manager.generate(0)
    empty = [engine is None for engine in servers.all_engines]
    manager.rollout_id = 0
    rollout_module_manager = rollout_module.RolloutManager.__ray_metadata__.modified_class
    rollout_module_manager.recover_updatable_engines(manager)
    print(json.dumps({"before": before, "empty": empty, "new": servers.num_new_engines, "after": manager.told()}))
    ray.shutdown()


class Manager:
    """The parts of RolloutManager that matter, slime's own where they can run."""

    def __init__(self, args: Any, server: Any) -> None:
        self.args, self.servers, self.rollout_id = args, {"default": server}, -1
        self._health_monitors: list[Any] = []

    def _get_updatable_server(self) -> Any:
        return self.servers["default"]

    def health_monitoring_pause(self) -> None:
        """No monitors."""

    def recover_updatable_engines(self) -> None:
        """slime's is called."""

    def generate(self, rollout_id: int) -> None:
        """The end of slime's: the rollout is logged."""
        given = SimpleNamespace(**vars(self.args), custom_rollout_log_function_path=None, load_debug_rollout_data="x")
        rollout_metrics.log_rollout_data(rollout_id, given, [], None, 1.0)

    def told(self) -> list[Any]:
        """What every engine was given."""
        return [ray.get(engine.told.remote()) for engine in self.servers["default"].engines]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
