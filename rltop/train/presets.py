"""Command lines that are known to work. `rltop demo`, the tests and the documentation take them from here."""

from __future__ import annotations

from collections.abc import Sequence

from rltop.train.arguments import TrainConfig, to_argv

DEMO_ROLLOUTS = 130
"""How fast the task is learned depends on the processor, which rounds sums in another order. Seen to pass 0.8 between
rollout 80 and 110."""


def demo_args(
    *,
    seed: int = 1,
    deterministic: bool = False,
    num_rollout: int | None = None,
    num_engines: int = 2,
    inject: Sequence[str] = (),
) -> list[str]:
    """Arguments of `rltop train` for the demo, every value written out under slime's names.

    A tiny model of bytes learns to sort three digits: mean reward from below 0.4 to above 0.8 within two minutes on two
    cores. The extra log-prob pass and the reference model are on, so that every step-1 check has a measured number.
    There are two engines, so that one serves while the other is toggled.
    """
    # The one fault that a single rank cannot have.
    stages = 2 if any(text.partition("@")[0] == "pp-layer-ids" for text in inject) else 1
    return to_argv(
        TrainConfig(
            actor_num_gpus_per_node=stages,
            pipeline_model_parallel_size=stages,
            rollout_num_engines=num_engines,
            num_rollout=DEMO_ROLLOUTS if num_rollout is None else num_rollout,
            rollout_batch_size=32,
            n_samples_per_prompt=8,
            global_batch_size=256,
            rollout_temperature=1.0,
            rollout_max_response_len=24,
            apply_chat_template=True,
            cold_start_steps=200,
            cold_start_loss=0.11,
            cold_start_lr=3e-3,
            lr=2e-3,
            lr_warmup_iters=20,
            max_tokens_per_gpu=2048,
            use_kl_loss=True,
            kl_loss_coef=0.001,
            kl_loss_type="k3",
            log_probs_pass="always",
            seed=seed,
            deterministic=deterministic,
            inject=tuple(inject),
        )
    )
