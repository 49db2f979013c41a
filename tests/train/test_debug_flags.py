"""The flags that debug rollout and training apart: slime's rules, and refusals where slime does something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args, to_argv
from rltop.train.sides import bundles

LOAD = ["--load-debug-rollout-data", "d/{rollout_id}.pt"]
ROLLOUT_ONLY = "--debug-rollout-only"


@pytest.mark.parametrize(
    ("argv", "mode", "ranks", "engines"),
    [
        ([], "full", 2, 3),
        ([ROLLOUT_ONLY], "rollout-only", 0, 3),
        (LOAD, "train-only", 2, 0),
        (["--debug-train-only", *LOAD], "train-only", 2, 0),
    ],
)
def test_the_mode_says_which_sides_exist(argv: list[str], mode: str, ranks: int, engines: int) -> None:
    config = parse_args(["--actor-num-gpus-per-node", "2", "--rollout-num-engines", "3", "--colocate", *argv])
    assert (config.mode, config.trainer_ranks, config.engine_count) == (mode, ranks, engines)
    assert len(bundles(config)) == ranks + engines
    assert config.offloads_train == config.offloads_rollout == (mode == "full")
    args = config.as_args()
    assert (args["debug_train_only"], args["colocate"]) == (mode == "train-only", mode == "full")


def test_there_is_a_place_for_the_manager_when_the_daemon_has_the_engines() -> None:
    assert len(bundles(parse_args([ROLLOUT_ONLY]), engines=False)) == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([ROLLOUT_ONLY, "--debug-train-only"], ["two modes at once", "--debug-train-only"]),
        ([ROLLOUT_ONLY, *LOAD], ["two modes at once", "--load-debug-rollout-data"]),
        (["--debug-train-only"], ["nothing to train on", "--load-debug-rollout-data 'DIR/{rollout_id}.pt'"]),
        ([ROLLOUT_ONLY, "--cold-start-steps", "9"], ["a cold start without a trainer", "DIR/initial"]),
        ([ROLLOUT_ONLY, "--save-debug-train-data", "d/{rollout_id}"], ["what does not happen", "rollout-only"]),
        ([*LOAD, "--save-debug-rollout-data", "e/{rollout_id}"], ["what does not happen", "generates no rollout"]),
        (["--dump-details", "d", "--save-debug-rollout-data", "e/{rollout_id}"], ["two paths", "d/rollout_data"]),
        (["--dump-details", "d", "--save-debug-train-data", "e/{rollout_id}"], ["two paths", "d/train_data"]),
        (
            ["--save-debug-rollout-data", "d/{rollout_id}.pt", "--save-debug-train-data", "d/{rollout_id}.pt"],
            ["two dumps in one file", "d/0.pt"],
        ),
        (["--save-debug-train-data", "d/all.pt"], ["not a path for dumps", "overwrite the one before"]),
        (["--save-debug-train-data", "d/{rank}.pt"], ["not a path for dumps", "overwrite the one before"]),
        (["--save-debug-train-data", "d/{step_id}.pt"], ["only {rank}, {rollout_id}", "step_id"]),
        (["--load-debug-rollout-data", "d/{}.pt"], ["not a path for dumps", "--load-debug-rollout-data d/{}.pt"]),
        (["--load-debug-rollout-data-subsample", "0.5"], ["a share of nothing", "--load-debug-rollout-data"]),
        ([*LOAD, "--load-debug-rollout-data-subsample", "0"], ["not a share", "above 0"]),
        ([*LOAD, "--load-debug-rollout-data-subsample", "1.5"], ["not a share", "at most 1"]),
        (["--n-samples-per-eval-prompt", "4"], ["--n-samples-per-eval-prompt", "--eval-interval N"]),
        (["--skip-eval-before-train"], ["--skip-eval-before-train", "--eval-interval N"]),
        (["--eval-interval", "0"], ["--eval-interval", "at least 1"]),
        ([ROLLOUT_ONLY, "--ci-save-grad-norm", "g/{rollout_id}"], ["a grad_norm of no step"]),
        (
            ["--ci-save-grad-norm", "g/{rollout_id}", "--ci-load-grad-norm", "g/{rollout_id}"],
            ["saving and loading at once"],
        ),
        (
            ["--num-steps-per-rollout", "2", "--ci-save-grad-norm", "g/{rollout_id}"],
            ["one path for several steps", "{rollout_id}_{step_id}"],
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_what_to_do(argv: list[str], words: list[str]) -> None:
    with pytest.raises(RltopError) as caught:
        parse_args(argv)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_dump_details_is_both_dumps() -> None:
    config = parse_args(["--dump-details", "D"])
    assert (config.rollout_dumps, config.train_dumps) == (
        "D/rollout_data/{rollout_id}.pt",
        "D/train_data/{rollout_id}.pt",
    )
    assert config.as_args()["save_debug_train_data"] == config.train_dumps
    assert parse_args(["--dump-details", "D", ROLLOUT_ONLY]).train_dumps is None
    assert parse_args(["--dump-details", "D", *LOAD]).rollout_dumps is None


def test_braces_in_the_name_of_a_directory_stay_what_they_are() -> None:
    path = TrainConfig(dump_details=Path("a{b}c")).rollout_dumps
    assert path is not None
    assert path.format(rollout_id=3) == "a{b}c/rollout_data/3.pt"


def test_one_file_may_serve_every_rollout_of_a_replay() -> None:
    assert parse_args(["--load-debug-rollout-data", "d/7.pt"]).mode == "train-only"


def test_a_rollout_needs_no_division_among_ranks_that_do_not_exist() -> None:
    argv = ["--actor-num-gpus-per-node", "3", "--rollout-batch-size", "5", "--n-samples-per-prompt", "4"]
    assert parse_args([*argv, ROLLOUT_ONLY]).trainer_ranks == 0
    with pytest.raises(RltopError, match="data parallel"):
        parse_args(argv)


def test_the_command_line_of_a_replay_reads_back() -> None:
    config = parse_args(
        [*LOAD, "--load-debug-rollout-data-subsample", "0.5", "--dump-details", "D", "--reward-key", "a"]
    )
    assert parse_args(to_argv(config)) == config


@pytest.mark.parametrize(
    ("argv", "first", "after"),
    [
        ([], False, []),
        (["--eval-interval", "2"], True, [1, 3]),
        (["--eval-interval", "2", "--skip-eval-before-train"], False, [1, 3]),
        (["--eval-interval", "2", *LOAD], False, []),
        (["--eval-interval", "2", ROLLOUT_ONLY], True, [1, 3]),
    ],
)
def test_evaluations_come_as_slimes_do_and_never_without_engines(
    argv: list[str], first: bool, after: list[int]
) -> None:
    config = parse_args(argv)
    assert config.evaluates_first == first
    assert [rollout_id for rollout_id in range(4) if config.evaluates_after(rollout_id)] == after
