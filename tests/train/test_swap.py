"""Who has the devices when: slime's order, what an engine still holds, and whole colocated runs."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from rltop.checks.found import LogEvent
from rltop.errors import RltopError
from rltop.evidence.logs import LogScan
from rltop.train.arguments import TrainConfig
from rltop.train.engine_memory import CACHES, EngineMemory
from rltop.train.narrator import LOGGER
from rltop.train.ports import EngineFacts, Holding
from tests.train.fakes import ENGINE, FakeRollouts, FakeTrainer
from tests.train.local import run_locally
from tests.train.test_loop import make_loop

TWO = TrainConfig(num_rollout=2, rollout_batch_size=2, n_samples_per_prompt=2, save_dir=Path("/run"))
RELEASED = [("offload", False)]
WEIGHTS_BACK, CACHES_BACK = [("onload", ("weights",), False)], [("onload", CACHES, False)]
WAKE, NAP, SLEEP = [("wake_up", False)], [("sleep", False)], [("sleep", True)]
STEP, GENERATE = "train_step", "generate"


def order(**flags: bool | None) -> list[Any]:
    """What happened to memory, and between which of the loop's own calls."""
    trainer = FakeTrainer([])
    make_loop(dataclasses.replace(TWO, **flags), trainer).run()  # type: ignore[arg-type]  # flags are bool | None
    moves = ("offload", "onload", "wake_up", "sleep")
    calls = [call if isinstance(call, tuple) else (call,) for call in trainer.calls]
    kept = [call if call[0] in moves else call[0] for call in calls if call[0] in (*moves, "publish", STEP, GENERATE)]
    return [*kept, *(["final save"] if ("save", "/run/final") in trainer.calls else [])]


def test_the_sides_take_turns_in_slimes_order() -> None:
    turn = [*RELEASED, *WAKE, STEP, *NAP, *WEIGHTS_BACK, "publish", *SLEEP, *CACHES_BACK]
    final = [("wake_up", True), *SLEEP, "final save"]
    assert order(colocate=True) == [*NAP, *SLEEP, GENERATE, *turn, GENERATE, *turn, *final]


def test_each_side_can_offload_alone() -> None:
    turn = [*RELEASED, STEP, *WEIGHTS_BACK, "publish", *CACHES_BACK]
    assert order(offload_rollout=True) == [GENERATE, *turn, GENERATE, *turn, "final save"]
    turn = [*WAKE, STEP, *NAP, "publish", *SLEEP]
    final = [("wake_up", True), *SLEEP, "final save"]
    assert order(offload_train=True) == [*NAP, *SLEEP, GENERATE, *turn, GENERATE, *turn, *final]
    assert order() == [GENERATE, STEP, "publish", GENERATE, STEP, "publish", "final save"]


def test_an_engine_that_comes_back_in_a_rollout_is_pushed_by_a_trainer_that_wakes_for_it() -> None:
    trainer = FakeTrainer([])
    loop = make_loop(dataclasses.replace(TWO, num_rollout=1, colocate=True, save_dir=None), trainer)
    assert isinstance(loop.rollouts, FakeRollouts)
    loop.rollouts.back = [[ENGINE]]
    loop.run()
    at = trainer.calls.index(("generate", 0, "default"))
    assert trainer.calls[at + 1 : at + 4] == [("wake_up", True), "verify", ("sleep", True)]


HELD = Holding(engine="1", pid=77, device="gpu", before_gb=41.5, now_gb=40.25, said_gb=40.0, held=True)


def test_memory_that_is_still_held_is_named_before_the_trainer_wakes(caplog: pytest.LogCaptureFixture) -> None:
    trainer = FakeTrainer([])
    loop = make_loop(dataclasses.replace(TWO, colocate=True, inject=("late-release",)), trainer)
    assert isinstance(loop.rollouts, FakeRollouts)
    loop.rollouts.held = [dataclasses.replace(HELD, engine="0", held=False), HELD]
    logging.getLogger(LOGGER).addHandler(caplog.handler)
    try:
        with pytest.raises(RltopError) as caught:
            loop.run()
    finally:
        logging.getLogger(LOGGER).removeHandler(caplog.handler)
    assert ("wake_up", False) not in trainer.calls
    assert "engine 1 (pid 77) 40.250 GB" in caught.value.why
    assert "(injected)" in caught.value.why
    assert "engine 0" not in caught.value.why
    (line,) = {record.getMessage() for record in caplog.records if "still held" in record.getMessage()}
    (event,) = events(line, "memory_held")
    assert event.data["processes"] == {"77": 40.25}
    assert (event.data["device"], event.data["engines"], event.owner) == ("gpu", "1", "trainer")


def events(text: str, kind: str) -> list[LogEvent]:
    """What the log reader makes of a line of the trainer's log."""
    scan = LogScan("trainer.log")
    data = f"[2026-11-30 03:08:00] narrator.py:1 - {text}\n".encode()
    scan.feed(1, [data])
    scan.settle()
    return [event for event in scan.so_far()[0] if event.kind == kind]


# --- what an engine holds


class Device:
    """Engines whose footprint falls `falls` looks after their release."""

    def __init__(self, falls: dict[str, int], said_gb: float = 1.0) -> None:
        self.falls, self.looks, self.said_gb = falls, dict[str, int](), said_gb

    def footprint(self, engine: EngineFacts) -> dict[int, float]:
        """Two ranks and a process that has nothing of it; the second rank is the one that is late."""
        looks = self.looks[engine.id] = self.looks.get(engine.id, -1) + 1  # the first is before the release
        return {1: 1.3 if looks == 0 else 0.3, 2: 0.3 if looks > self.falls[engine.id] else 1.3, 3: 0.1}


@pytest.mark.parametrize(
    ("falls", "held"),
    [
        ({"0": 0, "1": 0}, []),
        ({"0": 0, "1": 20}, []),
        ({"0": 0, "1": 1000}, ["1"]),
        ({"0": 1000, "1": 1000}, ["0", "1"]),
    ],
)
def test_who_has_let_go_is_measured_and_given_a_moment(
    falls: dict[str, int], held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    device = Device(falls)
    monkeypatch.setattr("rltop.train.engine_memory._says_it_holds", lambda engine: 1.0)
    monkeypatch.setattr("rltop.train.engine_memory._together", lambda engines, work: {})
    memory = EngineMemory(
        footprint=device.footprint,
        clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + seconds),
    )
    memory.release([ENGINE, dataclasses.replace(ENGINE, id="1")])
    found = [one for one in memory.holdings() if one.held]
    assert [(one.engine, one.pid, one.now_gb) for one in found] == [(name, 2, 1.3) for name in held]


def test_what_an_engine_says_of_itself_may_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three engines that started at once on an H200: 0.93 GiB were said, 1.441 became 1.010."""
    monkeypatch.setattr("rltop.train.engine_memory._says_it_holds", lambda engine: 0.93)
    monkeypatch.setattr("rltop.train.engine_memory._together", lambda engines, work: {})
    sizes = iter([{7: 1.441}, {7: 1.010}])
    memory = EngineMemory(footprint=lambda engine: next(sizes))
    memory.release([ENGINE])
    assert [one.held for one in memory.holdings()] == [False]


def test_what_cannot_be_seen_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rltop.train.engine_memory._says_it_holds", lambda engine: 1.0)
    monkeypatch.setattr("rltop.train.engine_memory._together", lambda engines, work: {})
    memory = EngineMemory(footprint=lambda engine: None)
    memory.release([ENGINE])
    assert memory.holdings() == []
    assert memory.back() == [ENGINE]
    assert memory.lent == []


# --- whole runs, on one machine


SMALL = TrainConfig(
    num_rollout=2,
    rollout_batch_size=4,
    n_samples_per_prompt=4,
    apply_chat_template=True,
    entropy_coef=0.01,  # a gradient whatever the rewards are
    use_kl_loss=True,
    deterministic=True,
    log_probs_pass="always",
)


@pytest.fixture(scope="module")
def console() -> list[str]:
    """Lines of the run."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


@pytest.mark.train
def test_a_colocated_run_is_the_same_run_bit_for_bit(tmp_path: Path, console: list[str]) -> None:
    plain = run_locally(SMALL, tmp_path / "plain")
    console.clear()
    shared = run_locally(dataclasses.replace(SMALL, colocate=True, weight_transport="tensor"), tmp_path / "shared")
    assert plain.history.steps == shared.history.steps
    assert plain.history.rewards == shared.history.rewards
    assert any(step["grad_norm"] > 0 for step in plain.history.steps)
    assert shared.history.mismatches == []
    text = "\n".join(console)
    for line in ("Timer wake_up start", "Timer sleep end", "[Rank 0] Memory-Usage before offload model: {'gpu': 'cpu'"):
        assert line in text
    perf = [row["values"] for row in shared.payloads("metrics") if "perf/wake_up_time" in row["values"]]
    assert len(perf) == 2
    assert all(row["perf/sleep_time"] > 0 for row in perf)


@pytest.mark.train
def test_the_planted_faults_are_said_in_words_that_the_checks_read(tmp_path: Path, console: list[str]) -> None:
    config = dataclasses.replace(SMALL, colocate=True, use_kl_loss=False)
    console.clear()
    run_locally(dataclasses.replace(config, inject=("no-update-after-resume",)), tmp_path / "empty")
    (line,) = [text for text in console if "it has no weights" in text]
    vocabulary = 260
    how = f"gave every token the log-prob {-math.log(vocabulary):.4f}"
    assert events(line, "no_weights")[0].data == {"engine_id": "0", "how": how, "samples": 16, "rollout": 1}
    console.clear()
    with pytest.raises(RltopError, match="still holds the memory"):
        run_locally(dataclasses.replace(config, inject=("late-release@0",)), tmp_path / "late")
    (line,) = [text for text in console if "is still held" in text]
    assert events(line, "memory_held")[0].data["engines"] == "0"
