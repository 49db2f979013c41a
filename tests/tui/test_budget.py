"""Painted bytes per tick. Deterministic, so it is asserted; wall clocks are only reported (benchmarks/attach.py)."""

from __future__ import annotations

from benchmarks.bytes import BUDGET_ALL, BUDGET_TENTH, painted_bytes


async def test_a_tick_with_all_of_64_engines_changed_stays_in_its_budget() -> None:
    painted = await painted_bytes(share=1.0, rounds=10)
    assert 0 < painted.most <= BUDGET_ALL


async def test_a_tick_with_a_tenth_of_the_engines_changed_stays_in_its_budget() -> None:
    painted = await painted_bytes(share=0.1, rounds=10)
    assert 0 < painted.most <= BUDGET_TENTH


async def test_a_tick_without_news_paints_next_to_nothing() -> None:
    painted = await painted_bytes(share=0.0, rounds=3, news=False)
    assert painted.most <= 400


async def test_the_engine_screen_stays_in_the_same_budgets() -> None:
    painted = await painted_bytes(share=1.0, rounds=5, keys=("e",))
    assert 0 < painted.most <= BUDGET_ALL
    painted = await painted_bytes(share=0.1, rounds=5, keys=("e",))
    assert 0 < painted.most <= BUDGET_TENTH
