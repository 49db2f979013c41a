"""Rollout dumps: slime's keys, plain values, whole files, and what rltop's own reader makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rltop.errors import RltopError
from rltop.evidence.collect import collect
from rltop.train.dump import save_rollout
from rltop.train.sample import Sample, Status

SLIMES = {
    *("group_index", "index", "prompt", "tokens", "multimodal_inputs", "multimodal_train_inputs", "response"),
    *("response_length", "label", "reward", "loss_mask", "weight_versions", "rollout_log_probs"),
    *("rollout_routed_experts", "remove_sample", "teacher_log_probs", "status", "metadata", "generate_function_path"),
    *("train_metadata", "session_id", "non_generation_time", "spec_info", "prefix_cache_info", "rollout_id"),
}
"""Fields of slime's `Sample` that its `to_dict` writes."""


def sample(at: int, status: Status = "completed") -> Sample:
    return Sample(
        index=at,
        group_index=at // 2,
        prompt="sort 321",
        prompt_ids=(1, 2, 3),
        response="123",
        response_ids=(4, 5),
        rollout_log_probs=(-0.5, -0.25),
        reward=1.0,
        label="123",
        status=status,
        finish_reason="stop",
        weight_version="7",
        engine="1",
        engine_generation=3,
    )


def test_a_dump_is_slimes(tmp_path: Path) -> None:
    path = save_rollout(f"{tmp_path}/d/{{rollout_id}}.pt", 7, [sample(at) for at in range(4)])
    assert path == tmp_path / "d" / "7.pt"
    content = torch.load(path, weights_only=True)
    assert content["rollout_id"] == 7
    first, last = content["samples"][0], content["samples"][-1]
    assert first.keys() == SLIMES
    assert (first["index"], last["index"], first["group_index"], last["group_index"]) == (28, 31, 14, 15)
    assert first["tokens"] == [1, 2, 3, 4, 5]
    assert len(first["tokens"]) - first["response_length"] == 3
    assert first["rollout_log_probs"] == [-0.5, -0.25]
    assert first["weight_versions"] == ["7"]
    assert first["status"] == "completed"
    assert first["metadata"] == {"engine": "1", "engine_generation": 3}
    assert [entry.name for entry in path.parent.iterdir()] == ["7.pt"]


def test_rltops_own_reader_finds_the_versions(tmp_path: Path) -> None:
    for rollout_id in (0, 1):
        save_rollout(f"{tmp_path}/{{rollout_id}}.pt", rollout_id, [sample(at) for at in range(4)])
    found = collect([tmp_path])
    assert {(one.rollout_id, one.weight_version) for one in found.samples} == {(0, "7"), (1, "7")}


def test_a_disk_that_takes_nothing_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("a file where the directory should be")
    with pytest.raises(RltopError) as caught:
        save_rollout(f"{tmp_path}/d/{{rollout_id}}.pt", 0, [sample(0)])
    assert caught.value.where == f"--save-debug-rollout-data {tmp_path}/d/0.pt"
    assert caught.value.exit_code == 1
