"""`--weight-transport distributed`: the trainer and the CPU engine meet in a process group of their own (gloo)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rltop.engines.calls import distributed_call
from rltop.engines.client import EngineClient
from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.engine_actor import EngineActor
from rltop.train.ports import BASE_VERSION, SyncReport
from rltop.train.rollout_manager import RolloutManager
from rltop.train.sides import engine_specs
from rltop.train.sync import push
from rltop.train.tiny_model import make_tiny_model
from rltop.train.trainer_actor import TrainActor
from rltop.train.update_group import UpdateGroups
from tests.train.local import LocalRollouts

pytestmark = pytest.mark.train

CONFIG = TrainConfig(weight_transport="distributed", check_weight_update_equal=True, num_rollout=1)


@contextlib.contextmanager
def sides(directory: Path) -> Iterator[tuple[TrainActor, LocalRollouts]]:
    config = dataclasses.replace(CONFIG, rollout_num_engines=2)
    trainer, rollouts = TrainActor(config, str(directory)), LocalRollouts(config, directory, RolloutManager(config))
    facts = trainer.load()
    rollouts.load(facts.checkpoint)
    try:
        rollouts.start(trainer.freeze_base(str(directory / "initial")))
        yield trainer, rollouts
    finally:
        rollouts.stop()
        trainer.disconnect()


def what(report: SyncReport) -> list[tuple[bool, bool | None, str]]:
    return [(one.ok, one.same, one.version) for one in report.engines.values()]


def test_an_engine_holds_what_was_broadcast_and_a_refusal_costs_one_push(tmp_path: Path) -> None:
    checkpoint = make_tiny_model(tmp_path / "tiny")
    weights = {name: tensor + 1 for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    actor = EngineActor(engine_specs(CONFIG, tmp_path, "test")[0])
    groups = UpdateGroups("127.0.0.1", None)
    try:
        engine = actor.start(str(checkpoint))
        with EngineClient(engine.url) as client:

            def pushed(version: str) -> SyncReport:
                return push(
                    [weights],
                    [weights],
                    version=version,
                    transport="distributed",
                    engines={"0": client},
                    directory=None,
                    planted=False,
                    send=lambda _, __, named: groups.push(engine, client, named, version),
                )

            assert what(pushed("1")) == [(True, True, "1")]
            client.inject("update-refused:count=1")
            refused = pushed("2")
            assert (what(refused), "update-refused" in refused.engines["0"].message) == ([(False, None, "1")], True)
            assert what(pushed("2")) == [(True, True, "2")]
            actor.stop()
            assert pushed("3").engines["0"].gone
    finally:
        groups.close()
        actor.stop()


@pytest.mark.soak
def test_engines_have_groups_of_their_own_and_one_that_is_another_process_now_joins_anew(tmp_path: Path) -> None:
    with sides(tmp_path) as (trainer, rollouts):
        assert what(trainer.prove(BASE_VERSION, -1, rollouts.facts)) == [(True, True, BASE_VERSION)] * 2
        assert what(trainer.publish("1", 0, rollouts.facts)) == [(True, True, "1")] * 2
        rollouts.actors[1].stop()
        alone = trainer.publish("2", 1, rollouts.facts)
        assert (alone.engines["0"].same, alone.engines["1"].gone) == (True, True)
        rollouts.facts[1] = rollouts.actors[1].start(rollouts.facts[1].model_path)
        assert what(trainer.publish("2", 1, rollouts.facts)) == [(True, True, "2")] * 2


def test_only_the_last_call_of_a_push_names_the_version_and_empties_the_cache() -> None:
    pieces = [("a", "bfloat16", (2, 3)), ("b", "float32", (4,))]
    first, last = distributed_call(pieces[:1], "g", None, 5.0), distributed_call(pieces[1:], "g", "7", 5.0)
    assert first.body == {
        "names": ["a"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "flush_cache": False,
    }
    assert last.body is not None
    assert (last.body["weight_version"], last.body["flush_cache"], last.timeout_s) == ("7", True, 5.0)


def test_a_broadcast_between_processes_on_one_device_is_refused() -> None:
    with pytest.raises(RltopError, match="--weight-transport tensor") as told:
        parse_args(["--weight-transport", "distributed", "--colocate"])
    assert told.value.exit_code == 2
