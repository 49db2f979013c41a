"""slime's own metric functions on a CPU, attached to rltop: `python drive.py OUT.json`.

Driven are rollout_metrics.log_rollout_data and log_eval_rollout_data, train_metric_utils.log_rollout_data (with
multi-turn and pass rates), log_perf_data, the timers, and model.train with train_one_step, whose forward and optimizer
are given (slime computes and logs everything else). What slime hands to W&B is written to OUT.json, what it prints goes
to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# isort: off
import attached  # type: ignore[import-not-found]  # noqa: F401  before everything else
# isort: on

import torch
import torch.distributed as dist
from megatron.core import mpu
from slime.backends.megatron_utils import model as model_module
from slime.observability import logging_utils, rollout_metrics, train_metric_utils
from slime.observability.timer import Timer
from slime.rollout import base_types
from slime.utils.types import Sample

import rltop.integrations.slime as hooks

SENT: list[dict[str, Any]] = []
STEPS = (1, 2, 1, 2)
"""Optimizer steps of each rollout: unequal, so that slime's train/step repeats."""


def args() -> Namespace:
    """What the functions look at."""
    return Namespace(
        use_wandb=True,
        use_tensorboard=False,
        wandb_always_use_train_step=False,
        custom_rollout_log_function_path=None,
        custom_eval_rollout_log_function_path=None,
        load_debug_rollout_data=None,
        advantage_estimator="grpo",
        log_reward_category=None,
        log_passrate=True,
        log_multi_turn=True,
        log_correct_samples=False,
        ci_test=False,
        reward_key=None,
        rollout_num_gpus=2,
        rollout_max_response_len=16,
        n_samples_per_eval_prompt=2,
        n_samples_per_prompt=2,
        rollout_batch_size=2,
        global_batch_size=4,
        num_rollout=len(STEPS),
        finetune=True,
        use_kl_loss=True,
        kl_loss_coef=0.0,
        kl_coef=0.0,
        wandb_key="secret",
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        num_layers=2,
        ffn_hidden_size=128,
        vocab_size=512,
        padded_vocab_size=512,
        kv_channels=16,
        group_query_attention=False,
        swiglu=True,
        num_experts=None,
        multi_latent_attention=False,
        qk_head_dim=16,
        qk_pos_emb_head_dim=0,
        v_head_dim=16,
        q_lora_rank=None,
        kv_lora_rank=None,
        calculate_per_token_loss=False,
        reset_optimizer_states=False,
        manual_gc=False,
        use_distributed_optimizer=False,
        overlap_param_gather=False,
        overlap_grad_reduce=False,
        enable_mtp_training=False,
        custom_megatron_before_train_step_hook_path=None,
        seq_length=64,
        micro_batch_size=1,
        decoder_seq_length=None,
        ci_save_grad_norm=None,
        ci_load_grad_norm=None,
        ci_disable_kl_checker=True,
        check_for_nan_in_loss_and_grad=True,
        update_weight_transport="nccl",
    )


def sample(rollout: int, at: int) -> Sample:
    """One of a rollout's."""
    length = 3 + at
    made = Sample(index=4 * rollout + at, group_index=at // 2, prompt=f"{at}+{at}=", response=f"It is {2 * at}. ")
    made.tokens, made.response_length, made.label = list(range(5 + length)), length, str(2 * at)
    made.reward, made.status = float(at % 2), Sample.Status.TRUNCATED if at == 3 else Sample.Status.COMPLETED
    made.rollout_log_probs, made.weight_versions = [-0.25 - 0.01 * at] * length, [str(rollout + 1)]
    return made


def generate(given: Namespace, rollout_id: int, source: Any, evaluation: bool = False) -> Any:
    """The rollout function."""
    samples = [sample(rollout_id, at) for at in range(4)]
    if evaluation:
        rewards = [one.reward for one in samples]
        data = {"aime": {"rewards": rewards, "truncated": [False] * 4, "samples": samples}}
        return base_types.RolloutFnEvalOutput(data=data)
    return base_types.RolloutFnTrainOutput(samples=[samples], metrics={"rollout/dynamic_filter/drop_zero_std_1.0": 3})


def train_data(rollout: int, samples: list[Sample], reuse: bool) -> dict[str, Any]:
    """What a Megatron rank has before the optimizer."""
    lengths = [one.response_length for one in samples]
    actor = [torch.full((n,), -0.25 - 0.01 * i) for i, n in enumerate(lengths)]
    noise = [torch.full((n,), 0.001) for n in lengths]
    data: dict[str, Any] = {
        "tokens": [torch.tensor(one.tokens) for one in samples],
        "response_lengths": lengths,
        "total_lengths": [len(one.tokens) for one in samples],
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in lengths],
        "rewards": [one.reward - 0.5 for one in samples],
        "raw_reward": [one.reward for one in samples],
        "truncated": [int(one.status == Sample.Status.TRUNCATED) for one in samples],
        "round_number": [1, 2, 1, 1],
        "rollout_log_probs": [a + b for a, b in zip(actor, noise, strict=True)],
        "ref_log_probs": actor if rollout == 0 else [a - 0.02 for a in actor],
        "advantages": [torch.ones(n) for n in lengths],
        "num_microbatches": [1] * STEPS[rollout],
        "global_batch_sizes": [4 // STEPS[rollout]] * STEPS[rollout],
    }
    return data if reuse else data | {"log_probs": [one.clone() for one in actor]}


class Optimizer:
    """Steps, and says how long the gradient is."""

    param_groups = ({"lr": 1e-6}, {"lr": 1e-6})

    def __init__(self) -> None:
        self.norms = iter([0.1873, 0.2, 0.3, float("nan"), 0.25, 0.26])

    def scale_loss(self, loss: Any) -> Any:
        """As it is."""
        return loss

    def zero_grad(self) -> None:
        """Nothing."""

    def step(self) -> tuple[bool, float, None]:
        """One."""
        return True, next(self.norms), None


def forward_backward(**_: Any) -> list[dict[str, Any]]:
    """What Megatron's schedule returns: sums of a micro-batch."""
    keys = ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "train_rollout_logprob_abs_diff", "kl_loss"]
    return [{"keys": keys, "values": torch.tensor([4.0, 0.5, 0.25, 1.7, 0.0, 0.0, 0.0484, 0.1 / 3])}]


def main(out: str) -> None:
    """All rollouts."""
    given = args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("DRIVE_PORT", "29577"), "RANK": "0"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    mpu.initialize_model_parallel()
    logging_utils.configure_logger()
    logging_utils.wandb.log = lambda metrics: SENT.append(dict(metrics))
    optimizer, scheduler = Optimizer(), SimpleNamespace(step=lambda increment: None, get_lr=lambda group: group["lr"])
    chunk = SimpleNamespace(train=lambda: None, zero_grad_buffer=lambda: None, role="actor")
    source = [SimpleNamespace(reset=lambda: None)]
    overlap = SimpleNamespace(grad_scale_func=None, timers=None, finalize_model_grads_func=None)
    with (
        patch.object(model_module, "get_args", lambda: given),
        patch.object(model_module, "get_model_config", lambda chunk: overlap),
        patch.object(model_module, "get_forward_backward_func", lambda: forward_backward),
        patch.object(model_module, "DDP", type("DDP", (), {})),
    ):
        for rollout in range(len(STEPS)):
            made = base_types.call_rollout_fn(generate, given, rollout, None, evaluation=False)
            rollout_metrics.log_rollout_data(rollout, given, made.samples[0], made.metrics, 12.5 + rollout)
            data = train_data(rollout, made.samples[0], reuse=rollout == 3)
            Timer().start("train_wait")
            Timer().end("train_wait")
            with Timer().context("train"):
                train_metric_utils.log_rollout_data(rollout, given, data)
                with Timer().context("actor_train"):
                    batches = data["num_microbatches"], data["global_batch_sizes"]
                    model_module.train(rollout, [chunk], optimizer, scheduler, source, *batches)
            Timer().seq_lens = data["total_lengths"]
            train_metric_utils.log_perf_data(rollout, given, {"perf/update_weights_density": 0.013})
        evaluated = base_types.call_rollout_fn(generate, given, 3, None, evaluation=True)
        rollout_metrics.log_eval_rollout_data(3, given, evaluated.data, evaluated.metrics)
    logging_utils.wandb.run = None
    logging_utils.finish_tracking(given)
    attachment = hooks.attach()
    assert attachment is not None
    assert attachment.errors == 0, attachment.last_error
    with open(out, "w") as file:
        json.dump([{k: _spoken(v) for k, v in row.items()} for row in SENT], file)
    dist.destroy_process_group()


def _spoken(value: Any) -> Any:
    return float(value) if not isinstance(value, int) else value


if __name__ == "__main__":
    main(sys.argv[1])
