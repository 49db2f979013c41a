"""Log-probs compared token by token, against a plain computation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.integrations import slime_tokens
from rltop.integrations.slime_tokens import gaps

pytestmark = pytest.mark.train

_VALUE = st.floats(-20, 0, width=32) | st.sampled_from([math.nan, -math.inf])
_SAMPLE = st.lists(st.tuples(_VALUE, _VALUE, st.booleans()), max_size=12)


def _data(samples: list[list[tuple[float, float, bool]]], name: str) -> dict[str, Any]:
    return {
        "log_probs": [torch.tensor([a for a, _, _ in sample], dtype=torch.float32) for sample in samples],
        name: [torch.tensor([b for _, b, _ in sample], dtype=torch.float32) for sample in samples],
        "loss_masks": [torch.tensor([int(m) for _, _, m in sample]) for sample in samples],
    }


@settings(max_examples=25)
@given(st.lists(_SAMPLE, min_size=1, max_size=6), st.integers(1, 30), st.booleans())
def test_as_computed_one_by_one(samples: list[list[tuple[float, float, bool]]], chunk: int, masked: bool) -> None:
    pair, name = ("actor_engine", "rollout_log_probs") if masked else ("actor_ref", "ref_log_probs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slime_tokens, "CHUNK", chunk)
        found = {gap.pair: gap for gap in gaps(_data(samples, name))[0]}[pair]
    tokens = [(i, j, a, b) for i, sample in enumerate(samples) for j, (a, b, m) in enumerate(sample) if m or not masked]
    good = [(i, j, abs(a - b)) for i, j, a, b in tokens if math.isfinite(a) and math.isfinite(b)]
    assert found.tokens == len(good)
    assert found.bad == len(tokens) - len(good)
    offends = [
        (i, j)
        for i, j, a, b in tokens
        if not (math.isfinite(a) and math.isfinite(b)) or abs(torch.tensor(a - b).item()) > slime_tokens.TOLERANCE
    ]
    first = None if found.first is None else (found.first.sample, found.first.token)
    assert first == (offends[0] if offends else None)
    if good:
        assert found.largest == pytest.approx(max(gap for _, _, gap in good), abs=2e-6)
        assert found.mean == pytest.approx(sum(gap for _, _, gap in good) / len(good), abs=2e-6)
        ordered = sorted(gap for _, _, gap in good)
        middle = ordered[max(0, math.ceil(0.5 * len(ordered)) - 1)]
        assert middle - 2e-6 <= found.quantiles["p50"] <= max(middle * 1.34, 1e-8) + 2e-6
    else:
        assert math.isnan(found.mean)


def test_equal_bits_are_exactly_zero() -> None:
    values = [torch.tensor([-0.1, -2.0, -1e-9]), torch.tensor([-3.0])]
    found, absent = gaps({"log_probs": values, "ref_log_probs": [one.clone() for one in values]})
    assert [gap.metrics() for gap in found] == [
        {
            "rollout/token_gap/actor_ref/mean": 0.0,
            "rollout/token_gap/actor_ref/max": 0.0,
            "rollout/token_gap/actor_ref/p50": 0.0,
            "rollout/token_gap/actor_ref/p99": 0.0,
            "rollout/token_gap/actor_ref/p999": 0.0,
            "rollout/token_gap/actor_ref/tokens": 4.0,
            "rollout/token_gap/actor_ref/nan": 0.0,
        }
    ]
    assert absent == {"actor_engine": "no rollout_log_probs in rollout_data"}


def test_differences_that_cancel_in_the_means_are_seen() -> None:
    actor, reference = [torch.tensor([-1.0, -2.0])], [torch.tensor([-2.0, -1.0])]
    gap = gaps({"log_probs": actor, "ref_log_probs": reference})[0][0]
    assert (gap.mean, gap.largest) == (1.0, 1.0)
    assert gap.first is not None
    assert (gap.first.sample, gap.first.token, gap.first.left, gap.first.right) == (0, 0, -1.0, -2.0)


def test_without_the_actors_pass_the_reference_is_held_against_the_engine() -> None:
    data = {"ref_log_probs": [torch.tensor([-1.0])], "rollout_log_probs": [torch.tensor([-1.5])]}
    found, absent = gaps(data)
    assert [(gap.pair, gap.mean) for gap in found] == [("ref_engine", 0.5)]
    assert set(absent) == {"actor_ref", "actor_engine"}


def test_under_context_parallelism_the_masks_are_cut_by_slimes_own_function() -> None:
    data = {
        "log_probs": [torch.tensor([-1.0, -1.0])],
        "rollout_log_probs": [torch.tensor([-1.0, 0.0])],
        "loss_masks": [torch.tensor([1, 1, 0, 1])],
        "total_lengths": [9],
        "response_lengths": [4],
    }
    found, absent = gaps(data)
    assert (found, "context parallelism" in absent["actor_engine"]) == ([], True)
    found, _ = gaps(data, slice_mask=lambda mask, total, response: mask[1:3])
    assert [(gap.tokens, gap.largest) for gap in found] == [(1, 0.0)]


@pytest.mark.parametrize("odd", [None, [], [1.0, 2.0], "text", [torch.zeros(2), None]])
def test_what_is_no_list_of_tensors_is_not_measured(odd: Any) -> None:
    found, absent = gaps({"log_probs": odd, "ref_log_probs": [torch.zeros(2)]})
    assert (found, "log_probs" in absent["actor_ref"]) == ([], True)
