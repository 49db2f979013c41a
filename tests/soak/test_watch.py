"""`rltop watch` over a log that a writer process fills 100 times as fast as the run, and over a real Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rltop.cli.main import main
from rltop.runs import find_run
from tests.daemon.util import Viewer

pytestmark = pytest.mark.soak
SPEED = 100.0
WRITER = """
import sys, time
from tests.daemon.slime_log import Plan, lines
begun = time.monotonic()
marks = sys.argv[3:]
with open(sys.argv[1], "a", buffering=1) as log:
    for when, line in lines(Plan()):
        if marks and marks[0] in line:
            del marks[0]
            waits = time.monotonic()
            sys.stdin.readline()
            begun += time.monotonic() - waits
        time.sleep(max(0.0, begun + when / float(sys.argv[2]) - time.monotonic()))
        log.write(line + "\\n")
"""
"""At some lines it waits until it is told to go on: what lies a minute apart in the run would lie within one look of a
daemon that has little of the machine."""
AWAITED = (
    ("perf 1: ", {"rollout.text": "pass", "engine.died": "pass"}),
    ("perf 7: ", {"rollout.text": "fail"}),
    ("'port': 15600", {"engine.died": "fail"}),
)
"""Line before which it waits, and the verdicts that are shown by then."""
JOB = """
import os, ray
from ray.util.placement_group import placement_group
ray.init(address="auto")
@ray.remote(num_cpus=0.1)
class RolloutManager:
    def die(self):
        print("[2026-03-01 10:00:00] a.py:1 - perf 3: {'rollout/raw_reward': 0.25}", flush=True)
        os._exit(7)
try:
    ray.get(RolloutManager.remote().die.remote())
except ray.exceptions.RayActorError:
    pass
placement_group([{"GPU": 8}])
import time; time.sleep(60)
"""


@pytest.fixture
def runs_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """RLTOP_DIR, with a short path because unix sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as name:
        monkeypatch.setenv("RLTOP_DIR", name)
        yield Path(name)


def test_a_run_of_30_minutes_in_18_seconds(tmp_path: Path, runs_dir: Path) -> None:
    log = tmp_path / "train.log"
    log.touch()
    assert main(["watch", "--log", str(log), "--headless", "--name", "w-1"]) == 0
    seen: dict[str, list[tuple[str, int | None]]] = {"rollout.text": [], "engine.died": [], "engine/2": []}
    argv = [sys.executable, "-c", WRITER, str(log), str(SPEED), *(line for line, _ in AWAITED)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, text=True) as writer:
        try:
            with Viewer(find_run("w-1")) as viewer:
                viewer.hello()

                def over(state: dict[str, Any]) -> bool:
                    rollout = (state.get("metric/perf/rollout_time") or {}).get("step")
                    for name, row in seen.items():
                        cell = state.get(name if "/" in name else f"check/{name}") or {}
                        word = cell.get("status") or cell.get("state")
                        if word and (not row or row[-1][0] != word):
                            row.append((word, rollout))
                    return rollout == 19 and writer.poll() is not None

                assert writer.stdin is not None
                for _, verdicts in AWAITED:

                    def shown(state: dict[str, Any], verdicts: Mapping[str, str] = verdicts) -> bool:
                        over(state)
                        return all(state[f"check/{name}"]["status"] == word for name, word in verdicts.items())

                    viewer.until_state(shown, patience_s=120.0)
                    writer.stdin.write("\n")
                    writer.stdin.flush()
                viewer.until_state(over, patience_s=120.0)
                state = viewer.state
        finally:
            writer.kill()
            assert main(["down", "w-1"]) == 0
    assert [word for word, _ in seen["rollout.text"]][-2:] == ["pass", "fail"]
    assert [word for word, _ in seen["engine.died"]][-3:] == ["pass", "fail", "warn"]
    assert [word for word, _ in seen["engine/2"]] == ["NAMED", "CRASHED", "NAMED"]
    failed = next(rollout for word, rollout in seen["rollout.text"] if word == "fail")
    assert failed == 6, "told while rollout 7 is made"
    verdict = state["check/rollout.text"]
    assert (verdict["rollout"], verdict["evidence"][0]["source"]) == (7, "train.log")
    assert state["checks"]["root_causes"][0] == "weights.sync-garble"
    assert state["engine/2"]["crashes"][0]["rollout"] == 10
    assert state["log/train.log"]["dropped"] == 0
    assert state["daemon"]["faults"] == 0


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[tuple[str, Path, str]]:
    """A Ray with its dashboard: URL, its directory of logs, the ray program. RLTOP_RAY names another program than the
    one on the PATH; a Ray that was installed without `ray[default]` has no dashboard."""
    program = os.environ.get("RLTOP_RAY") or shutil.which("ray") or ""
    python = Path(program).with_name("python") if program else None
    if python is None or subprocess.run([python, "-c", "import aiohttp, ray.dashboard"], check=False).returncode != 0:
        pytest.skip("NO RAY WITH A DASHBOARD HERE (pip install 'ray[default]', RLTOP_RAY): the cluster is NOT tested")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as name:
        words = [program, "start", "--head", "--port=26380", "--dashboard-port=28266", "--num-cpus=2", "--num-gpus=1"]
        words += ["--disable-usage-stats", f"--temp-dir={name}", "--object-store-memory=80000000", "--block"]
        # Without a token, so only on the loopback interface.
        words += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
        environ = {**os.environ, "RAY_AUTH_MODE": "disabled"}
        with (
            (tmp_path / "ray.out").open("w") as out,
            subprocess.Popen(words, stdout=out, stderr=out, env=environ) as head,
        ):
            try:
                yield "http://127.0.0.1:28266", Path(name) / "session_latest" / "logs", program
            finally:
                head.terminate()
                head.wait(60)


def test_a_real_ray_with_a_job(ray: tuple[str, Path, str], tmp_path: Path, runs_dir: Path) -> None:
    url, logs, program = ray
    script = tmp_path / "job.py"
    script.write_text(JOB)
    submit = [program, "job", "submit", "--address", url, "--no-wait", "--"]
    submit += [str(Path(program).with_name("python")), str(script)]
    deadline = time.monotonic() + 120
    while subprocess.run(submit, capture_output=True, check=False).returncode != 0:
        assert time.monotonic() < deadline, "Ray takes no job"
        time.sleep(2)
    assert main(["watch", "--ray", url, "--log", str(logs), "--headless", "--name", "r-1"]) == 0
    try:
        with Viewer(find_run("r-1")) as viewer:
            viewer.hello()

            def told(state: dict[str, Any]) -> bool:
                cluster = state["cluster"]
                return bool(cluster["dead_actors"] and cluster["waiting"] and state["metric/rollout/raw_reward"])

            viewer.until_state(told, patience_s=120.0)
            cluster = viewer.state["cluster"]
            assert cluster["dead_actors"][0]["class"] == "RolloutManager", json.dumps(cluster)
            assert (cluster["waiting"][0]["gpus"], cluster["gpus"], cluster["nodes"]["alive"]) == (8.0, 1.0, 1)
            assert viewer.state["metric/rollout/raw_reward"] | {"t": 0} == {
                "step": 3,
                "value": 0.25,
                "t": 0,
                "axis": "rollout",
                "rollout_id": 3,
                "nan": 0,
            }
            assert cluster["jobs"][0]["status"] == "RUNNING"
    finally:
        assert main(["down", "r-1"]) == 0
