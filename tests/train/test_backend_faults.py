"""What each fault that the backend plants does to the numbers, and that a NaN never gets into the weights."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch

from rltop.train.inject import parse_fault
from rltop.train.loss import LossConfig
from rltop.train.megatron.backend import BackendConfig, MegatronBackend
from rltop.train.megatron.batching import TokenSample, TrainSample
from rltop.train.tiny_model import make_tiny_model

pytestmark = pytest.mark.train

SAMPLES = [TokenSample([*b"Sort 3 1 2: ", *b"1 2 3"[: 2 + index % 4]], 2 + index % 4) for index in range(64)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained a little, as a run is after its cold start: a fault must show on a model that is sure of its tokens."""
    directory = tmp_path_factory.mktemp("faults")
    fresh = MegatronBackend(make_tiny_model(directory / "tiny"), config=BackendConfig())
    fresh.cold_start(SAMPLES, 20, lr=3e-3, batch_size=32)
    fresh.save_hf(directory / "warm")
    return directory / "warm"


def start(checkpoint: Path, *faults: str) -> MegatronBackend:
    backend = MegatronBackend(
        checkpoint, config=BackendConfig(lr=1e-3), faults=[parse_fault(fault) for fault in faults]
    )
    backend.snapshot_ref()
    return backend


def step(backend: MegatronBackend, rollout_id: int = 0) -> dict[str, float]:
    actor, ref = backend.log_probs(SAMPLES, which="actor"), backend.log_probs(SAMPLES, which="ref")
    batch = [
        TrainSample(sample.tokens, sample.response_length, (-1.0) ** index, mine, theirs, mine)
        for index, (sample, mine, theirs) in enumerate(zip(SAMPLES, actor, ref, strict=True))
    ]
    return backend.train_step(batch, LossConfig(), rollout_id=rollout_id)


def weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.hf_tensors()}


def test_a_perturbed_reference_shows_in_log_probs_and_kl(checkpoint: Path) -> None:
    backend = start(checkpoint, "ref-perturb")
    actor, ref = (torch.cat(backend.log_probs(SAMPLES, which=which)) for which in ("actor", "ref"))
    assert (actor - ref).abs().max() > 5e-3
    assert (actor.mean() - ref.mean()).abs() > 1e-8
    assert step(backend)["kl_loss"] > 1e-8


def test_a_summed_loss_shows_in_the_gradient_norm_and_nowhere_else(checkpoint: Path) -> None:
    healthy, summed = step(start(checkpoint)), step(start(checkpoint, "loss-sum"))
    assert healthy["grad_norm"] < 10 < summed["grad_norm"]
    assert summed["ppo_kl"] == summed["kl_loss"] == summed["train_rollout_logprob_abs_diff"] == 0.0
    assert summed["entropy_loss"] == pytest.approx(healthy["entropy_loss"], rel=0.2)


def test_a_nan_gradient_is_reported_and_does_not_reach_the_weights(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = start(checkpoint, "nan-grad@1")
    assert math.isfinite(step(backend, rollout_id=0)["grad_norm"])
    before = weights(backend)
    with caplog.at_level(logging.WARNING):
        poisoned = step(backend, rollout_id=1)
    assert math.isnan(poisoned["grad_norm"])
    assert poisoned["step_skipped"] == 1.0
    assert "step skipped, weights unchanged" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(backend).items())
    after = step(backend, rollout_id=1)  # a second step of the same rollout
    assert math.isfinite(after["grad_norm"])
    assert after["step_skipped"] == 0.0
    assert not all(torch.equal(tensor, before[name]) for name, tensor in weights(backend).items())


def test_a_real_nan_in_the_loss_is_stopped_the_same_way(checkpoint: Path) -> None:
    backend = start(checkpoint)
    before = weights(backend)
    metrics = backend.train_step([TrainSample([1, 2, 3], 1, advantage=math.nan)], LossConfig())
    assert math.isnan(metrics["loss"])
    assert math.isnan(metrics["grad_norm"])
    assert metrics["step_skipped"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(backend).items())


def test_faults_of_the_loop_do_nothing_here(checkpoint: Path) -> None:
    assert step(start(checkpoint, "no-template", "swap-layers")) == step(start(checkpoint))
