"""Rollout dumps: slime's keys, plain values, whole files, and what rltop's own reader makes of them."""

from __future__ import annotations

import functools
import resource
import signal
from dataclasses import replace
from pathlib import Path

import torch

from rltop.evidence.collect import collect
from rltop.train.dump import Dumped, save_rollout, slime_sample, write_dump
from rltop.train.sample import Asked, Sample, Status

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
    path = tmp_path / "d" / "7.pt"
    assert save_rollout(f"{tmp_path}/d/{{rollout_id}}.pt", 7, [sample(at) for at in range(4)]) == Dumped(str(path))
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


def test_when_and_how_a_sample_was_asked_for(tmp_path: Path) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 8, "sampling_seed": 5}
    told = {"id": "r1", "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "e2e_latency": 0.5}
    one = replace(sample(2), asked=Asked(100.0, 100.5, params, told))
    found = slime_sample(one, first=4, first_group=2)
    assert found.keys() == SLIMES | {"trace"}
    assert found["metadata"]["sampling_params"] == params
    assert found["prefix_cache_info"] == {"cached_tokens": 1, "total_prompt_tokens": 3}
    assert found["spec_info"]["completion_token_num"] == 0, "no speculation: slime adds nothing up"
    trace = found["trace"]
    assert (trace["version"], trace["sample_id"], trace["group_id"]) == (1, 6, 3)
    start, end = trace["events"]
    assert (start["type"], start["ts"], end["type"], end["ts"]) == ("span_start", 100.0, "span_end", 100.5)
    assert start["span_id"] == end["span_id"]
    assert start["attrs"] == {"max_new_tokens": 8}
    assert end["attrs"] == {
        "sglang_request_id": "r1",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "e2e_latency": 0.5,
        "finish_reason": "stop",
    }
    assert one == sample(2), "two runs that draw the same are the same, whenever they were"
    pattern = f"{tmp_path}/{{rollout_id}}.pt"
    assert not save_rollout(pattern, 0, [one]).problem
    assert (
        torch.load(tmp_path / "0.pt", weights_only=True)["samples"][0]["trace"]
        == slime_sample(one, first=0, first_group=0)["trace"]
    )


def test_rltops_own_reader_finds_the_versions(tmp_path: Path) -> None:
    for rollout_id in (0, 1):
        save_rollout(f"{tmp_path}/{{rollout_id}}.pt", rollout_id, [sample(at) for at in range(4)])
    found = collect([tmp_path])
    assert {(one.rollout_id, one.weight_version) for one in found.samples} == {(0, "7"), (1, "7")}


def test_a_disk_that_takes_nothing_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("a file where the directory should be")
    dumped = save_rollout(f"{tmp_path}/d/{{rollout_id}}.pt", 0, [sample(0)])
    assert dumped.path == f"{tmp_path}/d/0.pt"
    assert "File exists" in dumped.problem or "Not a directory" in dumped.problem


def test_a_disk_that_fills_up_in_the_middle_leaves_no_half_a_file(tmp_path: Path) -> None:
    content = {"rollout_id": 0, "samples": [slime_sample(sample(0), first=at, first_group=0) for at in range(2_000)]}
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    full((64 * 1024, before[1]))
    try:
        dumped = write_dump(tmp_path / "0.pt", content)
    finally:
        full(before)
        signal.signal(signal.SIGXFSZ, handler)
    assert dumped.problem == "File too large"
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_has_slimes_prefix(tmp_path: Path) -> None:
    dumped = save_rollout(f"{tmp_path}/{{rollout_id}}.pt", 3, [sample(0)], evaluation=True)
    assert dumped == Dumped(f"{tmp_path}/eval_3.pt")
    assert torch.load(dumped.path, weights_only=True)["rollout_id"] == 3
