"""Metrics of other trainers under rltop's names too, and what a thousand ranks say in one cell."""

from __future__ import annotations

from math import isnan, nan

import pytest

from rltop.daemon.ingest import Ingest
from rltop.daemon.live_checks import LiveChecks
from rltop.daemon.metric_cells import OPEN_STEPS, OWN_RANKS
from rltop.daemon.source_cells import MOST_HOSTS, MOST_SHOWN
from rltop.evidence.metric_names import Names, parse
from rltop.protocol.messages import Record
from tests.daemon.fakes import Trainer
from tests.daemon.test_ingest import House, last_values

TWO = """
[[map]]
framework = "mine"
[map.names]
"kl" = ["train/kl_loss", "rollout/kl"]
"ms" = { to = "perf/t", scale = 0.25 }
"""


@pytest.fixture
def house() -> House:
    return House()


def curves(house: House) -> set[str]:
    return set(house.core.series.keys())


# ---------------------------------------------------------------- names


def test_a_metric_of_verl_is_a_curve_under_both_names_and_says_what_it_was(house: House) -> None:
    house.take("run", {"framework": "verl"})
    seen = house.ingest.take(house.trainer.metrics(7, {"actor/grad_norm": 0.5, "critic/score/mean": 0.25, "x/y": 1.0}))
    assert seen.payload["values"]["train/grad_norm"] == 0.5
    assert house.state("metric/train/grad_norm")["reported"] == "actor/grad_norm"
    assert [house.state(f"metric/{name}")["axis"] for name in ("actor/grad_norm", "train/grad_norm")] == ["train"] * 2
    assert house.state("metric/rollout/raw_reward")["axis"] == "rollout"
    assert "reported" not in house.state("metric/actor/grad_norm")
    assert last_values(house, "train/grad_norm") == last_values(house, "actor/grad_norm") == [(7.0, 0.5)]
    told = house.state("names")["train/grad_norm"]
    assert (told["reported"], told["framework"], told["axis"], told["scale"]) == ("actor/grad_norm", "verl", "train", 1)
    assert "dp_actor.py" in told["source"]


def test_slimes_own_records_go_by_unchanged(house: House) -> None:
    record = house.trainer.metrics(1, {"train/grad_norm": 0.5, "rollout/raw_reward": 1.0, "perf/step_time": 3.0})
    assert house.ingest.take(record) is record
    assert curves(house) == {"train/grad_norm", "rollout/raw_reward", "perf/step_time"}
    assert house.state("names") is None


def test_a_source_that_names_its_framework_needs_no_run_record(house: House) -> None:
    record = house.trainer.metrics(1, {"reward": 0.5, "timing/generation": 3.0})
    source = {"role": "trainer", "rank": 0, "host": "here", "pid": 7, "framework": "OpenRLHF"}
    house.ingest.take(Record(**{**_fields(record), "source": type(record.source)(**source)}))  # type: ignore[arg-type]
    assert last_values(house, "rollout/raw_reward") == [(1.0, 0.5)]
    assert last_values(house, "perf/rollout_time") == [(1.0, 3.0)]


def _fields(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


@pytest.mark.parametrize(
    ("ids", "ours"),
    [
        ({}, "train/kl_loss"),
        ({"axis": "rollout"}, "rollout/kl"),
        ({"axis": "train"}, "train/kl_loss"),
        ({"step_in_rollout": 0, "rollout_id": 4}, "train/kl_loss"),
        ({"rollout_id": 4}, "rollout/kl"),
        ({"rollout_id": 3}, "train/kl_loss"),
    ],
)
def test_a_name_with_two_meanings_goes_by_the_ids_of_its_record(ids: dict[str, object], ours: str) -> None:
    house = House()
    house.ingest = Ingest(house.core, host="here", alive=lambda pid: True, names=Names(parse(TWO, where="t")))
    house.take("run", {"framework": "mine"})
    seen = house.ingest.take(house.trainer.record("metrics", {"values": {"kl": 0.5, "ms": 20.0}, "step": 4, **ids}))
    assert curves(house) == {"kl", "ms", ours, "perf/t"}
    assert last_values(house, "perf/t") == [(4.0, 5.0)]
    assert seen.payload["axis"] is None


def test_the_live_checks_see_what_another_trainer_reports(house: House) -> None:
    checks = LiveChecks()
    for step in range(1, 4):
        checks.feed(house.ingest.take(house.trainer.metrics(step, {"actor/grad_norm": nan if step == 3 else 0.5})))
    (verdict,) = [v for v in checks.report().verdicts if v.id == "train.nan"]
    assert (verdict.status, verdict.step) == ("fail", 3)


def test_what_is_reported_under_our_name_counts(house: House) -> None:
    house.ingest.take(house.trainer.metrics(1, {"actor/grad_norm": 9.0, "train/grad_norm": 1.0}))
    assert last_values(house, "train/grad_norm") == [(1.0, 1.0)]


# ---------------------------------------------------------------- ranks


def test_the_first_ranks_keep_their_curves_and_the_fleet_is_folded_into_one_cell(house: House) -> None:
    for rank in range(1000):
        house.ingest.take(Trainer(rank=rank).metrics(1, {"m": float(rank)}))
    house.ingest.tick()
    own = {f"m@{rank}" for rank in range(1, OWN_RANKS + 1)}
    assert curves(house) == {"m", "m@min", "m@max", *own}
    cell = house.state("ranks/m")
    assert (cell["ranks"], cell["min"], cell["max"], cell["mean"]) == (1000, 0.0, 999.0, 499.5), "rank 0 came first"
    assert (cell["min_rank"], cell["max_rank"]) == ("trainer/0", "trainer/999")
    assert last_values(house, "m@max") == [(1.0, 999.0)]
    assert house.state("source/trainer/0")["malformed"] == 0


def test_few_ranks_are_not_folded(house: House) -> None:
    for rank in range(OWN_RANKS + 1):
        house.ingest.take(Trainer(rank=rank).metrics(1, {"m": float(rank)}))
    house.ingest.tick()
    assert curves(house) == {"m", *(f"m@{rank}" for rank in range(1, OWN_RANKS + 1))}


def test_a_rank_with_nan_is_named_and_hides_nobody(house: House) -> None:
    for rank in range(100):
        house.ingest.take(Trainer(rank=rank).metrics(1, {"m": nan if rank >= 90 else float(rank)}))
    house.ingest.tick()
    cell = house.state("ranks/m")
    assert (cell["max"], cell["bad"], cell["nan"]) == (89.0, 10, 10)
    assert cell["bad_ranks"] == [f"trainer/{rank}" for rank in range(90, 98)]
    for rank in range(100):
        house.ingest.take(Trainer(rank=rank).metrics(2, {"m": nan}))
    house.ingest.tick()
    assert isnan(house.state("ranks/m")["max"])
    assert house.state("metric/m@max")["nan"] == 1


def test_late_ranks_count_for_their_step_and_very_late_ones_are_counted(house: House) -> None:
    fleet = [Trainer(rank=rank) for rank in range(1, 41)]
    for step in range(1, OPEN_STEPS + 2):
        for trainer in fleet[:-1]:
            house.ingest.take(trainer.metrics(step, {"m": 1.0}))
    house.ingest.tick()
    house.ingest.take(fleet[-1].metrics(OPEN_STEPS, {"m": 5.0}))
    house.ingest.take(fleet[-1].metrics(1, {"m": 9.0}))
    house.ingest.tick()
    assert house.state("ranks/m")["late"] == 1
    assert last_values(house, "m@max")[-2:] == [(float(OPEN_STEPS), 5.0), (OPEN_STEPS + 1.0, 1.0)]


def test_a_new_start_forgets_the_open_steps(house: House) -> None:
    fleet = [Trainer(rank=rank) for rank in range(1, 41)]
    house.take("run", {"framework": "mine"})
    for trainer in fleet:
        house.ingest.take(trainer.metrics(90, {"m": 1.0}))
    house.take("run", {"framework": "mine"})
    for trainer in fleet:
        house.ingest.take(trainer.metrics(3, {"m": 2.0}))
    house.ingest.tick()
    assert (house.state("ranks/m")["step"], house.state("ranks/m")["late"]) == (3, 0)


# ---------------------------------------------------------------- sources


def fleet_of(house: House, count: int) -> list[Trainer]:
    fleet = [Trainer(rank=rank, host=f"node{rank // 8}", pid=100 + rank) for rank in range(count)]
    for trainer in fleet:
        house.ingest.take(trainer.metrics(1, {"m": 1.0}))
    house.ingest.tick()
    return fleet


def test_a_fleet_has_one_cell_for_its_role_and_few_of_its_own(house: House) -> None:
    fleet_of(house, 1024)
    cell = house.state("sources/trainer")
    assert (cell["count"], cell["records"], cell["lost"], cell["hosts"]) == (1024, 1024, 0, 128)
    assert len(cell["by_host"]) == MOST_HOSTS
    assert len(house.core.table.keys("source/")) == MOST_SHOWN
    assert house.state("source/trainer/0") is not None
    assert set(house.ingest.ages()) == {f"trainer/{rank}" for rank in range(MOST_SHOWN)} | {"trainer/*"}


def test_who_loses_records_is_shown_and_its_host_comes_first(house: House) -> None:
    fleet = fleet_of(house, 1024)
    house.core.time += 60
    for trainer in fleet:
        if trainer.source.rank != 999:
            house.ingest.take(trainer.metrics(2, {"m": 1.0}))
    house.ingest.take(fleet[900].record("metrics", {"values": {"m": 1.0}, "step": 3}, skip=4))
    house.ingest.tick()
    cell = house.state("sources/trainer")
    assert (cell["lost"], cell["troubled"], cell["oldest"]) == (4, 1, "trainer/999")
    assert next(iter(cell["by_host"])) == "node112"
    assert house.state("source/trainer/900")["lost"] == 4
    (event,) = house.core.events("loss")
    assert event["source"] == "trainer/900"


def test_a_fleet_that_reports_on_to_a_new_daemon_lost_nothing(house: House) -> None:
    fleet = fleet_of(house, 1024)
    again = House()
    for key in house.core.table.keys(""):
        again.core.table.set(key, house.state(key))
    again.ingest.restore()
    for trainer in fleet:
        again.ingest.take(trainer.metrics(2, {"m": 1.0}))
    again.ingest.tick()
    cell = again.state("sources/trainer")
    assert (cell["count"], cell["lost"]) == (1024, 0)


def test_few_sources_keep_a_cell_each_and_none_for_the_role(house: House) -> None:
    fleet_of(house, MOST_SHOWN)
    assert len(house.core.table.keys("source/")) == MOST_SHOWN
    assert house.core.table.keys("sources/") == []


def test_of_a_thousand_ranks_the_checks_hear_the_one_that_tells_a_fault(house: House) -> None:
    checks = LiveChecks()
    for step in range(3):
        for rank in range(300):
            value = nan if (rank, step) == (299, 2) else 0.5
            checks.feed(house.ingest.take(Trainer(rank=rank).metrics(step, {"train/grad_norm": value})))
    assert len(checks.observations().metrics) == 3 * 16 + 1
    (verdict,) = [v for v in checks.report().verdicts if v.id == "train.nan"]
    assert (verdict.status, verdict.step) == ("fail", 2)
