"""What the arguments of `rltop train` must be: checks that need nothing but the arguments.

Batch sizes that do not divide are refused with the arithmetic written out (check `args.batch`); flags of the modes are
in `rltop.train.debug_flags`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltop.errors import RltopError
from rltop.train.debug_flags import check_modes
from rltop.train.fault_checks import check_faults

if TYPE_CHECKING:
    from rltop.train.arguments import TrainConfig


def validate(config: TrainConfig) -> None:
    """Raise RltopError for the first thing that cannot work; see `_RANGES` and `_check_batch`."""
    for name, (low, what) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise RltopError(f"{what} must be at least {low}", where=_flag(name), why=f"it is {value}")
    if config.rollout_temperature <= 0:
        raise RltopError(
            "the temperature must be above 0",
            where="--rollout-temperature",
            why=f"it is {config.rollout_temperature}: greedy samples have no log-probabilities to train on",
        )
    if config.lr <= 0:
        raise RltopError("the learning rate must be above 0", where="--lr", why=f"it is {config.lr}")
    if config.kl_loss_coef != 0 and not config.use_kl_loss:
        raise RltopError(
            "a KL coefficient without a KL term",
            where="--kl-loss-coef",
            why=f"it is {config.kl_loss_coef}, but without --use-kl-loss the reference model never runs",
            do="--use-kl-loss",
        )
    if config.ref_load is not None and not config.use_kl_loss:
        raise RltopError(
            "a reference checkpoint that nothing reads",
            where="--ref-load",
            why="without --use-kl-loss the reference model never runs",
            do="--use-kl-loss",
        )
    if config.engine == "cpu" and config.engine_python:
        raise RltopError(
            "an interpreter with SGLang for an engine that is not SGLang",
            where=f"--engine-python {config.engine_python}",
            why="--engine is cpu, rltop's own stand-in",
            do="--engine sglang",
        )
    if config.colocate and config.weight_transport == "distributed":
        raise RltopError(
            "a broadcast between processes on one device",
            where="--weight-transport distributed",
            why="with --colocate trainer and engine share their GPU, and NCCL refuses two members there",
            do="--weight-transport tensor, which copies on the GPU",
        )
    for text in config.engine_env:
        name, equals, _ = text.partition("=")
        if not equals or not name:
            raise RltopError("not an environment variable", where=f"--engine-env {text}", do="--engine-env NAME=VALUE")
    if (config.save is None) != (config.save_interval is None):
        given, other = ("--save", "--save-interval N") if config.save else ("--save-interval", "--save DIR")
        raise RltopError(f"{given} needs {other}", where=given, why="one without the other saves nothing", do=other)
    if config.mode != "rollout-only":
        _check_ranks(config)
    _check_batch(config)
    check_modes(config)
    _check_equal(config)
    check_faults(config)


_RANGES: dict[str, tuple[float, str]] = {
    "actor_num_nodes": (1, "the number of nodes"),
    "actor_num_gpus_per_node": (1, "the number of ranks per node"),
    "tensor_model_parallel_size": (1, "the tensor parallel size"),
    "pipeline_model_parallel_size": (1, "the pipeline parallel size"),
    "context_parallel_size": (1, "the context parallel size"),
    "num_rollout": (1, "the number of rollouts"),
    "rollout_batch_size": (1, "the number of prompts"),
    "n_samples_per_prompt": (2, "a group, whose rewards are normalised over it,"),
    "global_batch_size": (1, "the global batch size"),
    "num_steps_per_rollout": (1, "the number of steps"),
    "rollout_max_response_len": (1, "the longest response"),
    "rollout_num_engines": (1, "the number of engines"),
    "rollout_engine_wait_s": (0, "the wait for an engine"),
    "save_interval": (1, "the save interval"),
    "eval_interval": (1, "the evaluation interval"),
    "n_samples_per_eval_prompt": (1, "the number of responses"),
    "cold_start_steps": (0, "the number of cold-start steps"),
    "cold_start_loss": (0, "the loss that ends the cold start"),
    "lr_warmup_iters": (0, "the number of warm-up steps"),
    "max_tokens_per_gpu": (1, "the micro-batch"),
    "clip_grad": (0, "the gradient clip"),
    "eps_clip": (0, "the clip range"),
    "eps_clip_high": (0, "the clip range"),
    "entropy_coef": (0, "the entropy coefficient"),
    "kl_loss_coef": (0, "the KL coefficient"),
    "seed": (0, "the seed"),
}
"""Field -> smallest legal value and what it is called."""


def _check_equal(config: TrainConfig) -> None:
    """slime takes the flag in modes that never push weights: its engines then stay random, without a word."""
    if not config.check_weight_update_equal or config.mode == "full":
        return
    rollout_only = config.mode == "rollout-only"
    raise RltopError(
        "a comparison of weights that are never pushed",
        where="--check-weight-update-equal",
        why="--debug-rollout-only has no trainer: the engines would be filled with random numbers and stay so"
        if rollout_only
        else f"--debug-{config.mode} has no engine to compare with",
        do=f"leave one of the two out{'; `rltop weights diff` compares an engine with a checkpoint' * rollout_only}",
    )


def _check_ranks(config: TrainConfig) -> None:
    """Megatron's arithmetic: data parallel = ranks / (tensor x pipeline x context), without remainder."""
    if config.context_parallel_size != 1:
        raise RltopError(
            "context parallel is not supported by this trainer",
            where="--context-parallel-size",
            why=f"it is {config.context_parallel_size}, but the local layer spec's attention takes whole sequences",
            do="--context-parallel-size 1, and more ranks with --tensor-model-parallel-size",
        )
    nodes, each = config.actor_num_nodes, config.actor_num_gpus_per_node
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    model = tensor * pipeline
    if nodes * each % model:
        raise RltopError(
            "the ranks do not divide into copies of the model",
            where="--actor-num-gpus-per-node",
            why=f"--actor-num-nodes {nodes} x --actor-num-gpus-per-node {each} = {nodes * each} ranks, but a copy "
            f"takes --tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} = {model}",
            do=f"--actor-num-gpus-per-node {-(-each // model) * model}",
        )
    if nodes > 1 and config.ray_address is None:
        raise RltopError(
            "several nodes without a cluster",
            where="--actor-num-nodes",
            why=f"it is {nodes}, and the private Ray of a run is this machine only",
            do="--ray-address ADDRESS, or --actor-num-nodes 1",
        )


def _check_batch(config: TrainConfig) -> None:
    """slime's arithmetic: samples = prompts x responses, split evenly over the optimizer steps of a rollout."""
    samples = config.samples_per_rollout
    total = f"--rollout-batch-size {config.rollout_batch_size} x --n-samples-per-prompt {config.n_samples_per_prompt}"
    total = f"{total} = {samples} samples per rollout"
    steps, batch = config.num_steps_per_rollout, config.global_batch_size
    if steps is not None and samples % steps:
        raise RltopError(
            "batch sizes do not divide",
            where="--num-steps-per-rollout",
            why=f"{total}, and {samples} / {steps} steps leaves {samples % steps} over",
            do=f"--num-steps-per-rollout {_nearest_divisor(samples, steps)}",
        )
    if steps is not None and batch is not None and batch != samples // steps:
        raise RltopError(
            "two batch sizes that contradict each other",
            where="--global-batch-size",
            why=f"{total}, / {steps} steps = {samples // steps}, but --global-batch-size says {batch}",
            do=f"--global-batch-size {samples // steps}, or leave it out",
        )
    if batch is not None and batch > samples:
        raise RltopError(
            "a step needs more samples than a rollout has",
            where="--global-batch-size",
            why=f"{total}, --global-batch-size {batch} > {samples}: no step would ever run",
            do=f"--global-batch-size {samples}",
        )
    if batch is not None and samples % batch:
        raise RltopError(
            "batch sizes do not divide",
            where="--global-batch-size",
            why=f"{total}, and {samples} / {batch} leaves {samples % batch} over, which no step would train on",
            do=f"--global-batch-size {_nearest_divisor(samples, batch)}",
        )
    data = config.layout.data if config.trainer_ranks else 1
    if config.step_size < data:
        model = config.layout.tensor * config.layout.pipeline
        most = config.step_size * model // config.actor_num_nodes // model * model
        raise RltopError(
            "more data parallel ranks than a step has samples",
            where="--actor-num-gpus-per-node",
            why=f"{config.layout.world} ranks, {config.layout}, and {config.step_size} samples per step ({total}): "
            f"{data - config.step_size} copies of the model would have nothing to do",
            do=f"--actor-num-gpus-per-node {max(most, model)} at most, or larger batches",
        )
    if config.step_size % data:
        raise RltopError(
            "a step's samples do not divide among the data parallel ranks",
            where="--global-batch-size",
            why=f"{config.step_size} samples per step, {config.layout}: {config.step_size} / {data} leaves "
            f"{config.step_size % data} over",
            do=f"a batch size that is a multiple of {data}",
        )


def _nearest_divisor(total: int, wanted: int) -> int:
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    return min(divisors, key=lambda n: abs(n - wanted))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
