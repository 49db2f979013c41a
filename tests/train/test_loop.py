"""The order of the loop, what it reports, and what it does when an engine holds the wrong weights."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from rltop.engines.weight_findings import Finding
from rltop.errors import RltopError
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.loop import History, Loop
from rltop.train.narrator import LOGGER, Narrator
from rltop.train.ports import EngineReply
from rltop.train.summary import summary
from tests.train.fakes import ENGINE, FakeRollouts, FakeTrainer
from tests.train.local import ingest

TWO_ROLLOUTS = TrainConfig(num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=2)


def make_loop(config: TrainConfig, trainer: FakeTrainer, reporter: Reporter | None = None) -> Loop:
    ticks = itertools.count()
    reporter = reporter or Reporter(address="")
    return Loop(
        config=config,
        trainer=trainer,
        rollouts=FakeRollouts(trainer.calls),
        narrator=Narrator(reporter, lambda: float(next(ticks))),
        clock=lambda: float(next(ticks)),
        base_directory=Path("/run/base"),
        history=History(),
    )


def short(calls: list[Any]) -> list[Any]:
    return [call[:2] if isinstance(call, tuple) and call[0] == "train_step" else call for call in calls]


def test_one_rollout_follows_the_other_with_weights_of_its_own_version() -> None:
    trainer = FakeTrainer([])
    make_loop(TWO_ROLLOUTS, trainer).run()
    assert short(trainer.calls) == [
        "load",
        ("tokenizer", "/model"),
        "freeze_base",
        ("engines", "/run/base"),
        "verify",
        ("generate", 0, "default"),
        ("train_step", 0),
        ("publish", "1", 0),
        ("generate", 1, "1"),
        ("train_step", 1),
        ("publish", "2", 1),
    ]


def test_cold_start_passes_and_final_save_run_when_asked_for(tmp_path: Path) -> None:
    config = TrainConfig(
        num_rollout=1,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        cold_start_steps=2,
        use_kl_loss=True,
        log_probs_pass="always",
        save_dir=tmp_path,
    )
    trainer = FakeTrainer([])
    make_loop(config, trainer).run()
    assert ("cold_start", 1) in trainer.calls
    assert [call for call in trainer.calls if call[0] == "log_probs"] == [("log_probs", "actor"), ("log_probs", "ref")]
    assert trainer.calls[-1] == ("save", str(tmp_path / "final"))


def test_a_skipped_pass_leaves_the_old_log_probs_to_the_step_itself() -> None:
    trainer = FakeTrainer([])
    make_loop(TWO_ROLLOUTS, trainer).run()
    steps = [call for call in trainer.calls if call[0] == "train_step"]
    assert steps[0][2][0].log_probs is None
    assert steps[0][2][0].ref_log_probs is None
    assert steps[0][2][1].advantage == 0.5


def test_several_steps_share_the_rollout_in_order() -> None:
    config = TrainConfig(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2, num_steps_per_rollout=2)
    trainer = FakeTrainer([])
    make_loop(config, trainer).run()
    steps = [call for call in trainer.calls if call[0] == "train_step"]
    assert [[sample.tokens[1] for sample in step[2]] for step in steps] == [[0, 1], [2, 3]]
    assert steps[0][2][0].log_probs == (-0.25, -0.25)


@pytest.mark.parametrize(
    "reply",
    [
        EngineReply(ok=False, version="default", message="status 400: shapes differ"),
        EngineReply(ok=True, version="default"),
    ],
)
def test_an_engine_that_did_not_take_the_weights_ends_the_run(reply: EngineReply) -> None:
    trainer = FakeTrainer([], reply=reply)
    with pytest.raises(RltopError) as caught:
        make_loop(TWO_ROLLOUTS, trainer).run()
    assert caught.value.exit_code == 1
    assert "engine 0 did not take the weights of version '1'" in str(caught.value)
    assert ("generate", 1, "1") not in trainer.calls


@pytest.mark.parametrize("planted", [True, False])
def test_other_weights_on_an_engine_are_shouted_about_and_the_run_goes_on(
    planted: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    config = TrainConfig(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2)
    reply = EngineReply(ok=True, version="1", message="3 tensors differ: a", digest="e", same=False)
    loop = make_loop(config, FakeTrainer([], reply=reply, planted=planted))
    with caplog.at_level(logging.INFO, LOGGER):
        loop.run()
    assert loop.history.mismatches == ["1"]
    (line,) = [record for record in caplog.records if "holds other weights" in record.message]
    assert line.levelno == (logging.WARNING if planted else logging.ERROR)
    assert "3 tensors differ" in line.message


def test_lines_have_slimes_shapes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    with caplog.at_level(logging.INFO, LOGGER):
        make_loop(TWO_ROLLOUTS, FakeTrainer([])).run()
    lines = [record.message for record in caplog.records]
    assert "First rollout sample: ['qr'], label: r, reward: 0.0" in lines
    assert any(line.startswith("rollout 0: {'rollout/response_lengths': 2.0") for line in lines)
    assert any(line.startswith("step 1: {'train/loss': 0.5") and "'train/step': 1}" in line for line in lines)
    assert any(line.startswith("Timer actor_train end (elapsed: ") for line in lines)
    perf = [line for line in lines if line.startswith("perf 0: ")]
    assert len(perf) == 2
    assert "perf/rollout_time" in perf[0]
    assert "perf/train_wait_time" in perf[1]


@pytest.fixture
def daemon() -> Iterator[tuple[str, Any]]:
    with ingest() as place:
        yield place


def records_until_bye(socket: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    while not records or records[-1]["kind"] != "bye":
        assert socket.poll(10_000), "no record for ten seconds"
        records.append(msgpack.unpackb(socket.recv_multipart()[2]))
    return records


def test_the_daemon_is_told_everything_in_order(daemon: tuple[str, Any]) -> None:
    address, socket = daemon
    with Reporter(address=address, run="r") as reporter:
        loop = make_loop(TWO_ROLLOUTS, FakeTrainer([]), reporter)
        loop.run()
        loop.narrator.bye("done")
        records = records_until_bye(socket)
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    run = next(record["payload"] for record in records if record["kind"] == "run")
    assert run["framework"] == "rltop"
    assert run["stand_ins"]
    assert run["args"]["rollout_batch_size"] == 2
    steps = [r["payload"] for r in records if r["kind"] == "metrics" and r["payload"]["axis"] == "train"]
    assert [(s["step"], s["rollout_id"], s["step_in_rollout"]) for s in steps] == [(0, 0, 0), (1, 1, 0)]
    assert steps[0]["values"]["train/lr-pg_0"] == 1e-3
    versions = [(r["payload"]["version"], r["payload"]["rollout_id"]) for r in records if r["kind"] == "weights"]
    assert versions == [("default", 0), ("1", 1), ("2", 2)]
    phases = [(r["payload"]["name"], r["payload"]["edge"]) for r in records if r["kind"] == "phase"]
    assert phases[:4] == [("start", "enter"), ("start", "leave"), ("rollout", "enter"), ("rollout", "leave")]
    (samples, _) = [r["payload"] for r in records if r["kind"] == "samples"]
    assert samples["total"] == 4
    assert samples["samples"][0]["rollout_log_probs"] == [-0.5, -0.5]


def test_the_summary_keeps_what_was_measured_and_speaks_nan() -> None:
    loop = make_loop(TWO_ROLLOUTS, FakeTrainer([]))
    loop.run()
    loop.history.steps[1]["loss"] = float("nan")
    result = summary(TWO_ROLLOUTS, loop.history, reason="done", seconds=1.0)
    assert result["rewards"] == [0.5, 0.5]
    assert result["final_reward"] == 0.5
    assert result["losses"] == [0.5, "NaN"]
    assert result["train_rollout_logprob_abs_diff_max"] == 0.002
    assert result["syncs"] == 3
    assert "CPU engine" in result["stand_ins"][0]


def test_the_summary_of_a_run_that_never_started_has_no_numbers() -> None:
    result = summary(TWO_ROLLOUTS, History(), reason="interrupted", seconds=0.5)
    assert (result["rewards"], result["final_reward"], result["first_step"]) == ([], None, {})


def supervised(trainer: FakeTrainer, *, back: bool = False) -> Loop:
    loop = make_loop(TWO_ROLLOUTS, trainer)
    assert isinstance(loop.rollouts, FakeRollouts)
    loop.rollouts.supervised = True
    loop.rollouts.back = [[], [ENGINE]] if back else []
    return loop


def test_engines_that_somebody_brings_back_may_miss_an_update() -> None:
    trainer = FakeTrainer([], reply=EngineReply(ok=False, version="", message="it does not answer", gone=True))
    loop = supervised(trainer)
    loop.run()
    assert len(loop.history.rewards) == 2
    assert trainer.calls[-2:] == [("publish", "2", 1), ("took", "2", ["0"])]


def test_the_weights_of_a_running_rollout_go_to_an_engine_that_came_back() -> None:
    trainer = FakeTrainer([])
    loop = supervised(trainer, back=True)
    loop.run()
    at = trainer.calls.index(("generate", 1, "1"))
    assert trainer.calls[at + 1 : at + 3] == [("publish", "1", 0), ("took", "1", ["0"])]
    assert loop.history.syncs == 3


def test_in_the_first_rollout_an_engine_that_came_back_is_verified() -> None:
    trainer = FakeTrainer([])
    loop = supervised(trainer)
    assert isinstance(loop.rollouts, FakeRollouts)
    loop.rollouts.back = [[ENGINE]]
    loop.run()
    at = trainer.calls.index(("generate", 0, "default"))
    assert trainer.calls[at + 1 : at + 3] == ["verify", ("took", "default", ["0"])]


def test_an_engine_with_an_earlier_runs_weights_gets_the_first_ones() -> None:
    trainer = FakeTrainer([], base_reply=EngineReply(ok=True, version="57", same=False))
    loop = supervised(trainer)
    assert isinstance(loop.rollouts, FakeRollouts)
    loop.rollouts.back = [[ENGINE]]
    loop.run()
    at = trainer.calls.index(("generate", 0, "default"))
    assert trainer.calls[at + 1 : at + 4] == ["verify", ("publish", "default", -1), ("took", "default", ["0"])]


# ---------------------------------------------------------------------- --check-weight-update-equal

CHECKED = TrainConfig(num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=2, check_weight_update_equal=True)


def test_the_first_sync_is_proven_once_and_nothing_is_verified_or_pushed_beside_it() -> None:
    trainer = FakeTrainer([])
    make_loop(CHECKED, trainer).run()
    asked = [call for call in trainer.calls if call == "verify" or call[0] in ("prove", "publish", "generate")]
    assert asked == [
        ("prove", "default", -1),
        ("generate", 0, "default"),
        ("publish", "1", 0),
        ("generate", 1, "1"),
        ("publish", "2", 1),
    ]


def test_on_a_resume_the_interrupted_run_s_version_is_proven() -> None:
    trainer = FakeTrainer([], loaded_iteration=0)
    make_loop(CHECKED, trainer).run()
    asked = [call for call in trainer.calls if call == "verify" or call[0] in ("prove", "publish", "generate")]
    assert asked == [("prove", "1", 0), ("generate", 1, "1"), ("publish", "2", 1)]


def test_what_the_proof_finds_ends_the_run_before_any_sample_and_is_in_the_record(daemon: tuple[str, Any]) -> None:
    address, socket = daemon
    finding = Finding("model.norm.weight", "zero", "0", max_abs_err=1.0)
    wrong = EngineReply(True, "default", "1 tensor differs", "x", same=False, findings=(finding,), differing=1)
    trainer = FakeTrainer([], base_reply=wrong)
    with Reporter(address=address, run="r") as reporter:
        loop = make_loop(CHECKED, trainer, reporter)
        with pytest.raises(RltopError, match="not the weights that should be there") as ended:
            loop.run()
        loop.narrator.bye("failed")
    assert "model.norm.weight: zero" in ended.value.why
    assert not any(call[0] == "generate" for call in trainer.calls if isinstance(call, tuple))
    (sync,) = [record["payload"] for record in records_until_bye(socket) if record["kind"] == "weights"]
    assert sync["checked"]
    assert sync["engines"]["0"]["differing"] == 1
    assert sync["engines"]["0"]["findings"] == [
        {"name": "model.norm.weight", "kind": "zero", "engine": "0", "max_abs_err": 1.0}
    ]


def test_an_engine_that_refuses_the_first_sync_ends_a_supervised_run_too() -> None:
    """Nobody else can bring it back: its weights are random numbers."""
    finding = Finding("model.norm.weight", "wrong-shape", "0", "[3], it should be [4]")
    refused = EngineReply(False, "reset_tensors", "status 400", findings=(finding,), differing=1)
    loop = make_loop(CHECKED, FakeTrainer([], base_reply=refused))
    assert isinstance(loop.rollouts, FakeRollouts)
    loop.rollouts.supervised = True
    with pytest.raises(RltopError, match="not the weights that should be there") as ended:
        loop.run()
    assert "model.norm.weight: wrong-shape, [3], it should be [4]" in ended.value.why
