"""A Ray cluster of several nodes on this machine, in a process of its own: a head without CPUs, and nodes of one CPU.

`python -m tests.engines.two_nodes DIRECTORY NODES` prints its address and its nodes' ids, then obeys lines: `kill N`
(the N-th node, as a machine that loses its power), `add`, and the end of its input. It asks for the token of the
environment it was given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
STORE = 80 * 1024 * 1024


def main(directory: str, nodes: int) -> None:
    """Run it."""
    # Ray notes the newest cluster of a machine in a file, where others look for theirs: not in /tmp/ray.
    os.environ["RAY_TMPDIR"] = directory
    (Path(directory) / "ray").mkdir()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={**head, "_system_config": HEALTH})
    made = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(nodes)]
    print(json.dumps({"address": cluster.address, "nodes": [node.node_id for node in made]}), flush=True)
    for line in sys.stdin:
        match line.split():
            case ["kill", number]:
                cluster.remove_node(made[int(number)], allow_graceful=False)
            case ["add"]:
                made.append(cluster.add_node(num_cpus=1, object_store_memory=STORE))
        print("done", flush=True)
    cluster.shutdown()


class Nodes:
    """The process, for a test."""

    def __init__(self, process: subprocess.Popen[str], folder: str) -> None:
        assert process.stdout is not None
        self._process = process
        self.folder = folder
        """In the environment of every process of it, as RAY_TMPDIR."""
        told: dict[str, Any] = json.loads(process.stdout.readline())
        self.address: str = told["address"]
        self.ids: list[str] = told["nodes"]

    def do(self, command: str) -> None:
        """`kill N` or `add`; returns when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def ray_nodes(env: dict[str, str], nodes: int = 1) -> Iterator[Nodes]:
    """Started, and ended with the block. env: the whole environment."""
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="rltop-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "tests.engines.two_nodes", folder, str(nodes)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=Path(__file__).parents[2]
        ) as process:
            try:
                yield Nodes(process, folder)
            finally:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
