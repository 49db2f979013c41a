"""Real SGLang 0.5.23 on this CPU under the fleet: one server's life, in the order of the tests, and how it may end.

Every start takes 20 s on a quiet machine and minutes on a crowded one, so the tests share one engine and follow each
other: weights, drain and toggles, a killed scheduler, a killed leader with an orphan, a good end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import save_file

from rltop.engines import ports
from rltop.engines.client import EngineClient
from rltop.engines.fleet import FleetPolicy, Refused, Restart, SetToggles, StartEngines, Stop, Synced
from rltop.engines.launcher import Look, Remains
from rltop.engines.requests import Required
from rltop.engines.weights import checksum_differences, publish
from rltop.train.tiny_model import initial_weights
from tests.engines.contract import MODEL, PROMPT, contract_model, other_weights
from tests.engines.stand_in import script
from tests.soak.sglang_cpu import SglangCpu, sglang_cpu_environment
from tests.soak.sglang_cpu.ground import Ground, slot

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
CHANGES = {
    "radix_cache": "off",
    "overlap_schedule": "off",
    "chunked_prefill": "64",
    "mem_fraction_static": "0.25",
    "launch_blocking": "on",
    "cuda_graph_padding": "off",
}
SENDER = Path(__file__).parent / "sglang_cpu" / "sender.py"


@pytest.fixture(scope="module")
def environment() -> SglangCpu:
    """Built once per checkout."""
    return sglang_cpu_environment(ROOT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint."""
    return contract_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ground(environment: SglangCpu, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A fleet with one serving engine. Its first process leaves a child that nobody ends: an orphan in the making."""
    folder = tmp_path_factory.mktemp("fleet")
    python = script(folder / "python", f'setsid sleep 86399 & exec {environment.python} "$@"')
    made = Ground(folder, FleetPolicy(backoff_s=1.0, drain_s=300.0))
    try:
        made.do(StartEngines(slots=(slot(environment, model, python=python),)))
        yield made
    finally:
        made.end()


def look(ground: Ground) -> Look:
    found: Look = ground.await_(ground.launcher.look(ground.launched()))
    return found


def remains(ground: Ground) -> Remains:
    found: Remains = ground.await_(ground.launcher.remains(ground.launched()))
    return found


def sleeper(ground: Ground) -> psutil.Process:
    """The child that nobody ends."""
    (pid,) = [pid for pid, name in look(ground).children if name == "sleep 86399"]
    return psutil.Process(pid)


def test_it_starts_and_serves(ground: Ground) -> None:
    cell = ground.state("HEALTHY")
    assert ground.states(0.0)[:4] == ["LAUNCHING", "LOADING", "WARMING", "STALE"]
    assert (cell["version"], cell["weight_version"], cell["generation"]) == ("0.5.23", "default", 1)
    port = int(cell["url"].rpartition(":")[2])
    assert port in ports.RESERVED, "chosen before the start, and kept free for it"
    with EngineClient(cell["url"]) as client:
        assert client.server_info()["port"] == port
        payload = {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}
        assert client.generate(payload, require_version="default")[0]["meta_info"]["completion_tokens"] <= 4
    names = [name for _, name in look(ground).children]
    assert any(name.startswith("sglang::scheduler") for name in names), names
    assert any(name.startswith("sglang::detokenizer") for name in names), names
    left = remains(ground)
    assert ground.launched().keeper_pid in [pid for pid, _ in left.lock_holders]
    assert f"held by pid {ground.launched().pid}" in left.port_holder


def test_a_taken_port_is_known_before_the_slow_start(ground: Ground, environment: SglangCpu, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        request = StartEngines(slots=(slot(environment, model, engine_id="taken", port=port),))
        working = ground.begin(request)
        cell = ground.until(lambda cell: f"port {port} is in use" in str(cell.get("cause", "")), "taken")
        assert time.monotonic() - began < 30
        assert f"held by pid {os.getpid()}" in cell["cause"]
        assert working.exception(timeout=60) is not None
        ground.do(Stop(targets=("taken",)))


def test_weights_from_disk_are_loaded_by_the_fleet(ground: Ground, model: Path, tmp_path: Path) -> None:
    since = time.monotonic()
    path = publish(tmp_path, 7, other_weights().items(), checkpoint=model)
    ground.required = Required(version="7", source="disk", path=str(path))
    cell = ground.until(lambda cell: cell["state"] == "HEALTHY" and cell["weight_version"] == "7")
    assert ground.states(since) == ["STALE", "HEALTHY"], "it leaves the rotation until it holds what is required"
    with EngineClient(cell["url"]) as client:
        assert checksum_differences(other_weights().items(), client.weights_checker("checksum")) == []


def test_a_trainers_weights_come_over_gloo_and_nothing_restarts_meanwhile(
    ground: Ground, environment: SglangCpu, tmp_path: Path
) -> None:
    weights = dict(initial_weights(MODEL))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "new.safetensors")
    generation = ground.state("HEALTHY")["generation"]
    url = ground.cells["0"]["url"]
    ground.updating = True
    ground.required = Required(version="8", source="trainer")
    with sending(environment, tmp_path / "new.safetensors") as sender, httpx.Client(base_url=url, timeout=300) as http:
        sender.join(http)
        restarting = ground.begin(Restart())
        ground.until(lambda cell: cell["pending"] == "the end of the weight update")
        assert post(http, "/begin_weight_update", {})["success"]
        sender.send()
        names = sorted(weights)
        body = {
            "names": names,
            "dtypes": [str(weights[name].dtype).removeprefix("torch.") for name in names],
            "shapes": [list(weights[name].shape) for name in names],
            "group_name": "weights",
            "weight_version": "8",
        }
        assert post(http, "/update_weights_from_distributed", body)["success"]
        assert post(http, "/end_weight_update", {})["success"]
        assert ground.cells["0"]["generation"] == generation, "the restart waits"
        restarting.cancel()
        with EngineClient(url) as client:
            assert checksum_differences(weights.items(), client.weights_checker("checksum")) == []
    ground.updating = False
    if ground.cells["0"]["state"] == "STALE":
        ground.do(Synced(target="0", generation=generation, version="8"))
    cell = ground.until(lambda cell: cell["state"] == "HEALTHY" and cell["weight_version"] == "8")
    assert cell["generation"] == generation


class Sender:
    """A trainer's side of a weight update group."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self._port = port

    def says(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == word + "\n"

    def join(self, http: httpx.Client) -> None:
        """Both sides wait for each other."""
        self.says("ready")
        group = {"master_address": "127.0.0.1", "master_port": self._port, "rank_offset": 1, "world_size": 2}
        assert post(http, "/init_weights_update_group", {**group, "group_name": "weights", "backend": "gloo"})[
            "success"
        ]
        self.says("joined")

    def send(self) -> None:
        """The broadcast waits for the receiver."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()


class sending:  # noqa: N801 - a context manager
    """A `Sender`, ended with the block."""

    def __init__(self, environment: SglangCpu, weights: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        command = [str(environment.python), str(SENDER), str(self._port), str(weights)]
        env = {**os.environ, **environment.env}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )

    def __enter__(self) -> Sender:
        return Sender(self._process, self._port)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = http.post(path, json=body).json()
    return answer


def test_toggles_take_effect_after_a_drain_that_loses_nothing(ground: Ground, tmp_path: Path, model: Path) -> None:
    # The trainer's weights would not come again: what is required is on disk from here on.
    path = publish(tmp_path, 9, initial_weights(MODEL).items(), checkpoint=model)
    ground.required = Required(version="9", source="disk", path=str(path))
    cell = ground.until(lambda cell: cell["state"] == "HEALTHY" and cell["weight_version"] == "9")
    answers: list[Any] = []
    payload = {"text": PROMPT, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}

    def generate() -> None:
        with EngineClient(cell["url"]) as client:
            answers.extend(client.generate(payload, require_version="9"))

    thread = threading.Thread(target=generate)
    thread.start()
    with EngineClient(cell["url"]) as client:
        while not client.loads()["loads"][0]["num_running_reqs"]:
            assert thread.is_alive()
    since = time.monotonic()
    stages = ground.do(SetToggles(changes=CHANGES))
    thread.join()
    print("\n".join(stages))
    assert answers[0]["meta_info"]["completion_tokens"] == 300, "what ran was drained, not cut off"
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "length"
    states = ["DRAINING", "STOPPING", "RECLAIMING", "STOPPED", "LAUNCHING", "LOADING", "WARMING", "STALE", "HEALTHY"]
    after = ground.state("HEALTHY")
    assert [state for state in ground.states(since) if state in states] == states
    assert (after["generation"], after["weight_version"]) == (2, "9"), "not the checkpoint that it was started from"
    effective = CHANGES.keys() - {"cuda_graph_padding"}
    assert {name: after["toggles"][name] for name in effective} == {name: CHANGES[name] for name in effective}
    assert after["ignored"] == ["cuda_graph_padding"], "accepted, and a CPU has no graphs to pad"
    assert "CUDA_LAUNCH_BLOCKING=1" in after["verified"]["launch_blocking"]
    old = ground.run_dir / "engines" / "0" / "1" / "record.json"
    assert '"code": 0' in old.read_text(), "SIGTERM is a good end for 0.5.23"


def test_what_sglang_would_rewrite_is_refused(ground: Ground) -> None:
    plan = ground.plan(SetToggles(changes={"attention_backend": "intel_amx"}))
    assert isinstance(plan, Refused)
    assert plan.code == "refused-by-rules"
    assert "torch_native" in plan.why


def test_a_killed_scheduler_is_a_crash_and_the_engine_comes_back(ground: Ground) -> None:
    generation = ground.state("HEALTHY")["generation"]
    (pid,) = [pid for pid, name in look(ground).children if name.startswith("sglang::scheduler")]
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ground.until(lambda cell: cell["state"] != "HEALTHY")
    print(f"out of the rotation {time.monotonic() - since:.2f} s after the kill")
    cell = ground.state("CRASHED") if "CRASHED" not in ground.states(since) else ground.cells["0"]
    print(f"crashed: {cell['fingerprint']}: {cell['cause']}")
    assert cell["fingerprint"]
    cell = ground.until(lambda cell: cell["state"] == "HEALTHY" and cell["generation"] == generation + 1)
    assert (cell["restarts"], cell["weight_version"]) == (1, "9")
    states = ground.states(since)
    assert states.index("CRASHED") < states.index("BACKOFF") < states.index("STALE") < states.index("HEALTHY")


def test_an_orphan_that_keeps_the_lock_is_ended_before_the_next_start(ground: Ground) -> None:
    generation = ground.state("HEALTHY")["generation"]
    orphan = sleeper(ground)
    leader = psutil.Process(ground.launched().pid)
    since = time.monotonic()
    leader.kill()
    ground.until(lambda cell: cell["state"] != "HEALTHY")
    print(f"out of the rotation {time.monotonic() - since:.2f} s after the kill")
    assert time.monotonic() - since < 5
    ground.until(lambda cell: cell["state"] == "HEALTHY" and cell["generation"] == generation + 1)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert len([pid for pid, name in look(ground).children if name == "sleep 86399"]) == 1, "the new one's own"


def test_another_attention_backend_takes_effect(ground: Ground) -> None:
    """The only other one that a CPU without AMX has; it compiles at the first forward pass."""
    generation = ground.state("HEALTHY")["generation"]
    ground.do(SetToggles(changes={"attention_backend": "flex_attention"}))
    cell = ground.until(lambda cell: cell["state"] == "HEALTHY" and cell["generation"] == generation + 1)
    assert cell["toggles"]["attention_backend"] == "flex_attention"
    with EngineClient(cell["url"]) as client:
        payload = {"text": PROMPT, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        assert client.generate(payload)[0]["meta_info"]["completion_tokens"] == 4


def test_a_good_end_leaves_nothing(ground: Ground) -> None:
    launched, processes = ground.launched(), [psutil.Process(pid) for pid, _ in look(ground).children]
    ground.do(Stop())
    seen: Look = ground.await_(ground.launcher.look(launched))
    left: Remains = ground.await_(ground.launcher.remains(launched))
    assert (seen.alive, seen.exit_code, seen.children, seen.lock_held) == (False, 0, (), False)
    assert left.clean
    assert left.port_holder == ""
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
