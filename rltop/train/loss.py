"""The GRPO loss, in plain torch: advantages, clipped surrogate, KL estimators, and how tokens are averaged.

Names, signs and defaults of the metrics are slime's, so that a number here means what it means in a slime run. All
log-probs are natural logarithms of the distribution that was sampled from, that is of logits divided by the rollout
temperature. Tensors are flat over the response tokens of a micro-batch, `[tokens]`, unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rltop.errors import RltopError

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

KL_CLAMP = 10.0
"""`low_var_kl` is limited to ± this per token: one token with a collapsed probability cannot dominate a step."""

STD_EPSILON = 1e-6
"""Added to a group's standard deviation: a group of equal rewards gets advantages of exactly 0, not NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Coefficients of the policy loss `pg_loss + kl_loss_coef * kl_loss - entropy_coef * entropy`."""

    eps_clip: float = 0.2
    """The ratio is clipped below at `1 - eps_clip`."""
    eps_clip_high: float | None = None
    """and above at `1 + eps_clip_high`; None takes `eps_clip`. DAPO's "clip higher" is a larger value here."""
    kl_loss_coef: float = 0.0
    """0 keeps the KL out of the gradient; it is measured all the same when reference log-probs are there."""
    kl_loss_type: KlType = "low_var_kl"
    """Estimator, see `kl_estimate`."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 measures it only."""
    calculate_per_token_loss: bool = False
    """False: mean over samples of each sample's token mean. True: mean over all tokens of the step."""

    def __post_init__(self) -> None:
        if self.kl_loss_type not in get_args(KlType):
            raise RltopError(
                f"unknown KL estimator {self.kl_loss_type!r}",
                where="--kl-loss-type",
                do="use one of " + ", ".join(get_args(KlType)),
            )
        if not 0 < self.eps_clip < 1:
            raise RltopError("clip range out of bounds", where="--eps-clip", why=f"0 < {self.eps_clip} < 1 must hold")


def group_advantages(rewards: Sequence[float], group_size: int, *, divide_by_std: bool = True) -> list[float]:
    """GRPO advantages (DeepSeekMath, arXiv:2402.03300): reward minus its group's mean, over the group's deviation.

    `rewards` holds the groups one after the other. The deviation is the unbiased one, as in slime. A group of one, or
    of equal rewards, has advantages 0. Raises `RltopError` when the groups do not divide the rewards.
    """
    if group_size < 1 or len(rewards) % group_size:
        raise RltopError(
            "rewards do not divide into groups",
            where="--n-samples-per-prompt",
            why=f"{len(rewards)} rewards, groups of {group_size}",
        )
    advantages: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        mean = sum(group) / group_size
        centred = [reward - mean for reward in group]
        if max(group) == min(group):
            # Rounding of the mean must not turn "nothing to learn" into a huge normalised signal.
            centred = [0.0] * group_size
        scale = 1.0
        if divide_by_std and group_size > 1:
            scale = math.sqrt(sum(value * value for value in centred) / (group_size - 1)) + STD_EPSILON
        advantages += [value / scale for value in centred]
    return advantages


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KlType) -> Tensor:
    """KL(policy || reference) per token from samples of the policy: Schulman, "Approximating KL Divergence" (2020).

    With d = log_probs - ref_log_probs: k1 = d (unbiased, signed), k2 = d²/2 (biased, small variance),
    k3 = exp(-d) - 1 + d (unbiased, never negative). `low_var_kl` is k3 limited to ± `KL_CLAMP`.
    """
    difference = log_probs - ref_log_probs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.exp(-difference) - 1 + difference
        case "low_var_kl":
            return (torch.exp(-difference) - 1 + difference).clamp(-KL_CLAMP, KL_CLAMP)


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What the loss needs per response token of a micro-batch; all `[tokens]` and without gradient."""

    advantages: Tensor
    old_log_probs: Tensor | None
    """Of the policy before this rollout's first update, from the trainer's own extra pass. None: the pass was left out,
    the current ones stand in, and `ppo_kl` and `pg_clipfrac` are 0 by construction."""
    ref_log_probs: Tensor | None
    rollout_log_probs: Tensor | None
    """As the engine reported them while sampling."""
    weights: Tensor
    """Share of each token in every mean, mask included; over a whole step they sum to 1 (see `token_weights`)."""


def token_weights(masks: Sequence[Sequence[int]], *, per_token: bool, total: int) -> list[list[float]]:
    """The weight of every response token in the means of a step: `sum(weight * x)` over the step is the mean of x.

    per_token: 1/total for each unmasked token, `total` = unmasked tokens of the step. Otherwise 1/(total * tokens of
    the sample), `total` = samples of the step. A sample without an unmasked token weighs nothing.
    """
    weights = []
    for mask in masks:
        share = total if per_token else total * sum(mask)
        weights.append([bit / share if bit else 0.0 for bit in mask])
    return weights


def policy_loss(
    log_probs: Tensor, entropy: Tensor, terms: TokenTerms, config: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's share of the step's loss, and of its metrics: both add up over micro-batches.

    pg_loss is PPO's clipped surrogate (arXiv:1707.06347). `ppo_kl` = old - new, signed; at the first step of a
    rollout it is exactly 0. `kl_loss` is absent without reference, `train_rollout_logprob_abs_diff` without the
    engine's log-probs.
    """

    def mean(values: Tensor) -> Tensor:
        return (values * terms.weights).sum()

    old_log_probs = log_probs.detach() if terms.old_log_probs is None else terms.old_log_probs
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    ppo_kl = old_log_probs - log_probs
    ratio = torch.exp(-ppo_kl)
    unclipped = -ratio * terms.advantages
    clipped = -ratio.clamp(1 - config.eps_clip, 1 + high) * terms.advantages
    pg_loss, entropy_loss = mean(torch.maximum(unclipped, clipped)), mean(entropy)
    # A term with coefficient 0 stays out of the graph: its infinities, times 0, would be NaN in the gradient.
    loss = pg_loss - config.entropy_coef * entropy_loss if config.entropy_coef else pg_loss
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": entropy_loss,
        "ppo_kl": mean(ppo_kl),
        "pg_clipfrac": mean((clipped > unclipped).float()),
    }
    if terms.ref_log_probs is not None:
        metrics["kl_loss"] = mean(kl_estimate(log_probs, terms.ref_log_probs, config.kl_loss_type))
        loss = loss + config.kl_loss_coef * metrics["kl_loss"] if config.kl_loss_coef else loss
    if terms.rollout_log_probs is not None:
        metrics["train_rollout_logprob_abs_diff"] = mean((old_log_probs - terms.rollout_log_probs).abs())
    return loss, {"loss": loss.detach()} | {name: value.detach() for name, value in metrics.items()}
