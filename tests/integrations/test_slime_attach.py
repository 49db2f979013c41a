"""Which rank tells what, and at which step."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rltop.integrations.outbox import Outbox
from rltop.integrations.slime_attach import Attachment

Call = tuple[str, int, str, tuple[Any, ...], dict[str, Any]]


class Desk:
    """An attachment whose outboxes only note what they are given."""

    def __init__(self, **environ: str) -> None:
        self.calls: list[Call] = []
        calls = self.calls

        class Noting(Outbox):
            def put(self, method: str, *args: Any, **kwargs: Any) -> None:
                calls.append((self.role, self.rank, method, args, kwargs))

        self.a = Attachment(Noting, {"RLTOP_INGEST": "x", **environ})


def _mpu(monkeypatch: pytest.MonkeyPatch, *, dp: int = 0, tp: int = 0, pp: int = 0, stages: int = 1) -> None:
    mpu: Any = ModuleType("megatron.core.parallel_state")
    mpu.model_parallel_is_initialized = lambda: True
    mpu.get_data_parallel_rank = lambda with_context_parallel: dp
    mpu.get_tensor_model_parallel_rank = lambda: tp
    mpu.get_pipeline_model_parallel_rank = lambda: pp
    mpu.get_pipeline_model_parallel_world_size = lambda: stages
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", mpu)


def test_the_rank_that_logs_is_the_runs_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _mpu(monkeypatch, pp=1, stages=2)
    desk = Desk(RANK="4")
    desk.a.trainer_up("actor", 0)
    desk.a.timer("actor_train", "enter")
    desk.a.weights(1, ok=True, args=SimpleNamespace(colocate=True), elapsed_s=1.0)
    assert [(role, rank, method) for role, rank, method, _, _ in desk.calls] == [
        ("trainer", 0, "phase_edge"),
        ("trainer", 0, "weights"),
    ]
    assert desk.calls[1][4] == {"version": "1", "rollout_id": 0, "ok": True, "transport": "tensor", "elapsed_s": 1.0}


def test_other_ranks_tell_no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    _mpu(monkeypatch, dp=1)
    desk = Desk(RANK="1")
    desk.a.timer("actor_train", "enter")
    desk.a.weights(1, ok=True, args=None, elapsed_s=1.0)
    assert desk.calls == []
    assert desk.a.errors == 0


@pytest.mark.train
@pytest.mark.parametrize(("tp", "told"), [(0, 3), (1, 0)])
def test_of_tensor_parallel_ranks_the_first_compares_tokens(
    monkeypatch: pytest.MonkeyPatch, tp: int, told: int
) -> None:
    import torch

    _mpu(monkeypatch, dp=2, tp=tp)
    desk = Desk(RANK="5")
    data = {"log_probs": [torch.tensor([-1.0, float("nan")])], "ref_log_probs": [torch.tensor([-1.5, -1.0])]}
    for _ in range(2):  # a flag and the launch hook
        desk.a.rollout_data(0, SimpleNamespace(finetune=True), data)
    assert desk.a.errors == 0, desk.a.last_error
    assert len(desk.calls) == told
    assert {(role, rank) for role, rank, *_ in desk.calls} <= {("trainer", 5)}
    if told:
        metrics, bad, off = desk.calls
        assert metrics[3][0]["rollout/token_gap/actor_ref/max"] == 0.5
        assert metrics[4] == {"step": 0, "axis": "rollout", "rollout_id": 0}
        assert "rank 5, rollout 0: 1 of 2 tokens" in bad[3][1]
        assert "differ by up to 0.5 nat" in off[3][1]


def test_steps_of_a_rollout_are_its_number_and_never_go_back() -> None:
    desk = Desk()
    before = desk.a.enter_scope(3)
    desk.a.log({"perf/rollout_time": 1.0, "rollout/step": 48}, "rollout/step")  # --wandb-always-use-train-step
    desk.a.leave_scope(before)
    desk.a.log({"rollout/raw_reward": 1, "rollout/step": 7}, "rollout/step")  # an older layout: no function around it
    for rollout, step, number in ((0, 0, 0), (1, 0, 2), (1, 1, 3), (2, 0, 2)):
        desk.a.train_step(rollout, step)
        desk.a.log({"train/loss": 0.5, "train/step": number}, "train/step")
    desk.a.log({"train/critic-value_loss": 0.5, "train/step": 3}, "train/step")
    desk.a.log({"rollout/x": 1.0}, "rollout/step")
    rows = [(role, kw["step"], kw.get("rollout_id")) for role, _, m, _, kw in desk.calls if m == "metrics"]
    assert rows == [
        ("rollout", 3, 3),
        ("trainer", 7, None),
        ("trainer", 0, 0),
        ("trainer", 2, 1),
        ("trainer", 3, 1),
        ("trainer", 4, 2),
        ("critic", 3, 2),
    ]
    assert [args[1] for _, _, method, args, _ in desk.calls if method == "log"] == [
        "train/step goes from 3 to 2: rollouts have unequal numbers of optimizer steps. Shown as a count that grows; "
        "rollout_id and the step inside it are exact",
        "metrics without rollout/step: left out",
    ]


def test_values_are_floats_before_they_leave_the_caller() -> None:
    class Lent:
        """Stands for a tensor whose memory is lent away right after the call."""

        def __float__(self) -> float:
            return 0.25

    class Broken:
        def __float__(self) -> float:
            raise RuntimeError("no number")

    desk = Desk()
    desk.a.log({"train/a": Lent(), "train/b": Broken(), "train/c": 3, "train/step": 0}, "train/step")
    assert desk.calls[0][3][0] == {"train/a": 0.25, "train/b": "Broken", "train/c": 3}


def test_an_engine_of_others_is_not_said_to_have_stopped() -> None:
    desk = Desk()
    engine = SimpleNamespace(
        rank=2, node_rank=0, server_host="h", server_port=1, args=SimpleNamespace(rollout_external=True)
    )
    desk.a.engine(engine, "HEALTHY")
    desk.a.engine(engine, "STOPPED")
    desk.a.engine(SimpleNamespace(rank=3, node_rank=1), "HEALTHY")
    assert [(call[4]["id"], call[4]["state"], call[4]["url"]) for call in desk.calls] == [
        ("2", "HEALTHY", "http://h:1")
    ]


def test_without_an_address_nothing_is_queued() -> None:
    a = Attachment(lambda role, rank: pytest.fail("an outbox"), {})
    a.log({"rollout/x": 1, "rollout/step": 0}, "rollout/step")
    a.begin(None, 0)
    a.samples(0, None, [])
    a.rollout_data(0, None, {"log_probs": []})
    a.engine(SimpleNamespace(rank=0), "HEALTHY")
    a.timer("train", "enter")
    a.end()
    assert a.errors == 0
