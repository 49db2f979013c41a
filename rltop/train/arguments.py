"""Arguments of `rltop train`, under slime's names. What they must be is in `rltop.train.argument_checks`.

Unlike slime, a flag that is not understood is an error that names the closest known ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltop.train.argument_checks import validate
from rltop.train.flags import flag_names, parse_flags
from rltop.train.layout import Layout

EngineKind = Literal["cpu", "sglang"]
Transport = Literal["disk", "tensor", "distributed"]
KlLossType = Literal["k1", "k2", "k3", "low_var_kl"]
TransformerImpl = Literal["local", "transformer_engine"]
LogProbsPass = Literal["always", "auto"]
Mode = Literal["full", "rollout-only", "train-only"]
SGLANG_PREFIX = "--sglang-"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything a run is told. Field order is the order of `--help`; field docstrings are its text."""

    hf_checkpoint: Path | None = None
    """Hugging Face checkpoint to train; without it rltop makes its own tiny Qwen3 with a vocabulary of bytes."""
    ref_load: Path | None = None
    """Hugging Face checkpoint of the reference model; without it the weights at the start of the run."""
    save_dir: Path | None = None
    """Keeps the base checkpoint, the final checkpoint and the logs; without it they go with the run."""

    load: Path | None = None
    """Megatron checkpoint directory to resume from: weights, optimizer, random streams and rollout id. Absent or empty
    is a fresh start, so that --load and --save may be the same from the beginning."""
    save: Path | None = None
    """Megatron checkpoint directory to save to; needs --save-interval."""
    save_interval: int | None = None
    """Rollouts from one save to the next; the last rollout is always saved."""

    actor_num_nodes: int = 1
    """Nodes that train; more than one needs a Ray cluster to join."""
    actor_num_gpus_per_node: int = 1
    """Megatron ranks per node, one process and one GPU each; without GPUs they are processes on the CPU."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every layer."""
    pipeline_model_parallel_size: int = 1
    """Stages, each with an equal run of layers. What the two sizes leave of the ranks is data parallel."""
    context_parallel_size: int = 1
    """Must be 1: this trainer does not split sequences."""

    transformer_impl: TransformerImpl = "local"
    """Megatron's layer spec: local, or transformer_engine, which needs a GPU and TransformerEngine."""
    bf16: bool = False
    """Train in bfloat16, with fp32 gradients and master weights; without it in fp32."""

    colocate: bool = False
    """Trainer and engines share their devices: both offload between their turns, unless told otherwise below."""
    offload: bool = False
    """Both of --offload-train and --offload-rollout."""
    offload_train: bool | None = None
    """The trainer gives its memory back while engines generate; without it only with --colocate."""
    offload_rollout: bool | None = None
    """The engines give weights and KV cache back while the trainer works; without it only with --colocate."""

    num_rollout: int = 100
    """Rollouts, each followed by its optimizer steps and a weight sync."""
    rollout_batch_size: int = 16
    """Prompts per rollout."""
    n_samples_per_prompt: int = 16
    """Responses per prompt: one group, over which rewards are normalised."""
    global_batch_size: int | None = None
    """Samples per optimizer step; without it (and without steps) all samples of a rollout."""
    num_steps_per_rollout: int | None = None
    """Optimizer steps per rollout; sets the global batch size."""
    rollout_temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    rollout_max_response_len: int = 24
    """Longest response, in tokens."""
    apply_chat_template: bool = False
    """Render prompts with the checkpoint's chat template."""
    cold_start_steps: int = 0
    """Most supervised steps on worked examples of the task before the first rollout."""
    cold_start_loss: float = 0.0
    """The supervised steps end earlier once the loss (nats per token, mean of five steps) is at most this."""
    cold_start_lr: float = 3e-3
    """Learning rate of the supervised steps."""

    lr: float = 1e-3
    """Learning rate of Adam, constant after the warm-up."""
    lr_warmup_iters: int = 0
    """Optimizer steps over which the learning rate grows from almost 0: Adam's first steps have full size in every
    direction, noise included."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    max_tokens_per_gpu: int = 4096
    """Most tokens, padding included, in one micro-batch; a longer sample gets one of its own."""
    eps_clip: float = 0.2
    """Lower clip range of the policy ratio (1 - eps_clip)."""
    eps_clip_high: float | None = None
    """Upper clip range (1 + eps_clip_high); without it eps_clip."""
    use_kl_loss: bool = False
    """Run the reference model and add its KL to the loss."""
    kl_loss_coef: float = 0.0
    """Weight of the KL term; 0 with --use-kl-loss measures it without using it."""
    kl_loss_type: KlLossType = "k3"
    """Estimator of the KL; k1 is signed, low_var_kl is k3 with clamping."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    calculate_per_token_loss: bool = False
    """Mean over all tokens of a step instead of the mean of the samples' means."""
    log_probs_pass: LogProbsPass = "auto"
    """auto: with one step per rollout the actor's separate pass is skipped, as in slime, and ppo_kl is 0 by
    construction; always: it runs, so that ppo_kl and rollout/log_probs are measured."""

    engine: EngineKind = "cpu"
    """cpu: rltop's own CPU engine, a stand-in that speaks SGLang's HTTP API; sglang: real SGLang."""
    engine_python: Path | None = None
    """Python of the environment that has SGLang; without it the one that runs rltop."""
    engine_env: tuple[str, ...] = ()
    """NAME=VALUE for the environment of every engine; may be repeated."""
    rollout_num_engines: int = 1
    """Engines, each in its own process; slime's rollout GPUs divided by the GPUs per engine."""
    weight_transport: Transport = "disk"
    """How weights reach the engines after every step: a checkpoint on disk, tensors over HTTP (with --colocate on a GPU
    by reference), or distributed: broadcast in a process group per engine, NCCL between GPUs, gloo on a CPU."""
    check_weight_update_equal: bool = False
    """Before the first rollout: remember every engine's weights, fill them with random numbers, sync, and compare
    tensor by tensor. A difference is named and ends the run."""

    rollout_engine_wait_s: float = 600.0
    """Where rltop's daemon owns the engines and brings them back: seconds that a rollout waits while none can be asked,
    before the run ends."""
    debug_rollout_only: bool = False
    """Engines only: rollouts are generated, scored and logged, nothing trains and no Megatron process exists."""
    debug_train_only: bool = False
    """Trainer only: no engine starts, no weights are sent, nothing is evaluated; needs --load-debug-rollout-data."""
    save_debug_rollout_data: str | None = None
    """Path to which the samples of every rollout are saved, in slime's format; {rollout_id} in it is filled in. Those
    of an evaluation go to the same path with eval_ before the id."""
    load_debug_rollout_data: str | None = None
    """Path of saved samples that are trained on instead of generated ones, in slime's format; {rollout_id} in it is
    filled in. Implies --debug-train-only."""
    load_debug_rollout_data_subsample: float | None = None
    """Share of the loaded samples that is kept, half from the start and half from the end; only whole groups."""
    save_debug_train_data: str | None = None
    """Path to which what every sample was trained with is saved, in slime's format; {rollout_id} and {rank} in it are
    filled in."""
    dump_details: Path | None = None
    """Directory for all of it: rollout_data/{rollout_id}.pt, train_data/{rollout_id}.pt and the tokenizer."""
    reward_key: str | None = None
    """Which value counts where loaded samples have several rewards, by name."""
    log_passrate: bool = False
    """Log passrate/pass@k per rollout; on in rollout-only mode."""
    eval_interval: int | None = None
    """Rollouts from one evaluation to the next, on the task's own evaluation prompts; also before the first rollout."""
    n_samples_per_eval_prompt: int = 1
    """Responses per evaluation prompt."""
    skip_eval_before_train: bool = False
    """No evaluation before the first rollout."""
    ci_save_grad_norm: str | None = None
    """Path to which the grad_norm of every step is saved; {rollout_id}, {step_id} and {role} in it are filled in."""
    ci_load_grad_norm: str | None = None
    """Path of saved grad_norms: the run ends at the first step whose own differs by more than 1 % (and 0.01)."""

    seed: int = 1234
    """Weights, cold start, prompts and samples all follow from it."""
    deterministic: bool = False
    """Fixed sample-to-engine map, fixed batches, deterministic kernels: two runs give the same bits."""
    inject: tuple[str, ...] = ()
    """Plants a fault, NAME or NAME@ROLLOUT, to rehearse finding it; may be repeated. Of the numbers: ref-perturb,
    no-template, nan-grad, loss-sum. Of the weight sync, also NAME@start: swap-layers, pp-layer-ids, zero-norm,
    nan-block, wrong-shape, lost-rotary; stale-tensor. Of --colocate: late-release, no-update-after-resume. One that
    has no place in the run is refused."""
    ray_address: str | None = None
    """Ray cluster to join (also RAY_ADDRESS); without it a private one is started on this machine."""
    json: bool = False
    """Print one JSON object on standard output at the end."""

    sglang_args: tuple[str, ...] = field(default=(), metadata={"flag": False})
    """Tokens for the engine's own command line: what was given as --sglang-X, without the prefix."""

    @property
    def layout(self) -> Layout:
        """How the trainer's ranks split the work: data = nodes x ranks per node / (tensor x pipeline)."""
        world = self.actor_num_nodes * self.actor_num_gpus_per_node
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return Layout(tensor=tensor, pipeline=pipeline, data=world // (tensor * pipeline))

    @property
    def offloads_train(self) -> bool:
        """slime's rule: --offload sets both, else what was said, else --colocate. With one side only: never."""
        return self.mode == "full" and (
            self.offload or (self.colocate if self.offload_train is None else self.offload_train)
        )

    @property
    def offloads_rollout(self) -> bool:
        """As `offloads_train`, for the engines."""
        return self.mode == "full" and (
            self.offload or (self.colocate if self.offload_rollout is None else self.offload_rollout)
        )

    @property
    def mode(self) -> Mode:
        """Which sides of the run exist. As in slime, loading samples implies train-only."""
        if self.debug_rollout_only:
            return "rollout-only"
        return "train-only" if self.debug_train_only or self.load_debug_rollout_data is not None else "full"

    @property
    def trainer_ranks(self) -> int:
        """Megatron processes: none in rollout-only mode."""
        return 0 if self.mode == "rollout-only" else self.layout.world

    @property
    def engine_count(self) -> int:
        """Engine processes: none in train-only mode."""
        return 0 if self.mode == "train-only" else self.rollout_num_engines

    @property
    def rollout_dumps(self) -> str | None:
        """Where generated samples are saved, whichever flag says so; a train-only run generates none."""
        if self.mode == "train-only":
            return None
        derived = None if self.dump_details is None else _within(self.dump_details, "rollout_data")
        return self.save_debug_rollout_data or derived

    @property
    def train_dumps(self) -> str | None:
        """Where the training data is saved, whichever flag says so; a rollout-only run has none."""
        if self.mode == "rollout-only":
            return None
        derived = None if self.dump_details is None else _within(self.dump_details, "train_data")
        return self.save_debug_train_data or derived

    @property
    def samples_per_rollout(self) -> int:
        """Prompts times responses per prompt."""
        return self.rollout_batch_size * self.n_samples_per_prompt

    @property
    def step_size(self) -> int:
        """Samples per optimizer step, resolved from whichever flag was given."""
        if self.num_steps_per_rollout is not None:
            return self.samples_per_rollout // self.num_steps_per_rollout
        return self.global_batch_size or self.samples_per_rollout

    @property
    def fixed_step_size(self) -> bool:
        """Whether a flag says it; else a loaded rollout is one step, whatever it holds."""
        return self.num_steps_per_rollout is not None or self.global_batch_size is not None

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps per rollout, at least 1."""
        return self.samples_per_rollout // self.step_size

    @property
    def runs_actor_pass(self) -> bool:
        """Whether `rollout/log_probs` is measured by a pass of its own.

        slime's rule: with exactly one step per rollout the pass would repeat the training forward and is skipped.
        """
        return self.log_probs_pass == "always" or self.steps_per_rollout > 1

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference model is the run's own start, which a resumed run cannot make again."""
        return self.use_kl_loss and self.ref_load is None

    def saves_after(self, rollout_id: int) -> bool:
        """slime's rule: every `save_interval` rollouts, and the last one."""
        if self.save is None or self.save_interval is None:
            return False
        return (rollout_id + 1) % self.save_interval == 0 or rollout_id == self.num_rollout - 1

    @property
    def evaluates_first(self) -> bool:
        """slime's rule: also before rollout 0; never without engines."""
        return self.eval_interval is not None and not self.skip_eval_before_train and self.engine_count > 0

    def evaluates_after(self, rollout_id: int) -> bool:
        """slime's rule: every `eval_interval` rollouts; never without engines."""
        return self.eval_interval is not None and self.engine_count > 0 and (rollout_id + 1) % self.eval_interval == 0

    def plants(self, fault: str) -> bool:
        """Whether `--inject` names this fault, with or without `@ROLLOUT`."""
        return any(text.partition("@")[0] == fault for text in self.inject)

    def as_args(self) -> dict[str, Any]:
        """Effective arguments for the record `run`: slime's names with underscores, plain values.

        Micro-batches are always packed up to `max_tokens_per_gpu`, which slime calls dynamic.
        """
        args = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        worked_out = {
            "global_batch_size": self.step_size,
            "num_steps_per_rollout": self.steps_per_rollout,
            "use_dynamic_batch_size": True,
            "colocate": self.colocate and self.mode == "full",
            "offload_train": self.offloads_train,
            "offload_rollout": self.offloads_rollout,
            "debug_train_only": self.mode == "train-only",
            "save_debug_rollout_data": self.rollout_dumps,
            "save_debug_train_data": self.train_dumps,
        }
        return args | worked_out


def parse_args(argv: Sequence[str], *, default_ray_address: str | None = None) -> TrainConfig:
    """Config from a command line. Raises RltopError with exit code 2; `--help` raises SystemExit(0).

    default_ray_address: what RAY_ADDRESS says.
    """
    parsed = parse_flags(
        TrainConfig,
        argv,
        prog="rltop train",
        passthrough=SGLANG_PREFIX,
        about="GRPO on Ray actors: Megatron-Core trains, SGLang (or rltop's CPU engine) generates.",
    )
    sglang_args = tuple(_unprefixed(token) for token in parsed.passthrough)
    config = TrainConfig(**({"ray_address": default_ray_address} | parsed.values), sglang_args=sglang_args)
    validate(config)
    return config


def _unprefixed(token: str) -> str:
    return "--" + token.removeprefix(SGLANG_PREFIX) if token.startswith(SGLANG_PREFIX) else token


def _within(directory: Path, folder: str) -> str:
    """slime's layout of --dump-details; braces in the directory's own name are not placeholders."""
    return f"{str(directory).replace('{', '{{').replace('}', '}}')}/{folder}/{{rollout_id}}.pt"


def _plain(value: Any) -> Any:
    match value:
        case Path():
            return str(value)
        case tuple():
            return list(value)
        case _:
            return value


def to_argv(config: TrainConfig) -> list[str]:
    """The command line that says what `config` says, every default written out; `parse_args` reads it back."""
    argv: list[str] = []
    for flag, spec in zip(flag_names(TrainConfig), _flag_fields(), strict=True):
        match getattr(config, spec.name):
            case False if spec.default is None:
                argv.append("--no-" + flag.removeprefix("--"))
            case None | False:
                continue
            case True:
                argv.append(flag)
            case tuple() as values:
                for value in values:
                    argv += [flag, value]
            case value:
                argv += [flag, str(value)]
    return argv + [SGLANG_PREFIX + t.removeprefix("--") if t.startswith("--") else t for t in config.sglang_args]


def _flag_fields() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(TrainConfig) if f.metadata.get("flag", True)]
