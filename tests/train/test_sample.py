"""Means and counts of a rollout, under slime's names."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rltop.train.sample import Sample, for_viewers, generation_metrics, rollout_metrics, token_mean, zero_spread_groups

SAMPLE = Sample(
    index=0,
    group_index=0,
    prompt="p",
    prompt_ids=(1, 2, 3),
    response="ab",
    response_ids=(4, 5),
    rollout_log_probs=(-0.5, -1.5),
    reward=1.0,
    label="ab",
    status="completed",
    finish_reason="stop",
    weight_version="default",
    engine="0",
)


def make(rewards: list[float], group_size: int) -> list[Sample]:
    return [replace(SAMPLE, index=at, group_index=at // group_size, reward=reward) for at, reward in enumerate(rewards)]


def test_means_are_over_tokens_where_slime_counts_tokens() -> None:
    long = replace(SAMPLE, response_ids=(4, 5, 6, 7), rollout_log_probs=(-1.0, -1.0, -1.0, -1.0), reward=0.0)
    metrics = rollout_metrics([SAMPLE, long], [1.0, -1.0], log_probs=None, ref_log_probs=[(-1.0, -1.0), (-4.0,) * 4])
    assert metrics["rollout/rollout_log_probs"] == pytest.approx(-6 / 6)
    assert metrics["rollout/ref_log_probs"] == pytest.approx(-18 / 6)
    assert metrics["rollout/advantages"] == pytest.approx((2 - 4) / 6)
    assert metrics["rollout/raw_reward"] == 0.5
    assert metrics["rollout/rewards"] == 0.0
    assert metrics["rollout/response_lengths"] == 3.0
    assert metrics["rollout/total_lengths"] == 6.0


def test_a_pass_that_did_not_run_has_no_key() -> None:
    metrics = rollout_metrics([SAMPLE], [0.0], log_probs=None, ref_log_probs=None)
    assert "rollout/log_probs" not in metrics
    assert "rollout/ref_log_probs" not in metrics
    assert "rollout/kl" not in metrics


def test_groups_without_spread_are_counted_by_their_reward() -> None:
    counts = zero_spread_groups([0, 0, 1, 1, 0, 1, 0, 0], 2)
    assert counts == {"rollout/zero_std/count_0": 2.0, "rollout/zero_std/count_1": 1.0}


def test_generation_metrics_describe_lengths_and_truncation() -> None:
    cut = replace(SAMPLE, response_ids=(1,) * 8, status="truncated")
    metrics = generation_metrics([SAMPLE, SAMPLE, cut, SAMPLE], group_size=2, seconds=2.0, engines=2)
    assert metrics["rollout/response_len/max"] == 8.0
    assert metrics["rollout/response_len/median"] == 2.0
    assert metrics["rollout/truncated_ratio"] == 0.25
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(14 / 2 / 2)


def test_viewers_see_many_prompts_rather_than_many_answers_to_one() -> None:
    samples = make([0.0] * 64, 8)
    views = for_viewers(samples, None, group_size=8, limit=16)
    assert [view["index"] for view in views] == sorted(group * 8 + row for group in range(8) for row in range(2))
    assert "log_probs" not in views[0]
    assert for_viewers(samples[:3], [(-1.0, -2.0)] * 3, group_size=8)[2]["log_probs"] == [-1.0, -2.0]


def test_a_nan_token_makes_the_mean_nan() -> None:
    assert math.isnan(token_mean([(-1.0, math.nan)]))
    assert math.isnan(token_mean([]))
