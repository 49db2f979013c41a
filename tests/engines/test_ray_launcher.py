"""Engines on the nodes of a Ray cluster (`ray.cluster_utils`, one machine): found again, lost, and placed elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from rltop.engines.launcher import Launched, Look, LostNode
from rltop.engines.ray_launcher import RayLauncher
from rltop.errors import RltopError
from tests.engines.stand_in import ENDS_WELL, PATIENCE_S, SERVES, spec, until
from tests.engines.two_nodes import Nodes, ray_nodes

pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture(scope="module")
def nodes(token_file: Path) -> Iterator[Nodes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_enable_metrics_collection": "0"}
    with ray_nodes(env) as started:
        yield started


@pytest.fixture
async def launcher(nodes: Nodes, token_file: Path) -> AsyncIterator[RayLauncher]:
    made = RayLauncher(address=nodes.address, token_file=str(token_file))
    yield made
    await made.close()


async def answered(launcher: RayLauncher, launched: Launched) -> Look:
    """A look, however often it takes: "no answer" says nothing."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await launcher.look(launched)
        except LostNode:
            raise
        except RltopError:
            assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def lost_in(launcher: RayLauncher, launched: Launched) -> LostNode:
    """What a look says when Ray has noticed that the node is gone."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            await launcher.look(launched)
        except LostNode as lost:
            return lost
        except RltopError:
            pass  # the node does not answer, and Ray has not called it dead yet
        await asyncio.sleep(0.1)
    raise AssertionError("it was never lost")


def host_workers(nodes: Nodes) -> list[psutil.Process]:
    """The Ray workers with a host in them, of this cluster."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "HostActor" in "".join(process.cmdline()) and process.environ().get("RAY_TMPDIR") == nodes.folder:
                found.append(process)
    return found


RUN = """
import sys, ray
ray.init(address=sys.argv[1], namespace="rltop", log_to_driver=False)
assert ray.util.placement_group([{"CPU": 1}], name="the-run").wait(60)
print("placed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def run(nodes: Nodes, token_file: Path) -> Iterator[subprocess.Popen[str]]:
    """A run with a placement group in the cluster, until its standard input ends."""
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_TMPDIR": nodes.folder}
    command = [sys.executable, "-c", RUN, nodes.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "placed\n"
        yield process
        process.kill()


async def test_the_group_of_a_run_that_ended_is_gone_and_its_engine_can_still_be_ended(
    nodes: Nodes, launcher: RayLauncher, run: subprocess.Popen[str], tmp_path: Path
) -> None:
    launched = await launcher.start(spec(tmp_path, place={"placement_group": "the-run", "bundle": 0}))
    assert run.stdin is not None
    run.stdin.close()
    await asyncio.to_thread(until, lambda: not host_workers(nodes), "the actor did not go with its group")
    assert (await answered(launcher, launched)).alive
    await launcher.kill(launched)
    assert not (await answered(launcher, launched)).alive
    assert (await launcher.remains(launched)).clean
    with pytest.raises(RltopError, match="there is no such placement group"):
        await launcher.start(spec(tmp_path, generation=2, place={"placement_group": "the-run", "bundle": 0}))


async def test_an_engines_life_on_two_nodes(
    nodes: Nodes, launcher: RayLauncher, token_file: Path, tmp_path: Path
) -> None:
    first = await launcher.start(spec(tmp_path, ENDS_WELL, env={"CUDA_LAUNCH_BLOCKING": "1"}))
    assert (await launcher.environ(first) or {})["CUDA_LAUNCH_BLOCKING"] == "1"
    assert first.node_id == nodes.ids[0]
    assert (await launcher.look(first)).alive
    await asyncio.to_thread(until, lambda: b"ready" in Path(first.log).read_bytes())
    assert b"child" in await launcher.read_log(first, 0, 1000)
    with pytest.raises(RltopError, match="engine 0 still has a process"):
        await launcher.start(spec(tmp_path, generation=2))

    # A daemon that was killed: another one finds the actor and, by the record, the engine.
    later = RayLauncher(address=nodes.address, token_file=str(token_file))
    assert await later.adopt(first.directory, first.marker) == first
    assert await later.adopt(first.directory, first.marker + "1") is None

    # The actor dies, the engine does not: it is found again from the same bundle.
    (worker,) = host_workers(nodes)
    worker.kill()
    seen = await answered(later, first)
    assert (seen.alive, seen.exit_code) == (True, None)
    assert [other.pid for other in host_workers(nodes)] != [worker.pid]
    assert later._process is not None
    later._process.kill()  # Ray does that to a driver whose cluster is gone
    assert (await answered(later, first)).alive
    await later.close()
    assert (await answered(launcher, first)).alive, "the place of a living engine is not given back"

    # The node dies, with it the engine; the slot gets a place on the other node.
    nodes.do("add")
    nodes.do("kill 0")
    await asyncio.to_thread(until, lambda: not psutil.pid_exists(first.pid))
    lost = await lost_in(launcher, first)
    assert lost.what == "the engine's node is lost"
    assert first.node_id[:8] in lost.where
    second = await launcher.start(spec(tmp_path, SERVES, generation=2))
    assert second.node_id not in ("", first.node_id)
    assert (await launcher.look(second)).alive
    with pytest.raises(LostNode):
        await launcher.look(first)
    later = RayLauncher(address=nodes.address, token_file=str(token_file))
    assert await later.adopt(second.directory, second.marker) == second
    await later.close()
    await launcher.kill(second)
    assert (await launcher.look(second)).exit_code == -signal.SIGKILL
    assert (await launcher.remains(second)).clean
    await launcher.close()
    await asyncio.to_thread(until, lambda: not host_workers(nodes), "the place of a dead engine was not given back")


async def test_a_cluster_that_is_not_there_is_one_message() -> None:
    launcher = RayLauncher(address="127.0.0.1:1")
    with pytest.raises(RltopError, match="cannot reach the Ray cluster") as failed:
        await launcher.adopt("/nowhere", "run/0/1")
    assert failed.value.where == "127.0.0.1:1"
    await launcher.close()
