"""Command line of the trainer: slime's names, strict, with the numbers in the message."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from rltop.errors import RltopError
from rltop.train.arguments import TrainConfig, parse_args, to_argv
from rltop.train.flags import field_docs, negated_names
from rltop.train.presets import demo_args


def test_an_empty_command_line_gives_the_defaults() -> None:
    assert parse_args([]) == TrainConfig()


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--lr", "2e-4"], "lr", 2e-4),
        (["--num-rollout=7"], "num_rollout", 7),
        (["--apply-chat-template"], "apply_chat_template", True),
        (["--kl-loss-type", "low_var_kl"], "kl_loss_type", "low_var_kl"),
        (["--engine", "sglang"], "engine", "sglang"),
        (["--eps-clip-high", "0.28"], "eps_clip_high", 0.28),
        (["--num-rollout", "3", "--num-rollout", "4"], "num_rollout", 4),
    ],
)
def test_a_flag_sets_its_field(argv: list[str], name: str, value: object) -> None:
    assert getattr(parse_args(argv), name) == value


def test_what_starts_with_sglang_goes_to_the_engine_without_the_prefix() -> None:
    argv = ["--engine", "sglang", "--sglang-mem-fraction-static", "0.3", "--sglang-disable-radix-cache", "--lr", "1e-5"]
    config = parse_args([*argv, "--sglang-log-level=debug"])
    assert config.sglang_args == ("--mem-fraction-static", "0.3", "--disable-radix-cache", "--log-level=debug")
    assert config.lr == 1e-5


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rolout-batch-size", "8"], ["unknown flag", "--rolout-batch-size", "--rollout-batch-size"]),
        (["--n-samples-per-promt=8"], ["--n-samples-per-promt", "--n-samples-per-prompt"]),
        (["--batch-size", "8"], ["did you mean --rollout-batch-size or --global-batch-size?"]),
        (["--hidden-size", "8"], ["--hidden-size", "`rltop train --help` lists all flags"]),
        (["--epochs", "8"], ["--epochs", "`rltop train --help` lists all flags"]),
        (["--engine-python", ""], ["--engine-python", "an empty path"]),
        (["--hf-checkpoint="], ["--hf-checkpoint", "an empty path"]),
        (["--lr"], ["--lr", "expected one argument"]),
        (["--lr", "fast"], ["--lr", "fast"]),
        (["--lr", "nan"], ["--lr", "finite"]),
        (["--num-rollout", "2.5"], ["--num-rollout", "2.5"]),
        (["--engine", "vllm"], ["--engine", "vllm", "sglang"]),
        (["now"], ["unexpected argument", "now"]),
        (["--num-rollout", "0"], ["--num-rollout", "at least 1", "0"]),
        (["--n-samples-per-prompt", "1"], ["--n-samples-per-prompt", "at least 2"]),
        (["--rollout-temperature", "0"], ["--rollout-temperature", "above 0"]),
        (["--lr", "0"], ["--lr", "above 0"]),
        (["--tensor-model-parallel-size", "0"], ["--tensor-model-parallel-size", "at least 1"]),
        (["--context-parallel-size", "2"], ["--context-parallel-size", "not supported", "it is 2"]),
        (
            ["--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "3"],
            ["--actor-num-gpus-per-node", "= 3 ranks", "= 2", "--actor-num-gpus-per-node 4"],
        ),
        (["--pipeline-model-parallel-size", "2"], ["--actor-num-gpus-per-node", "= 1 ranks", "= 2"]),
        (["--actor-num-nodes", "2"], ["--actor-num-nodes", "--ray-address"]),
        (
            ["--actor-num-gpus-per-node", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"],
            ["--global-batch-size", "16 / 3 leaves 1 over", "multiple of 3"],
        ),
        (
            ["--actor-num-gpus-per-node", "1000000"],
            ["--actor-num-gpus-per-node: more data parallel ranks", "256 samples per step", "per-node 256 at most"],
        ),
        (["--inject", "pp-layer-ids"], ["--inject pp-layer-ids", "--pipeline-model-parallel-size 2"]),
        (["--kl-loss-coef", "0.1"], ["--kl-loss-coef", "0.1", "--use-kl-loss"]),
        (["--ref-load", "x"], ["--ref-load", "--use-kl-loss"]),
        (["--engine-python", "/opt/python"], ["--engine-python /opt/python", "--engine sglang"]),
        (["--engine-env", "CUDA_LAUNCH_BLOCKING"], ["--engine-env", "NAME=VALUE"]),
        (["--inject", "fire"], ["--inject", "fire", "swap-layers"]),
    ],
)
def test_a_mistake_is_named_with_exit_code_2(argv: list[str], words: list[str]) -> None:
    with pytest.raises(RltopError) as caught:
        parse_args(argv)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "step_size", "steps"),
    [
        ("--rollout-batch-size 4 --n-samples-per-prompt 8", 32, 1),
        ("--rollout-batch-size 4 --n-samples-per-prompt 8 --global-batch-size 8", 8, 4),
        ("--rollout-batch-size 4 --n-samples-per-prompt 8 --num-steps-per-rollout 2", 16, 2),
        ("--rollout-batch-size 4 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --global-batch-size 16", 16, 2),
    ],
)
def test_batch_arithmetic_is_slimes(argv: str, step_size: int, steps: int) -> None:
    config = parse_args(argv.split())
    assert (config.step_size, config.steps_per_rollout) == (step_size, steps)
    assert config.as_args()["global_batch_size"] == step_size


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--num-steps-per-rollout 5", ["4 x --n-samples-per-prompt 8 = 32", "32 / 5", "2 over", "rollout 4"]),
        ("--global-batch-size 33", ["= 32", "33 > 32", "--global-batch-size 32"]),
        ("--global-batch-size 12", ["32 / 12 leaves 8 over", "--global-batch-size 8"]),
        ("--num-steps-per-rollout 2 --global-batch-size 8", ["/ 2 steps = 16", "says 8"]),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused_with_the_arithmetic(argv: str, words: list[str]) -> None:
    with pytest.raises(RltopError) as caught:
        parse_args(f"--rollout-batch-size 4 --n-samples-per-prompt 8 {argv}".split())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("dumps/rollout.pt", "each would overwrite the one before"),
        ("dumps/{rollout_id}_{rank}.pt", "only {rollout_id} can stand in it (KeyError: 'rank')"),
        ("dumps/{rollout_id", "only {rollout_id} can stand in it (ValueError"),
        ("dumps/{}.pt", "only {rollout_id} can stand in it (IndexError"),
    ],
)
def test_a_path_for_dumps_has_the_rollout_in_it_and_nothing_else(path: str, why: str) -> None:
    with pytest.raises(RltopError) as caught:
        parse_args(["--save-debug-rollout-data", path])
    assert caught.value.where == f"--save-debug-rollout-data {path}"
    assert why in caught.value.why


def test_the_separate_pass_is_skipped_as_in_slime_unless_asked_for() -> None:
    assert not parse_args([]).runs_actor_pass
    assert parse_args(["--num-steps-per-rollout", "2"]).runs_actor_pass
    assert parse_args(["--log-probs-pass", "always"]).runs_actor_pass


@pytest.mark.parametrize(
    ("argv", "train", "rollout"),
    [
        ("", False, False),
        ("--colocate", True, True),
        ("--offload", True, True),
        ("--offload-train", True, False),
        ("--offload-rollout", False, True),
        ("--colocate --no-offload-train", False, True),
        ("--colocate --no-offload-rollout", True, False),
        ("--offload --no-offload-train", True, True),
    ],
)
def test_who_offloads_is_slimes_rule(argv: str, train: bool, rollout: bool) -> None:
    config = parse_args(argv.split())
    assert (config.offloads_train, config.offloads_rollout) == (train, rollout)
    assert (config.as_args()["offload_train"], config.as_args()["offload_rollout"]) == (train, rollout)
    assert parse_args(to_argv(config)) == config


def test_a_config_survives_its_own_command_line() -> None:
    argv = "--sglang-disable-cuda-graph --sglang-device cpu --inject nan-grad@2 --inject swap-layers"
    config = parse_args([*argv.split(), "--use-kl-loss", "--kl-loss-coef", "0.001", "--seed", "7"])
    assert parse_args(to_argv(config)) == config


def test_the_demo_writes_every_value_out() -> None:
    argv = demo_args(seed=3, deterministic=True, num_rollout=5, inject=["nan-grad"])
    config = parse_args(argv)
    assert (config.seed, config.deterministic, config.num_rollout, config.inject) == (3, True, 5, ("nan-grad",))
    assert config.runs_actor_pass
    assert config.use_kl_loss
    assert "--rollout-batch-size" in argv


def test_flags_that_may_be_left_open_have_a_form_that_says_no() -> None:
    assert negated_names(TrainConfig) == ["--no-offload-train", "--no-offload-rollout"]


def test_every_field_is_documented() -> None:
    docs = field_docs(TrainConfig)
    assert [f.name for f in dataclasses.fields(TrainConfig) if not docs.get(f.name)] == []


def test_ray_address_comes_from_the_flag_before_the_environment() -> None:
    assert parse_args([], default_ray_address="a:1").ray_address == "a:1"
    assert parse_args(["--ray-address", "b:2"], default_ray_address="a:1").ray_address == "b:2"


def test_a_wrong_command_line_loads_nothing_heavy() -> None:
    """The operator's typo is answered at once, not after seconds of imports."""
    code = (
        "import sys\n"
        "from rltop.cli.main import main\n"
        "code = main(['train', '--lerning-rate', '1'])\n"
        "heavy = {'torch', 'ray', 'megatron.core', 'transformers'} & set(sys.modules)\n"
        "print(code, sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 []"
    assert "unknown flag" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_goes_to_stdout_and_names_every_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rltop", "train", "--help"], capture_output=True, text=True, check=True
    )
    for field in dataclasses.fields(TrainConfig):
        if field.metadata.get("flag", True):
            assert "--" + field.name.replace("_", "-") in done.stdout


def test_what_the_model_leaves_of_the_ranks_is_data_parallel() -> None:
    argv = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--ray-address", "auto"]
    config = parse_args([*argv, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"])
    assert (config.layout.world, config.layout.data) == (16, 2)
    assert str(parse_args([]).layout) == "TP1 PP1 DP1"
