"""Records become state, events and series, whatever a producer sends."""

from __future__ import annotations

from math import inf, isnan, nan
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltop.daemon.ingest import LOG_LINES_PER_S, LOST_AFTER_S, MAX_SAMPLES, Ingest
from rltop.daemon.phases import PhaseClock
from rltop.integrations.slime_samples import arguments
from rltop.protocol.messages import PAYLOADS
from tests.daemon.fakes import FakeCore, Trainer


class House:
    """A core and an ingest over it; `alive` are the processes that exist."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.alive = {7}
        self.ingest = Ingest(self.core, host="here", alive=lambda pid: pid in self.alive)
        self.trainer = Trainer()

    def take(self, kind: str, payload: dict[str, Any], **how: int) -> None:
        self.ingest.take(self.trainer.record(kind, payload, **how))

    def state(self, key: str) -> Any:
        return self.core.table.get(key)

    def phase(self, name: str, edge: str, at: float, **more: Any) -> None:
        self.core.time = self.trainer.mono = at
        self.take("phase", {"name": name, "edge": edge, **more})


@pytest.fixture
def house() -> House:
    return House()


def last_values(house: House, key: str) -> list[tuple[float, float]]:
    found = house.core.series.query(key, None, None, 1000)
    return [] if found is None else list(zip(found.step, found.last, strict=True))


# ---------------------------------------------------------------- secrets

KEY = "sk-abcdefghijklmnop1234"
ARGS: dict[str, Any] = {
    "api_key": KEY,
    "wandb": {"key": "x", "wandb_key": "hunter2hunter2", "project": "p"},
    "credentials": {"user": "me", "list": ["hunter2hunter2"]},
    "command": ["serve", "--api-key", "hunter2hunter2", "--port", "1"],
    "url": "http://me:hunter2hunter2@host/x",
    "nested": [{"password": 88887777, "on": True}],
    "image_token": 151655,
    "eos_token": "</s>",
    "input_key": "prompt",
    "use_wandb_api_key": True,
}


@pytest.mark.parametrize("told_by", ["reporter", "slime"])
def test_secrets_of_a_run_reach_neither_state_nor_journal_nor_checks(house: House, told_by: str) -> None:
    told = ARGS if told_by == "reporter" else arguments(SimpleNamespace(**ARGS))
    seen = house.ingest.take(house.trainer.record("run", {"framework": "slime", "args": told}))
    house.take("engine", {"id": "0", "url": "http://me:hunter2hunter2@host", "kind": "sglang", "state": "HEALTHY"})
    kept = house.state("run")["args"]
    assert kept["image_token"] == 151655
    assert (kept["eos_token"], kept["input_key"], kept["use_wandb_api_key"]) == ("</s>", "prompt", True)
    assert kept["wandb"]["project"] == "p"
    assert kept["command"] == ["serve", "--api-key", "***", "--port", "1"]
    everything = repr((house.core.table.get("run"), house.core.table.get("engine/0"), seen, house.core.written.rows))
    for secret in (KEY, "hunter2hunter2", "88887777"):
        assert secret not in everything


# ---------------------------------------------------------------- metrics


def test_a_metric_is_a_state_key_and_a_point_of_its_series(house: House) -> None:
    house.ingest.take(house.trainer.metrics(3, {"train/loss": 0.5}, axis="train", rollout_id=1))
    expected = {"step": 3, "value": 0.5, "t": 1000.0, "axis": "train", "rollout_id": 1, "nan": 0}
    assert house.state("metric/train/loss") == expected
    assert last_values(house, "train/loss") == [(3.0, 0.5)]
    assert house.core.written.told("point") == [("train/loss", 3, 0.5)]
    assert house.core.written.told("point time") == [("train/loss", 3, house.core.time)]


def test_without_an_axis_the_name_of_a_metric_says_it(house: House) -> None:
    house.ingest.take(house.trainer.metrics(3, {"train/loss": 0.5, "rollout/raw_reward": 1.0, "mine": 2.0}))
    axes = {name: house.state(f"metric/{name}")["axis"] for name in ("train/loss", "rollout/raw_reward", "mine")}
    assert axes == {"train/loss": "train", "rollout/raw_reward": "rollout", "mine": "rollout"}


def test_nan_and_inf_are_counted_kept_and_shown(house: House) -> None:
    for step, value in enumerate((1.0, nan, inf, 2.0)):
        house.ingest.take(house.trainer.metrics(step, {"m": value}))
    assert house.state("metric/m")["nan"] == 2
    found = house.core.series.query("m", None, None, 1)
    assert found is not None
    assert (list(found.nan), list(found.hi)) == ([2], [2.0])
    assert isnan(house.core.written.told("point")[1][2])


def test_a_bad_value_costs_only_itself(house: House) -> None:
    values = {"good": 1, "text": "NaN", "none": None, "list": [1], "": 1.0, "x" * 300: 1.0, "big": 10**400}
    house.ingest.take(house.trainer.metrics(1, values))
    assert last_values(house, "good") == [(1.0, 1.0)]
    assert house.state("metric/big")["value"] == inf
    house.ingest.tick()
    assert house.state("source/trainer/0")["malformed"] == 5
    assert len(house.core.series.keys()) == 2


def test_ranks_other_than_zero_have_curves_of_their_own(house: House) -> None:
    house.ingest.take(Trainer(rank=3).metrics(1, {"m": 5.0}))
    house.ingest.take(house.trainer.metrics(1, {"m": 1.0}))
    assert last_values(house, "m") == [(1.0, 1.0)]
    assert last_values(house, "m@3") == [(1.0, 5.0)]


def test_a_new_start_of_the_run_cuts_the_tail_that_it_goes_over_again(house: House) -> None:
    house.take("run", {"framework": "rltop"})
    for step in range(10):
        house.ingest.take(house.trainer.metrics(step, {"m": float(step)}))
    house.take("run", {"framework": "rltop", "start_rollout_id": 4})
    house.ingest.take(house.trainer.metrics(4, {"m": 40.0}))
    assert last_values(house, "m") == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert house.core.written.told("cut") == [("m", 4)]


# ---------------------------------------------------------------- losses and junk


def test_a_hole_in_the_sequence_is_counted_and_shown_once_a_second(house: House) -> None:
    house.take("log", {"level": "info", "text": "a"})
    house.take("log", {"level": "info", "text": "b"}, skip=3)
    house.take("log", {"level": "info", "text": "c"}, skip=2)
    assert house.core.events("loss") == []
    house.ingest.tick()
    house.ingest.tick()
    (loss,) = house.core.events("loss")
    assert (loss["from"], loss["to"], loss["count"], loss["source"]) == (2, 7, 5, "trainer/0")
    assert house.state("source/trainer/0")["lost"] == 5


def test_two_processes_under_one_name_count_each_for_itself(house: House) -> None:
    parent, child = Trainer(pid=7), Trainer(pid=8)
    for _ in range(5):
        house.ingest.take(parent.record("log", {"level": "info", "text": "p"}))
        house.ingest.take(child.record("log", {"level": "info", "text": "c"}))
    house.ingest.tick()
    assert house.state("source/trainer/0")["lost"] == 0
    assert house.state("source/trainer/0")["records"] == 10


def test_drops_that_the_producer_reports_add_up(house: House) -> None:
    house.take("log", {"level": "info", "text": "a"}, dropped=4)
    house.take("log", {"level": "info", "text": "a"}, dropped=6)
    house.ingest.take(Trainer(pid=9).record("log", {"level": "info", "text": "a"}, dropped=1))
    house.ingest.tick()
    assert house.state("source/trainer/0")["dropped"] == 7


def test_late_and_double_records_are_no_loss(house: House) -> None:
    records = [house.trainer.record("log", {"level": "info", "text": str(i)}) for i in range(3)]
    for record in (records[0], records[2], records[1], records[1]):
        house.ingest.take(record)
    house.ingest.tick()
    assert house.state("source/trainer/0")["lost"] == 1
    assert house.state("source/trainer/0")["seq"] == 3


def test_unknown_kinds_and_wrong_payloads_are_counted_and_said_once(house: House) -> None:
    for _ in range(3):
        house.take("telepathy", {})
        house.take("phase", {"name": 3})
        house.take("metrics", {"values": [1], "step": 0})
    house.ingest.malformed("not a message")
    house.ingest.malformed("not a message")
    house.ingest.tick()
    source = house.state("source/trainer/0")
    assert (source["unknown"], source["malformed"]) == (3, 6)
    assert len(house.core.texts("log")) == 4


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


fields = sorted({field for payload in PAYLOADS.values() for field in payload.__struct_fields__})
payloads = st.dictionaries(st.sampled_from(fields), json, max_size=6)


@given(st.lists(st.tuples(st.sampled_from([*PAYLOADS, "other"]), payloads), max_size=8))
@settings(max_examples=60)
def test_no_payload_breaks_it(sent: list[tuple[str, dict[str, Any]]]) -> None:
    house = House()
    for kind, payload in sent:
        house.take(kind, payload)
        house.ingest.tick()
    assert house.state("source/trainer/0") is None or house.state("source/trainer/0")["records"] == len(sent)


def test_names_that_would_be_absurd_keys_are_refused(house: House) -> None:
    house.ingest.take(Trainer(role="x" * 10_000).metrics(1, {"m": 1.0}))
    house.take("engine", {"id": "9" * 1000})
    house.take("phase", {"name": "p" * 1000, "edge": "enter"})
    assert max(map(len, house.core.table.keys(""))) < 100
    assert house.state("phase") is None


def test_a_flood_of_log_lines_is_cut_and_the_cut_is_said(house: House) -> None:
    for number in range(LOG_LINES_PER_S + 40):
        house.take("log", {"level": "info", "text": str(number)})
    house.ingest.tick()
    assert len(house.core.texts("log")) == LOG_LINES_PER_S + 1
    assert "40 log lines" in house.core.texts("log")[-1]
    house.take("log", {"level": "info", "text": "next second"})
    assert house.core.texts("log")[-1] == "next second"


# ---------------------------------------------------------------- run and phases


def test_a_run_starts_and_ends_with_its_owner(house: House) -> None:
    rollout = Trainer(role="rollout", pid=8)
    house.take("run", {"framework": "rltop", "args": {"lr": 1e-6}, "injected_faults": ["nan-grad"], "num_rollout": 9})
    assert house.state("run")["state"] == "running"
    assert house.state("run")["args"] == {"lr": 1e-6}
    assert "nan-grad" in house.core.texts("run")[-1]
    house.ingest.take(rollout.record("bye", {"reason": "done"}))
    assert house.state("run")["state"] == "running"
    house.take("bye", {"reason": "failed", "text": "out of memory"})
    assert (house.state("run")["state"], house.state("run")["text"]) == ("failed", "out of memory")
    assert house.core.events("run")[-1]["level"] == "error"


def test_what_the_run_said_of_its_end_stands_against_the_exit_code(house: House) -> None:
    house.take("run", {"framework": "rltop"})
    house.take("bye", {"reason": "interrupted"})
    house.ingest.end("failed", "exit code 130")
    assert house.state("run")["state"] == "interrupted"


def test_a_run_whose_process_is_gone_is_lost_after_a_while_and_may_come_back(house: House) -> None:
    house.take("run", {"framework": "rltop"})
    house.alive.clear()
    house.ingest.tick()
    house.core.time += LOST_AFTER_S - 1
    house.ingest.tick()
    assert house.state("run")["state"] == "running"
    house.core.time += 2
    house.ingest.tick()
    house.ingest.tick()
    assert house.state("run")["state"] == "lost"
    assert len([text for text in house.core.texts("run") if "lost" in text]) == 1
    house.take("log", {"level": "info", "text": "still here"})
    assert house.state("run")["state"] == "running"


def test_a_run_that_only_reports_metrics_is_running(house: House) -> None:
    house.core.set("run", {"state": "waiting", "ended": None})
    house.take("log", {"level": "info", "text": "hello"})
    assert house.state("run")["state"] == "waiting"
    for step in range(3):
        house.ingest.take(house.trainer.metrics(step, {"train/loss": 0.5}))
    assert house.state("run")["state"] == "running"
    assert house.core.texts("run") == ["trainer/0 reports: the run is running"]
    house.take("bye", {"reason": "done"})
    house.ingest.take(house.trainer.metrics(4, {"train/loss": 0.5}))
    assert house.state("run")["state"] == "done"


def test_a_daemon_that_hung_says_that_the_last_records_of_an_ended_trainer_never_came(house: House) -> None:
    house.take("run", {"framework": "rltop"})
    house.ingest.tick()
    house.core.time += 30  # stopped; meanwhile the trainer ends, and its buffers are full
    house.alive.clear()
    house.ingest.tick()
    house.ingest.end("done", "", "daemon")
    assert house.core.texts("run")[-1] == "run done"
    assert not [text for text in house.core.texts("run") if "lost" in text]
    house.ingest.take(house.trainer.metrics(3, {"train/loss": 0.5}))  # what a buffer still held
    for _ in range(20):
        house.core.time += 1
        house.ingest.tick()
    (event,) = house.core.events("loss")
    assert event["level"] == "error"
    assert event["text"].startswith(
        "the trainer ended and its last records never came: the daemon hung or was not there for 30 s"
    )
    assert event["text"].endswith("the last one is number 2")
    run = house.state("run")
    assert (run["state"], run["text"]) == ("done", event["text"])


@pytest.mark.parametrize("said_goodbye", [False, True])
@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_daemon_that_came_back_says_what_ended_while_none_was_there(
    house: House, said_goodbye: bool, role: str
) -> None:
    """Whoever told of the run: slime's rollout manager does."""
    house.trainer = Trainer(role=role)
    house.take("run", {"framework": "rltop"})
    if said_goodbye:
        house.take("bye", {"reason": "done"})
    house.ingest.tick()
    again = House()  # killed, with the trainer after it
    for key in house.core.table.keys(""):
        again.core.set(key, house.state(key))
    again.core.time = house.core.time + 3
    again.ingest.restore()
    again.alive.clear()
    for _ in range(20):
        again.ingest.tick()
        again.core.time += 1
    texts = again.core.texts("loss")
    assert [text.startswith("the trainer ended and its last records never came") for text in texts] == (
        [] if said_goodbye else [True]
    )
    assert again.state("run")["state"] == ("done" if said_goodbye else "lost")


def test_a_trainer_that_said_goodbye_or_ended_under_our_eyes_left_nothing_out(house: House) -> None:
    house.take("run", {"framework": "rltop"})
    house.ingest.tick()
    house.core.time += 30
    house.alive.clear()
    house.ingest.tick()
    house.take("bye", {"reason": "done"})
    second = Trainer(role="rollout", pid=8)
    house.alive.add(8)
    house.ingest.take(second.metrics(1, {"rollout/raw_reward": 0.5}))
    house.ingest.tick()
    house.alive.clear()
    for _ in range(20):
        house.core.time += 1
        house.ingest.tick()
    assert house.core.events("loss") == []
    assert house.state("run")["text"] == ""


def test_a_run_on_another_machine_is_never_called_lost(house: House) -> None:
    far = Trainer(host="node9", pid=12345)
    house.ingest.take(far.record("run", {"framework": "rltop"}))
    house.core.time += 1000
    house.ingest.tick()
    assert house.state("run")["state"] == "running"


def test_a_run_that_came_over_tcp_is_never_called_lost_though_its_host_has_our_name(house: House) -> None:
    house.ingest.take(house.trainer.record("run", {"framework": "rltop"}), "node9")
    house.alive.clear()
    house.core.time += 1000
    house.ingest.tick()
    assert house.state("run")["state"] == "running"
    assert house.state("source/trainer/0")["key"] == "node9"


def test_a_silent_run_with_a_living_process_is_not_lost(house: House) -> None:
    house.take("run", {"framework": "rltop"})
    house.core.time += 10_000
    house.ingest.tick()
    assert house.state("run")["state"] == "running"
    assert house.ingest.ages() == {"trainer/0": 10_000}


def test_sources_that_said_goodbye_do_not_age(house: House) -> None:
    house.take("bye", {"reason": "done"})
    assert house.ingest.ages() == {}


def test_the_phase_clock_shows_the_innermost_phase_and_its_usual_length(house: House) -> None:
    for rollout in range(4):
        at = rollout * 100.0
        house.phase("rollout", "enter", at, rollout_id=rollout)
        house.phase("rollout", "leave", at + 10, rollout_id=rollout, elapsed_s=10.0 + rollout)
    assert house.state("phase")["name"] == ""
    assert house.state("phase")["since"] == 310.0
    house.phase("rollout", "enter", 400, rollout_id=4)
    house.phase("log_probs", "enter", 405, rollout_id=4)
    phase = house.state("phase")
    assert (phase["name"], phase["since"], phase["median_s"], phase["open"]) == (
        "log_probs", 405.0, None, ["rollout", "log_probs"],
    )  # fmt: skip
    house.phase("log_probs", "leave", 406)
    assert (house.state("phase")["name"], house.state("phase")["median_s"]) == ("rollout", 11.5)


def test_a_phase_that_took_unusually_long_is_an_event_and_others_are_not(house: House) -> None:
    for step in range(6):
        house.phase("train", "enter", step * 10.0)
        house.phase("train", "leave", step * 10.0 + 2, elapsed_s=2.0)
    assert house.core.events("phase") == []
    house.phase("train", "leave", 90, rollout_id=6, elapsed_s=9.0)
    (slow,) = house.core.events("phase")
    assert (slow["name"], slow["rollout_id"], slow["elapsed_s"]) == ("train", 6, 9.0)
    assert "usually 2.0 s" in slow["text"]


def test_a_goodbye_closes_open_phases(house: House) -> None:
    house.phase("rollout", "enter", 5)
    house.take("bye", {"reason": "failed"})
    assert house.state("phase")["open"] == []


def test_a_leave_without_a_length_is_measured_by_the_producers_clock() -> None:
    clock = PhaseClock()
    clock.enter("t/0", "train", 1, now=50.0, mono=10.0)
    assert clock.leave("t/0", "train", None, mono=13.5) == (3.5, False)
    assert clock.leave("t/0", "train", None, mono=14.0) == (None, False), "never entered"


def test_entering_twice_replaces_the_first() -> None:
    clock = PhaseClock()
    clock.enter("t/0", "train", 1, now=1.0, mono=1.0)
    clock.enter("t/0", "train", 2, now=9.0, mono=9.0)
    assert clock.current(None, 9.0)["open"] == ["train"]
    assert clock.current(None, 9.0)["rollout_id"] == 2


# ---------------------------------------------------------------- engines, weights, samples


def test_engine_changes_are_events_and_scraped_numbers_survive_within_a_generation(house: House) -> None:
    house.take("engine", {"id": "0", "url": "http://h:1", "kind": "cpu", "state": "HEALTHY"})
    house.core.update("engine/0", running=3, tokens_per_s=90.0)
    house.take("engine", {"id": "0", "url": "http://h:1", "kind": "cpu", "state": "HEALTHY", "weight_version": "2"})
    assert (house.state("engine/0")["running"], house.state("engine/0")["weight_version"]) == (3, "2")
    house.take("engine", {"id": "0", "kind": "cpu", "state": "CRASHED", "generation": 2})
    assert house.state("engine/0")["running"] is None
    first, second = house.core.events("engine")
    assert (first["from"], first["to"], second["from"], second["to"]) == (None, "HEALTHY", "HEALTHY", "CRASHED")
    assert (first["level"], second["level"]) == ("info", "error")


def test_a_failed_weight_sync_names_the_engine(house: House) -> None:
    engines = {"0": {"ok": True}, "1": {"ok": False, "message": "shape"}}
    house.take("weights", {"version": "4", "rollout_id": 5, "ok": False, "engines": engines})
    (said,) = house.core.events("weights")
    assert (said["ok"], said["level"]) == (False, "error")
    assert "engine 1" in said["text"]
    assert house.state("weights")["version"] == "4"


def test_a_few_samples_are_shown_cut_and_the_journal_gets_them_whole(house: House) -> None:
    samples = [{"index": i, "response": "x" * 20_000, "token_ids": list(range(5000))} for i in range(30)]
    house.take("samples", {"rollout_id": 2, "samples": samples, "total": 64})
    shown = house.state("samples")
    assert (len(shown["samples"]), shown["total"]) == (MAX_SAMPLES, 64)
    assert "12000 more characters" in shown["samples"][0]["response"]
    assert len(shown["samples"][0]["token_ids"]) == 1024
    ((_, kind, source, payload),) = house.core.written.told("record")
    assert (kind, source, len(payload["samples"])) == ("samples", "trainer/0", 30)


def test_a_new_daemon_goes_on_counting_where_the_old_one_stopped(house: House) -> None:
    house.ingest.take(house.trainer.metrics(1, {"m": nan}))
    house.ingest.tick()
    again = House()
    for key in house.core.table.keys(""):
        again.core.table.set(key, house.state(key))
    again.ingest.restore()
    again.trainer = house.trainer
    again.ingest.take(house.trainer.metrics(2, {"m": nan}))
    again.take("log", {"level": "info", "text": "x"}, skip=2)
    again.ingest.tick()
    assert again.state("metric/m")["nan"] == 2
    source = again.state("source/trainer/0")
    assert (source["records"], source["lost"], source["seq"]) == (3, 2, 5)


def test_an_engine_that_took_weights_has_them_at_once(house: House) -> None:
    house.take("engine", {"id": "0", "weight_version": "3"})
    house.take("engine", {"id": "1", "weight_version": "3"})
    engines = {"0": {"ok": True, "version": "4"}, "1": {"ok": False, "version": "3"}, "9": {"ok": True}}
    house.take("weights", {"version": "4", "rollout_id": 5, "ok": False, "engines": engines})
    assert [house.state(f"engine/{name}")["weight_version"] for name in "01"] == ["4", "3"]
