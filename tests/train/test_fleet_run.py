"""A training run under load while its engines are restarted, toggled and killed: with the real daemon and its fleet.

The dumps prove that no sample is lost and none comes from stale weights.
"""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import pytest

from rltop.daemon import spawn
from rltop.protocol.messages import Accepted
from rltop.train.cpu_engine.faults import VARIABLE
from rltop.train.cpu_engine.process import CRASH_VARIABLE
from tests.engines.two_nodes import ray_nodes
from tests.train.operated import operated

pytestmark = [pytest.mark.train, pytest.mark.timeout(400)]

TOGGLES = {"cuda_graph": "off", "speculative": "NGRAM", "deepep": "auto", "launch_blocking": "on"}


def test_a_restarted_engine_costs_the_training_nothing(tmp_path: Path) -> None:
    with operated(tmp_path) as run:
        before = run.rollout
        op = run.operate("engine-restart", "1")
        assert "engine 1: drained" in op["text"]
        assert run.rollout > before, "the other engine served meanwhile"
        run.until_made_by("1", 2)
        assert run.engines()["0"][:2] == ("HEALTHY", 1)
        assert {run.check(name) for name in ("weights.mixed-version", "weights.update-failed")} <= {"pass", "skip"}
        run.assert_whole()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_each_toggle_on_one_engine_on_all_and_back(tmp_path: Path) -> None:
    with operated(tmp_path) as run:
        for toggle, value in TOGGLES.items():
            was = run.viewer.state["toggles/0"][toggle]["value"]
            for target, wanted in (("0", value), ("all", value), ("all", was)):
                before = run.rollout
                run.operate("engine-set", target, changes={toggle: wanted})
                assert run.rollout > before, "training stood still"
                for name in ("0", "1") if target == "all" else (target,):
                    assert run.viewer.state[f"toggles/{name}"][toggle]["value"] == wanted
            run.goes_on()
        assert {state for state, _, _ in run.engines().values()} == {"HEALTHY"}
        run.assert_whole()
        print(*run.ops, sep="\n")


@pytest.mark.soak
def test_a_colocated_run_takes_turns_with_engines_that_are_restarted_and_killed(tmp_path: Path) -> None:
    with operated(tmp_path, "--colocate") as run:
        run.until(lambda state: run.check("train.colocate-swap") == "pass", "no second turn")
        run.until(lambda state: run.engines()["1"][0] == "OFFLOADED", "engine 1 is not lent")
        os.kill(run.viewer.state["engine/1"]["pid"], signal.SIGKILL)
        run.goes_on()
        run.until(lambda state: run.engines()["1"][:2] == ("HEALTHY", 2), "the killed engine does not come back")
        run.until_made_by("1", 2)
        run.operate("engine-restart", "0")
        run.until_made_by("0", 2)
        run.goes_on()
        assert {run.check(name) for name in ("train.colocate-swap", "engine.resume-order")} == {"pass"}
        assert {run.check(name) for name in ("weights.mixed-version", "weights.update-failed")} <= {"pass", "skip"}
        run.assert_whole()


@pytest.mark.soak
def test_engines_and_daemon_are_killed_and_training_goes_on(tmp_path: Path) -> None:
    with operated(tmp_path) as run:
        os.kill(run.viewer.state["engine/1"]["pid"], signal.SIGKILL)
        run.goes_on()
        run.until(lambda state: run.engines()["1"][:2] == ("HEALTHY", 2), "the killed engine does not come back")
        os.kill(run.run.pid, signal.SIGKILL)
        last = run.saved()[-1]
        again = spawn.start_daemon(run.run.name, config={"engines": {}})
        run.attach_again(again)
        run.goes_on()
        assert run.saved()[-1] > last
        run.operate("engine-restart", "0")
        run.until_made_by("0", 2)
        run.assert_whole()
        spawn.stop_daemon(again)


@pytest.mark.soak
def test_on_a_ray_cluster_the_engines_are_in_the_runs_bundles(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ray_nodes({**env, **secret}, nodes=3) as nodes:
        joined = {**secret, "RAY_TMPDIR": nodes.folder}
        with operated(tmp_path, "--ray-address", nodes.address, env=joined) as run:
            cells = [run.viewer.state[f"engine/{name}"] for name in ("0", "1")]
            assert [cell["launcher"] for cell in cells] == ["ray", "ray"]
            run.operate("engine-restart", "1")
            run.until_made_by("1", 2)
            run.assert_whole()
            token = run.run.path / "train" / "ray-token"
            assert token.stat().st_mode & 0o777 == 0o600


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_bisection_on_one_engine_costs_the_training_nothing(tmp_path: Path) -> None:
    """Engine 0 crashes of its radix cache; engine 1 runs without one, and serves while engine 0 is on trial."""
    # Nobody's engine crashes before it is asked for: the condition holds for engine 0 alone, from then on.
    env = {VARIABLE: "ima:radix_cache&!chunked_prefill:hazard=0.05", CRASH_VARIABLE: "0.2"}
    with operated(tmp_path, env=env) as run:
        run.operate("engine-set", "1", changes={"radix_cache": "off"})
        run.operate("engine-set", "0", changes={"chunked_prefill": "off"})
        run.until(lambda state: state["engine/0"].get("crashes"), "engine 0 does not crash")
        first = run.rollout
        toggles = ["cuda_graph", "overlap_schedule", "radix_cache"]
        args = {"engine": "0", "toggles": toggles, "time_scale": 20.0, "engines": ["0"]}
        answer = run.viewer.command("bisect-start", args=args, reason="a test")
        assert isinstance(answer, Accepted), answer
        while (run.viewer.state.get("bisect") or {}).get("ended") is None:
            run.goes_on(1)  # fails when the training stands still
            assert run.rollout - first < 2000
        cell = run.viewer.state["bisect"]
        assert (cell["state"], cell["verdict"]["culprit"]) == ("found", ["radix_cache"]), cell["verdict"]
        assert cell["restored"] == {"0": "original"}
        assert run.rollout - first > 5, "training went on all the while"
        generations = {row["generation"] for row in cell["trials"]}
        run.operate("engine-set", "0", changes={"radix_cache": "off"})  # what an operator does then
        run.until(lambda state: run.engines()["0"][0] == "HEALTHY", "engine 0 does not come back")
        run.goes_on(3)
        run.assert_whole()
        made = {key for rollout_id in run.saved() for key in run.made_by(rollout_id)}
        assert not {generation for engine, generation in made if engine == "0"} & generations, "none on trial served"
        assert {run.check(name) for name in ("weights.mixed-version", "weights.update-failed")} <= {"pass", "skip"}
