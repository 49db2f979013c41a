"""The A/B comparison: its intervals hold what they promise, and it says so while there is too little data."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.engines.ab import (
    ENOUGH,
    INTERVAL_S,
    MOST,
    Arm,
    Comparison,
    mean_interval,
    poisson_limits,
    rate_difference,
    student_t,
)
from rltop.engines.scrape import EngineStats

ARMS: dict[str, Arm] = {"0": "A", "1": "A", "2": "B", "3": "B"}


# -- statistics, against published tables


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 7, 2.36462),
        (0.995, 30, 2.75),
        (0.975, 1000, 1.96234),
        (0.9, 3, 1.63774),
        (0.5, 4, 0),
    ],
)
def test_quantiles_of_students_t(probability: float, freedom: float, value: float) -> None:
    assert student_t(probability, freedom) == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.6889), (1, 0.0253, 5.5716), (5, 1.6235, 11.6683), (100, 81.3640, 121.6268)]
)
def test_exact_limits_of_a_poisson_mean(count: int, low: float, high: float) -> None:
    assert poisson_limits(count, 0.95) == pytest.approx((low, high), abs=1e-4)


def test_no_crash_in_either_arm_still_has_an_interval() -> None:
    low, high = rate_difference(0, 2.0, 0, 1.0, 0.95)
    assert (low, high) == pytest.approx((-3.6889 / 2, 3.6889), abs=1e-3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=ENOUGH, max_size=60))
@settings(deadline=None)
def test_an_interval_holds_its_mean_and_grows_with_its_level(values: list[float]) -> None:
    shown, claimed = mean_interval(values, 0.95), mean_interval(values, 0.99)
    assert shown is not None
    assert claimed is not None
    mean = math.fsum(values) / len(values)
    assert claimed[0] <= shown[0] <= mean <= shown[1] <= claimed[1]
    assert mean - shown[0] == pytest.approx(shown[1] - mean, abs=1e-6)


def covered(generator: random.Random, n: int, correlation: float, repeats: int) -> float:
    """Share of 95 % intervals that hold the true mean of an AR(1) series."""
    inside = 0
    for _ in range(repeats):
        value, series = generator.gauss(0, 1) / math.sqrt(1 - correlation**2), []
        for _ in range(n):
            series.append(value)
            value = correlation * value + generator.gauss(0, 1)
        found = mean_interval(series, 0.95)
        assert found is not None
        inside += found[0] <= 0 <= found[1]
    return inside / repeats


@pytest.mark.parametrize(
    ("n", "correlation", "least"), [(ENOUGH, 0.0, 0.93), (60, 0.0, 0.93), (60, 0.6, 0.91), (15, 0.6, 0.82)]
)
def test_the_interval_of_a_mean_covers_as_often_as_the_module_says(n: int, correlation: float, least: float) -> None:
    assert covered(random.Random(7), n, correlation, 1000) >= least


@pytest.mark.parametrize(("rate_a", "rate_b"), [(0.5, 0.5), (1.0, 3.0), (4.0, 2.0)])
def test_the_interval_of_crash_rates_covers_as_often_as_it_says(rate_a: float, rate_b: float) -> None:
    generator, inside = random.Random(3), 0
    for _ in range(400):
        low, high = rate_difference(_poisson(generator, rate_a * 5), 5, _poisson(generator, rate_b * 3), 3, 0.95)
        inside += low <= rate_b - rate_a <= high
    assert inside / 400 >= 0.94


def _poisson(generator: random.Random, mean: float) -> int:
    count, product = 0, generator.random()
    while product > math.exp(-mean):
        count += 1
        product *= generator.random()
    return count


# -- a fleet


class Fleet:
    """Engines that decode at a given rate, looked at once a second."""

    def __init__(self, rates: dict[str, float], *, noise: float = 0.0, seed: int = 1) -> None:
        self.comparison = Comparison(arms=ARMS, since=0.0)
        self.rates, self.noise, self.random = rates, noise, random.Random(seed)
        self.decoded = dict.fromkeys(rates, 0.0)
        self.now = 0.0

    def run(self, seconds: int, *, busy: bool = True, accept: float | None = None) -> None:
        for _ in range(seconds):
            self.now += 1
            shared = 1 + 0.5 * math.sin(self.now / 7)  # traffic that both arms see
            for engine, rate in self.rates.items():
                speed = rate * shared * (1 + self.noise * self.random.gauss(0, 1)) if busy else 0.0
                self.decoded[engine] += speed
                stats = EngineStats(
                    url="",
                    reachable=True,
                    running=4 if busy else 0,
                    decode_tokens_total=self.decoded[engine],
                    spec_accept_length=accept,
                )
                self.comparison.looked(engine, stats, self.now)


def test_a_faster_arm_is_found_though_the_traffic_changes_more_than_it() -> None:
    fleet = Fleet({"0": 100, "1": 100, "2": 110, "3": 110}, noise=0.1)
    fleet.run(int(INTERVAL_S * 30))
    row = fleet.comparison.rows()[0]
    assert row.name == "tokens_per_s"
    assert row.sure
    assert row.a is not None
    assert row.low is not None
    assert row.high is not None
    assert row.low < 0.1 * row.a < row.high
    assert "tokens per second higher with the change: +1" in fleet.comparison.verdict()


def test_two_equal_arms_show_no_difference() -> None:
    wrong = 0
    for seed in range(20):
        fleet = Fleet(dict.fromkeys(ARMS, 100.0), noise=0.3, seed=seed)
        fleet.run(int(INTERVAL_S * 20))
        wrong += fleet.comparison.rows()[0].sure
    assert wrong <= 2


def test_too_little_data_is_said_and_has_no_interval() -> None:
    fleet = Fleet({"0": 100, "1": 100, "2": 900, "3": 900})
    fleet.run(int(INTERVAL_S * 3))
    row = fleet.comparison.rows()[0]
    assert (row.low, row.high, row.sure) == (None, None, False)
    assert row.n in (3, 4)
    assert fleet.comparison.verdict().startswith("not enough yet")
    assert Comparison(arms=ARMS, since=0.0).verdict().startswith("not enough yet: 0 of")


def test_idle_time_and_a_restart_do_not_count_as_slowness() -> None:
    fleet = Fleet({"0": 100, "1": 100, "2": 100, "3": 100})
    fleet.run(int(INTERVAL_S * 15))
    fleet.run(int(INTERVAL_S * 15), busy=False)
    fleet.decoded["2"] = 0.0  # its process is new
    fleet.comparison.crashed("2")
    fleet.run(int(INTERVAL_S * 15))
    row = fleet.comparison.rows()[0]
    assert row.diff is not None
    assert abs(row.diff) < 5
    assert row.n < 35


def test_crashes_are_counted_per_engine_hour() -> None:
    fleet = Fleet(dict.fromkeys(ARMS, 10.0))
    fleet.run(901)
    for _ in range(8):
        fleet.comparison.crashed("3")
    fleet.comparison.crashed("9")  # not in the comparison
    row = fleet.comparison.rows()[-1]
    assert (row.name, row.n, row.sure) == ("crashes_per_hour", 8, True)
    assert (row.a, row.b) == pytest.approx((0.0, 16.0), rel=0.01)
    assert "crashes per hour more with the change" in fleet.comparison.verdict()


def test_gap_and_acceptance_length_have_rows_of_their_own() -> None:
    fleet, generator = Fleet(dict.fromkeys(ARMS, 10.0)), random.Random(2)
    fleet.run(int(INTERVAL_S * 15), accept=2.5)
    for rollout in range(20):
        for engine, arm in ARMS.items():
            mean = (0.02 if arm == "A" else 0.08) + generator.gauss(0, 0.002)
            fleet.comparison.sampled(engine, rollout, mean, 1000)
    fleet.comparison.sampled("0", 20, math.nan, 1000)
    rows = {row.name: row for row in fleet.comparison.rows()}
    assert list(rows) == ["tokens_per_s", "log_prob_gap", "accept_length", "crashes_per_hour"]
    gap = rows["log_prob_gap"]
    assert (gap.n, gap.sure) == (20, True)
    assert gap.diff == pytest.approx(0.06, abs=0.003)
    assert (rows["accept_length"].a, rows["accept_length"].diff) == (2.5, 0.0)
    assert set(gap.cell()) == {"name", "a", "b", "diff", "low", "high", "n"}


def test_a_comparison_of_weeks_stays_small() -> None:
    comparison = Comparison(arms=ARMS, since=0.0)
    for rollout in range(MOST + 50):
        for engine in ("0", "2"):
            comparison.sampled(engine, rollout, 0.01, 10)
    assert comparison.rows()[0].n == MOST


def test_the_intervals_of_one_measure_do_not_count_for_another() -> None:
    found = Comparison(arms=ARMS, since=0.0)
    for rollout in range(17):
        found.sampled("0", rollout, 0.01 + 0.001 * (rollout % 3), 100)
        found.sampled("2", rollout, 0.01 + 0.001 * (rollout % 2), 100)
    assert {row.name: row.n for row in found.rows()} == {"log_prob_gap": 17, "crashes_per_hour": 0}
    assert found.verdict() == (
        "not enough yet: 0 of 12 intervals in which both arms had work; "
        "no difference of the log-prob gap in 17 intervals"
    )
