"""Train dumps, version 2: in the order of the rollout, and each data parallel rank's share can be restored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rltop.evidence.dump_file import DumpFile
from rltop.train.dump import write_dump
from rltop.train.layout import Layout
from rltop.train.ports import StepSample
from rltop.train.sample import Sample
from rltop.train.train_dump import TrainRecord

ROLLOUT = 3


def sample(at: int) -> Sample:
    return Sample(
        index=at,
        group_index=at // 2,
        prompt="p",
        prompt_ids=(1, 2),
        response="r",
        response_ids=(10 + at,) * (1 + at % 3),
        rollout_log_probs=(-0.5,) * (1 + at % 3),
        reward=float(at % 2),
        label="l",
        status="truncated" if at == 1 else "completed",
        finish_reason="stop",
        weight_version="1",
        engine="0",
    )


def step_sample(one: Sample) -> StepSample:
    mask = (1,) + (0,) * (len(one.response_ids) - 1) if one.index == 2 else None
    return StepSample(one.tokens, len(one.response_ids), one.reward - 0.5, one.rollout_log_probs, None, None, mask)


@pytest.fixture
def payload() -> dict[str, Any]:
    """Eight samples, two steps, two replicas of two stages."""
    samples = [sample(at) for at in range(8)]
    record = TrainRecord(Layout(pipeline=2, data=2))
    for first in (0, 4):
        part = samples[first : first + 4]
        log_probs = [torch.full((len(one.response_ids),), -0.1 * one.index) for one in part]
        record.add([step_sample(one) for one in part], log_probs, log_probs, [[[3], [0]], [[1, 2]]])
    return record.payload(ROLLOUT, samples)


def test_samples_are_in_the_order_of_the_rollout_dump(payload: dict[str, Any]) -> None:
    assert (payload["format_version"], payload["rollout_id"], payload["rank"]) == (2, ROLLOUT, 0)
    assert payload["raw_reward"] == [0.0, 1.0] * 4
    assert [one["rollout_position"] for one in payload["samples"]] == list(range(8))
    assert [one["sample_index"] for one in payload["samples"]] == [24 + at for at in range(8)]
    second, third = payload["samples"][1:3]
    assert (second["truncated"], second["rewards"], second["total_lengths"]) == (1, 0.5, 4)
    assert second["log_probs"].tolist() == pytest.approx([-0.1, -0.1])
    assert third["loss_masks"].tolist() == [1, 0, 0]
    assert third["rollout_mask_sums"] == 1
    assert "ref_log_probs" not in third


def test_every_shard_can_be_restored(payload: dict[str, Any]) -> None:
    shards = payload["dp_shards"]
    # Megatron's order tp-dp-pp: the last stage of replica d is rank 2 + d.
    assert [(one["rank"], one["data_parallel_rank"]) for one in shards] == [(2, 0), (3, 1)]
    assert [one["partition"] for one in shards] == [[3, 0, 7, 4], [1, 2, 5, 6]]
    assert [one["micro_batch_indices"] for one in shards] == [[[0], [1], [2], [3]], [[0, 1], [2, 3]]]
    assert [one["num_microbatches"] for one in shards] == [[2, 2], [1, 1]]
    assert [one["global_batch_sizes"] for one in shards] == [[4, 4], [4, 4]]
    for shard in shards:
        mine = [payload["samples"][at] for at in shard["partition"]]
        assert [one["sample_index"] for one in mine] == shard["sample_indices"]
        assert {one["data_parallel_rank"] for one in mine} == {shard["data_parallel_rank"]}
        flat = [at for batch in shard["micro_batch_indices"] for at in batch]
        assert flat == list(range(len(mine)))


def test_it_loads_without_running_anything(payload: dict[str, Any], tmp_path: Path) -> None:
    assert write_dump(tmp_path / "3.pt", payload).problem == ""
    again = torch.load(tmp_path / "3.pt", weights_only=True)
    assert again["dp_shards"] == payload["dp_shards"]
    with DumpFile.open(tmp_path / "3.pt") as dump:
        first = dump.sample(0)
        assert (dump.kind, dump.rollout_id, dump.foreign) == ("train-v2", ROLLOUT, ())
        assert (first.tokens, first.response_length) == ([1, 2, 10], 1)


def test_a_loaded_sample_keeps_the_index_of_the_run_that_made_it() -> None:
    one = dataclasses.replace(sample(0), source_index=1234)
    record = TrainRecord(Layout())
    record.add([step_sample(one)], [torch.zeros(1)], [torch.zeros(1)], [[[0]]])
    assert record.payload(ROLLOUT, [one])["samples"][0]["sample_index"] == 1234
