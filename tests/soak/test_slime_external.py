"""slime's own code attached to engines that rltop owns: `RLTOP_SLIME=DIR[:DIR…] make soak`, each a checkout of slime.

The engines are rltop's CPU engine, the router is a stand-in, SGLang is not there (`slime_external/drive.py`): what is
slime's is how it attaches, registers and pushes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from rltop.runs import RunInfo, find_run
from tests.daemon.util import Viewer
from tests.engines.fake_slime_router import FakeSlimeRouter, fake_slime_router
from tests.soak.slime_checkout import BASE, CHECKOUTS, PYTHON, needs

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

DRIVE = Path(__file__).parent / "slime_external" / "drive.py"
PATIENCE_S = 180.0
BACK = ("HEALTHY", 3)
Capture = pytest.CaptureFixture[str]


class Slime:
    """slime's side, in a process of its own."""

    def __init__(self, checkout: str) -> None:
        env = os.environ | {"PYTHONPATH": checkout, "RLTOP_INGEST": ""}
        pipe = subprocess.PIPE
        argv = [PYTHON, "-W", "ignore", str(DRIVE)]
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env, cwd=checkout)

    def does(self, do: str, **args: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **args}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def must(self, do: str, **args: Any) -> None:
        answer = self.does(do, **args)
        assert answer["ok"], answer


class Traffic:
    """Requests through the router, one after the other, until the block is left."""

    def __init__(self, router: FakeSlimeRouter) -> None:
        self.url = f"http://{router.address}/generate"
        self.answers: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}}
        while not self._stop.is_set():
            request = urllib.request.Request(self.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self.answers.append(answer.status)
            except urllib.error.HTTPError as error:
                with error:
                    self.answers.append(error.code)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def free_ports() -> int:
    """A port whose next one is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def trained(model: Path, folder: Path, number: int) -> Path:
    """A version as slime writes it, with weights of its own."""
    from safetensors.torch import load_file, save_file

    target = folder / f"weight_v{number:06d}"
    shutil.copytree(model, target)
    for file in target.glob("*.safetensors"):
        save_file({name: one + 0.001 * number for name, one in load_file(file).items()}, file, {"format": "pt"})
    return target


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

    return make_tiny_model(tmp_path / "model", TinyModelConfig(seed=1))


@pytest.fixture(params=CHECKOUTS or [""])
def slime(request: pytest.FixtureRequest) -> Iterator[Slime]:
    if not request.param:
        pytest.skip("NO SLIME HERE (RLTOP_SLIME=DIR of a checkout): it is NOT tested")
    needs(*BASE)
    found = Slime(request.param)
    yield found
    found.process.kill()
    found.process.communicate()


def until(run: RunInfo, matches: Any) -> dict[str, Any]:
    with Viewer(run) as viewer:
        viewer.hello()
        return dict(viewer.until_state(matches, patience_s=PATIENCE_S))


def holding(version: str, generation: int) -> Any:
    def matches(state: dict[str, Any]) -> bool:
        engines = [state.get(f"engine/{name}") or {} for name in ("0", "1")]
        want = ("HEALTHY", version, generation)
        right = [(one.get("state"), one.get("weight_version"), one.get("generation")) == want for one in engines]
        return all(right) and all(one.get("weight_digest") for one in engines)

    return matches


def test_restarted_with_other_flags_under_slimes_own_code(
    slime: Slime, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("RLTOP_DIR", str(tmp_path / "r"))
    port, weights = free_ports(), tmp_path / "weights"
    weights.mkdir()
    addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    urls = [f"http://{address}" for address in addresses]
    with fake_slime_router() as router:
        file = tmp_path / "engines.toml"
        file.write_text(
            f'[run]\nname = "policy"\n[engines]\nmodel_path = "{model}"\nkind = "cpu"\ncount = 2\nport = {port}\n'
            f'trainer = "slime"\nweights_dir = "{weights}"\nrouter = "{router.address}"\n'
        )
        assert main(["up", str(file), "--json"]) == 0
        try:
            flags = json.loads(capsys.readouterr().out)["slime_flags"]
            assert flags[0] == "--rollout-external-engine-addrs " + " ".join(addresses)
            run = find_run("policy")
            until(run, holding("default", 1))

            slime.must("attach", addresses=addresses, router=router.address)
            assert router.urls() == urls
            slime.must("push", path=str(trained(model, weights, 1)), version="1")
            before = until(run, holding("1", 1))
            router.asked.clear()

            with Traffic(router) as traffic:
                argv = ["engine", "set", "cuda_graph=off", "--engine", "all", "--run", "policy"]
                assert main(argv) == 0, capsys.readouterr()
                after = until(run, lambda state: holding("1", 2)(state) and router.urls() == urls)
            assert set(traffic.answers) == {200}
            assert len(traffic.answers) > 10
            assert router.asked == [f"{verb} {url}" for url in urls for verb in ("DELETE", "POST")]
            for name, url in zip(("0", "1"), urls, strict=True):
                engine = after[f"engine/{name}"]
                assert engine["url"] == url
                assert engine["weight_digest"] == before[f"engine/{name}"]["weight_digest"]
                assert engine["model_path"] == str(weights / "weight_v000001")
            assert after["fleet"]["required"] == {"version": "1", "source": "disk"}

            slime.must("health")
            slime.must("push", path=str(trained(model, weights, 2)), version="2")
            newest = until(run, holding("2", 2))
            assert newest["engine/0"]["weight_digest"] != before["engine/0"]["weight_digest"]

            # One that dies is brought back with the same version, at the same address, and into the router.
            router.asked.clear()
            os.kill(newest["engine/1"]["pid"], signal.SIGKILL)
            back = until(run, lambda state: (state["engine/1"]["state"], state["engine/1"]["generation"]) == BACK)
            assert (back["engine/1"]["url"], back["engine/1"]["weight_version"]) == (urls[1], "2")
            until(run, lambda state: router.urls() == urls)
            assert router.asked == [f"DELETE {urls[1]}", f"POST {urls[1]}"]
            slime.must("push", path=str(trained(model, weights, 3)), version="3")
            until(run, lambda state: state["fleet"]["required"]["version"] == "3")

            shutil.rmtree(weights / "weight_v000003")
            until(run, lambda state: state["fleet"]["required"] == {"version": "3", "source": "trainer"})
            capsys.readouterr()
            assert main(["engine", "restart", "--engine", "0", "--run", "policy"]) != 0
            assert "could not get weight version 3" in capsys.readouterr().err
            assert router.urls() == urls
        finally:
            assert main(["down", "policy"]) == 0
