"""The Ray cluster of a watched run, from recorded answers of Ray 2.60's dashboard, and from `ray status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rltop.daemon.watched_cluster import ACTORS, GROUPS, JOBS, NODES, Cluster, read_status
from tests.daemon.fakes import FakeCore

RECORDED = Path(__file__).parents[1] / "data" / "ray_state.json"
"""One node with two GPUs, one actor that died of itself, two that ended with their job, a group that waits."""
STATUS = """======== Autoscaler status: 2026-03-01 10:00:00 ========
Node status
Active:
 2 node_abc
Pending:
 (no pending nodes)
Resources
Usage:
 3.0/16.0 CPU
 8.0/16.0 GPU
Demands:
 {'GPU': 1.0, 'CPU': 1.0} * 16 (PACK): 1+ pending placement groups
"""


class Ray:
    """Answers as recorded, or not at all."""

    def __init__(self) -> None:
        found = json.loads(RECORDED.read_text())
        self.answers = dict(zip((NODES, ACTORS, GROUPS, JOBS), found.values(), strict=True))
        self.down = ""

    async def __call__(self, url: str) -> Any:
        if self.down:
            raise OSError(self.down)
        return self.answers[url.removeprefix("http://head:8265").partition("?")[0]]


async def test_nodes_actors_groups_and_jobs() -> None:
    core, changed = FakeCore(), []
    cluster = Cluster(core, "http://head:8265", changed=lambda: changed.append(1), ask=Ray())
    await cluster.once()
    cell = core.table.get("cluster")
    assert (cell["nodes"], cell["gpus"], cell["groups"]) == ({"alive": 1, "dead": 0}, 2.0, {"PENDING": 1, "CREATED": 1})
    assert [(one["class"], one["pid"]) for one in cell["dead_actors"]] == [("RolloutManager", 29245)]
    assert cell["waiting"] == [{"name": "", "gpus": 8.0}]
    assert [job["status"] for job in cell["jobs"]] == ["RUNNING"]
    [snapshot] = cluster.snapshots()
    assert (snapshot.nodes, snapshot.usage["GPU"]) == (1, (1.0, 2.0))
    assert sum(bundle["GPU"] * count for bundle, count, _ in snapshot.demands) == 8
    await cluster.once()
    assert changed == [1], "the same state is no news"


async def test_a_dashboard_that_goes_away_is_said_once_and_its_picture_stays() -> None:
    core, ray = FakeCore(), Ray()
    cluster = Cluster(core, "http://head:8265", changed=lambda: None, ask=ray)
    await cluster.once()
    ray.down = "ConnectError: refused"
    core.time += 10
    await cluster.once()
    await cluster.once()
    cell = core.table.get("cluster")
    assert (cell["error"], cell["seen"], cell["gpus"]) == ("ConnectError: refused", 1000.0, 2.0)
    ray.down = ""
    await cluster.once()
    assert core.table.get("cluster")["error"] is None
    assert [text.partition(" at ")[0] for text in core.texts("log")] == [
        "Ray does not answer",
        "Ray answers again (http://head:8265)",
    ]


@pytest.mark.parametrize("answer", [None, 7, [], {"data": 3}, {"data": {"result": {"result": [1, {"state": []}]}}}])
async def test_an_answer_of_any_shape_is_no_fault(answer: Any) -> None:
    core, ray = FakeCore(), Ray()
    ray.answers = dict.fromkeys((NODES, ACTORS, GROUPS, JOBS), answer)
    await Cluster(core, "http://head:8265", changed=lambda: None, ask=ray).once()
    assert core.table.get("cluster")["gpus"] == 0


def test_a_file_of_ray_status(tmp_path: Path) -> None:
    path = tmp_path / "ray_status.txt"
    path.write_text(STATUS)
    cell, snapshot = read_status(path)
    assert (cell["nodes"]["alive"], cell["gpus"], cell["gpus_used"]) == (2, 16.0, 8.0)
    assert cell["waiting"] == [{"name": "PACK", "gpus": 16.0}]
    assert snapshot.demands
    path.write_text("hello")
    with pytest.raises(OSError, match="is it the output"):
        read_status(path)
