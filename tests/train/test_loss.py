"""The GRPO loss against values worked out by hand, and the laws that hold for any values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rltop.errors import RltopError
from rltop.train.loss import (
    KL_CLAMP,
    KlType,
    LossConfig,
    TokenTerms,
    group_advantages,
    kl_estimate,
    policy_loss,
    token_weights,
)

pytestmark = pytest.mark.train

log_prob = st.floats(-15.0, 0.0, width=32)
rewards = st.floats(-10.0, 10.0, width=32)


def one(value: float) -> Tensor:
    return torch.tensor([value])


def terms(
    advantages: list[float],
    old: list[float] | None,
    *,
    ref: list[float] | None = None,
    rollout: list[float] | None = None,
    weights: list[float] | None = None,
) -> TokenTerms:
    def tensor(values: list[float] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values)

    share = weights or [1 / len(advantages)] * len(advantages)
    return TokenTerms(torch.tensor(advantages), tensor(old), tensor(ref), tensor(rollout), torch.tensor(share))


# --- advantages ---


def test_advantages_of_a_group_worked_out_by_hand() -> None:
    # mean 0.25, deviations 0.75 and three times -0.25, unbiased variance 0.75 / 3
    assert group_advantages([1, 0, 0, 0], 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_advantages_without_deviation_are_centred_rewards() -> None:
    assert group_advantages([1, 0, 3, 1], 2, divide_by_std=False) == [0.5, -0.5, 1.0, -1.0]


def test_groups_do_not_influence_each_other() -> None:
    assert group_advantages([1, 0, 5, 7], 2) == group_advantages([1, 0], 2) + group_advantages([5, 7], 2)


@given(reward=rewards, size=st.integers(1, 9))
def test_a_group_of_equal_rewards_has_nothing_to_learn(reward: float, size: int) -> None:
    assert group_advantages([reward] * size, size) == [0.0] * size


@given(group=st.lists(st.integers(0, 3), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(group: list[int]) -> None:
    advantages = group_advantages(group, len(group))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    by_reward = sorted(zip(group, advantages, strict=True))
    assert [advantage for _, advantage in by_reward] == sorted(advantages)


@pytest.mark.parametrize("size", [0, 3])
def test_rewards_that_do_not_divide_are_refused(size: int) -> None:
    with pytest.raises(RltopError, match="do not divide"):
        group_advantages([1, 2, 3, 4], size)


# --- KL ---


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5), ("low_var_kl", math.exp(-0.5) - 1 + 0.5)],
)
def test_kl_estimators_worked_out_by_hand(kind: KlType, expected: float) -> None:
    assert kl_estimate(one(-1.0), one(-1.5), kind).item() == pytest.approx(expected, rel=1e-5)


@given(ours=log_prob, theirs=log_prob)
def test_k2_and_k3_are_never_negative_and_k1_is_signed(ours: float, theirs: float) -> None:
    assert kl_estimate(one(ours), one(theirs), "k1").item() == pytest.approx(ours - theirs, abs=1e-5)
    assert kl_estimate(one(ours), one(theirs), "k2").item() >= 0
    assert kl_estimate(one(ours), one(theirs), "k3").item() >= -1e-6  # rounding of exp(x) - 1 near 0


@given(value=log_prob)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_equal_policies_have_exactly_no_kl(kind: KlType, value: float) -> None:
    assert kl_estimate(one(value), one(value), kind).item() == 0.0


@given(ours=log_prob, theirs=log_prob)
def test_low_var_kl_is_k3_with_a_limit(ours: float, theirs: float) -> None:
    limited = kl_estimate(one(ours), one(theirs), "low_var_kl").item()
    assert limited == max(-KL_CLAMP, min(KL_CLAMP, kl_estimate(one(ours), one(theirs), "k3").item()))


def test_the_mean_of_k1_and_k3_over_samples_of_the_policy_is_the_kl_divergence() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        estimate = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
        assert estimate.item() == pytest.approx(exact.item(), rel=1e-5)


# --- surrogate ---


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 1.0, -1.2, 1.0),  # a good token may not gain more than the range allows
        (1.5, -1.0, 1.5, 0.0),  # a bad one is held back in full
        (0.5, 1.0, -0.5, 0.0),
        (0.5, -1.0, 0.8, 1.0),
    ],
)
def test_the_clipped_surrogate_worked_out_by_hand(
    ratio: float, advantage: float, expected: float, clipped: float
) -> None:
    _, metrics = policy_loss(one(math.log(ratio) - 1), one(0.3), terms([advantage], [-1.0]), LossConfig())
    assert metrics["pg_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert metrics["pg_clipfrac"].item() == clipped
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio), abs=1e-6)


def test_the_upper_clip_range_can_be_wider() -> None:
    _, metrics = policy_loss(one(math.log(1.5)), one(0.0), terms([1.0], [0.0]), LossConfig(eps_clip_high=0.28))
    assert metrics["pg_loss"].item() == pytest.approx(-1.28)


def test_clipped_tokens_give_no_gradient() -> None:
    log_probs = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    loss, _ = policy_loss(log_probs, torch.zeros(2), terms([1.0, 1.0], [0.0, 0.0]), LossConfig())
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, -0.5]


def test_a_term_with_coefficient_zero_cannot_spoil_the_gradient() -> None:
    log_probs = torch.tensor([-1.0], requires_grad=True)
    config = LossConfig(kl_loss_type="k3")
    loss, metrics = policy_loss(log_probs, log_probs * math.inf, terms([1.0], [-1.0], ref=[200.0]), config)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
    assert metrics["kl_loss"].isinf()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


def test_the_loss_is_surrogate_plus_kl_minus_entropy() -> None:
    config = LossConfig(kl_loss_coef=0.1, entropy_coef=0.01, kl_loss_type="k1")
    loss, metrics = policy_loss(one(-1.0), one(0.7), terms([2.0], [-1.0], ref=[-1.5]), config)
    assert loss.item() == pytest.approx(-2.0 + 0.1 * 0.5 - 0.01 * 0.7)
    assert metrics["loss"].item() == loss.item()
    assert metrics["kl_loss"].item() == pytest.approx(0.5)
    assert metrics["entropy_loss"].item() == pytest.approx(0.7)


def test_what_is_not_there_is_not_measured() -> None:
    _, metrics = policy_loss(one(-1.0), one(0.7), terms([1.0], None), LossConfig(kl_loss_coef=0.1))
    assert set(metrics) == {"loss", "pg_loss", "entropy_loss", "ppo_kl", "pg_clipfrac"}
    assert metrics["ppo_kl"].item() == 0.0


def test_the_gap_to_the_engine_is_the_mean_absolute_difference() -> None:
    _, metrics = policy_loss(
        torch.tensor([-1.0, -2.0]), torch.zeros(2), terms([0.0, 0.0], [-1.0, -2.0], rollout=[-1.5, -1.9]), LossConfig()
    )
    assert metrics["train_rollout_logprob_abs_diff"].item() == pytest.approx(0.3)


# --- aggregation ---

MASKS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


def test_means_per_sample_and_per_token_worked_out_by_hand() -> None:
    masks = [[1, 1, 1, 0], [1]]
    per_sample = token_weights(masks, per_token=False, total=2)
    assert per_sample == [[pytest.approx(1 / 6)] * 3 + [0.0], [0.5]]
    per_token = token_weights(masks, per_token=True, total=4)
    assert per_token == [[0.25, 0.25, 0.25, 0.0], [0.25]]


@given(masks=MASKS.filter(lambda masks: all(map(any, masks))), per_token=st.booleans())
def test_weights_of_a_step_sum_to_one(masks: list[list[int]], per_token: bool) -> None:
    total = sum(map(sum, masks)) if per_token else len(masks)
    assert sum(map(sum, token_weights(masks, per_token=per_token, total=total))) == pytest.approx(1.0)


@given(masks=MASKS)
def test_a_fully_masked_sample_weighs_nothing(masks: list[list[int]]) -> None:
    weights = token_weights([*masks, [0, 0]], per_token=False, total=len(masks) + 1)
    assert weights[-1] == [0.0, 0.0]


# --- bad settings ---


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(RltopError, match="unknown KL estimator"):
        LossConfig(kl_loss_type="k4")  # type: ignore[arg-type]  # what a command line may hand over
    with pytest.raises(RltopError, match="clip range"):
        LossConfig(eps_clip=1.0)
