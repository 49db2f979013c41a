"""What a checker's words and two tensors' values say; digests are tried in `test_weight_diff.py`."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rltop.engines.ranks import ranks_of
from rltop.engines.raw_tensors import raw_of
from rltop.engines.weight_findings import (
    Finding,
    FindingKind,
    classify_values,
    compared,
    in_order,
    told,
    with_told,
    words_of,
)

OLD = (
    "check tensor equality failed:\n"
    "name=a.weight max_abs_err=1.25 mean_abs_err=0.5 get_tensor_info(expect)='type=T min=-1.0 max=2.0 mean=0.1' "
    "get_tensor_info(actual)='type=T shape=torch.Size([4]) min=0.0 max=0.0 mean=0.0 x_sample_head=tensor([0.])' \n"
    "name=b.weight max_abs_err=nan mean_abs_err=nan get_tensor_info(expect)='min=0.0 max=0.0' "
    "get_tensor_info(actual)='type=T min=nan max=nan mean=nan' "
)
"""0.5.14's."""
NEW = (
    "check tensor equality failed:\nname=a.weight max_abs_err=0.5 mean_abs_err=0.1 num_exceed=3 "
    "expect=raw(shape=(4,) dtype=torch.float32) actual=raw(shape=(4,) dtype=torch.float32) "
)
"""0.5.23's."""


def test_the_words_of_both_releases_are_read() -> None:
    old = compared(OLD)
    assert (old["a.weight"].max_abs_err, old["a.weight"].zero) == (1.25, True)
    assert math.isnan(old["b.weight"].max_abs_err)
    assert not old["b.weight"].zero
    new = compared(json.dumps({"success": False, "message": NEW}))  # as a client hands it on
    assert (new["a.weight"].max_abs_err, new["a.weight"].zero) == (0.5, False)
    assert compared("Torch not compiled with CUDA enabled") == {}
    assert words_of('{"success":false,"message":""}') == ""


def test_what_is_merely_different_is_named_by_what_the_checker_said() -> None:
    found = with_told([Finding("a.weight", "different"), Finding("b.weight", "different")], compared(OLD))
    assert [(one.name, one.kind) for one in found] == [("a.weight", "zero"), ("b.weight", "nan")]
    sure = with_told([Finding("a.weight", "stale")], compared(NEW))
    assert [(one.kind, one.max_abs_err) for one in sure] == [("stale", 0.5)]


def test_zero_tensors_come_first_and_layers_count_as_numbers() -> None:
    kinds: list[tuple[str, FindingKind]] = [
        ("model.layers.10.w", "different"),
        ("model.layers.2.w", "different"),
        ("model.layers.3.w", "nan"),
        ("model.norm.weight", "zero"),
    ]
    ordered = in_order(Finding(name, kind) for name, kind in kinds)
    assert [one.name for one in ordered] == [
        "model.norm.weight",
        "model.layers.3.w",
        "model.layers.2.w",
        "model.layers.10.w",
    ]
    assert told(ordered, 1) == "4 tensors differ: model.norm.weight: zero; …"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_say_the_kind(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    should = torch.randn(4, 6).to(dtype)

    def kind(found: torch.Tensor | None, *, old: bool = False) -> tuple[str, float | None]:
        one = classify_values("w", raw_of(should), None if found is None else raw_of(found), old=old)
        return ("equal", None) if one is None else (one.kind, one.max_abs_err)

    assert kind(should.clone()) == ("equal", None)
    assert kind(torch.zeros_like(should))[0] == "zero"
    assert kind(None)[0] == "missing"
    assert kind(should[:-1])[0] == "wrong-shape"
    bad = should.clone()
    bad[1, 1] = float("inf")
    assert kind(bad)[0] == "nan"
    moved = should.clone()
    moved[0, 0] += 0.5
    name, gap = kind(moved)
    assert name == "different"
    assert gap == pytest.approx(0.5, rel=0.02)
    assert kind(moved, old=True)[0] == "stale"


def test_ranks_of_both_releases_and_of_pipeline_stages() -> None:
    def rank(tp: int, pp: int, name: str, *, modern: bool) -> dict[str, object]:
        place = {"tp_rank": tp, "tp_size": 2, "dp_rank": 0, "pp_rank": pp}
        return {
            "checksums": {name: f"{tp}{pp}"},
            "parallelism_info": [{"role": "target", **place}] if modern else place,
        }

    for modern in (False, True):
        answer = {"ranks": [rank(tp, pp, f"stage{pp}", modern=modern) for tp in (1, 0) for pp in (0, 1)]}
        found = ranks_of(answer)
        assert [(shard.rank, shard.size) for shard, _ in found] == [(0, 2), (1, 2)]
        assert found[1][1] == {"stage0": "10", "stage1": "11"}
    assert ranks_of({"ranks": [None, {"checksums": 3}]}) == []
    assert ranks_of({}) == []
