"""Planted faults that have no place in a run are refused before it starts; each has a run that has a place for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args
from rltop.train.fault_checks import check_faults_of_start
from rltop.train.flags import field_docs
from rltop.train.inject import CATALOGUE, parse_fault
from rltop.train.presets import demo_args

PLACES = {
    "ref-perturb": "--use-kl-loss",
    "no-template": "--apply-chat-template",
    "pp-layer-ids": "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2",
    "late-release": "--colocate",
    "no-update-after-resume": "--offload-rollout",
}
"""What a plain run needs for a fault; the others have their place in any."""
TRAIN_ONLY = "--load-debug-rollout-data d/{rollout_id}.pt"


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_fault_has_a_place_and_is_refused_without_it(name: str) -> None:
    needs = PLACES.get(name, "").split()
    assert parse_args(["--inject", name, *needs]).plants(name)
    if needs:
        with pytest.raises(RltopError) as refused:
            parse_args(["--inject", name])
        assert refused.value.exit_code == 2
        assert needs[0] in f"{refused.value.why} {refused.value.do}"


@pytest.mark.parametrize("name", sorted(CATALOGUE))
@pytest.mark.parametrize(("mode", "flags"), [("rollout-only", "--debug-rollout-only"), ("train-only", TRAIN_ONLY)])
def test_a_fault_of_a_side_that_does_not_run_is_refused(name: str, mode: str, flags: str) -> None:
    there = {"rollout-only": {"prompt"}, "train-only": {"reference", "gradient", "loss"}}[mode]
    argv = ["--inject", name, *PLACES.get(name, "").split(), *flags.split()]
    if CATALOGUE[name].where in there:
        assert parse_args(argv).mode == mode
        return
    with pytest.raises(RltopError, match=r"does not (run|happen)") as refused:
        parse_args(argv)
    assert f"a {mode} run" in refused.value.why


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--inject late-release", ["a swap that does not happen", "--colocate"]),
        ("--inject late-release --colocate --no-offload-rollout", ["a swap that does not happen"]),
        ("--inject nan-grad --num-rollout 1", ["rollout 1", "--num-rollout 2", "nan-grad@0"]),
        ("--inject loss-sum@7 --num-rollout 7", ["--inject loss-sum@7", "rollout 6"]),
        ("--inject no-update-after-resume@2 --colocate --num-rollout 3", ["nobody asks", "--num-rollout 4"]),
        ("--inject stale-tensor@0", ["none before the first", "--check-weight-update-equal"]),
        (
            "--inject no-update-after-resume --colocate --engine sglang --sglang-enable-weights-cpu-backup",
            ["--sglang-enable-weights-cpu-backup", "no update is needed"],
        ),
    ],
)
def test_a_fault_that_could_not_act_says_why(argv: str, words: list[str]) -> None:
    with pytest.raises(RltopError) as refused:
        parse_args(argv.split())
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)


def test_a_push_before_the_first_rollout_and_an_evaluation_after_the_last_are_places() -> None:
    parse_args(["--inject", "stale-tensor@0", "--check-weight-update-equal"])
    parse_args(["--inject", "no-update-after-resume@2", "--colocate", "--num-rollout", "3", "--eval-interval", "3"])


@pytest.mark.parametrize(
    ("fault", "first", "fine"),
    [
        ("nan-grad@4", 5, False),
        ("nan-grad@5", 5, True),
        ("zero-norm@4", 5, True),  # pushed once more at the start
        ("zero-norm@3", 5, False),
        ("stale-tensor@4", 5, False),
        ("loss-sum@2", 5, True),  # lasts
        ("zero-norm@start", 5, False),
        ("zero-norm@start", None, True),
    ],
)
def test_a_run_that_resumes_knows_which_rollouts_are_over(fault: str, first: int | None, fine: bool) -> None:
    config = TrainConfig(inject=(fault,), load=Path("saved"))
    if fine:
        check_faults_of_start(config, first, 2)
        return
    with pytest.raises(RltopError, match="a rollout that is over"):
        check_faults_of_start(config, first, 2)


def test_one_layer_cannot_change_places() -> None:
    with pytest.raises(RltopError, match="without a second one"):
        check_faults_of_start(TrainConfig(inject=("swap-layers",)), None, 1)


def test_the_help_names_every_fault() -> None:
    assert [name for name in CATALOGUE if name not in field_docs(TrainConfig)["inject"]] == []


@pytest.mark.parametrize("name", sorted(name for name, kind in CATALOGUE.items() if kind.where != "swap"))
def test_the_demo_has_a_place_for_every_fault_of_one_side(name: str) -> None:
    config = parse_args(demo_args(seed=1, deterministic=False, inject=(name,)))
    assert parse_fault(config.inject[0]).rollout < config.num_rollout
