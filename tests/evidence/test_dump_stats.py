"""The metrics of a dump are slime's, name by name, and two dumps are compared prompt by prompt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rltop.evidence.dump_diff import DumpDiff, pair_of
from rltop.evidence.dump_sample import DumpSample, make_sample
from rltop.evidence.dump_stats import DumpStats, is_repetition, stats_of
from tests.evidence.dump_files import sample as row


def sample(at: int, **more: Any) -> DumpSample:
    return make_sample(at, row(at, **more))


def test_the_names_and_numbers_are_slimes() -> None:
    stats = DumpStats(rollout_time_s=10.0, rollout_num_gpus=2)
    lengths = [4, 6, 8, 10]
    for at, length in enumerate(lengths):
        stats.add(
            sample(
                at,
                response_length=length,
                loss_mask=[1] * (length - 1) + [0],
                non_generation_time=[0.0, 0.0, 1.0, 2.0][at],
                spec_info={
                    "spec_accept_token_num": 3,
                    "spec_draft_token_num": 6,
                    "spec_verify_ct": 2,
                    "completion_token_num": 5,
                },
                prefix_cache_info={"cached_tokens": 2, "total_prompt_tokens": 8},
                reward=[1, 0, 1, 1][at],
                group_index=at // 2,
                status=["completed", "truncated"][at == 3],
                trace={
                    "events": [{"type": "span_end", "name": "sglang_generate", "attrs": {"e2e_latency": 1.0 + at}}],
                },
            )
        )
    found = stats.metrics()
    assert found["rollout/response_len/mean"] == 6.0
    assert found["rollout/response_len/median"] == 6.0
    assert (found["rollout/response_len/max"], found["rollout/response_len/min"]) == (9, 3)
    assert [key for key in found if "zero_std" in key] == ["rollout/zero_std/count_1"]
    assert (found["rollout/spec_accept_rate"], found["rollout/spec_accept_length"]) == (0.5, 2.5)
    assert (found["rollout/prefix_cache_hit_rate"], found["rollout/avg_cached_tokens_per_sample"]) == (0.25, 2.0)
    assert (found["rollout/truncated_ratio"], found["rollout/repetition_frac"]) == (0.25, 0.0)
    assert found["perf/rollout_time"] == 10.0
    assert found["perf/tokens_per_gpu_per_sec"] == pytest.approx(28 / 10 / 2)
    assert found["perf/effective_tokens_per_gpu_per_sec"] == pytest.approx(24 / 10 / 2)
    assert found["perf/longest_sample_tokens_per_sec"] == 1.0
    assert found["perf/longest_sample_non_generation_time"] == 2.0
    assert found["perf/longest_sample_tokens_per_sec_without_non_generation"] == pytest.approx(10 / 8)
    assert found["perf/non_generation_time/max"] == 2.0
    assert found["perf/request/e2e_latency/mean"] == 2.5
    assert (found["passrate/pass@1"], found["passrate/pass@2"]) == (0.75, 1.0)
    assert found["rollout/raw_reward"] == 0.75
    assert found["rollout/response_lengths"] == 7.0


def test_what_the_samples_lack_is_absent() -> None:
    stats = DumpStats()
    stats.add(DumpSample(0, response="a"))
    assert set(stats.metrics()) == {
        "rollout/response_len/mean",
        "rollout/response_len/median",
        "rollout/response_len/max",
        "rollout/response_len/min",
        "rollout/repetition_frac",
        "rollout/response_lengths",
    }
    assert set(stats.absent()) == {"perf/rollout_time", "perf/tokens_per_gpu_per_sec", "rollout/raw_reward"}
    assert DumpStats().metrics() == {}


def test_a_reward_that_is_a_map_needs_its_key() -> None:
    stats = DumpStats(reward_key="format", log_reward_category="kind")
    for at in range(4):
        stats.add(sample(at, reward={"score": 1.0, "format": float(at % 2), "kind": "abc"[at % 3]}))
    found = stats.metrics()
    assert found["rollout/raw_reward"] == 0.5
    assert (found["rollout/error_cat/a"], found["rollout/error_cat/b"]) == (0.5, 0.25)


def test_data_sets_of_an_evaluation_are_told_apart() -> None:
    found = stats_of([sample(at, dataset="ab"[at % 2], reward=float(at % 2)) for at in range(4)], is_eval=True)
    assert (found["eval/a"], found["eval/b"]) == (0.0, 1.0)
    assert found["eval/a/response_len/max"] > 0
    assert "perf/rollout_time" not in found
    assert stats_of([sample(0)], is_eval=True)["eval/all"] == 0.0


def test_the_gap_is_of_the_tokens_that_the_mask_counts() -> None:
    one = DumpSample(0, response_length=3, rollout_log_probs=[-1.0, -1.0, -1.0], loss_mask=[1, 1, 0])
    stats = DumpStats()
    stats.add(one, DumpSample(0, log_probs=[-1.5, -1.0, -9.0], ref_log_probs=[-2.0, -2.0, -2.0]))
    found = stats.metrics()
    assert found["train/train_rollout_logprob_abs_diff"] == 0.25
    assert (found["rollout/log_probs"], found["rollout/ref_log_probs"]) == (-1.25, -2.0)


def test_groups_have_a_row_each() -> None:
    stats = DumpStats()
    for at in range(8):
        stats.add(sample(at))
    first, second = (group.row() for group in stats.groups())
    assert (first["group"], first["samples"], first["reward_mean"], first["reward_std"]) == (0, 4, 0.5, 0.5)
    assert (second["truncated"], second["prompt"]) == (1, "What is 1 squared?")


def test_a_repeated_end_counts_only_in_a_long_response() -> None:
    assert is_repetition("again and again " * 1000)
    assert not is_repetition("again and again " * 600)
    assert not is_repetition("".join(chr(33 + (at * at * 7919) % 90) + str(at) for at in range(4000)))


def test_two_responses_part_at_a_token() -> None:
    one, other = sample(0, response="answer"), sample(0, response="anXwers")
    shifted = replace(other, rollout_log_probs=[-0.5 + value for value in one.rollout_log_probs or ()] + [0.0])
    pair = pair_of((0, 1), one, shifted)
    assert (pair.at, pair.common, pair.tokens, pair.texts) == (2, 2, (ord("s"), ord("X")), ("swer", "Xwers"))
    assert pair.log_prob_abs_diff == pytest.approx(0.5)
    assert pair_of((0, 0), one, one).at is None
    longer = sample(0, response="answers")
    assert (pair_of((0, 1), one, longer).at, pair_of((0, 1), one, longer).tokens) == (6, (None, ord("s")))
    bare = pair_of((0, 1), replace(one, tokens=None), replace(other, tokens=None))
    assert (bare.at, bare.unit, bare.log_prob_abs_diff) == (2, "character", None)


def test_samples_pair_by_prompt_and_order() -> None:
    ours = [sample(at) for at in range(8)]
    theirs = [sample(at) for at in (4, 5, 6, 7)] + [sample(at, reward=1.0, response="other") for at in (0, 1)]
    theirs += [sample(0, prompt="only there")]
    diff = DumpDiff(ours.__getitem__)
    for at, one in enumerate(ours):
        diff.add_a(at, one)
    for at, one in enumerate(theirs):
        diff.add_b(at, one)
    told = diff.summary()
    assert (told["prompts"], told["only_a"], told["only_b"], told["pairs"], told["same"]) == (2, 0, 1, 6, 4)
    assert told["unpaired"] == [2, 1]
    assert told["first_diverging_token"] == {"min": 0, "median": 0.0}
    rows = diff.rows()
    assert [row["same"] for row in rows] == [0, 4]
    assert rows[0]["reward_diff"] == 0.5
    assert rows[0]["first"]["samples"] == [0, 4]
    assert rows[1]["log_prob_abs_diff"] == 0.0


def test_another_tokenizer_is_noticed() -> None:
    ours = sample(0)
    diff = DumpDiff(lambda at: ours)
    diff.add_a(0, ours)
    diff.add_b(0, replace(ours, tokens=[7, 7, 7, *(ours.response_tokens or ())], reward=math.nan))
    assert diff.summary()["other_prompt_tokens"] == 1
    assert diff.summary()["reward_diff"] is None
