"""Micro-batches: every sample once, nothing too large, the same plan for the same lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rltop.train.megatron.batching import TokenSample, collate, plan

pytestmark = pytest.mark.train

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=50)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 300), step=st.none() | st.integers(1, 20))
def test_every_sample_is_in_exactly_one_batch(lengths: list[int], max_tokens: int, step: int | None) -> None:
    batches = plan(lengths, max_tokens=max_tokens, step_samples=step)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))


@given(lengths=LENGTHS, max_tokens=st.integers(1, 300))
def test_a_batch_holds_no_more_padded_tokens_than_allowed_unless_it_is_one_sample(
    lengths: list[int], max_tokens: int
) -> None:
    for batch in plan(lengths, max_tokens=max_tokens):
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens


@given(lengths=LENGTHS, max_tokens=st.integers(1, 300), step=st.integers(1, 20))
def test_a_steps_batches_do_not_depend_on_the_other_steps(lengths: list[int], max_tokens: int, step: int) -> None:
    alone = [
        tuple(index + start for index in batch)
        for start in range(0, len(lengths), step)
        for batch in plan(lengths[start : start + step], max_tokens=max_tokens)
    ]
    assert plan(lengths, max_tokens=max_tokens, step_samples=step) == alone


def test_long_samples_come_first_and_ties_keep_their_order() -> None:
    assert plan([5, 9, 5, 9], max_tokens=18) == [(1, 3), (0, 2)]


def test_padding_positions_mask_and_targets() -> None:
    samples = [TokenSample([1, 2, 3], 1), TokenSample([4, 5, 6, 7], 2)]
    micro = collate(samples, (1, 0), torch.device("cpu"))
    assert micro.tokens.tolist() == [[4, 5, 6, 7], [1, 2, 3, 0]]
    assert micro.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert micro.mask[0, 0].tolist() == [[column > row for column in range(4)] for row in range(4)]
    # Position 1 of sample 1 predicts its token 2, position 2 its token 3; position 1 of sample 0 predicts its token 2.
    # Rows are position * 2 + place in the micro-batch.
    assert micro.predicted_by.tolist() == [2, 4, 3]
    assert micro.span == (2, 6)
    assert micro.targets.tolist() == [6, 7, 3]
    assert micro.sizes == (2, 1)
