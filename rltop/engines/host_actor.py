"""A `Host` in a Ray worker: the actor that `rltop.engines.ray_gateway` places on the engine's node, one per slot.

The engines are no children of the worker and survive it. They do not survive the node's raylet: without it nobody would
manage them, and Ray would give their GPUs away.
"""

from __future__ import annotations

from typing import Any

import psutil

from rltop.engines.host import Host
from rltop.engines.launcher import Launched, LaunchSpec, Look, Remains
from rltop.engines.processes import ident


class HostActor:
    """A plain class; Ray makes the actor of it."""

    def __init__(self, place: dict[str, Any]) -> None:
        import ray

        node_id = str(ray.get_runtime_context().get_node_id())
        self._about = {"place": place, "node_id": node_id}
        parent = psutil.Process().parent()
        raylet = parent if parent is not None and parent.name().startswith("raylet") else None
        self._host = Host(
            launcher="ray",
            node_id=node_id,
            reach=str(ray.util.get_node_ip_address()),
            tether=None if raylet is None else ident(raylet.pid),
        )

    def about(self) -> dict[str, Any]:
        """Where it is, and what was asked for."""
        return self._about

    def start(self, spec: LaunchSpec) -> Launched:
        return self._host.start(spec)

    def look(self, launched: Launched) -> Look:
        return self._host.look(launched)

    def read_log(self, launched: Launched, offset: int, limit: int) -> bytes:
        return self._host.read_log(launched, offset, limit)

    def terminate(self, launched: Launched) -> None:
        self._host.terminate(launched)

    def kill(self, launched: Launched) -> None:
        self._host.kill(launched)

    def remains(self, launched: Launched) -> Remains:
        return self._host.remains(launched)

    def environ(self, launched: Launched) -> dict[str, str] | None:
        return self._host.environ(launched)

    def adopt(self, directory: str, marker: str) -> Launched | None:
        return self._host.adopt(directory, marker)
