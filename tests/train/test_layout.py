"""Who holds what, and how samples are shared: plain arithmetic, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltop.errors import RltopError
from rltop.train.layout import Divisible, Layout, balanced, check_layout

SIZES = st.builds(Layout, tensor=st.integers(1, 4), pipeline=st.integers(1, 4), data=st.integers(1, 4))
MODEL = Divisible(num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=128)


def test_ranks_are_numbered_in_megatrons_order() -> None:
    """tp-cp-ep-dp-pp: shards of a layer are neighbours, stages are far apart."""
    layout = Layout(tensor=2, pipeline=2, data=2)
    places = [layout.place(rank) for rank in range(8)]
    assert [(p.tensor, p.data, p.pipeline) for p in places] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    assert str(places[5]) == "[ t 2/2, p 2/2 ]"


@given(SIZES)
def test_every_place_is_taken_once_and_rank_0_sends_the_weights(layout: Layout) -> None:
    places = [layout.place(rank) for rank in range(layout.world)]
    assert len({(p.tensor, p.data, p.pipeline) for p in places}) == layout.world
    assert [p.rank for p in places] == list(range(layout.world))
    assert places[0].first_stage
    assert places[0].sends_weights
    assert places[-1].last_stage


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_every_sample_goes_to_one_replica_and_counts_differ_by_at_most_the_remainder(
    lengths: list[int], replicas: int
) -> None:
    shares = balanced(lengths, replicas)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(list(share) == sorted(share) for share in shares)
    assert max(map(len, shares)) == -(-len(lengths) // replicas)


def test_tokens_are_balanced_and_steps_stay_apart() -> None:
    lengths = [10, 1, 9, 2, 8, 3, 7, 4]
    assert [sum(lengths[index] for index in share) for share in balanced(lengths, 2)] == [22, 22]
    by_step = balanced(lengths, 2, step_samples=4)
    for share, other in zip(by_step, balanced(lengths[:4], 2), strict=True):
        assert share[:2] == other
    assert [len([index for index in share if index < 4]) for share in by_step] == [2, 2]


def test_one_replica_gets_everything_in_order() -> None:
    assert balanced([3, 1, 2], 1) == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(pipeline=3), ["--pipeline-model-parallel-size", "4 layers", "leaves 1 over", "-size 2"]),
        (Layout(tensor=3), ["--tensor-model-parallel-size", "4 attention heads", "leaves 1 over", "-size 2"]),
        (Layout(tensor=4), ["--tensor-model-parallel-size", "2 key/value heads", "leaves 2 over", "-size 2"]),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_arithmetic(layout: Layout, words: list[str]) -> None:
    with pytest.raises(RltopError) as caught:
        check_layout(layout, MODEL, where="config.json")
    for word in [*words, "config.json"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=4, data=7)])
def test_a_model_that_divides_passes(layout: Layout) -> None:
    check_layout(layout, MODEL, where="config.json")
