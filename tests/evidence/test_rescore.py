"""What a second scoring changed: the arithmetic, on rewards that are written here."""

from __future__ import annotations

import math

import pytest

from rltop.evidence.rescore import Change, Rescore


def change(
    at: int, before: float | None, after: float | None, *, group: int | None = 0, status: str = "completed"
) -> Change:
    return Change(0, at, at, group, status, before, after)


def scored(*changes: Change, largest: int = 20) -> Rescore:
    found = Rescore(largest=largest)
    for one in changes:
        found.add(one)
    return found


def test_counts_and_means() -> None:
    found = scored(change(0, 0.0, 1.0), change(1, 1.0, 0.0), change(2, 1.0, 1.0), change(3, 0.5, 1.0))
    row = found.total
    assert (row.samples, row.changed, row.up, row.down) == (4, 3, 2, 1)
    assert (row.before.mean, row.after.mean) == (0.625, 0.75)


def test_a_reward_that_was_float32_once_did_not_change() -> None:
    assert scored(change(0, 0.1, 0.1 + 1e-10)).total.changed == 0
    assert scored(change(0, 0.1, 0.1001)).total.changed == 1


def test_each_status_by_itself() -> None:
    found = scored(change(0, 0.0, 1.0), change(1, 1.0, 1.0, status="truncated"), change(2, 0.0, 0.0, status=""))
    assert {status: (row.samples, row.changed) for status, row in found.by_status.items()} == {
        "completed": (1, 1),
        "truncated": (1, 0),
        "-": (1, 0),
    }


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [(0.0, 2.5, 2.5), (None, None, 0.0), (None, 0.0, math.inf), (1.0, math.nan, math.inf), (math.nan, math.nan, 0.0)],
)
def test_how_far_a_reward_moved(before: float | None, after: float | None, size: float) -> None:
    assert change(0, before, after).size == size


def test_what_is_not_finite_is_counted_and_in_no_mean() -> None:
    row = scored(change(0, 1.0, math.nan), change(1, 0.0, math.inf), change(2, None, 0.5)).total
    assert (row.before.mean, row.before.odd, row.after.mean, row.after.odd) == (0.5, 0, 0.5, 2)


def test_the_largest_changes_first_and_of_equal_ones_the_first_of_the_dump() -> None:
    moves = [0.5, 0.25, 1.0, 1.0, 0.0, 0.75, 1.0]
    found = scored(*(change(at, 0.0, move) for at, move in enumerate(moves)), largest=4)
    assert [one.at for one in found.largest] == [2, 3, 6, 5]


def test_groups_that_lost_or_gained_their_spread() -> None:
    found = scored(
        *(change(at, float(at), 1.0, group=0) for at in range(2)),  # lost
        *(change(at, 1.0, float(at), group=1) for at in range(2)),  # gained
        *(change(at, float(at), 2.0 * at, group=2) for at in range(2)),  # kept
        change(0, 0.0, 1.0, group=3),  # alone: no group
        change(0, 0.0, 1.0, group=None),
    )
    groups = found.groups()
    assert (groups.count, groups.spread_before, groups.spread_after, groups.lost, groups.gained) == (3, 2, 2, 1, 1)
    assert groups.examples == (("lost", 0, 0), ("gained", 0, 1))


def test_equal_group_numbers_of_two_rollouts_are_two_groups() -> None:
    found = Rescore()
    for rollout in range(2):
        for at in range(2):
            found.add(Change(rollout, at, at, 0, "completed", float(rollout), 0.0))
    assert found.groups().count == 2
    assert found.groups().spread_before == 0
