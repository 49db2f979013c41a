"""The loops of the three modes over fakes: what is called, what is not, and what a full disk costs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rltop.errors import RltopError
from rltop.reporter import Reporter
from rltop.train.arguments import TrainConfig
from rltop.train.grad_norm import compare_grad_norm, save_grad_norm
from rltop.train.loop import History, Loop
from rltop.train.narrator import LOGGER, Narrator
from rltop.train.rollout_only import RolloutLoop
from tests.train.fakes import FakeRollouts, FakeTrainer

SHAPE: dict[str, Any] = {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 2}


def narrator() -> Narrator:
    ticks = itertools.count()
    return Narrator(Reporter(address=""), lambda: float(next(ticks)))


def run(config: TrainConfig, trainer: FakeTrainer, *, disk: str | None = None) -> History:
    """One run; the calls of both sides are in `trainer.calls`."""
    rollouts, history = FakeRollouts(trainer.calls, disk=disk), History()
    if config.mode == "rollout-only":
        RolloutLoop(config, rollouts, narrator(), history).run()
    else:
        Loop(
            config=config,
            trainer=trainer,
            rollouts=rollouts,
            narrator=narrator(),
            clock=lambda: 0.0,
            base_directory=Path("/run/base"),
            history=history,
        ).run()
    return history


def names(trainer: FakeTrainer) -> list[Any]:
    return [call[:2] if isinstance(call, tuple) else call for call in trainer.calls]


def test_rollouts_alone_never_touch_a_trainer() -> None:
    trainer = FakeTrainer([])
    history = run(TrainConfig(**SHAPE, debug_rollout_only=True, eval_interval=1), trainer)
    assert names(trainer) == [
        *(("tokenizer", "/model"), ("engines", "/model"), ("evaluate", 0)),
        *(("generate", 0), ("evaluate", 0), ("generate", 1), ("evaluate", 1)),
    ]
    assert (history.rewards, history.steps, history.syncs) == ([0.5, 0.5], [], 0)


def test_rollouts_alone_always_require_the_first_weights() -> None:
    trainer = FakeTrainer([])
    run(TrainConfig(**SHAPE, debug_rollout_only=True), trainer)
    assert [call[2] for call in trainer.calls if call[0] == "generate"] == ["default", "default"]


def test_training_alone_never_touches_an_engine() -> None:
    trainer = FakeTrainer([])
    config = TrainConfig(**SHAPE, load_debug_rollout_data="/no/such/{rollout_id}.pt", eval_interval=1)
    history = run(config, trainer)
    assert names(trainer) == [
        *("load", ("tokenizer", "/model"), "freeze_base"),
        *(("generate", 0), ("train_step", 0), ("generate", 1), ("train_step", 1)),
    ]
    assert (len(history.steps), history.syncs, history.evaluations) == (2, 0, [])


def test_one_file_for_every_rollout_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=LOGGER):
        run(TrainConfig(**SHAPE, load_debug_rollout_data="/no/such.pt"), FakeTrainer([]))
    assert "/no/such.pt has no {rollout_id}: every rollout trains on the same file" in caplog.text


def test_a_full_run_evaluates_the_weights_that_the_next_rollout_has() -> None:
    trainer = FakeTrainer([])
    run(TrainConfig(**SHAPE, eval_interval=2), trainer)
    at = names(trainer)
    assert at.index(("evaluate", 0)) < at.index(("generate", 0))
    assert trainer.calls[-1] == ("evaluate", 1, "2")


def test_the_training_data_is_saved_after_the_steps_of_its_rollout() -> None:
    trainer = FakeTrainer([])
    run(TrainConfig(**SHAPE, save_debug_train_data="/dumps/{rollout_id}.pt"), trainer)
    at = names(trainer)
    assert at.index(("train_step", 0)) < at.index(("save_train_data", 0)) < at.index(("publish", "1"))


@pytest.mark.parametrize("mode", ["full", "rollout-only"])
def test_a_full_disk_costs_dumps_and_not_the_run(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = FakeTrainer([], disk="No space left on device")
    flags: dict[str, Any] = {"debug_rollout_only": True} if mode == "rollout-only" else {"dump_details": Path("/d")}
    with caplog.at_level("INFO", logger=LOGGER):
        history = run(TrainConfig(**SHAPE, **flags), trainer, disk="No space left on device")
    assert len(history.rewards) == 2
    assert history.dumps_lost == (2 if mode == "rollout-only" else 4)
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors[0].startswith(
        "Could not save /dumps/0.pt: No space left on device. The run goes on without it (1 lost"
    )
    assert f"'perf/dumps_lost': {float(history.dumps_lost)}" in caplog.text


def test_grad_norms_are_kept_and_compared_as_in_slime(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/{{role}}_{{rollout_id}}_{{step_id}}.pt"
    assert save_grad_norm(pattern, 3, 1, 0.5).path == f"{tmp_path}/actor_3_1.pt"
    compare_grad_norm(pattern, 3, 1, 0.5099)
    compare_grad_norm(pattern, 3, 1, 0.509)
    with pytest.raises(RltopError, match="another grad_norm") as caught:
        compare_grad_norm(pattern, 3, 1, 0.52)
    assert (caught.value.exit_code, caught.value.where) == (1, "rollout 3, step 1")
    with pytest.raises(RltopError, match="no grad_norm to compare with") as missing:
        compare_grad_norm(pattern, 3, 2, 0.5)
    assert missing.value.exit_code == 2
    (tmp_path / "actor_3_2.pt").write_bytes(b"no dump")
    with pytest.raises(RltopError, match="not a saved grad_norm"):
        compare_grad_norm(pattern, 3, 2, 0.5)
